"""A worker: takes jobs from the store one at a time and has a child process render them on one device."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from videoattn.jobs.child import RenderFunction
from videoattn.jobs.errors import OwnershipLost, StaleToken, StoreError, StoreFull, is_disk_full
from videoattn.jobs.model import Job, JobState, Progress, Token
from videoattn.jobs.process import ChildProcess, Launch, ProcessLost, Program, RenderProcess, import_name
from videoattn.jobs.store import Store

log = logging.getLogger(__name__)

_POLL = 0.5
_FULL_POLL = 2.0
_BACKOFF_LIMIT = 60.0
# A job that was being rendered when this many processes were lost may be what brings them down.
_LOSSES = 3
LOST = "lost: "


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker is doing: `starting`, `idle`, `busy`, `paused` (with the reason) or `stopped`.

    `pid` is its render process, `where` the machine of that when it is another one.
    """

    state: str
    reason: str | None = None
    job: int | None = None
    pid: int | None = None
    restarts: int = 0
    where: str | None = None


class _Attempt:
    """The job a worker has in hand; `stop_by` is when the child will be killed if it has not stopped."""

    def __init__(self, job: Job, token: Token) -> None:
        self.job = job
        self.token = token
        self.stop_by: float | None = None


class Worker:
    """One device's worker, a thread of the store's owner and its child process.

    `render(job, context)` is a function of an importable module; it runs in the child and returns a
    `Result`. `options` (JSON-able) reach it as `context.options`. A cancelled job that has not stopped
    `cancel_grace` seconds later is killed with its child. `lookahead` pending jobs are shown to the
    function as `context.upcoming`. No job is taken while less than `min_free` bytes are free. The child is
    restarted after a crash, and dies with this process. `launch` starts it, here or on another machine.
    """

    def __init__(
        self,
        store: Store,
        render: RenderFunction | str,
        *,
        device: str = "cpu",
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        cancel_grace: float = 60.0,
        start_timeout: float = 300.0,
        min_free: int = 256 << 20,
        lookahead: int = 0,
        launch: Launch = ChildProcess,
    ) -> None:
        self.store = store
        self.name = name or device
        program = Program(import_name(render), device, dict(options or {}), dict(environment or {}))
        log_file = store.state_folder / f"worker-{self.name.replace('/', '-')}.log"
        self._make_child: Callable[[], RenderProcess] = lambda: launch(program, log_file)
        self._cancel_grace = cancel_grace
        self._start_timeout = start_timeout
        self._min_free = min_free
        self._lookahead = lookahead
        self._child: RenderProcess | None = None
        self._attempt: _Attempt | None = None
        self._stopping = threading.Event()
        self._paused: str | None = None
        self._requeue = False
        self._stop_grace = 0.0
        self._failed_starts = 0
        self._status = WorkerStatus("starting")
        self._thread = threading.Thread(target=self._main, name=f"worker {self.name}", daemon=True)

    @property
    def status(self) -> WorkerStatus:
        """What the worker is doing now."""
        return self._status

    def start(self) -> None:
        """Start the child and begin to take jobs."""
        self._undo_listener = self.store.on_cancel(self._on_cancel)
        self._thread.start()

    def pause(self, reason: str = "paused by the user") -> None:
        """Finish the job in hand and take no further ones."""
        self._paused = reason

    def resume(self) -> None:
        """Take jobs again."""
        self._paused = None

    def stop(self, *, requeue: bool = False, grace: float = 10.0) -> None:
        """Stop the job in hand, then the child; returns when both have ended.

        The job becomes interrupted, or pending again with `requeue`. A child that has not stopped after
        `grace` seconds is killed. May be called again, from another thread too, with a shorter grace.
        """
        self.ask_to_stop(requeue=requeue, grace=grace)
        if self._thread.ident is not None:
            self._thread.join()

    def ask_to_stop(self, *, requeue: bool = False, grace: float = 10.0) -> None:
        """Begin what `stop` does, without waiting."""
        self._requeue = requeue
        self._stop_grace = grace
        self._stopping.set()
        if (attempt := self._attempt) is not None:
            self._ask_to_stop(attempt, grace)

    # The worker's thread

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except OwnershipLost as error:
            self._set(WorkerStatus("stopped", str(error)))
        except Exception as error:
            log.exception("worker %s stopped", self.name)
            self._set(WorkerStatus("stopped", f"{type(error).__name__}: {error}"))
        else:
            self._set(WorkerStatus("stopped"))
        finally:
            self._undo_listener()
            if self._child is not None:
                self._child.stop()

    def _turn(self) -> None:
        seen = self.store.writes
        child = self._ready_child()
        if child is None:
            return
        reason = self._paused or self._no_room()
        if reason is not None:
            self._set(replace(self._status, state="paused", reason=reason, job=None))
            self._stopping.wait(_POLL)
            return
        try:
            name = self.name if child.where is None else f"{self.name} on {child.where}"
            claimed = self.store.claim(name) if self.store.has_pending() else None
        except StoreFull as error:
            self._set(replace(self._status, state="paused", reason=str(error), job=None))
            self._stopping.wait(_FULL_POLL)
            return
        if claimed is None:
            self._set(replace(self._status, state="idle", reason=None, job=None))
            self.store.wait_for_write(seen, _POLL)
            return
        self._work(child, *claimed)

    def _work(self, child: RenderProcess, job: Job, token: Token) -> None:
        attempt = _Attempt(job, token)
        self._set(replace(self._status, state="busy", reason=None, job=job.id))
        try:
            work = self.store.work_folder(token)
        except StoreError as error:
            self._end(self.store.interrupt, token, str(error), requeue=True)
            return
        jobs = [_to_dict(each) for each in (job, *self._upcoming())]
        child.send(type="run", fence=token.fence, work=str(work), jobs=jobs)
        self._attempt = attempt
        # A cancellation or a stop between claim and here has found no attempt to stop.
        if self.store.get(job.id).cancel_requested:
            self._ask_to_stop(attempt, self._cancel_grace)
        if self._stopping.is_set():
            self._ask_to_stop(attempt, self._stop_grace)
        try:
            self._follow(child, attempt)
        finally:
            self._attempt = None

    def _follow(self, child: RenderProcess, attempt: _Attempt) -> None:
        """Read the child's messages until the attempt has ended."""
        token = attempt.token
        while True:
            message = child.receive(_POLL)
            if message is None:
                if attempt.stop_by is not None and time.monotonic() > attempt.stop_by:
                    child.kill()
                    self._end_stopped(
                        attempt, f"it did not stop in time and was killed with worker {self.name}"
                    )
                    return
                continue
            kind = message["type"]
            if kind == "exit":
                self._end_crashed(child, attempt)
                return
            if kind == "lost":
                self._end_lost(child, attempt, message["reason"])
                return
            if message.get("fence") != token.fence:
                continue
            if kind == "progress":
                self.store.set_progress(token, Progress(**message["progress"]))
            elif kind == "done":
                self._end_done(child, attempt)
                return
            elif kind == "cancelled":
                self._end_stopped(attempt, "the worker was stopped")
                return
            elif kind == "failed":
                error, again = message["error"], message["retry"]
                if message["disk_full"]:
                    self._end(self.store.interrupt, token, error, requeue=True)
                    self._full(error)
                else:
                    self._end(self.store.fail, token, error, retry=again)
                return

    def _end_stopped(self, attempt: _Attempt, reason: str) -> None:
        # The store turns it into a cancellation if that is what was asked for.
        requeue = self._requeue
        self._end(self.store.interrupt, attempt.token, reason, requeue=requeue)

    def _end_done(self, child: RenderProcess, attempt: _Attempt) -> None:
        work = self.store.work(attempt.token)

        def finish(token: Token) -> None:
            try:
                child.deliver(token.fence, work)
            except OSError as error:
                kind = StoreFull if is_disk_full(error) else StoreError
                raise kind(f"cannot write to {self.store.folder}: {error}") from error
            self.store.finish(token)

        try:
            self._end(finish, attempt.token)
        except ProcessLost as error:
            self._end_lost(child, attempt, str(error))

    def _end_lost(self, child: RenderProcess, attempt: _Attempt, reason: str) -> None:
        """Void the token of a process that may still be rendering, and give the job to another one."""
        child.kill()
        before = self.store.attempts(attempt.job.id)
        if sum((one.error or "").startswith(LOST) for one in before) + 1 >= _LOSSES:
            error = f"{LOST}{reason}; {_LOSSES} processes were lost while they rendered this job"
            self._end(self.store.fail, attempt.token, error, retry=False)
            return
        requeue = self._requeue or not self._stopping.is_set()
        self._end(self.store.interrupt, attempt.token, f"{LOST}{reason}", requeue=requeue)

    def _end_crashed(self, child: RenderProcess, attempt: _Attempt) -> None:
        if self._stopping.is_set():
            self._end_stopped(attempt, "the worker was stopped")
        else:
            self._end(self.store.fail, attempt.token, f"the worker process {child.fate()}")

    def _end(self, write: Callable[..., object], token: Token, *values: Any, **options: Any) -> None:
        """Record how an attempt ended, however long the disk stays full."""
        while True:
            try:
                write(token, *values, **options)
                return
            except StaleToken as error:
                log.warning("%s", error)
                return
            except StoreFull as error:
                self._full(str(error))
                # What is complete stays in its work folder, where the next opening finds it.
                if self._stopping.is_set():
                    return
            except StoreError as error:
                if isinstance(error, OwnershipLost) or write == self.store.fail:
                    raise
                write, values, options = self.store.fail, (str(error),), {}

    def _full(self, reason: str) -> None:
        self._set(replace(self._status, state="paused", reason=reason))
        self._stopping.wait(_FULL_POLL)

    def _ready_child(self) -> RenderProcess | None:
        """A child that can take a job; None when it could not be started, after a growing pause."""
        if self._child is not None and self._child.alive():
            return self._child
        restarts = self._status.restarts + (self._child is not None)
        if self._child is not None:
            self._child.stop()
        self._set(WorkerStatus("starting", restarts=restarts))
        try:
            self._child = self._make_child()
        except OSError as error:
            self._child, problem = None, f"the worker process could not be started: {error}"
        else:
            self._set(replace(self._status, pid=self._child.pid))
            problem = self._child.wait_until_ready(self._start_timeout, self._stopping, self._waiting)
            if problem is None:
                self._failed_starts = 0
                self._set(replace(self._status, reason=None, pid=self._child.pid, where=self._child.where))
                return self._child
            self._child.stop()
        if not self._stopping.is_set():
            self._failed_starts += 1
            self._set(replace(self._status, state="paused", reason=problem, pid=None))
            self._stopping.wait(min(_BACKOFF_LIMIT, 2.0 ** (self._failed_starts - 1)))
        return None

    def _waiting(self, reason: str) -> None:
        self._set(replace(self._status, reason=reason))

    def _upcoming(self) -> list[Job]:
        if not self._lookahead:
            return []
        first = self.store.queue(limit=self._lookahead, offset=self.store.counts()[JobState.RUNNING])
        return [job for job in first if job.state is JobState.PENDING]

    def _no_room(self) -> str | None:
        free = shutil.disk_usage(self.store.folder).free
        if free >= self._min_free:
            return None
        return (
            f"only {free >> 20} MiB are free in {self.store.folder}; "
            f"rendering goes on when {self._min_free >> 20} MiB are"
        )

    # Called from other threads

    def _on_cancel(self, job: int) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.job.id == job:
            self._ask_to_stop(attempt, self._cancel_grace)

    def _ask_to_stop(self, attempt: _Attempt, grace: float) -> None:
        stop_by = time.monotonic() + grace
        attempt.stop_by = stop_by if attempt.stop_by is None else min(stop_by, attempt.stop_by)
        if self._child is not None:
            self._child.send(type="cancel", fence=attempt.token.fence)

    def _set(self, status: WorkerStatus) -> None:
        if status != self._status:
            self._status = status
            self.store.touch()


def _to_dict(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__slots__}
