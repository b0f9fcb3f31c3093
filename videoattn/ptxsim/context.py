"""A context: lanes of one warp that share a program counter; how contexts split, meet again and exit."""

from __future__ import annotations

import numpy as np

from .codegen import PARAM_BASE
from .errors import ExecutionError
from .tcgen05 import Tcgen05Ops
from .wgmma import WgmmaOps


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


class Context(Tcgen05Ops, WgmmaOps):
    """Lanes of a warp that share a program counter."""

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
