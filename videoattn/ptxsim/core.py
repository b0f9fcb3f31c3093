"""State of a context that all groups of operations share: lanes, findings, happens-before clocks, waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .codegen import FULL
from .findings import ERROR, STRICT, Where
from .hb import ORDER, Conflict

if TYPE_CHECKING:
    from .cta import Cta, Warp
    from .machine import Machine


class Wait:
    """Why a context is blocked, in words; `soft` waits may be given up with a false answer."""

    __slots__ = ("key", "soft", "text")

    def __init__(self, text: str | Callable[[], str], key: object = None, soft: bool = False):
        self.text, self.key, self.soft = text, key, soft


def runs(numbers) -> str:
    """`0,4-7` for ascending numbers."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = int(n)
        else:
            out.append([int(n), int(n)])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def lane_list(mask: np.ndarray) -> str:
    """`0,4-7` for a lane mask."""
    return runs(np.flatnonzero(mask))


class Core:
    """Lanes `mask` of warp `W` at block `pc`; `clock` is what they know (see hb)."""

    W: Warp
    cta: Cta
    machine: Machine

    def __init__(self, warp: Warp, mask: np.ndarray, pc: int, clock: np.ndarray, joins: tuple = ()):
        self.W, self.cta, self.machine = warp, warp.cta, warp.cta.machine
        self.pc, self.clock, self.joins = pc, clock, joins
        self.at = 0
        self.last_event = None
        self.state = "ready"
        self.wait: Wait | None = None
        self.spurious: set[int] = set()
        self.give_up = False
        self.bar_passed = False
        self.bar_votes: list = []
        self.cluster_token: int | None = None
        self.mask, self.full, self.join_pc = mask, False, -1
        self.set_mask(mask)

    def set_mask(self, mask: np.ndarray) -> None:
        self.full = bool(mask.all())
        self.mask = FULL if self.full else mask
        self.join_pc = self.joins[-1].pc if self.joins else -1

    # ---- findings

    def where(self, at: int | None = None) -> Where:
        ins = self.machine.program.instrs[self.at if at is None else at]
        return Where(ins.line, ins.opcode, self.machine.source(ins), self.cta.index, self.W.index)

    def report(self, kind: str, message: str, severity: str = ERROR, key: object = None) -> None:
        self.machine.log.add(kind, severity, message, self.where(), key)

    def strict(self, kind: str, message: str, key: object = None) -> None:
        self.report(kind, message, STRICT, key)

    def say(self, text: str) -> None:
        """Add words to this instruction's event, when a trace is kept."""
        if self.last_event is not None and self.machine.trace is not None:
            self.last_event.text = text

    # ---- happens-before

    def release(self) -> np.ndarray:
        """What a release by these lanes passes on; later accesses are not part of it."""
        w = self.W
        self.clock[ORDER, w.column] = w.now
        self.clock[ORDER, w.init_column] = w.inits
        w.now += 1
        for load in w.loads.values():
            load.release(self.at)
        return self.clock[:3].copy()

    def issue_payload(self) -> np.ndarray:
        """What an asynchronous operation issued now inherits: everything before it but this warp's own
        accesses.
        """
        payload = self.clock[:3].copy()
        payload[:, self.W.column] = 0
        return payload

    def order_row(self) -> np.ndarray:
        """Row ORDER with this warp's own accesses included."""
        known = self.clock[ORDER]
        known[self.W.column] = self.W.now
        return known

    def acquire(self, payload: np.ndarray | None) -> None:
        if payload is not None:
            np.maximum(self.clock[:3], payload, out=self.clock[:3])

    def block(self, wait: Wait) -> None:
        self.state, self.wait = "blocked", wait

    def conflict_name(self, conflict: Conflict) -> str:
        """A conflicting access in words."""
        who = self.cta.cluster.columns.names[conflict.column]
        text = f"the {conflict.what} by {who}"
        if conflict.at >= 0:
            text += f" at PTX line {self.machine.program.instrs[conflict.at].line}"
        return text

    def __repr__(self) -> str:
        lanes = "all lanes" if self.full else f"lanes {lane_list(self.mask)}"
        return f"CTA {self.cta.index} warp {self.W.index} ({lanes})"
