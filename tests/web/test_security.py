"""What a hostile visitor might try, over HTTP against a real server."""

import io
import socket

import httpx
import pytest
from gradio_client import Client
from PIL import Image

from tests.web.conftest import PROMPT, serving
from videoattn.web.guard import hash_password
from videoattn.web.limits import MAX_PROMPT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("clips"), "--max-upload", "1") as running:
        yield running


def upload(server, content, name="image.png"):
    answer = server.http.post("gradio_api/upload", files={"files": (name, content)})
    answer.raise_for_status()
    (path,) = answer.json()
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def picture(size=(64, 48)):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "{output}/../../../../etc/passwd",
        "{output}/.videoattn/jobs.sqlite3",
        "{output}/.videoattn/owner.lock",
        "{output}/.videoattn/worker-cpu.log",
        "{output}/.videoattn/uploads/../jobs.sqlite3",
        "{output}/./.videoattn//jobs.sqlite3",
        "app.py",
        "videoattn/web/guard.py",
    ],
)
def test_no_file_outside_the_clips_is_handed_out(server, path):
    place = path.format(output=server.output)
    for prefix in ("gradio_api/file=", "file=", "gradio_api/file/", "media/1/", "media/"):
        answer = server.http.get(prefix + place)
        assert answer.status_code in (403, 404, 405, 422), (prefix, answer.status_code)
        assert b"root:" not in answer.content
        assert b"SQLite" not in answer.content


def test_a_raw_path_with_dots_stays_inside(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"GET /media/../../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"root:" not in answer


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "https://evil.example/x"])
def test_it_fetches_nothing_for_others(server, url):
    for prefix in ("gradio_api/file=", "gradio_api/proxy="):
        answer = server.http.get(prefix + url, follow_redirects=False)
        assert answer.status_code in (302, 307, 400, 403, 404), answer.status_code
        if answer.is_redirect:
            pytest.fail(f"{prefix} redirects to {answer.headers['location']}")


def test_a_huge_upload_is_cut_off(server):
    content = b"\0" * (2 << 20)
    answer = server.http.post("gradio_api/upload", files={"files": ("x.png", content)})
    assert answer.status_code == 413

    def chunks():
        for _ in range(64):
            yield b"\0" * (1 << 16)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    try:
        answer = server.http.post("gradio_api/upload", content=chunks(), headers=headers)
        assert answer.status_code in (400, 413)
    except httpx.TransportError:
        pass
    kept = [path for path in (server.output / ".videoattn" / "uploads").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 2 << 20


def test_a_file_of_the_wrong_type_never_becomes_an_image(server):
    for content in (b"#!/bin/sh\necho no", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GIF89a", b""):
        with pytest.raises(RuntimeError, match="no picture that can be read"):
            server.call("image", upload(server, content))
    assert list((server.output / ".videoattn" / "images").iterdir()) == []


def test_an_image_is_kept_under_a_name_of_our_own(server):
    (name,) = server.call("image", upload(server, picture() + b"trailing <script>", "../../evil.html"))
    assert name.endswith(".png")
    assert "evil" not in name
    kept = (server.output / ".videoattn" / "images" / name).read_bytes()
    assert b"script" not in kept
    (jobs,) = server.call("submit", {"prompt": PROMPT, "image": name, "num_inference_steps": 2}, 1, False)
    server.call("cancel", jobs[0])
    server.wait(jobs[0], "cancelled")


@pytest.mark.parametrize("path", ["/etc/passwd", "/root", "{output}/.videoattn/jobs.sqlite3", "../app.py"])
def test_a_path_on_the_server_is_no_upload(server, path):
    given = {"path": path.format(output=server.output), "meta": {"_type": "gradio.FileData"}}
    with pytest.raises(RuntimeError):
        server.call("image", given)


def test_a_decompression_bomb_is_refused(server):
    with pytest.raises(RuntimeError, match="million pixels"):
        server.call("image", upload(server, picture((12000, 6000))))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt": "a" * (MAX_PROMPT + 1)}, "longer than"),
        ({"prompt": PROMPT, "negative_prompt": "a" * (MAX_PROMPT + 1)}, "longer than"),
        ({"prompt": ""}, "no prompt"),
        ({"prompt": PROMPT, "image": "/etc/hostname"}, "upload it again"),
        ({"prompt": PROMPT, "image": "../jobs.sqlite3"}, "upload it again"),
        ({"prompt": PROMPT, "model": "/etc"}, "choose demo"),
        ({"prompt": PROMPT, "model": "../../../tmp"}, "choose demo"),
        ({"prompt": PROMPT, "lora": "/etc/passwd"}, "choose demo"),
        ({"prompt": PROMPT, "components": "/root"}, "choose demo"),
        ({"prompt": PROMPT, "upsampler": "/root"}, "choose demo"),
        ({"prompt": PROMPT, "width": 1 << 20, "height": 1 << 20}, "too large"),
        ({"prompt": PROMPT, "seed": -1}, "greater than or equal"),
        ({"prompt": PROMPT, "output": "/tmp/x"}, "no setting"),
        ({"prompt": PROMPT, "name": "../x"}, "no setting"),
    ],
)
def test_bounds_hold_for_api_calls(server, settings, said):
    with pytest.raises(RuntimeError, match=said) as caught:
        server.call("submit", settings, 1, False)
    assert "/clips" not in str(caught.value).replace("number of clips", "")
    assert server.call("queue", 10, 0)[0] == []


@pytest.mark.parametrize("clips", [0, 17, -1, 10**9, "many", None])
def test_the_number_of_clips_is_bounded(server, clips):
    with pytest.raises(RuntimeError):
        server.call("submit", {"prompt": PROMPT}, clips, False)


@pytest.mark.parametrize("job", [0, -1, 10**18, 1.5, "1; DROP TABLE jobs", None, True])
def test_a_job_that_is_none_is_answered_in_words(server, job):
    for name in ("status", "cancel"):
        with pytest.raises(RuntimeError):
            server.call(name, job)
    assert server.http.get("/").status_code == 200


def test_a_foreign_host_is_refused_everywhere(server):
    for path in ("/", "/config", "/media/1/clip", "/gradio_api/upload", "/gradio_api/queue/join"):
        for method in ("GET", "POST"):
            answer = server.http.request(method, path, headers={"Host": f"evil.example:{server.port}"})
            assert answer.status_code == 421


def test_a_foreign_origin_runs_nothing(server):
    headers = {"Origin": "http://evil.example", "Cookie": "session=1"}
    body = {"data": [{"prompt": PROMPT}, 1, False]}
    for path in ("/gradio_api/call/submit", "/gradio_api/queue/join", "/gradio_api/component_server"):
        answer = server.http.post(path, json=body, headers=headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    wishes = headers | {"Access-Control-Request-Method": "POST"}
    answer = server.http.options("/gradio_api/call/submit", headers=wishes)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert server.call("queue", 10, 0)[0] == []


def test_answers_carry_no_loose_cookie_and_cannot_be_framed(server):
    answer = server.http.get("/")
    assert "samesite=none" not in answer.headers.get("set-cookie", "").lower()
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_without_the_password_nothing_answers(tmp_path):
    users = tmp_path / "users"
    users.write_text(hash_password("ada", "correct horse") + "\n")
    options = ("--host", "0.0.0.0", "--auth", str(users))
    with (
        serving(tmp_path / "clips", *options) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as stranger,
    ):
        for path in ("/", "/config", "/media/1/clip", "/theme.css", "/gradio_api/info", "/assets/x.js"):
            assert stranger.get(path).status_code == 401
            assert stranger.get(path, auth=("ada", "wrong")).status_code == 401
        for path in ("/gradio_api/upload", "/gradio_api/call/submit", "/login"):
            assert stranger.post(path).status_code == 401
        known = ("ada", "correct horse")
        assert stranger.get("/", auth=known).status_code == 200
        assert stranger.get("/", auth=known, headers={"Host": "evil.example"}).status_code == 421
        client = Client(str(stranger.base_url), verbose=False, httpx_kwargs={"auth": known})
        assert client.predict(10, 0, api_name="/queue") == []
