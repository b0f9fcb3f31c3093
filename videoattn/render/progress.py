"""Progress of a render: phases with step counts and the time that remains."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LABELS = {
    "load_model": "load model",
    "encode_prompt": "encode prompt",
    "denoise": "denoise",
    "denoise_half": "denoise, half size",
    "upsample": "upsample latents",
    "denoise_full": "denoise, full size",
    "decode": "decode",
    "encode": "write clip",
}


class Listener(Protocol):
    """What a render reports to; raising from either method stops it, and leaves no file behind."""

    def phase(self, name: str, total: int | None) -> None:
        """A phase begins, the one before it has ended; `total` steps, None when not countable."""
        ...

    def step(self, done: int) -> None:
        """`done` steps of the current phase are finished."""
        ...


class Silent:
    """Reports nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """Ignored."""

    def step(self, done: int) -> None:
        """Ignored."""


class Terminal:
    """Bars on a terminal, one finished line a phase elsewhere; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._started = 0.0

    def phase(self, name: str, total: int | None) -> None:
        """Close the current bar and open the next."""
        self._close()
        self._name, self._total, self._started = name, total, time.monotonic()
        self._task = self._bars.add_task(LABELS.get(name, name), total=total)

    def step(self, done: int) -> None:
        """Move the current bar."""
        if self._task is not None:
            self._bars.update(self._task, completed=done)

    def _close(self) -> None:
        if self._task is None:
            return
        total = self._total or 1
        self._bars.update(self._task, total=total, completed=total)
        if not self._console.is_terminal:
            steps = f", {self._total} step{'s' if self._total > 1 else ''}" if self._total else ""
            seconds = time.monotonic() - self._started
            self._console.print(f"{LABELS.get(self._name, self._name)}: {seconds:.1f} s{steps}")
        self._task = None

    def __enter__(self) -> Terminal:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        self._bars.stop()
