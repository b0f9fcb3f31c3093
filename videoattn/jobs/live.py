"""What changes too often to be written: progress, and waking up those who wait for a change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from videoattn.jobs.model import Progress, Token


class LiveState:
    """The part of a store that lives in its owner's memory; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._revision = 0
        self._writes = 0
        self._ended = False
        self._progress: dict[int, Progress] = {}
        self._cancel_listeners: list[Callable[[int], None]] = []

    def set_progress(self, token: Token, progress: Progress) -> None:
        """Note how far an attempt is."""
        self._progress[token.job] = progress
        self._notify()

    def progress(self, job: int) -> Progress | None:
        """How far a running job is; None unless this process runs it."""
        return self._progress.get(job)

    @property
    def revision(self) -> int:
        """A number that grows with every change, progress included."""
        return self._revision

    def wait(self, seen: int, timeout: float | None = None) -> int:
        """Wait until the revision differs from `seen`, at most `timeout` seconds; returns the revision."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision != seen or self._ended, timeout)
            return self._revision

    @property
    def writes(self) -> int:
        """A number that grows with every change of a job, progress left out."""
        return self._writes

    def wait_for_write(self, seen: int, timeout: float | None = None) -> int:
        """Wait until `writes` differs from `seen`, at most `timeout` seconds; returns it."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes != seen or self._ended, timeout)
            return self._writes

    def on_cancel(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(job)` when the cancellation of a running job is asked for; returns an undo."""
        self._cancel_listeners.append(listener)
        return lambda: self._cancel_listeners.remove(listener)

    def touch(self) -> None:
        """Count a change that lies outside the store, such as a worker's status."""
        self._notify()

    def _tell_cancelled(self, job: int) -> None:
        for listener in list(self._cancel_listeners):
            listener(job)

    def _drop_progress(self, token: Token) -> None:
        self._progress.pop(token.job, None)

    def _end_waiting(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _notify(self, *, write: bool = False) -> None:
        with self._changed:
            self._revision += 1
            self._writes += write
            self._changed.notify_all()
