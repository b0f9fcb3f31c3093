"""Compare the engines of a batch on one machine: the local worker, and actors of a Ray started for the run.

    python scripts/measure_batch_throughput.py [--jobs 60] [--model demo] [--actors 1 2]

Renders the same jobs with each engine, one thread a render process, and prints a table: seconds of the whole
run and clips a minute from the first clip on (both depend on what else the machine does), CPU seconds of all
processes of the run, and what the engine adds to a job: the time from its claim to its publication less what
the render itself took, median and 95th percentile. Checks that all engines made the same bytes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Ray gives an actor with one CPU one thread; the local worker gets the same.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from videoattn.batch.on_ray import Ray
from videoattn.batch.plan import Planned, plan
from videoattn.batch.run import Engine, Local, Options, run
from videoattn.batch.view import Lines
from videoattn.jobs import JobState, StoreReader


class CpuSeconds:
    """The CPU time of this process and everything it starts while the context lasts, sampled."""

    def __enter__(self) -> CpuSeconds:
        self._seen: dict[tuple[int, float], float] = {}
        self._stop = threading.Event()
        self._start = sum(psutil.Process().cpu_times()[:2])
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    self._seen[process.pid, process.create_time()] = sum(process.cpu_times()[:2])

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.total = sum(psutil.Process().cpu_times()[:2]) - self._start + sum(self._seen.values())


def measure(planned: list[Planned], folder: Path, engine: Engine) -> tuple[list[str], dict[str, bytes]]:
    """One run: its row of the table, and the clips."""
    started = time.monotonic()
    with CpuSeconds() as cpu:
        quiet = Lines(Console(quiet=True))
        outcome = run(planned, folder, Options(min_free=0), quiet, engine=engine)
    seconds = time.monotonic() - started
    assert len(outcome.done) == len(planned), outcome
    with StoreReader(folder) as store:
        jobs = sorted(store.all(JobState.DONE), key=lambda job: job.finished or 0.0)
        ends = [job.finished or 0.0 for job in jobs]
        added = []
        for job in jobs:
            report = store.report(job.id) or {}
            if report["load_seconds"] < 0.01:
                taken = (job.finished or 0.0) - (job.started or 0.0)
                added.append((taken - report["total_seconds"]) * 1e3)
        clips = {job.name: (folder / job.files["clip"]).read_bytes() for job in jobs}
    pace = (len(ends) - 1) / (ends[-1] - ends[0]) * 60
    middle, high = np.percentile(added, (50, 95))
    row = [f"{seconds:.1f}", f"{pace:.0f}", f"{cpu.total:.1f}", f"{middle:.1f}", f"{high:.1f}"]
    return row, clips


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    engines: dict[str, Callable[[], Engine]] = {"local, one worker": Local}
    for count in options.actors:
        plural = "s" if count > 1 else ""
        engines[f"ray, {count} actor{plural}"] = lambda count=count: Ray("local", device="cpu", actors=count)
    settings = {"width": 64, "height": 64, "num_frames": 9, "num_inference_steps": 4}
    row = {"model": options.model, **settings, "prompt": "a red ball", "seeds": f"1..{options.jobs}"}
    table = Table(title=f"{options.jobs} clips of {options.model}, 64x64, 9 frames, 4 steps")
    table.add_column("engine")
    for column in ("seconds", "clips/min", "CPU seconds", "added ms a job", "95 %"):
        table.add_column(column, justify="right")
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        job_file = Path(temporary) / "jobs.json"
        job_file.write_text(json.dumps([row]))
        planned = plan(job_file)
        for number, (name, engine) in enumerate(engines.items()):
            cells, clips = measure(planned, Path(temporary) / str(number), engine())
            table.add_row(name, *cells)
            made.append(clips)
    console = Console(width=110)
    console.print(table)
    console.print(f"the same bytes from each: {all(each == made[0] for each in made)}")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    machine = f"{platform.machine()}, {multiprocessing.cpu_count()} cores, load {load} at the end"
    console.print(f"{datetime.date.today()}, {machine}")


if __name__ == "__main__":
    main()
