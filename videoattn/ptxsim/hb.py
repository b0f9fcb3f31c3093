"""Happens-before: vector clocks of warps and asynchronous agents, and the last accesses of every memory cell.

A clock has one column for each agent: a warp, a warp's TMEM loads or stores, its MMA pipe, its bulk groups,
an mbarrier (for the copies that complete on it). A thread's knowledge is four rows over the columns:

- ORDER: accesses that happen before its next one (PTX causality order, taking a warp's lanes as one thread);
- PROXY: of those, generic accesses that a fence.proxy.async made visible to the async proxy;
- CARRY: tcgen05 operations whose order the next synchronisation carries (fence::before_thread_sync, commit);
- TCGEN: tcgen05 operations of others that precede its next one (fence::after_thread_sync applied to CARRY).

An asynchronous access is checked and entered when it is issued; its column tells what must be observed later.
"""

from __future__ import annotations

import numpy as np

ORDER, PROXY, CARRY, TCGEN = range(4)

NEVER, GENERIC, ASYNC, TCGEN05 = range(4)  # kinds of writer


class Columns:
    """Names of the clock columns of one cluster."""

    def __init__(self, capacity: int):
        self.names = ["the initial state"]
        self.capacity = capacity

    def new(self, name: str) -> int:
        if len(self.names) == self.capacity:
            raise MemoryError("too many agents for the happens-before clocks")
        self.names.append(name)
        return len(self.names) - 1

    def clock(self) -> np.ndarray:
        """A fresh thread clock."""
        return np.zeros((4, self.capacity), np.int64)

    def payload(self) -> np.ndarray:
        """An empty release: rows ORDER, PROXY, CARRY."""
        return np.zeros((3, self.capacity), np.int64)


class Conflict:
    """An access that nothing orders before the present one."""

    __slots__ = ("at", "cell", "column", "what")

    def __init__(self, what: str, column: int, at: int, cell: int):
        self.what, self.column, self.at, self.cell = what, column, at, cell


class Shadow:
    """Last write and last reads of each cell of one memory."""

    def __init__(self, cells: int, initialised: bool = False):
        self.column = np.zeros(cells, np.int16)
        self.epoch = np.zeros(cells, np.int64)
        self.kind = np.full(cells, ASYNC if initialised else NEVER, np.uint8)
        self.at = np.full(cells, -1, np.int32)
        self.reads: dict[int, np.ndarray] = {}
        self.read_at: dict[int, int] = {}

    def unordered_write(self, known: np.ndarray, cells, skip: int = 0, only: int = 0) -> Conflict | None:
        """A write to `cells` that `known` (one clock row) does not cover, except by column `skip`.

        `only` restricts the search to writers of that kind.
        """
        column = self.column[cells]
        late = self.epoch[cells] > known[column]
        if not late.any():
            return None
        if skip:
            late &= column != skip
        if only:
            late &= self.kind[cells] == only
        where = np.flatnonzero(late)
        if not len(where):
            return None
        i = where[0]
        at = self.at[cells].ravel()[i]
        return Conflict("write", int(column.ravel()[i]), int(at), self._cell(cells, int(i)))

    def unordered_read(self, known: np.ndarray, cells, skip: int = 0) -> Conflict | None:
        """A read of `cells` that `known` does not cover, except by column `skip`."""
        for column, epochs in self.reads.items():
            if column == skip:
                continue
            late = epochs[cells] > known[column]
            if late.any():
                i = int(np.flatnonzero(late)[0])
                return Conflict("read", column, self.read_at[column], self._cell(cells, i))
        return None

    @staticmethod
    def _cell(cells, i: int) -> int:
        if isinstance(cells, slice):
            return int(cells.start) + i
        return int(np.ravel(cells)[i])

    def uninitialised(self, cells) -> int | None:
        """A cell of `cells` that nothing has written, if there is one."""
        never = self.kind[cells] == NEVER
        if never.any():
            return self._cell(cells, int(np.flatnonzero(never)[0]))
        return None

    def write(self, cells, column: int, epoch: int, kind: int, at: int) -> None:
        """Enter a write."""
        self.column[cells] = column
        self.epoch[cells] = epoch
        self.kind[cells] = kind
        self.at[cells] = at

    def read(self, cells, column: int, epoch: int, at: int) -> None:
        """Enter a read."""
        epochs = self.reads.get(column)
        if epochs is None:
            epochs = self.reads[column] = np.zeros(len(self.column), np.int64)
        epochs[cells] = epoch
        self.read_at[column] = at


def acquire(clock: np.ndarray, payload: np.ndarray) -> None:
    """Add a release's knowledge to a thread's."""
    np.maximum(clock[:3], payload, out=clock[:3])
