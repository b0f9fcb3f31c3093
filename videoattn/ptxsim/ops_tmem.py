"""Tensor memory as warps use it: allocation, lane windows, tcgen05.ld and st, waits (PTX ISA 9.7.16)."""

from __future__ import annotations

import numpy as np

from .core import Wait
from .hb import ORDER, TCGEN, TCGEN05
from .poison import PendingLoad, PendingRegister
from .tma import TmaOps
from .tmem import COLUMNS, region, shape_map

_SIZES = (32, 64, 128, 256, 512)


class TensorMemoryOps(TmaOps):
    """Mixed into Context."""

    # ---- allocation

    def tmem_alloc(self, mask, dst, count, group: int):
        if not mask.any():
            return True
        n = int(count[np.flatnonzero(mask)[0]])
        if not self._converged(mask, "tcgen05.alloc") or n not in _SIZES:
            if n not in _SIZES:
                self.report(
                    "tmem allocation", f"tcgen05.alloc of {n} columns; must be 32, 64, 128, 256 or 512"
                )
            return True
        cta = self.cta
        if cta.tmem.relinquished:
            self.report("tmem allocation", "tcgen05.alloc after relinquish_alloc_permit")
        if n > cta.tmem.last_size:
            self.report(
                "tmem allocation",
                f"{n} columns after an allocation of {cta.tmem.last_size}: sizes must not grow",
            )
        self._one_group(group)
        start = cta.tmem.allocate(n)
        if start is None:
            free = COLUMNS - int(cta.tmem.owned.sum())
            self.block(Wait(lambda: f"for {n} columns of tensor memory; {free} are free", "tmem"))
            return None
        cta.tmem.last_size = n
        off = dst[:1].astype(np.int64)
        self._check_shared_write(cta, off & 0xFFFFFF, 4, "tcgen05.alloc")
        cta.smem.views[4][int(off[0] & 0xFFFFFF) >> 2] = start
        return True

    def _one_group(self, group: int) -> None:
        cta = self.cta
        if cta.tmem_group not in (0, group):
            self.report("cta_group", f"cta_group::{group} after cta_group::{cta.tmem_group} in one kernel")
        cta.tmem_group = group
        if group == 2 and cta.cluster.size % 2:
            self.report("cta_group", "cta_group::2 in a cluster without a CTA pair")

    def tmem_dealloc(self, mask, address, count, group: int) -> None:
        if not self._converged(mask, "tcgen05.dealloc"):
            return
        self._one_group(group)
        start, n, tmem = int(address[0]), int(count[0]), self.cta.tmem
        if start >> 16 or tmem.allocations.get(start & 0xFFFF) != n:
            self.report(
                "tmem allocation", f"tcgen05.dealloc of {n} columns at {start:#x}, which alloc did not return"
            )
            return
        cells = region(0, 128, start, n)
        self._tmem_check(tmem, cells, True, "tcgen05.dealloc")
        tmem.free(start)
        for w in self.cta.warps:
            for c in w.contexts:
                if c.wait is not None and c.wait.key == "tmem":
                    self.machine.wake(c)

    def tmem_relinquish(self, mask, group: int) -> None:
        if not mask.any():
            return
        self._converged(mask, "tcgen05.relinquish_alloc_permit")
        self._one_group(group)
        self.cta.tmem.relinquished = True

    # ---- order

    def _tmem_known(self) -> np.ndarray:
        """Row TCGEN, with what this warp itself has waited for by tcgen05.wait.

        Its own MMAs are not among them: a commit's arrival needs the fence in the issuing thread too.
        """
        w = self.W
        known = self.clock[TCGEN].copy()
        own = [w.ld_column, w.st_column]
        known[own] = self.clock[ORDER, own]
        return known

    def _tmem_check(self, tmem, cells, write: bool, what: str, skip: int = 0) -> None:
        shadow, known = tmem.shadow, self.clock[ORDER]
        conflict = shadow.unordered_write(known, cells, skip)
        if conflict is None and write:
            conflict = shadow.unordered_read(known, cells, skip)
        if conflict is not None:
            column = conflict.cell % COLUMNS
            self.report(
                "race",
                f"{what} of tensor memory column {column} is not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )
            return
        known = self._tmem_known()
        conflict = shadow.unordered_write(known, cells, skip)
        if conflict is None and write:
            conflict = shadow.unordered_read(known, cells, skip)
        if conflict is not None:
            self.strict(
                "missing tcgen05 fence",
                f"{what} needs tcgen05.fence before and after the synchronisation with "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )

    def _tmem_owned(self, tmem, column: int, columns: int, what: str) -> bool:
        if column + columns > COLUMNS or column < 0:
            self.report("out of bounds", f"{what} of tensor memory columns {column}..{column + columns - 1}")
            return False
        if not tmem.owned[column : column + columns].all():
            self.report(
                "unallocated tmem",
                f"{what} of tensor memory columns {column}..{column + columns - 1}, "
                "not all of which are allocated",
                key=what,
            )
        return True

    def tmem_wait(self, mask, what: str) -> None:
        if not mask.any():
            return
        self._converged(mask, f"tcgen05.wait::{what}")
        w = self.W
        if what == "ld":
            self.machine.drain(("ld", id(w)))
            for load, regs in w.pending_loads:
                values = load.complete()
                load.waited = True
                for i, r in enumerate(regs):
                    held = w.R[r] if r >= 0 else None
                    if type(held) is PendingRegister and held.load is load:
                        w.R[r] = values[i]
            w.pending_loads.clear()
            self.clock[ORDER, w.ld_column] = w.ld_issued
        else:
            self.machine.drain(("st", id(w)))
            self.clock[ORDER, w.st_column] = w.st_issued

    # ---- loads and stores

    def _tmem_window(self, mask, address, shape: str, columns: int, what: str) -> tuple[int, int] | None:
        if not self._converged(mask, what):
            return None
        first = int(address[0])
        if (address != address[0]).any():
            self.report("non-uniform address", f"{what} with addresses that differ between lanes")
        lane, column = first >> 16, first & 0xFFFF
        base = 32 * (self.W.index % 4)
        allowed = (base,) if shape == "32x32b" else (base, base + 16)
        if lane not in allowed:
            self.report(
                "wrong lane window",
                f"{what} at lane {lane}; warp {self.W.index} may only use lanes {base}..{base + 31}",
            )
            if lane + (32 if shape == "32x32b" else 16) > 128:
                return None
        if not self._tmem_owned(self.cta.tmem, column, columns, what):
            return None
        return lane, column

    @staticmethod
    def _width(shape: str, n: int, packed: bool, split: int) -> int:
        width = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}[shape] * n
        return width * (2 if packed else 1) + (split if shape == "16x32bx2" else 0)

    def tmem_ld(
        self, mask, address, shape: str, n: int, packed: bool, split: int, regs: tuple[int, ...]
    ) -> list:
        columns = self._width(shape, n, packed, split)
        place = self._tmem_window(mask, address, shape, columns, "tcgen05.ld")
        if place is None:
            return self._not_loaded(mask, regs)
        lane, column = place
        tmem = self.cta.tmem
        height = 32 if shape == "32x32b" else 16
        cells = region(lane, height, column, columns)
        self._tmem_read(tmem, cells, "tcgen05.ld")

        def sample() -> list[np.ndarray]:
            if shape == "32x32b" and not packed:
                return list(tmem.cells[lane : lane + 32, column : column + n].T.copy())
            rows, cols = shape_map(shape, n, split)
            if packed:
                low = tmem.cells[lane + rows, column + 2 * cols] & np.uint32(0xFFFF)
                high = tmem.cells[lane + rows, column + 2 * cols + 1] & np.uint32(0xFFFF)
                return list(low | high << np.uint32(16))
            return list(tmem.cells[lane + rows, column + cols])

        return self._pending(sample, regs)

    def _tmem_read(self, tmem, cells, what: str) -> None:
        w = self.W
        hit = tmem.shadow.uninitialised(cells)
        if hit is not None:
            self.report(
                "uninitialised tmem", f"{what} reads column {hit % COLUMNS}, which nothing has written"
            )
        self._tmem_check(tmem, cells, False, what)
        w.ld_issued += 1
        tmem.shadow.read(cells, w.ld_column, w.ld_issued, self.at)
        w.unsynced |= self.mask

    def _not_loaded(self, mask, regs: tuple[int, ...]) -> list:
        """Registers after a load that a false guard skipped, or that was illegal."""
        if mask.any():
            return [np.full(32, 0x7FBADBAD, np.uint32) for _ in regs]
        return [self.W.R[r] if r >= 0 else None for r in regs]

    def _pending(self, sample, regs: tuple[int, ...]) -> list:
        w = self.W
        load = PendingLoad(self, sample, w.ld_issued)
        self.machine.post(("ld", id(w)), load.complete)
        w.pending_loads.append((load, regs))
        return [PendingRegister(load, i) for i in range(len(regs))]

    def tmem_ld_red(
        self, mask, address, n: int, kind: str, typ: str, absolute: bool, nan: bool, regs
    ) -> list:
        place = self._tmem_window(mask, address, "32x32b", n, "tcgen05.ld.red")
        if place is None:
            return self._not_loaded(mask, regs)
        lane, column = place
        tmem = self.cta.tmem
        cells = region(lane, 32, column, n)
        self._tmem_read(tmem, cells, "tcgen05.ld.red")

        def sample() -> list[np.ndarray]:
            values = tmem.cells[lane : lane + 32, column : column + n].T.copy()
            typed = values.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[typ])
            if absolute:
                typed = np.abs(typed)
            if typ == "f32" and not nan:
                fn = np.fmax if kind == "max" else np.fmin
            else:
                fn = np.maximum if kind == "max" else np.minimum
            return [*values, fn.reduce(typed, axis=0).view(np.uint32)]

        return self._pending(sample, regs)

    def tmem_st(self, mask, address, shape: str, n: int, packed: bool, split: int, values: tuple) -> None:
        columns = self._width(shape, n, packed, split)
        place = self._tmem_window(mask, address, shape, columns, "tcgen05.st")
        if place is None:
            return
        lane, column = place
        tmem, w = self.cta.tmem, self.W
        cells = region(lane, 32 if shape == "32x32b" else 16, column, columns)
        self._tmem_check(tmem, cells, True, "tcgen05.st", w.st_column)
        w.st_issued += 1
        tmem.shadow.write(cells, w.st_column, w.st_issued, TCGEN05, self.at)
        w.unsynced |= self.mask
        block = np.array(values, np.uint32)

        def apply() -> None:
            if shape == "32x32b" and not packed:
                tmem.cells[lane : lane + 32, column : column + n] = block.T
                return
            rows, cols = shape_map(shape, n, split)
            if packed:
                tmem.cells[lane + rows, column + 2 * cols] = block & np.uint32(0xFFFF)
                tmem.cells[lane + rows, column + 2 * cols + 1] = block >> np.uint32(16)
            else:
                tmem.cells[lane + rows, column + cols] = block

        self.machine.post(("st", id(w)), apply)
