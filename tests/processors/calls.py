"""A recording that keeps every attention call, and a compiler backend that counts graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from videoattn.dispatch import AttentionCall, Choice
from videoattn.timing import recorder


class Calls:
    """Every attention call made while `recording()` is on, in order."""

    compare = ()

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.kernels: list[str] = []

    def record(self, call: AttentionCall, choice: Choice, launch, **_):
        self.calls.append(call)
        self.kernels.append(choice.kernel)
        return launch(choice.kernel)

    @property
    def forms(self) -> Counter:
        """How often each (kind, mask form) was called."""
        return Counter((call.kind, call.mask) for call in self.calls)

    @property
    def kinds(self) -> Counter:
        """How often each kind was called."""
        return Counter(call.kind for call in self.calls)

    @property
    def by_kernel(self) -> Counter:
        """How often each (kind, kernel) ran."""
        return Counter((call.kind, kernel) for call, kernel in zip(self.calls, self.kernels, strict=True))


@contextmanager
def recording() -> Iterator[Calls]:
    """Keep the calls of a block."""
    calls = Calls()
    before, recorder._active = recorder._active, calls  # type: ignore[assignment]
    try:
        yield calls
    finally:
        recorder._active = before


class CountingBackend:
    """A torch.compile backend that runs graphs as traced and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs):
        self.graphs += 1
        return graph.forward
