"""Time the job store's queries with a long queue and a large gallery, while jobs run.

    python scripts/measure_job_store.py [--pending 500] [--done 2000] [--repeats 400]

Fills a store in a temporary folder with jobs of real size (settings, receipt, timings; small stand-in
clips), then times what a web page asks for: in the owner's process with a writer at work, from four threads
at once, and from another process. Prints one table of milliseconds.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import platform
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from videoattn.jobs import JobState, NewJob, Progress, Result, Store, StoreReader, outputs

KINDS = ("video_self", "video_text", "audio_self", "audio_text", "audio_to_video", "video_to_audio")
REPORT = {
    "receipt": {
        kind: {
            "kernel": "hopper",
            "requested": "auto",
            "reasons": dict.fromkeys(("blackwell", "sdpa", "flash4", "flash3"), "'hopper' comes first"),
        }
        for kind in KINDS
    },
    "seconds": {"encode_prompt": 1.25, "denoise": 31.5, "decode": 4.75, "encode": 2.125},
    "timing": [
        {"stage": "denoise", "kind": kind, "calls": 1440, "total_ms": 1234.5, "tflops": 512.25, "share": 0.3}
        for kind in KINDS
    ],
}


def payload(seed: int) -> dict[str, object]:
    """Settings of the size that a detailed prompt gives."""
    prompt = f"a red ball rolls over wet grass at dawn while the camera follows, take {seed}; " * 5
    return {"prompt": prompt, "seed": seed, "width": 1536, "height": 1024, "num_frames": 249}


def fill(folder: Path, pending: int, done: int) -> float:
    """Add and finish the jobs through the store's own methods; returns milliseconds a finished job."""
    with Store(folder) as store:
        store.add([NewJob(payload(seed)) for seed in range(done)])
        started = time.perf_counter()
        while (claimed := store.claim("cpu")) is not None:
            _, token = claimed
            work = store.work_folder(token)
            (work / "clip.mp4").write_bytes(bytes(2048))
            (work / "poster.png").write_bytes(bytes(512))
            outputs.write_manifest(work, Result({"clip": "clip.mp4", "poster": "poster.png"}, REPORT))
            store.finish(token)
        each = (time.perf_counter() - started) / max(done, 1) * 1e3
        store.add([NewJob(payload(seed)) for seed in range(done, done + pending)])
        return each


def poll(store: StoreReader) -> None:
    """What the queue tab asks for every second."""
    store.counts()
    for job in store.queue(limit=50):
        if isinstance(store, Store):
            store.progress(job.id)


def queries(store: StoreReader, rng: random.Random) -> dict[str, Callable[[], object]]:
    """The reads of a page by what they are for."""
    pages = store.counts()[JobState.DONE] // 24
    deep = store.ended(JobState.DONE, limit=1, offset=max(0, pages * 24 - 25))[0]
    return {
        "queue poll (counts, 50 jobs, progress)": lambda: poll(store),
        "queue, all pending": lambda: store.queue(limit=10_000),
        "gallery, first page of 24": lambda: store.ended(JobState.DONE, limit=24),
        "gallery, random page by number": lambda: store.ended(
            JobState.DONE, limit=24, offset=24 * rng.randrange(max(pages, 1))
        ),
        "gallery, last page by cursor": lambda: store.ended(JobState.DONE, limit=24, before=deep),
        "history, all ended states, random page": lambda: store.ended(
            limit=24, offset=24 * rng.randrange(max(pages, 1))
        ),
        "one job with report and attempts": lambda: (
            store.get(deep.id),
            store.report(deep.id),
            store.attempts(deep.id),
        ),
        "lookup by hash": lambda: store.by_hash(deep.hash),
    }


def timed(call: Callable[[], object], repeats: int) -> np.ndarray:
    """Milliseconds of each of `repeats` calls."""
    taken = np.empty(repeats)
    for number in range(repeats):
        started = time.perf_counter()
        call()
        taken[number] = (time.perf_counter() - started) * 1e3
    return taken


def busy(store: Store, stop: threading.Event) -> None:
    """A writer: progress all the time, a move, and a job taken and given back twice a second."""
    rng = random.Random(1)
    while not stop.is_set():
        claimed = store.claim("cpu")
        assert claimed is not None
        _, token = claimed
        for step in range(10):
            store.set_progress(token, Progress("denoise", step, 10, 1.0, time.time()))
            time.sleep(0.05)
        store.interrupt(token, "measuring", requeue=True)
        ids = [job.id for job in store.queue(limit=100) if job.state is JobState.PENDING]
        store.move(rng.choice(ids), before=rng.choice(ids))


def elsewhere(folder: str, repeats: int, results: multiprocessing.Queue) -> None:
    """The same queries from a process that does not own the store."""
    with StoreReader(folder) as reader:
        for name, call in queries(reader, random.Random(2)).items():
            results.put((name, timed(call, repeats)))


def in_threads(call: Callable[[], object], repeats: int, threads: int = 4) -> np.ndarray:
    """As `timed`, from several threads at once."""
    taken: list[np.ndarray] = []
    workers = [
        threading.Thread(target=lambda: taken.append(timed(call, repeats // threads))) for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return np.concatenate(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pending", type=int, default=500)
    parser.add_argument("--done", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        each = fill(folder, options.pending, options.done)
        started = time.perf_counter()
        store = Store(folder)
        opening = (time.perf_counter() - started) * 1e3
        stop = threading.Event()
        writer = threading.Thread(target=busy, args=(store, stop))
        writer.start()
        rows: dict[str, list[np.ndarray]] = {}
        for name, call in queries(store, random.Random(0)).items():
            rows[name] = [timed(call, options.repeats), in_threads(call, options.repeats)]
        results: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
        other = multiprocessing.get_context("spawn").Process(
            target=elsewhere, args=(temporary, options.repeats, results)
        )
        other.start()
        for _ in range(len(rows)):
            name, taken = results.get()
            rows[name].append(taken)
        other.join()
        stop.set()
        writer.join()
        writes = {
            "add one job": lambda: store.add(NewJob(payload(0))),
            "move one job": lambda: store.move(store.queue(limit=9)[5].id, after=store.queue(limit=9)[7].id),
            "reorder all pending": lambda: store.reorder([job.id for job in store.queue(limit=10_000)][::-1]),
        }
        written = {name: timed(call, min(100, options.repeats)) for name, call in writes.items()}
        store.close()

    console = Console(width=130)
    table = Table(
        title=f"job store, {options.pending} pending and {options.done} finished jobs, ms at p50 / p95 / max"
    )
    table.add_column("query")
    for column in ("owner, one thread", "owner, four threads", "another process"):
        table.add_column(column, justify="right")
    for name, columns in rows.items():
        table.add_row(name, *map(spread, columns))
    for name, taken in written.items():
        table.add_row(name, spread(taken), "", "")
    console.print(table)
    console.print(
        f"claim, write, publish: {each:.1f} ms a job; opening with all files checked: {opening:.0f} ms"
    )
    machine = f"{platform.machine()}, {multiprocessing.cpu_count()} cores"
    console.print(f"{datetime.date.today()}, {machine}, {options.repeats} repeats")


def spread(taken: np.ndarray) -> str:
    """Median, 95th percentile and maximum."""
    return f"{np.median(taken):.2f} / {np.percentile(taken, 95):.2f} / {taken.max():.2f}"


if __name__ == "__main__":
    main()
