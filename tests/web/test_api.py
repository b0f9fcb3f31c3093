"""The API through Gradio's own client."""

from pathlib import Path

import av
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from tests.web.conftest import PROMPT

pytestmark = pytest.mark.slow


@pytest.fixture
def client(server, tmp_path):
    return Client(server.url, verbose=False, download_files=str(tmp_path))


def test_submit_status_download(server, client):
    (job,) = client.predict({"prompt": PROMPT, "seed": 12, "num_inference_steps": 2}, api_name="/submit")
    server.wait(job, "done")
    status = client.predict(job, api_name="/status")
    assert status["state"] == "done"
    assert server.http.get(status["files"]["poster"]).content.startswith(b"\x89PNG")
    clip = client.predict(job, "clip", api_name="/download")
    with av.open(clip) as container:
        assert sum(1 for _ in container.decode(video=0)) == 33
    assert Path(clip).read_bytes() == server.http.get(f"media/{job}/clip").content


def test_clips_are_sent_in_ranges(server):
    (job,) = server.submit(seed=12)
    server.wait(job, "done")
    whole = server.http.get(f"media/{job}/clip").content
    part = server.http.get(f"media/{job}/clip", headers={"Range": "bytes=100-199"})
    assert part.status_code == 206
    assert part.content == whole[100:200]


def test_several_clips_have_consecutive_seeds_and_are_cancelled(server, client):
    jobs = client.predict(
        {"prompt": PROMPT, "seed": 40, "num_inference_steps": 100}, 3, False, api_name="/submit"
    )
    queued = client.predict(50, 0, api_name="/queue")
    assert [each["settings"]["seed"] for each in queued] == [40, 41, 42]
    for job in reversed(jobs):
        assert client.predict(job, api_name="/cancel") in ("cancelled", "running")
    for job in jobs:
        server.wait(job, "cancelled")


def test_a_start_image(server, client, tmp_path):
    image = tmp_path / "start.png"
    Image.new("RGB", (128, 128), "blue").save(image)
    name = client.predict(handle_file(str(image)), api_name="/image")
    (job,) = client.predict(
        {"prompt": PROMPT, "image": name, "num_inference_steps": 2, "seed": 1}, api_name="/submit"
    )
    server.wait(job, "done")
    clip = client.predict(job, "clip", api_name="/download")
    with av.open(clip) as container:
        first = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert first[..., 2].mean() > first[..., 0].mean() + 50


def test_errors_are_sentences(client):
    with pytest.raises(AppError, match="This model cannot make width 100: use 96 or 128"):
        client.predict({"prompt": PROMPT, "width": 100}, api_name="/submit")
    with pytest.raises(AppError, match="There is no job 4711"):
        client.predict(4711, api_name="/status")
    with pytest.raises(AppError, match="choose from auto"):
        client.predict({"prompt": PROMPT, "attention": "magic"}, api_name="/submit")


def test_private_events_stay_out_of_the_api(client):
    listed = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(listed) == {"/submit", "/status", "/cancel", "/queue", "/image", "/download"}
