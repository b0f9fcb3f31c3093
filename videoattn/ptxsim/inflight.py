"""Shared-memory loads whose data may still be on their way into registers.

A load is certain to have read its bytes once an instruction reads one of its registers (it waits for the
data), or once its warp executes a fence. An mbarrier arrival or a named barrier is not enough for a later
write by the async proxy: ptxas lets an arrival follow a load without waiting for the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .codegen import merge, under
from .findings import STRICT

if TYPE_CHECKING:
    from .core import Core
    from .memory import SharedMemory

# A thread has 255 registers and every load in flight fills one: more loads than that include dead ones.
MOST_IN_FLIGHT = 256


class SharedLoad:
    """A ld.shared or ldmatrix; its destinations are LoadedRegister until they are read.

    `done` is the warp's clock when the data was certain to be there, `released` the first release before.
    """

    __slots__ = (
        "_read", "at", "ctx", "done", "hits", "nbytes", "offsets", "released", "serial", "smem", "used",
        "values", "warp", "what",
    )  # fmt: skip

    def __init__(self, ctx: Core, smem: SharedMemory, offsets: np.ndarray, nbytes: int, what: str,
                 read: Callable[[], list[np.ndarray]]):  # fmt: skip
        warp = self.warp = ctx.W
        self.ctx = ctx
        self.smem, self.offsets, self.nbytes, self.what, self.at = smem, offsets, nbytes, what, ctx.at
        self.done: int | None = None
        self.released: int | None = None
        self.used = False
        self.hits: list[tuple[str, int]] = []
        self._read = read
        warp.loads_issued += 1
        self.serial = warp.column, warp.loads_issued
        self.values: list[np.ndarray] | None = None
        if ctx.machine.early:
            self.values = read()
        else:
            smem.unread[self.serial] = self
        loads = warp.loads
        if len(loads) == MOST_IN_FLIGHT:
            next(iter(loads.values())).finish()
        loads[self.serial] = self

    def read(self) -> list[np.ndarray]:
        """The loaded values, from memory as it is now unless they have been read."""
        if self.values is None:
            del self.smem.unread[self.serial]
            self.values = self._read()
        return self.values

    def finish(self) -> None:
        """The data has arrived."""
        if self.done is None:
            self.done = self.warp.now
            self.warp.loads.pop(self.serial, None)
            self.read()

    def use(self) -> list[np.ndarray]:
        """The values, for an instruction that needs them."""
        self.finish()
        self.used = True
        if self.hits:
            hits, self.hits = self.hits, []
            for message, by in hits:
                self._report(message, by)
        return self.read()

    def overtaken(self, message: str, by: int) -> None:
        """Instruction `by` may overwrite what it reads: a finding if an instruction needs the values."""
        if self.used:
            self._report(message, by)
        else:
            self.hits.append((message, by))

    def _report(self, message: str, by: int) -> None:
        ctx = self.ctx
        ctx.machine.log.add("load in flight", STRICT, message, ctx.where(self.at), by)

    def release(self, at: int) -> None:
        """The warp released, at instruction `at`, with this load in flight."""
        if self.released is not None:
            return
        self.released = at
        key = self.warp.column, self.at, int(self.offsets[0])
        # Who knows of this load knows that the one of the loop's last turn is done, so it may take its place.
        before = self.smem.escaped.get(key)
        if before is not None and before.done is None:
            key = (*key, self.serial)
        self.smem.escaped[key] = self

    def overlaps(self, cells) -> bool:
        """Whether it reads one of the memory's words `cells` (a slice, or an array of numbers)."""
        first = self.offsets >> 2
        last = (self.offsets + (self.nbytes - 1)) >> 2
        if isinstance(cells, slice):
            return bool(((last >= cells.start) & (first < cells.stop)).any())
        ordered = np.sort(cells)
        return bool((np.searchsorted(ordered, last, "right") > np.searchsorted(ordered, first)).any())


class LoadedRegister:
    """Register `reg` after a load whose data nothing has waited for; lanes outside `mask` keep `old`."""

    __slots__ = ("index", "load", "mask", "old", "reg", "widen")

    def __init__(self, load: SharedLoad, index: int, reg: int, widen, mask: np.ndarray | None, old):
        self.load, self.index, self.reg, self.widen, self.mask = load, index, reg, widen, mask
        self.old = old._use() if type(old) is LoadedRegister else old

    def _use(self):
        value = self.load.use()[self.index]
        if self.widen is not None:
            value = value.view(self.widen[0]).astype(self.widen[1])
        if self.mask is not None:
            value = merge(self.mask, value, self.old)
        R = self.load.warp.R
        if R[self.reg] is self:
            R[self.reg] = value
        return value

    def view(self, dtype) -> np.ndarray:
        return self._use().view(dtype)

    def under(self, mask: np.ndarray) -> np.ndarray:
        return under(self._use(), mask)

    def merged(self, mask: np.ndarray, new: np.ndarray):
        return merge(mask, new, self._use())


def loaded(values, index: int, reg: int, widen, mask: np.ndarray | None, old):
    """What a register holds after a load: `values` is a SharedLoad, or arrays that are there already."""
    if type(values) is SharedLoad:
        return LoadedRegister(values, index, reg, widen, mask, old)
    value = values[index]
    if widen is not None:
        value = value.view(widen[0]).astype(widen[1])
    return value if mask is None else merge(mask, value, old)
