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

    def reserve(self, spans: int) -> None:
        """Prepare for that many measurements before the next is read."""
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

    def reserve(self, spans: int) -> None:
        """Nothing to prepare."""


class _EventSpan:
    __slots__ = ("begin", "end", "host_seconds", "ran_dry", "stream")

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.stream: Any = None
        self.host_seconds = 0.0
        self.ran_dry = False


# Spans that were read, by device: a recording takes over the events of the one before.
_free: dict[torch.device, list[_EventSpan]] = {}


class CudaClock:
    """Pairs of CUDA events on the device's current stream; events are reused after they were read.

    `device` must have an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans = _free.setdefault(device, [])
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._streams: dict[int, torch.cuda.Stream] = {}

    def reserve(self, spans: int) -> None:
        """Have that many measurements' events ready, so that none is made while a call waits for it."""
        missing = [_EventSpan() for _ in range(spans - len(self._spans))]
        stream = torch.cuda.current_stream(self.device)
        for span in missing:
            # CUDA makes an event when it is first recorded.
            span.begin.record(stream)
            span.end.record(stream)
        self._spans += missing

    def start(self) -> _EventSpan:
        """Record the first event."""
        try:
            span = self._spans.pop()
        except IndexError:
            span = _EventSpan()
        raw = self._raw_stream(self.device.index)
        stream = self._streams.get(raw)
        if stream is None:
            # Making this object takes longer than recording an event.
            stream = self._streams[raw] = torch.cuda.current_stream(self.device)
        span.stream = stream
        span.begin.record(stream)
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
        self._spans.append(span)
        waited = span.ran_dry and span.host_seconds * 1e3 > LARGEST_WAIT * milliseconds
        return milliseconds, waited or milliseconds < SHORTEST_MS

    def wait(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize(self.device)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return _capturing()


# torch.cuda.is_current_stream_capturing() without its Python layer; a build without CUDA lacks it.
_capturing = (
    getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or torch.cuda.is_current_stream_capturing
)


def clock_for(device: torch.device) -> Clock:
    """A clock for work on that device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
