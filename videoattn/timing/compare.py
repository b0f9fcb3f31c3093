"""Shadow arms: other kernels run on a call's own inputs, beside the one that serves it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from videoattn import kernels
from videoattn.dispatch import AttentionCall, KernelUnavailable, device_capability

SLOTS = 1 << 14
# Bounds the fp32 difference held at a time (elements).
DIFFERENCE_CHUNK = 1 << 24


def arm_names(compare: str | Sequence[str]) -> tuple[str, ...]:
    """The arms asked for, in order: kernel names as a sequence or joined by commas.

    Raises:
        ValueError: a name is no kernel's, or `auto`, or stands twice.
    """
    names = [part.strip() for part in compare.split(",")] if isinstance(compare, str) else list(compare)
    names = [name for name in names if name]
    for name in names:
        if name not in kernels.NAMES:
            raise ValueError(
                f"unknown attention kernel '{name}' to compare with: choose from {', '.join(kernels.NAMES)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"'{name}' stands twice among the kernels to compare with")
    return tuple(names)


def refuse_idle_arms(names: Iterable[str], calls: Iterable[AttentionCall] = ()) -> None:
    """Raise KernelUnavailable, with the reason, for an arm that can serve none of `calls`.

    Without calls the arm is held against the ones an LTX model makes on this machine: head dims 64 and 128,
    unmasked, in bf16, fp16 and fp32, on the current GPU or else the CPU.
    """
    calls = tuple(calls) or _ltx_calls()
    for name in names:
        reasons = [refusal(call, name) for call in calls]
        if None not in reasons:
            distinct = dict.fromkeys(reason for reason in reasons if reason)
            raise KernelUnavailable(
                f"cannot compare with '{name}', it serves none of the model's calls: {'; '.join(distinct)}"
            )


def _ltx_calls() -> tuple[AttentionCall, ...]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(
        AttentionCall(1, 32, 4096, 4096, head_dim, dtype, device.type, device_capability(device))
        for head_dim in (128, 64)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


def refusal(call: AttentionCall, name: str) -> str | None:
    """None, or the reason the kernel of that name can't serve the call."""
    return kernels.get(name).supports(call)


class Slots:
    """Scalars on one device, written one by one by its own work and read all at once.

    A tensor made during a call may lie in the memory of a CUDA graph that is being warmed up, where nothing
    must outlive the call; these are made when a stage starts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[torch.Tensor] = []
        self._count = 0
        self._values: list[float] = []
        self._lock = threading.Lock()
        self._grow()

    def _grow(self) -> None:
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(False):
            self._chunks.append(torch.empty(SLOTS, device=self._device))

    def put(self, scalar: torch.Tensor) -> int:
        """Copy a scalar into the next slot; its number."""
        with self._lock:
            number = self._count
            self._count += 1
            if number >= SLOTS * len(self._chunks):
                self._grow()
            slot = self._chunks[number // SLOTS][number % SLOTS]
        slot.copy_(scalar)
        return number

    def read(self, number: int) -> float:
        """The value of a slot; the first question copies all slots to the host."""
        if len(self._values) != self._count:
            self._values = [value for chunk in self._chunks for value in chunk.tolist()][: self._count]
        return self._values[number]


def max_abs_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """max|a − b| in fp32 as a scalar tensor on their device; NaN where either holds one.

    `a` and `b` are `(batch, q_len, heads, head_dim)`; the work runs on the current stream.
    """
    rows = max(1, DIFFERENCE_CHUNK // max(1, a[:, :1].numel()))
    parts = [
        (a[:, start : start + rows].float() - b[:, start : start + rows]).abs_().amax()
        for start in range(0, a.shape[1], rows)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).amax()
