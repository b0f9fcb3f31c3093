"""Work of the two modalities at once: the audio's on a second CUDA stream, beside the video's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Lane(Protocol):
    """A place beside the current stream."""

    def run(self, main: Callable[[], Any], beside: Callable[[], Any]) -> tuple[Any, Any]:
        """Run both; what comes after is behind both."""
        ...


class CudaLane:
    """A second stream of one device.

    What `beside` reads must stay referenced until `run` returns: the allocator knows a tensor's first stream
    only, and would hand its memory on.
    """

    def __init__(self, device: torch.device) -> None:
        # A short kernel of the audio's, once it is ready, should not queue behind a long one of the video's.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device

    def run(self, main: Callable[[], Any], beside: Callable[[], Any]) -> tuple[Any, Any]:
        """Fork before both, join behind them."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            second = beside()
        first = main()
        current.wait_stream(self._stream)
        return first, second


class _State(threading.local):
    lane: Lane | None = None


_state = _State()


@contextmanager
def overlapping(lane: Lane | None) -> Iterator[None]:
    """Inside, this thread's `both` runs its second function on that lane; None for one after the other."""
    before = _state.lane
    _state.lane = lane
    try:
        yield
    finally:
        _state.lane = before


def both(main: Callable[[], Any], beside: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of two functions that do not depend on each other; in traced code one after the other."""
    if torch.compiler.is_compiling() or _state.lane is None:
        return main(), beside()
    return _state.lane.run(main, beside)
