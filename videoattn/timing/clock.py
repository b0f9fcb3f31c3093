"""Clocks for single calls: CUDA event pairs on the current stream, `perf_counter` elsewhere."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch

# A pair of events alone takes about 2 µs of device time, so a shorter call would be off by a tenth or more.
SHORTEST_MS = 0.02
# A device that had run dry waited for the host inside the pair; beyond this share the wait is measured.
LARGEST_WAIT = 0.05


# A started or finished measurement; only the clock that made it can read it.
Span = Any


class Clock(Protocol):
    """Measures intervals on one device without waiting for it."""

    def start(self) -> Span:
        """Begin a measurement at this point of the device's work."""
        ...

    def stop(self, span: Span) -> None:
        """End it."""
        ...

    def read(self, span: Span) -> tuple[float, bool]:
        """Milliseconds, and whether they are mostly the launch gap; once per span, after `wait`."""
        ...

    def wait(self) -> None:
        """Return when all work given to the device is done."""
        ...

    def capturing(self) -> bool:
        """Whether calls are now being captured into a CUDA graph instead of run."""
        ...


class _HostSpan:
    __slots__ = ("seconds",)

    def __init__(self, began: float) -> None:
        self.seconds = began


class HostClock:
    """`perf_counter`, for devices that finish a call before it returns."""

    def start(self) -> _HostSpan:
        """Begin a measurement now."""
        return _HostSpan(perf_counter())

    def stop(self, span: _HostSpan) -> None:
        """End it."""
        span.seconds = perf_counter() - span.seconds

    def read(self, span: _HostSpan) -> tuple[float, bool]:
        """Milliseconds; the host has no launch gap."""
        return span.seconds * 1e3, False

    def wait(self) -> None:
        """Nothing is ever pending."""

    def capturing(self) -> bool:
        """Never."""
        return False


class _EventSpan:
    __slots__ = ("begin", "end", "host_seconds", "ran_dry", "stream")

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self.begin = begin
        self.end = end
        self.stream = stream
        self.host_seconds = 0.0
        self.ran_dry = False


class CudaClock:
    """Pairs of CUDA events on the device's current stream; events are reused after they were read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.cuda.Event] = []

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def start(self) -> _EventSpan:
        """Record the first event."""
        span = _EventSpan(self._event(), self._event(), torch.cuda.current_stream(self.device))
        span.begin.record(span.stream)
        span.host_seconds = perf_counter()
        return span

    def stop(self, span: _EventSpan) -> None:
        """Record the second event, and note whether the device had by then passed the first."""
        span.end.record(span.stream)
        span.host_seconds = perf_counter() - span.host_seconds
        # If it had not, the device was still busy with earlier work and can't have waited inside the pair.
        span.ran_dry = span.begin.query()

    def read(self, span: _EventSpan) -> tuple[float, bool]:
        """Milliseconds between the events, and whether the pair is too short or waited for the host."""
        milliseconds = span.begin.elapsed_time(span.end)
        self._free += (span.begin, span.end)
        waited = span.ran_dry and span.host_seconds * 1e3 > LARGEST_WAIT * milliseconds
        return milliseconds, waited or milliseconds < SHORTEST_MS

    def wait(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize(self.device)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


def clock_for(device: torch.device) -> Clock:
    """A clock for work on that device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
