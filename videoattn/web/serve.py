"""The server: the store's owner, its workers, the page and the files behind one guard."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI
from fastapi import Path as UrlPath
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from videoattn.jobs import Store, Worker
from videoattn.jobs.errors import UnknownJob
from videoattn.jobs.rendering import LOOKAHEAD, identify, render_job
from videoattn.render.errors import UsageError
from videoattn.web.actions import Actions
from videoattn.web.choices import Models
from videoattn.web.guard import Accounts, Guard, Policy, is_loopback
from videoattn.web.limits import MAX_UPLOAD, UPLOAD_AGE

MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".jsonl": "application/x-ndjson",
}
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the page is served; `hosts` are further names for Host headers, `max_upload` is in bytes."""

    output: Path
    host: str = "127.0.0.1"
    port: int = 7860
    accounts: Accounts | None = None
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    models: Models = field(default_factory=Models)
    max_upload: int = MAX_UPLOAD


def serve(settings: Settings, *, say: Callable[[str], None] = print) -> None:
    """Serve until Ctrl-C or SIGTERM; the job in hand is queued again then.

    Raises UsageError when the address can't be bound, StoreError when another process owns the folder.
    """
    with _listen(settings.host, settings.port) as listener, running(settings, say) as actions:
        port = listener.getsockname()[1]
        app = build(actions, settings, port)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=2, ws="none", server_header=False
        )
        server = _Server(config)
        host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
        shown = f"[{host}]" if ":" in host else host
        say(f"open http://{shown}:{port}/ (clips go to {settings.output})")
        server.run(sockets=[listener])
        say("stopping; the queue goes on when the page is served again")


@contextmanager
def running(settings: Settings, say: Callable[[str], None]) -> Iterator[Actions]:
    """The store and its workers while the page is served."""
    with Store(settings.output, identify=identify) as store:
        for line in _repairs(store):
            say(line)
        workers = [
            Worker(
                store,
                render_job,
                device=device,
                options={"local_files_only": settings.models.local_files_only},
                lookahead=LOOKAHEAD,
            )
            for device in settings.devices
        ]
        for worker in workers:
            worker.start()
        try:
            yield Actions(store, workers, settings.models)
        finally:
            stopping = [threading.Thread(target=each.stop, kwargs={"requeue": True}) for each in workers]
            for each in stopping:
                each.start()
            for each in stopping:
                each.join()


class _Server(uvicorn.Server):
    """A server that a signal ends like any other return: uvicorn's raises the signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the server while it runs."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def build(actions: Actions, settings: Settings, port: int) -> ASGIApp:
    """The whole application: page, API and files, with the guard outermost."""
    uploads = (actions.store.state_folder / "uploads").resolve()
    uploads.mkdir(parents=True, exist_ok=True)
    _sweep(uploads, age=0.0)
    # Read by Gradio when it is imported.
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr

    from videoattn.web import page

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/media/{job}/{role}")
    def media(job: int, role: Annotated[str, UrlPath(max_length=32)], download: bool = False) -> Response:
        return _media(actions, job, role, download=download)

    folder = str(actions.store.folder.resolve())
    gr.mount_gradio_app(
        app,
        page.build(actions),
        path="/",
        server_name=settings.host,
        server_port=port,
        allowed_paths=[folder],
        blocked_paths=[str(actions.store.state_folder.resolve() / name) for name in _private(actions.store)],
        max_file_size=settings.max_upload,
        show_error=True,
        run_history=False,
        footer_links=["api"],
        ssr_mode=False,
        theme=page.theme(),
        css=page.css(),
        head=page.head(),
    )
    threading.Thread(target=_sweep_forever, args=(uploads,), name="uploads", daemon=True).start()
    policy = Policy(_hosts(settings), port, settings.accounts, settings.max_upload)
    return Guard(_Headers(app), policy)


def _media(actions: Actions, job: int, role: str, *, download: bool) -> Response:
    try:
        path = actions.file(job, role)
    except (UnknownJob, UsageError) as error:
        return PlainTextResponse(f"{error}\n", 404)
    kind = MEDIA_TYPES.get(path.suffix)
    disposition = "attachment" if download or kind is None else "inline"
    return FileResponse(
        path,
        media_type=kind or "application/octet-stream",
        filename=path.name,
        content_disposition_type=disposition,
        headers={"Cache-Control": "private, max-age=3600"},
    )


def _private(store: Store) -> list[str]:
    """What lies in the store's own folder and is nobody's business; what visitors sent stays readable."""
    present = {path.name for path in store.state_folder.iterdir()} - {"uploads", "images"}
    return sorted(present | {"jobs.sqlite3", "jobs.sqlite3-wal", "jobs.sqlite3-shm", "owner.lock", "work"})


def _hosts(settings: Settings) -> frozenset[str]:
    names = {name.lower() for name in settings.hosts}
    if is_loopback(settings.host):
        return frozenset(names | {"localhost", "127.0.0.1", "::1", settings.host.lower()})
    names |= {settings.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    with suppress(OSError):
        names |= {str(each[4][0]).lower() for each in socket.getaddrinfo(socket.gethostname(), None)}
    # Bound to every address, so loopback reaches it as well.
    if settings.host in ("0.0.0.0", "::"):
        names |= {"localhost", "127.0.0.1", "::1"}
    return frozenset(names - {"0.0.0.0", "::"})


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, bound before anything else is started."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot serve on {host} port {port}: {reason}; choose another --port") from None
    with listener:
        yield listener


def _repairs(store: Store) -> list[str]:
    """What opening the store had to repair, one line each."""
    found = store.recovered
    lines = (
        (found.interrupted, "cut off when the server died: retry on the Queue tab"),
        (found.completed, "had finished when the server died and were put in place"),
        (found.missing, "marked failed, because their clips have disappeared"),
        (found.adopted, "taken in from clips that the store did not know"),
    )
    return [f"{len(ids)} job{'s' if len(ids) > 1 else ''} {text}" for ids, text in lines if ids]


def _sweep_forever(folder: Path) -> None:
    while True:
        time.sleep(UPLOAD_AGE / 12)
        _sweep(folder, age=UPLOAD_AGE)


def _sweep(folder: Path, *, age: float) -> None:
    """Remove uploads that nobody turned into a job in time, oldest first when they fill the folder."""
    now = time.time()
    files = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                files.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in files)
    for modified, size, path in sorted(files):
        if now - modified >= age or total > 4 * MAX_UPLOAD:
            with suppress(OSError):
                path.unlink()
                total -= size


class _Headers:
    """ASGI middleware that adds the headers which keep a browser from guessing types and from framing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
            await send(message)

        await self.app(scope, receive, with_headers)
