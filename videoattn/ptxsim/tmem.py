"""Tensor memory: 128 lanes x 512 columns of 32-bit cells, its allocation map, and the access shapes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .hb import NEVER, Shadow

LANES, COLUMNS = 128, 512
_GROUP = 16  # lanes a shadow cell covers


class TensorMemory:
    """One CTA's tensor memory."""

    def __init__(self) -> None:
        self.cells = np.full((LANES, COLUMNS), 0x7FBADBAD, np.uint32)
        self.owned = np.zeros(COLUMNS, np.bool_)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
        self.last_size = COLUMNS
        self.shadow = Shadow(LANES // _GROUP * COLUMNS)

    def allocate(self, columns: int) -> int | None:
        """First column of a free range, or None."""
        for start in range(0, COLUMNS - columns + 1, columns):
            if not self.owned[start : start + columns].any():
                self.owned[start : start + columns] = True
                self.allocations[start] = columns
                cells = region(0, LANES, start, columns)
                self.shadow.kind[cells] = NEVER
                self.shadow.column[cells] = 0
                self.shadow.epoch[cells] = 0
                return start
        return None

    def free(self, start: int) -> int:
        columns = self.allocations.pop(start)
        self.owned[start : start + columns] = False
        return columns


@lru_cache(4096)
def region(lane: int, lanes: int, column: int, columns: int) -> np.ndarray:
    """Shadow cells of a rectangle."""
    groups = np.arange(lane // _GROUP, -(-(lane + lanes) // _GROUP))
    cells = (groups[:, None] * COLUMNS + np.arange(column, column + columns)).ravel()
    cells.flags.writeable = False
    return cells


@lru_cache(512)
def shape_map(shape: str, n: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) offsets [register, thread] of tcgen05.ld/st shape.xN (PTX ISA 9.7.16.2.3)."""
    t = np.arange(32)
    if shape == "32x32b":
        i = np.arange(n)[:, None]
        return np.broadcast_to(t, (n, 32)), np.broadcast_to(i, (n, 32))
    if shape == "16x64b":
        i = np.arange(n)[:, None]
        return np.broadcast_to(t // 4 + 8 * (t % 2), (n, 32)), 2 * i + t // 2 % 2
    if shape == "16x128b":
        i = np.arange(2 * n)[:, None]
        return t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    if shape == "16x256b":
        i = np.arange(4 * n)[:, None]
        return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    i = np.arange(n)[:, None]  # 16x32bx2
    return np.broadcast_to(t % 16, (n, 32)), i + np.where(t >= 16, split, 0)


def accumulator_map(
    m: int, group: int, n: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Where D lives, for each CTA of the group: (rows of D, columns of D, TMEM lanes, TMEM columns),
    broadcastable.
    """
    row, col = np.arange(m)[:, None], np.arange(n)[None, :]
    if group == 1 and m == 128:
        return [(row, col, row, col)]
    if group == 1 and m == 64:
        return [(row, col, 32 * (row // 16) + row % 16, col)]
    out = []
    for half in range(2):
        rows = np.arange(half * m // 2, (half + 1) * m // 2)[:, None]
        if m == 256:
            out.append((rows, col, rows % 128, col))
        else:
            out.append((rows, col, rows % 64 + 64 * (col >= n // 2), col % (n // 2)))
    return out
