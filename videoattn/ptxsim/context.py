"""A context: lanes of one warp that share a program counter; how contexts split, meet again and exit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .codegen import FULL, PARAM_BASE
from .errors import ExecutionError
from .findings import ERROR, STRICT, Where
from .hb import CARRY, ORDER
from .ops_barrier import BarrierOps
from .ops_memory import MemoryOps
from .ops_warp import WarpOps
from .tcgen05 import Tcgen05Ops
from .tma import TmaOps
from .wgmma import WgmmaOps

if TYPE_CHECKING:
    from .machine import Warp


class Join:
    """Where the lanes of a divergent branch meet again."""

    __slots__ = ("expected", "pc", "waiting")

    def __init__(self, pc: int, expected: np.ndarray):
        self.pc, self.expected = pc, expected
        self.waiting: list[Context] = []

    def complete(self) -> bool:
        if not self.waiting:
            return False
        here = self.waiting[0].mask.copy()
        for c in self.waiting[1:]:
            here |= c.mask
        return bool((here == self.expected).all())


class Wait:
    """Why a context is blocked, in words; `soft` waits may be given up with a false answer."""

    __slots__ = ("key", "soft", "text")

    def __init__(self, text, key=None, soft: bool = False):
        self.text, self.key, self.soft = text, key, soft


class Context(MemoryOps, BarrierOps, WarpOps, TmaOps, Tcgen05Ops, WgmmaOps):
    """Lanes in `mask` of warp `W` at block `pc`; `clock` is what they know (see hb)."""

    def __init__(
        self, warp: Warp, mask: np.ndarray, pc: int, clock: np.ndarray, joins: tuple[Join, ...] = ()
    ):
        self.W, self.cta, self.machine = warp, warp.cta, warp.cta.machine
        self.pc, self.clock, self.joins = pc, clock, joins
        self.at = 0
        self.state = "ready"
        self.wait: Wait | None = None
        self.spurious: set[int] = set()
        self.give_up = False
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

    # ---- happens-before

    def release(self) -> np.ndarray:
        """What a release by these lanes passes on; later accesses are not part of it."""
        w = self.W
        self.clock[ORDER, w.column] = w.now
        w.now += 1
        return self.clock[:3].copy()

    def issue_payload(self) -> np.ndarray:
        """What an asynchronous operation issued now inherits: everything before it but this warp's own accesses."""
        payload = self.clock[:3].copy()
        payload[:, self.W.column] = 0
        return payload

    def acquire(self, payload: np.ndarray | None) -> None:
        if payload is not None:
            np.maximum(self.clock[:3], payload, out=self.clock[:3])

    # ---- control

    def diverge(self, taken: np.ndarray, target: int, fall: int, join: int) -> int:
        mine = self.mask & taken
        other = self.mask & ~taken
        joins = self.joins
        if join >= 0:
            joins = (*joins, Join(join, self.mask.copy()))
        self.joins = joins
        twin = Context(self.W, other, fall, self.clock.copy(), joins)
        self.pc = target
        self.set_mask(mine)
        self.W.contexts.append(twin)
        self.machine.ready.append(twin)
        return -2

    def arrive_join(self) -> None:
        """At the meeting point: wait for the other lanes, or go on with them."""
        join = self.joins[-1]
        join.waiting.append(self)
        self.state = "join"
        self.try_join(join)

    def try_join(self, join: Join) -> None:
        if not join.complete():
            return
        first, *rest = join.waiting
        mask = first.mask.copy()
        for c in rest:
            mask |= c.mask
            np.maximum(first.clock, c.clock, out=first.clock)
            c.state = "merged"
            c.W.contexts.remove(c)
        join.waiting = []
        first.joins = first.joins[:-1]
        first.set_mask(mask)
        first.machine.wake(first)

    def exit(self) -> None:
        self.state = "done"
        w = self.W
        w.live = w.live & ~self.mask
        w.contexts.remove(self)
        for join in self.joins:
            join.expected = join.expected & ~self.mask
            if join.waiting:
                join.waiting[0].try_join(join)
        w.cta.lanes_exited(self)

    def block(self, wait: Wait) -> None:
        self.state, self.wait = "blocked", wait

    # ---- addresses and special registers

    def special(self, name: str) -> np.ndarray:
        value = self.W.special.get(name)
        if value is None:
            if name in ("%clock", "%globaltimer_lo"):
                return np.full(32, self.machine.steps & 0xFFFFFFFF, np.uint32)
            if name in ("%clock64", "%globaltimer"):
                return np.full(32, self.machine.steps, np.uint64)
            raise ExecutionError(f"special register {name} is outside the model")
        return value

    def symbol(self, name: str, offset: int, dtype: type, line: int) -> np.ndarray:
        key = (name, offset, dtype)
        value = self.cta.symbols.get(key)
        if value is None:
            value = np.full(32, self.cta.address_of(name, line) + offset, dtype)
            value.flags.writeable = False
            self.cta.symbols[key] = value
        return value

    def ld_param(self, name: str, offset: int, size: int, count: int) -> list[np.ndarray]:
        data = self.machine.params
        start = self.machine.param_offsets[name] + offset
        out = []
        for i in range(count):
            bits = int.from_bytes(data[start + i * size : start + (i + 1) * size], "little")
            out.append(np.full(32, bits, f"u{size}"))
        return out

    def ld_param_at(self, mask: np.ndarray, address: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        """A load through a register that holds a parameter's address."""
        data = self.machine.params
        out = [np.zeros(32, f"u{size}") for _ in range(count)]
        for lane in np.flatnonzero(mask):
            start = int(address[lane]) - PARAM_BASE
            if not 0 <= start <= len(data) - size * count:
                raise ExecutionError(f"ld.param from {int(address[lane]):#x}, which lies in no parameter")
            for i in range(count):
                at = start + i * size
                out[i][lane] = int.from_bytes(data[at : at + size], "little")
        return out

    def conflict_name(self, conflict) -> str:
        """A conflicting access in words."""
        who = self.cta.cluster.columns.names[conflict.column]
        text = f"the {conflict.what} by {who}"
        if conflict.at >= 0:
            text += f" at PTX line {self.machine.program.instrs[conflict.at].line}"
        return text

    def __repr__(self) -> str:
        lanes = "all lanes" if self.full else f"lanes {lane_list(self.mask)}"
        return f"CTA {self.cta.index} warp {self.W.index} ({lanes})"


def lane_list(mask: np.ndarray) -> str:
    """`0,4-7` for a lane mask."""
    lanes = np.flatnonzero(mask)
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = int(lane)
        else:
            runs.append([int(lane), int(lane)])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


__all__ = ["CARRY", "PARAM_BASE", "Context", "Join", "Wait", "lane_list"]
