"""The guard in front of a small app, over real sockets."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from videoattn.web.guard import Accounts, Guard, Policy, hash_password, is_loopback


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@contextmanager
def serving(accounts=None, max_body=1 << 20):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    policy = Policy(frozenset({"127.0.0.1", "localhost"}), port, accounts, max_body)
    app = Guard(Starlette(routes=[Route("/", echo, methods=["GET", "POST", "OPTIONS"])]), policy)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client, port
    finally:
        server.should_exit = True
        thread.join()


def test_its_own_page_is_served():
    with serving() as (client, port):
        assert client.get("/").status_code == 200
        assert client.get("/", headers={"Host": f"localhost:{port}"}).status_code == 200
        assert client.post("/", headers={"Origin": f"http://127.0.0.1:{port}"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1:1", "127.0.0.1.evil.example", "", "[::", "localhost:x"]
)
def test_a_foreign_host_is_refused(host):
    with serving() as (client, _):
        assert client.get("/", headers={"Host": host}).status_code in (400, 421)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "file://127.0.0.1"])
def test_a_foreign_origin_is_refused(method, origin):
    with serving() as (client, _):
        answer = client.request(
            method, "/", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
        )
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_password_is_demanded():
    accounts = Accounts(["# comment", hash_password("ada", "pass:word é")])
    with serving(accounts) as (client, _):
        assert client.get("/").status_code == 401
        assert client.get("/", auth=("ada", "wrong")).status_code == 401
        assert client.get("/", auth=("bob", "pass:word é")).status_code == 401
        assert client.get("/", headers={"Authorization": "Basic !!"}).status_code == 401
        for _ in range(2):
            assert client.get("/", auth=httpx.BasicAuth("ada", "pass:word é")).status_code == 200
        assert client.get("/", auth=("ada", "wrong")).status_code == 401


@pytest.mark.parametrize("lines", [[], ["ada:plain"], ["ada:md5:00:00"], ["ada:scrypt:zz:00"]])
def test_an_unusable_auth_file_is_refused(lines):
    with pytest.raises(ValueError, match=r"USER:scrypt|no user"):
        Accounts(lines)


def test_large_bodies_are_refused():
    with serving(max_body=1000) as (client, _):
        assert client.post("/", content=b"x" * 1000).text == "1000"
        assert client.post("/", content=b"x" * 1001).status_code == 413
        assert client.post("/", content=(b"x" * 500 for _ in range(3))).status_code == 413


def test_loopback_names():
    assert all(map(is_loopback, ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "example.org", "::"]))
