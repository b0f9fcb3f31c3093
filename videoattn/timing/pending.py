"""From what was recorded during a stage to rows, once the device is done with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from videoattn.dispatch import AttentionCall, Kind
from videoattn.timing.clock import Clock, Span
from videoattn.timing.compare import Slots
from videoattn.timing.log import ArmTime, CallRow, ForwardTime, Mark, StageTime, TimingLog
from videoattn.timing.place import Place, Places

# Bounds of the guess: a pair of events takes some microseconds to make, once per process.
FEWEST_CALLS, MOST_CALLS = 256, 4096


@dataclass(slots=True, eq=False)
class Arm:
    """A shadow arm beside one call: its span and result, or the reason it did not run."""

    span: Span | None = None
    difference: tuple[Slots, int] | None = None
    reason: str | None = None


class PendingCall(NamedTuple):
    """A recorded call whose spans have not been read yet; `whole` encloses the call and its arms.

    A tuple, since one is made inside every call; `place` is given where the arms' order needed it.
    """

    step: int | None
    call: AttentionCall
    kernel: str
    kv_lengths: torch.Tensor | None
    clock: Clock
    span: Span | None
    place: Place | None = None
    arms: Mapping[str, Arm] = {}
    whole: Span | None = None


@dataclass(slots=True, eq=False)
class Stage:
    """A stage of a clip while it runs; `began` and `seconds` are of the host's clock."""

    clip: str | None
    name: str | None
    layers: Mapping[Kind, int]
    began: float = 0.0
    seconds: float = 0.0
    shadow_seconds: float = 0.0
    pending: list[PendingCall] = field(default_factory=list)
    slots: dict[torch.device, Slots] = field(default_factory=dict)
    forwards: list[tuple[int | None, Clock, Span, int]] = field(default_factory=list)
    places: Places = field(init=False)

    def __post_init__(self) -> None:
        self.places = Places(self.layers)

    @property
    def expected_calls(self) -> int:
        """A guess at the calls of the stage, within bounds: those of a distilled model in its 8 steps."""
        return min(max(FEWEST_CALLS, 8 * sum(self.layers.values())), MOST_CALLS)

    def resolve(self, log: TimingLog) -> None:
        """Read every span of the stage into rows of the log; its device work must be done."""
        lengths = _read_lengths(self.pending)
        for pending in self.pending:
            row = _row(self, pending, lengths)
            if pending.whole is not None and row.milliseconds is not None:
                spent, _ = pending.clock.read(pending.whole)
                self.shadow_seconds += max(0.0, spent - row.milliseconds) / 1e3
            log.rows.append(row)
        for step, clock, span, replayed_calls in self.forwards:
            milliseconds, _ = clock.read(span)
            log.forwards.append(ForwardTime(self.clip, self.name, step, milliseconds, replayed_calls))
        log.stages.append(StageTime(self.clip, self.name, self.seconds, self.shadow_seconds))


def _row(stage: Stage, pending: PendingCall, lengths: dict[int, list[int]]) -> CallRow:
    call = pending.call
    place = pending.place or stage.places.next(call.kind, pending.step)
    milliseconds, mark = _time(pending.clock, pending.span)
    row = CallRow(
        clip=stage.clip,
        stage=stage.name,
        step=None if (call.kind or "").endswith("_connector") else pending.step,
        forward=place.forward,
        layer=place.layer,
        kind=call.kind,
        batch=call.batch,
        heads=call.heads,
        q_len=call.q_len,
        kv_len=call.kv_len,
        head_dim=call.head_dim,
        dtype=str(call.dtype).removeprefix("torch."),
        kernel=pending.kernel,
        mask=call.mask,
        kv_tokens=_kv_tokens(pending, lengths),
        milliseconds=milliseconds,
        tflops=None,
        mark=mark,
    )
    if milliseconds and mark is None and row.flops is not None:
        row.tflops = row.flops / milliseconds / 1e9
    for name, arm in pending.arms.items():
        row.arms[name] = _arm_time(pending, arm, row)
    return row


def _kv_tokens(pending: PendingCall, lengths: dict[int, list[int]]) -> int | None:
    if pending.call.mask != "kv_lengths":
        return pending.call.batch * pending.call.kv_len
    return sum(lengths[id(pending.kv_lengths)]) if pending.kv_lengths is not None else None


def _arm_time(pending: PendingCall, arm: Arm, row: CallRow) -> ArmTime:
    if arm.span is None or arm.difference is None:
        return ArmTime(reason=arm.reason)
    milliseconds, mark = _time(pending.clock, arm.span)
    slots, number = arm.difference
    difference = slots.read(number)
    finite = math.isfinite(difference)
    comparable = bool(milliseconds and row.milliseconds and mark is None and row.mark is None)
    ratio = milliseconds / row.milliseconds if comparable else None  # type: ignore[operator]
    return ArmTime(milliseconds, ratio, difference if finite else None, finite, mark)


def _time(clock: Clock, span: Span | None) -> tuple[float | None, Mark | None]:
    if span is None:
        return None, "graph capture"
    milliseconds, gap = clock.read(span)
    return milliseconds, "launch gap" if gap else None


def _read_lengths(pending: list[PendingCall]) -> dict[int, list[int]]:
    """Valid keys of each batch entry by the id of their tensor; each tensor is read once."""
    tensors = {id(p.kv_lengths): (p.kv_lengths, p.call.kv_len) for p in pending if p.kv_lengths is not None}
    return {
        key: [min(max(0, length), kv_len) for length in tensor.tolist()]
        for key, (tensor, kv_len) in tensors.items()
    }
