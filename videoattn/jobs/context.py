"""What a render function is given beside its job: where to write, what to report to, what stays loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from videoattn.jobs.model import Job, Progress

# Ten reports a second are all that a person can see; a tiny model makes hundreds of steps in that time.
_REPORT_INTERVAL = 0.1


class JobCancelled(BaseException):
    """The job is to stop now. Not an `Exception`: code that survives errors must not survive this."""


class PermanentError(Exception):
    """A failure that another try would only repeat; its message is one line for the user."""


class LoadedModels:
    """Keeps the last thing that was loaded, so that a run of jobs on one model loads it once."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._value: Any = None

    def get(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """The value loaded under `key`; another key's value is dropped before `load` is called."""
        if self._value is None or self._key != key:
            self._key = self._value = None
            self._value = load()
            self._key = key
        return self._value


class Context:
    """The worker's side of one attempt.

    `work` is the attempt's own folder, `device` the worker's device, `options` what the worker was started
    with, `models` outlives the job; `upcoming` are jobs likely to follow, so that what they need can be
    prepared together. `progress()` and `check()` raise `JobCancelled` once the job is to stop; calling
    either once per denoise step costs microseconds.
    """

    def __init__(
        self,
        *,
        work: Path,
        device: str,
        attempt: int,
        options: Mapping[str, Any],
        upcoming: Sequence[Job] = (),
        models: LoadedModels,
        is_cancelled: Callable[[], bool],
        report: Callable[[Progress], None],
    ) -> None:
        self.work = work
        self.device = device
        self.attempt = attempt
        self.options = options
        self.upcoming = upcoming
        self.models = models
        self._is_cancelled = is_cancelled
        self._report = report
        self._phase: str | None = None
        self._phase_start = (0.0, 0)
        self._last_report = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether the job is to stop."""
        return self._is_cancelled()

    def check(self) -> None:
        """Raise `JobCancelled` if the job is to stop."""
        if self._is_cancelled():
            raise JobCancelled

    def progress(self, phase: str, step: int = 0, of: int = 0, remaining: float | None = None) -> None:
        """Report `step` of `of` in `phase`, then `check()`.

        `remaining` is in seconds for the whole job; None estimates the rest of this phase from its pace so
        far.
        """
        now = time.monotonic()
        new_phase = phase != self._phase
        if new_phase:
            self._phase, self._phase_start = phase, (now, step)
        if new_phase or step >= of or now - self._last_report >= _REPORT_INTERVAL:
            since, first = self._phase_start
            if remaining is None and step > first:
                remaining = (now - since) / (step - first) * max(0, of - step)
            self._last_report = now
            self._report(Progress(phase, step, of, remaining, time.time()))
        self.check()
