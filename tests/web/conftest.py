"""Real servers in processes of their own, and a real browser in front of them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROMPT = "a large red star circling on a blue background"


class Server:
    """`app.py` in a process of its own."""

    def __init__(self, output, *options, port=0):
        self.output = Path(output)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--output", str(output), *options],
            cwd=ROOT,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = []
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith("open http://"):
                break
        else:
            raise AssertionError(f"the server ended: {self.said}")
        self.url = line.split()[1]
        self.port = int(self.url.rstrip("/").rsplit(":", 1)[1])
        # A full pipe would stop the server.
        threading.Thread(target=self._drain, daemon=True).start()
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def _drain(self):
        for line in self.process.stdout:
            self.said.append(line.strip())

    def call(self, name, *data):
        """Call an API endpoint as a program would; returns its outputs, RuntimeError carries its error."""
        answer = self.http.post(f"gradio_api/call/{name}", json={"data": list(data)})
        answer.raise_for_status()
        event = None
        with self.http.stream("GET", f"gradio_api/call/{name}/{answer.json()['event_id']}") as stream:
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: ") and event in ("complete", "error"):
                    found = json.loads(line.removeprefix("data: "))
                    if event == "error":
                        raise RuntimeError(str(found))
                    return found
        raise RuntimeError("no answer")

    def submit(self, *, clips=1, timing=False, **settings):
        (jobs,) = self.call("submit", {"prompt": PROMPT, "num_inference_steps": 2, **settings}, clips, timing)
        return jobs

    def status(self, job):
        return self.call("status", job)[0]

    def wait(self, job, *states, seconds=240):
        deadline = time.monotonic() + seconds
        while (status := self.status(job))["state"] not in states:
            assert time.monotonic() < deadline, status
            time.sleep(0.2)
        return status

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.http.close()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.http.close()


@contextmanager
def serving(output, *options):
    server = Server(output, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(name="serving")
def _serving():
    return serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that the tests of one file share."""
    with serving(tmp_path_factory.mktemp("clips")) as running:
        yield running


@pytest.fixture(scope="session")
def chromium():
    # No skip: without a browser the page is untested, and that is a failure.
    expect.set_options(timeout=60_000)
    with sync_playwright() as running:
        yield running.chromium


@pytest.fixture
def browse(chromium, tmp_path):
    """Opens a page of a server in a fresh browser profile; fails on any error in the page's scripts.

    `script` runs before the page's own.
    """
    opened, errors = [], []

    def open_page(url, *, script=None, **options):
        context = chromium.launch_persistent_context(
            str(tmp_path / f"profile{len(opened)}"),
            executable_path=CHROMIUM,
            args=ARGUMENTS,
            **{"viewport": {"width": 1280, "height": 900}, **options},
        )
        context.set_default_timeout(60_000)
        opened.append(context)
        page = context.pages[0]
        if script is not None:
            page.add_init_script(script)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.locator("#prompt textarea").wait_for()
        return page

    yield open_page
    for context in opened:
        context.close()
    assert not errors
