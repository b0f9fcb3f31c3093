"""How quickly the page answers: opening it, a queue poll and a gallery page with many jobs.

    python scripts/measure_page.py [--queued 500] [--clips 2000] [--polls 200] [--opens 5]

Fills a store with queued jobs and finished clips (one file, linked), starts `app.py` on it, pauses the queue,
and measures over HTTP the very requests that the page sends, and in headless Chromium the time from opening
the page until text can be typed into the prompt box.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from PIL import Image
from rich.console import Console
from rich.table import Table

from videoattn.jobs import JobState, NewJob, Result, Store
from videoattn.jobs.outputs import write_manifest
from videoattn.jobs.rendering import new_job
from videoattn.render.checks import check
from videoattn.render.job import RenderJob

ROOT = Path(__file__).parents[1]
CHROMIUM = "/usr/bin/chromium"
PROMPT = "a large red star circling on a blue background"


def fill(folder: Path, queued: int, clips: int) -> None:
    """A store with finished clips and queued jobs, through the store's own ways for the first clip."""
    prepared = check(RenderJob(model="demo", prompt=PROMPT))
    payload = new_job(prepared).payload
    report = {"job": payload["job"], "receipt": None, "stage_seconds": {"denoise": 4.0}, "total_seconds": 5.0}
    with Store(folder) as store:
        store.add([NewJob(payload, f"{number:064x}") for number in range(clips + queued)])
        claimed = store.claim("cpu")
        assert claimed is not None
        job, token = claimed
        work = store.work_folder(token)
        (work / "clip.mp4").write_bytes(b"\0" * 60_000)
        Image.effect_noise((128, 128), 80).convert("RGB").save(work / "poster.png")
        write_manifest(work, Result({"clip": "clip.mp4", "poster": "poster.png"}, report))
        first = store.finish(token)
        # Claiming each would cost minutes of commits that are not what is measured here.
        with sqlite3.connect(store.database) as db:
            for number in range(job.id + 1, clips + 1):
                files = {
                    role: name.replace(first.name, f"clip{number}") for role, name in first.files.items()
                }
                for role, name in files.items():
                    os.link(folder / first.files[role], folder / name)
                db.execute(
                    "UPDATE jobs SET state = ?, files = ?, report = ?, started = ?, finished = ?, "
                    "name = ? WHERE id = ?",
                    (
                        JobState.DONE,
                        json.dumps(files),
                        json.dumps(report),
                        time.time() - 10,
                        time.time() - number,
                        f"clip{number}",
                        number,
                    ),
                )


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The page on a store, nothing rendering beside it."""
    command = [sys.executable, str(ROOT / "app.py"), "--port", "0", "--output", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("open http"):
                yield line.split()[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def panels(client: httpx.Client) -> dict[str, int]:
    """The numbers of the page's panels, by name."""
    config = client.get("config").json()
    found = {}
    for component in config["components"]:
        name = component["props"].get("elem_id") or ""
        if name.startswith("va-"):
            found[name.removeprefix("va-")] = component["id"]
    return found


def ask(client: httpx.Client, panel: int, function: str, request: dict[str, object]) -> dict[str, str]:
    """One request as the page sends it."""
    body = {"session_hash": "measure", "component_id": panel, "fn_name": function, "data": request}
    answer = client.post("gradio_api/component_server", json=body)
    answer.raise_for_status()
    return answer.json()


def measure(client: httpx.Client, panel: int, requests: list[dict[str, object]]) -> list[float]:
    """Seconds of each request, sorted."""
    times = []
    for request in requests:
        started = time.perf_counter()
        ask(client, panel, "panel_show", request)
        times.append(time.perf_counter() - started)
    return sorted(times)


def open_page(url: str, times: int) -> list[float]:
    """Seconds from opening the page to a prompt box that takes text, each in a fresh profile."""
    from playwright.sync_api import sync_playwright

    found = []
    options = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
    with sync_playwright() as playwright:
        for _ in range(times):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
                context = playwright.chromium.launch_persistent_context(
                    profile, executable_path=CHROMIUM, args=[f"--{option}" for option in options]
                )
                page = context.pages[0]
                started = time.perf_counter()
                page.goto(url, wait_until="commit")
                page.locator("#prompt textarea").fill("a star")
                found.append(time.perf_counter() - started)
                context.close()
    return sorted(found)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queued", type=int, default=500)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--polls", type=int, default=200)
    parser.add_argument("--opens", type=int, default=5)
    options = parser.parse_args()

    table = Table(title=f"The page with {options.queued} queued jobs and {options.clips} clips")
    for name in ("what", "requests", "median ms", "95 % ms", "worst ms"):
        table.add_column(name, justify="left" if name == "what" else "right")

    def add(what: str, times: list[float]) -> None:
        upper = times[math.ceil(0.95 * len(times)) - 1]
        values = (statistics.median(times), upper, times[-1])
        table.add_row(what, str(len(times)), *(f"{1000 * value:.0f}" for value in values))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "clips"
        fill(folder, options.queued, options.clips)
        with serving(folder) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            numbers = panels(client)
            ask(client, numbers["queue"], "panel_act", {"act": "pause"})
            queue_pages, gallery_pages = math.ceil(options.queued / 50), math.ceil(options.clips / 24)
            polls = [{"page": 1 + number % queue_pages} for number in range(options.polls)]
            add("queue poll", measure(client, numbers["queue"], polls))
            pages = [{"page": 1 + number * 37 % gallery_pages} for number in range(options.polls)]
            add("gallery page", measure(client, numbers["gallery"], pages))
            add("latest clip poll", measure(client, numbers["latest"], [{}] * options.polls))
            if options.opens:
                add("open the page, type into the prompt box", open_page(url, options.opens))
    console = Console(width=110)
    console.print(table)
    load = os.getloadavg()[0]
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {load:.1f}"
    )


if __name__ == "__main__":
    main()
