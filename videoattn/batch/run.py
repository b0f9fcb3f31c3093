"""Running a batch: the store in the output folder is the truth, one worker a device, nothing done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from videoattn.batch.plan import Planned
from videoattn.jobs import Job, JobState, NewJob, Store, Worker
from videoattn.jobs.model import RETRYABLE
from videoattn.jobs.process import ChildProcess, Launch
from videoattn.jobs.rendering import LOOKAHEAD, identify, new_job, render_job

_POLL = 0.1
# A worker that waits for room or for its process this long, with nobody else at work, ends the run.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a batch is run; `retries` counts further attempts after a failure of one run."""

    retries: int = 1
    timing: bool = False
    compare: tuple[str, ...] = ()
    resume: bool = True
    local_files_only: bool = False
    min_free: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a batch ended: job ids in the order of the plan, `ids` all of them.

    `skipped` were done before. `left` were not rendered: the run was interrupted (`interrupted`), or
    stopped for the reason in `stopped`.
    """

    ids: list[int]
    done: list[int]
    skipped: list[int]
    failed: list[int]
    left: list[int]
    interrupted: bool = False
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        """0 all done, 1 some failed or the run stopped, 130 interrupted."""
        if self.interrupted:
            return 130
        return 1 if self.failed or self.left or self.stopped else 0


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one worker: its name, the device that its process is told, and what starts the process."""

    name: str
    device: str
    launch: Launch = ChildProcess


class Engine(Protocol):
    """Where a batch renders."""

    def slots(self, store: Store, todo: Sequence[int], note: Callable[[str], None]) -> list[Slot]:
        """Room for the workers of these jobs, at most one for each; called once, with something to do."""
        ...

    def close(self) -> None:
        """Let go of what `slots` has taken."""
        ...


class Local:
    """One child process for each device of this machine."""

    def __init__(self, devices: Sequence[str] = ("cpu",)) -> None:
        self._devices = devices

    def slots(self, store: Store, todo: Sequence[int], note: Callable[[str], None]) -> list[Slot]:
        """A slot for each device."""
        return [Slot(device, device) for device in self._devices[: len(todo)]]

    def close(self) -> None:
        """The processes have ended with their workers."""


class View(Protocol):
    """What a run shows itself on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, store: Store, ids: Sequence[int], skipped: int) -> None:
        """The run begins with these jobs to do."""
        ...

    def refresh(self, workers: Sequence[Worker]) -> None:
        """Time has passed."""
        ...

    def ended(self, job: Job) -> None:
        """A job is done or has failed for good."""
        ...


def run(
    jobs: Sequence[Planned],
    output: Path,
    options: Options,
    view: View,
    *,
    engine: Engine | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Render what is missing or changed in `output`, by default on this machine's CPU.

    Ctrl-C stops within a denoise step, a second one at once; either way nothing is lost and the outcome
    says `interrupted`. Raises `StoreBusy` while another run or a web page uses the folder, and `StoreError`
    when it can't be a store.
    """
    with Store(output, identify=identify) as store:
        _say_recovered(store, note)
        ids, todo = synchronise(store, jobs, options, note)
        interrupted, stopped = False, None
        with closing(engine or Local()) as place:
            slots = place.slots(store, todo, note) if todo else []
            workers = [_worker(store, slot, options) for slot in slots]
            with view:
                view.begin(store, todo, len(ids) - len(todo))
                try:
                    if todo:
                        stopped = _work(store, todo, workers, view)
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    _stop(workers, at_once=stopped is not None)
        return _outcome(store, ids, set(todo), interrupted, stopped)


def synchronise(
    store: Store, jobs: Sequence[Planned], options: Options, note: Callable[[str], None]
) -> tuple[list[int], list[int]]:
    """Make the store's queue what is missing of the plan, in its order; returns all ids, and those to do.

    A job is told by its output name. One with the same hash is kept as it is, one with another is replaced,
    its old clip stays until the new one is there. Pending jobs of other job files are set aside as
    cancelled. What `note` receives says so, and which of the kept ones lack a measurement that is asked for.
    """
    ids: list[int] = []
    todo: set[int] = set()
    again: dict[int, str] = {}
    missing: list[NewJob] = []
    places: list[int] = []
    for planned in jobs:
        wanted = _new_job(planned, options)
        job = store.by_name(planned.name)
        if job is None:
            places.append(len(ids))
            missing.append(wanted)
            ids.append(-1)
            continue
        ids.append(job.id)
        if job.hash != planned.hash or (job.state is JobState.DONE and not options.resume):
            store.replace(job.id, wanted)
            todo.add(job.id)
        elif job.state is not JobState.DONE and job.payload != wanted.payload:
            # What has no part in the hash, a timing log or leave to offload, is asked for anew.
            store.replace(job.id, wanted)
            todo.add(job.id)
        elif job.state is JobState.PENDING:
            todo.add(job.id)
        elif job.state is not JobState.DONE:
            again[job.id] = job.name
    for place, job_id in zip(places, store.add(missing), strict=True):
        ids[place] = job_id
        todo.add(job_id)
    _say_not_measured(store, [each for each in ids if each >= 0 and each not in todo], options, note)
    store.retry_all(RETRYABLE, again)
    queued = again.keys() & store.open_ids()
    todo |= queued
    # Each run has its own retries, also for a job that used up those of the last one or was cut off in it.
    store.allow(todo, 1 + options.retries)
    for job_id in again.keys() - queued:
        note(f"{again[job_id]} was tried {store.attempt_limit} times and is left as it is")
    strangers = store.cancel_pending(store.open_ids() - todo)
    if strangers:
        note(f"{strangers} pending jobs of other job files in {store.folder} are set aside")
    in_order = [job_id for job_id in ids if job_id in todo]
    store.reorder(in_order)
    return ids, in_order


def _new_job(planned: Planned, options: Options) -> NewJob:
    return new_job(
        planned.prepared,
        name=planned.name,
        origin=planned.place.to_dict(),
        timing=options.timing,
        compare=options.compare,
        allow_offload=planned.allow_offload,
        max_attempts=1 + options.retries,
    )


def _worker(store: Store, slot: Slot, options: Options) -> Worker:
    return Worker(
        store,
        render_job,
        device=slot.device,
        name=slot.name,
        options={"local_files_only": options.local_files_only},
        min_free=options.min_free,
        lookahead=LOOKAHEAD,
        launch=slot.launch,
    )


def _work(store: Store, todo: Sequence[int], workers: Sequence[Worker], view: View) -> str | None:
    """Wait until everything has ended; returns why it can't go on, or None."""
    for worker in workers:
        worker.start()
    left = set(todo)
    stuck_since: float | None = None
    seen = -1
    while left:
        if store.writes != seen:
            seen = store.writes
            ended = left - store.open_ids()
            left -= ended
            for job in sorted(map(store.get, ended), key=lambda job: (job.finished or 0.0, job.id)):
                view.ended(job)
        view.refresh(workers)
        reasons = {worker.status.reason for worker in workers if worker.status.state in ("paused", "stopped")}
        if any(worker.status.state not in ("paused", "stopped") for worker in workers):
            stuck_since = None
        elif stuck_since is None:
            stuck_since = time.monotonic()
        elif time.monotonic() - stuck_since > _PATIENCE:
            return "; ".join(sorted(reason for reason in reasons if reason)) or "the workers have stopped"
        time.sleep(_POLL)
    return None


def _stop(workers: Sequence[Worker], *, at_once: bool) -> None:
    """Stop all workers, the running jobs go back into the queue; an interruption meanwhile means at once."""
    grace = 0.0 if at_once else 15.0
    while True:
        try:
            for worker in workers:
                worker.ask_to_stop(requeue=True, grace=grace)
            for worker in workers:
                worker.stop(requeue=True, grace=grace)
            return
        except KeyboardInterrupt:
            grace = 0.0


def _outcome(
    store: Store, ids: Sequence[int], todo: set[int], interrupted: bool, stopped: str | None
) -> Outcome:
    done, skipped, failed, left = [], [], [], []
    for job in map(store.get, ids):
        if job.state is JobState.DONE:
            (done if job.id in todo else skipped).append(job.id)
        elif job.state is JobState.FAILED:
            failed.append(job.id)
        else:
            left.append(job.id)
    return Outcome(list(ids), done, skipped, failed, left, interrupted, stopped)


def _say_not_measured(
    store: Store, kept: Sequence[int], options: Options, note: Callable[[str], None]
) -> None:
    done = [job for job in map(store.get, kept) if job.state is JobState.DONE]
    unlogged = sum(options.timing and "timing" not in job.files for job in done)
    arms = set(options.compare)
    uncompared = sum(not arms <= set(job.payload.get("compare", ())) for job in done)
    for count, lacking in (
        (unlogged, "no timing log"),
        (uncompared, f"no comparison with {', '.join(options.compare)}"),
    ):
        if count:
            clips = "clip that was done before has" if count == 1 else "clips that were done before have"
            note(f"{count} {clips} {lacking}: --no-resume renders {'it' if count == 1 else 'them'} again")


def _say_recovered(store: Store, note: Callable[[str], None]) -> None:
    found = store.recovered
    for ids, text in (
        (found.interrupted, "jobs were cut off in an earlier run and are rendered again"),
        (found.completed, "jobs had finished when an earlier run died and were put in place"),
        (found.missing, "clips have disappeared and are rendered again"),
        (found.adopted, "clips that the store did not know were taken in"),
    ):
        if ids:
            note(f"{len(ids)} {text}")
