"""What a batch shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from videoattn.jobs import Job, JobState, Store, Worker
from videoattn.render.job import RenderJob
from videoattn.render.progress import LABELS
from videoattn.render.settings import forwards_per_step, is_guided


def cost(job: RenderJob) -> float:
    """How much work a resolved job is, in pixels times transformer samples; only ratios mean anything."""
    pixels = (job.width or 1) * (job.height or 1) * (job.num_frames or 1)
    return float(pixels * (job.num_inference_steps or 1) * (forwards_per_step(job) + is_guided(job)))


class _Totals:
    """Counts, and the time that the rest will need at the pace so far."""

    def __init__(self) -> None:
        self.done = self.failed = self.total = self.skipped = 0
        self._costs: dict[int, float] = {}
        self._finished_cost = self._seconds = 0.0
        self._store: Store | None = None
        self.workers = 1
        self._started = time.monotonic()

    def begin(self, store: Store, ids: Sequence[int], skipped: int) -> None:
        self._started, self._store = time.monotonic(), store
        self.total, self.skipped = len(ids), skipped
        wanted = set(ids)
        for job in store.all(JobState.PENDING):
            if job.id in wanted:
                self._costs[job.id] = cost(RenderJob.model_validate(job.payload["job"]))

    def ended(self, job: Job) -> None:
        cost_of_job = self._costs.pop(job.id, 0.0)
        if job.state is not JobState.DONE:
            self.failed += 1
            return
        self.done += 1
        self._finished_cost += cost_of_job
        # What loading the model took is not the pace of the jobs that follow.
        report = self._store.report(job.id) if self._store is not None else None
        loading = (report or {}).get("load_seconds") or 0.0
        self._seconds += max(0.0, (job.finished or 0.0) - (job.started or 0.0) - loading)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining(self) -> float | None:
        if not self._finished_cost:
            return None
        return self._seconds / self._finished_cost * sum(self._costs.values()) / max(1, self.workers)


class Lines:
    """One line for every job that ends, for logs and pipes; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._totals = _Totals()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, store: Store, ids: Sequence[int], skipped: int) -> None:
        """Say how much there is to do."""
        self._totals.begin(store, ids, skipped)
        before = f", {skipped} done before" if skipped else ""
        self._console.print(f"{len(ids)} to render{before}", markup=False)

    def refresh(self, workers: Sequence[Worker]) -> None:
        """Lines show nothing in between."""
        self._totals.workers = len(workers)

    def ended(self, job: Job) -> None:
        """Print a job's line."""
        totals = self._totals
        totals.ended(job)
        number = f"[{totals.done + totals.failed}/{totals.total}]"
        remaining = totals.remaining
        left = f", {duration(remaining)} left" if remaining else ""
        self._console.print(f"{number} {_ended_line(job)}{left}", markup=False)


class LiveTable:
    """Running jobs with their bars, totals, the latest failures; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._totals = _Totals()
        self._store: Store | None = None
        self._workers: Sequence[Worker] = ()
        # Standard output belongs to the report's paths, and to whoever has redirected it.
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,
        )
        self._console = console

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, store: Store, ids: Sequence[int], skipped: int) -> None:
        """Start the totals."""
        self._store = store
        self._totals.begin(store, ids, skipped)

    def refresh(self, workers: Sequence[Worker]) -> None:
        """Note who works; the table draws itself."""
        self._workers = workers
        self._totals.workers = len(workers)

    def ended(self, job: Job) -> None:
        """Count a job; a failure is also printed above the table, where it stays."""
        self._totals.ended(job)
        if job.state is not JobState.DONE:
            self._console.print(_ended_line(job), markup=False)

    def _draw(self) -> RenderableType:
        totals, store = self._totals, self._store
        table = Table(box=None, pad_edge=False, show_header=False)
        for worker in self._workers:
            status = worker.status
            job_id = status.job
            name = worker.name if status.where is None else f"{worker.name} on {status.where}"
            progress = store.progress(job_id) if store is not None and job_id is not None else None
            if store is None or job_id is None or progress is None:
                table.add_row(Text(name), Text(status.reason or status.state), "", "", "")
                continue
            table.add_row(
                Text(name),
                Text(store.get(job_id).name, overflow="ellipsis", no_wrap=True),
                LABELS.get(progress.phase, progress.phase),
                ProgressBar(total=progress.of or 1, completed=progress.step, width=24),
                f"{progress.step}/{progress.of}" if progress.of else "",
            )
        parts = [f"{totals.done} done"]
        if totals.failed:
            parts.append(f"{totals.failed} failed")
        parts.append(f"{totals.total - totals.done - totals.failed} left")
        if totals.skipped:
            parts.append(f"{totals.skipped} done before")
        parts.append(f"{duration(totals.elapsed)} elapsed")
        if totals.remaining is not None:
            parts.append(f"about {duration(totals.remaining)} to go")
        whole = ProgressBar(total=totals.total or 1, completed=totals.done + totals.failed, width=40)
        return Group(table, whole, Text(", ".join(parts)))


def view_for(console: Console) -> Lines | LiveTable:
    """The live table on a terminal, lines elsewhere."""
    return LiveTable(console) if console.is_terminal else Lines(console)


def duration(seconds: float) -> str:
    """Seconds as people say them: `8 s`, `4 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _ended_line(job: Job) -> str:
    tries = f" after {job.tries} attempts" if job.tries > 1 else ""
    if job.state is JobState.DONE:
        seconds = (job.finished or 0) - (job.started or 0)
        return f"done {job.name}, {seconds:.1f} s{tries}"
    origin = job.origin or {}
    where = f" ({origin['file']} row {origin['row']})" if origin.get("row") else ""
    return f"{job.state} {job.name}{where}{tries}: {job.error or 'no reason was recorded'}"
