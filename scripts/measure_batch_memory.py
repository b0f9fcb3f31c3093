"""Measure whether a long batch's memory stays flat: resident bytes of driver and worker over many small jobs.

    python scripts/measure_batch_memory.py [--jobs 500] [--model demo]

Renders the jobs through the batch's own run, samples the resident set of both processes as each job ends,
and prints the slope of a least-squares line after a warm-up and over the second half, with its 95 % interval
from 2000 bootstrap resamples of blocks of ten jobs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import psutil

from videoattn.batch.plan import plan
from videoattn.batch.run import Local, Options, run
from videoattn.jobs import Job, Store, Worker

BLOCK = 10


class Sampler:
    """A batch's view that notes resident bytes of driver and worker as each job ends."""

    def __init__(self, jobs: int) -> None:
        # Made beforehand: a list that grows with the jobs would be measured as well.
        self.samples = np.zeros((jobs, 2))
        self.taken = 0
        self._workers: Sequence[Worker] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, store: Store, ids: Sequence[int], skipped: int) -> None:
        """Nothing to show."""

    def refresh(self, workers: Sequence[Worker]) -> None:
        """Remember who works."""
        self._workers = workers

    def ended(self, job: Job) -> None:
        """Take a sample."""
        pid = self._workers[0].status.pid if self._workers else None
        if pid is not None:
            processes = (psutil.Process(), psutil.Process(pid))
            self.samples[self.taken] = [process.memory_info().rss for process in processes]
            self.taken += 1


def slope(values: np.ndarray) -> tuple[float, float, float]:
    """KiB a job of a least-squares line, and its 95 % bootstrap interval over blocks."""
    jobs = np.arange(len(values))

    def fit(index: np.ndarray) -> float:
        return float(np.polyfit(jobs[index], values[index], 1)[0]) / 1024

    blocks = np.arange(len(values) // BLOCK)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(2000):
        chosen = rng.choice(blocks, len(blocks))
        drawn.append(fit((chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return fit(jobs), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = {
            "model": options.model,
            "width": 64,
            "height": 64,
            "num_frames": 9,
            "num_inference_steps": 2,
        }
        prompts = [
            f"a {colour} ball, take {take}" for colour in ("red", "blue") for take in range(options.jobs // 2)
        ]
        job_file = folder / "jobs.json"
        job_file.write_text(json.dumps([{**settings, "prompt": prompt} for prompt in prompts]))
        sampler = Sampler(options.jobs)
        started = time.monotonic()
        engine = Local((options.device,))
        outcome = run(plan(job_file), folder / "out", Options(min_free=0), sampler, engine=engine)
        seconds = time.monotonic() - started
    samples = sampler.samples[: sampler.taken]
    ended = f"{len(outcome.done)} jobs done, {len(outcome.failed)} failed"
    print(f"{ended}, {seconds:.0f} s, 64x64, 9 frames, 2 steps")
    for column, name in enumerate(("driver", "worker")):
        for begin in (options.warm_up, len(samples) // 2):
            values = samples[begin:, column]
            each, low, high = slope(values)
            first, last = values[:20].mean() / 2**20, values[-20:].mean() / 2**20
            print(
                f"{name}: {first:.1f} MiB after {begin} jobs, {last:.1f} MiB at the end, "
                f"{each:+.2f} KiB a job (95 %: {low:+.2f} to {high:+.2f})"
            )
    print(f"{datetime.date.today()}, {platform.machine()}, {multiprocessing.cpu_count()} cores")


if __name__ == "__main__":
    main()
