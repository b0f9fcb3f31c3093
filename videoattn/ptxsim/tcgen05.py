"""tcgen05: tensor memory allocation, loads and stores, MMA, commit (PTX ISA 9.7.16)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .core import Wait
from .hb import CARRY, ORDER, TCGEN, TCGEN05
from .layouts import decode_tcgen05, operand_index
from .mma_sync import halves_to_f32
from .poison import PendingLoad, PendingRegister
from .tma import TmaOps
from .tmem import COLUMNS, accumulator_map, region, shape_map

_SIZES = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of kind::f16; `problem` says what is illegal about it."""

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_mn: bool
    b_mn: bool
    a_neg: bool
    b_neg: bool
    problem: str


@lru_cache(256)
def decode_idesc(bits: int, group: int, a_in_tmem: bool) -> InstructionDescriptor:
    """Decode and check against the shapes of kind::f16."""
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    types = {0: "f16", 1: "bf16"}
    a, b = types.get(bits >> 7 & 7, "?"), types.get(bits >> 10 & 7, "?")
    d = {0: "f16", 1: "f32"}.get(bits >> 4 & 3, "?")
    problem = ""
    if bits & 0b1111 or bits >> 6 & 1 or bits >> 23 & 1 or bits >> 29:
        problem = "bits for sparsity, saturation, shift or reserved bits are set"
    elif "?" in (a, b):
        problem = f"A type {bits >> 7 & 7}, B type {bits >> 10 & 7}; kind::f16 has 0 (f16) and 1 (bf16)"
    elif d == "?" or (d == "f16" and (a, b) != ("f16", "f16")):
        problem = f"D type {bits >> 4 & 3} with {a} operands"
    elif m not in ((64, 128) if group == 1 else (128, 256)):
        problem = f"M = {m} with cta_group::{group}"
    elif not 8 * group <= n <= 256 or n % (16 if group == 2 or m == 128 else 8):
        problem = f"N = {n} with M = {m}, cta_group::{group}"
    elif a_in_tmem and bits >> 15 & 1:
        problem = "A in tensor memory must be K-major"
    return InstructionDescriptor(
        m,
        n,
        a,
        b,
        d,
        bool(bits >> 15 & 1),
        bool(bits >> 16 & 1),
        bool(bits >> 13 & 1),
        bool(bits >> 14 & 1),
        problem,
    )


class Tcgen05Ops(TmaOps):
    """Mixed into Context."""

    # ---- allocation

    def tmem_alloc(self, mask, dst, count, group: int):
        n = int(count[np.flatnonzero(mask)[0]]) if mask.any() else 0
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
        self._converged(mask, "tcgen05.relinquish_alloc_permit")
        self._one_group(group)
        self.cta.tmem.relinquished = True

    # ---- order

    def _tmem_known(self) -> np.ndarray:
        """Row TCGEN with this warp's own operations taken from ORDER."""
        w = self.W
        known = self.clock[TCGEN].copy()
        own = [w.ld_column, w.st_column, w.mma_column]
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
        garbage = [np.full(32, 0x7FBADBAD, np.uint32) for _ in regs]
        columns = self._width(shape, n, packed, split)
        place = self._tmem_window(mask, address, shape, columns, "tcgen05.ld")
        if place is None:
            return garbage
        lane, column = place
        tmem, w = self.cta.tmem, self.W
        height = 32 if shape == "32x32b" else 16
        cells = region(lane, height, column, columns)
        hit = tmem.shadow.uninitialised(cells)
        if hit is not None:
            self.report(
                "uninitialised tmem", f"tcgen05.ld reads column {hit % COLUMNS}, which nothing has written"
            )
        self._tmem_check(tmem, cells, False, "tcgen05.ld")
        w.ld_issued += 1
        tmem.shadow.read(cells, w.ld_column, w.ld_issued, self.at)
        w.unsynced |= self.mask

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
            return [np.full(32, 0x7FBADBAD, np.uint32) for _ in regs]
        lane, column = place
        tmem, w = self.cta.tmem, self.W
        cells = region(lane, 32, column, n)
        self._tmem_check(tmem, cells, False, "tcgen05.ld.red")
        w.ld_issued += 1
        tmem.shadow.read(cells, w.ld_column, w.ld_issued, self.at)

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

    # ---- MMA

    def tcgen05_mma(
        self, mask, d, a, b, idesc, enable, a_in_tmem: bool, group: int, scale: int, off_lanes
    ) -> None:
        for lane in np.flatnonzero(mask):
            self._one_group(group)
            desc = decode_idesc(int(idesc[lane]), group, a_in_tmem)
            if desc.problem:
                self.report(
                    "illegal descriptor", f"instruction descriptor {int(idesc[lane]):#010x}: {desc.problem}"
                )
                continue
            disabled = None if off_lanes is None else [int(v[lane]) for v in off_lanes]
            self._issue_mma(
                int(d[lane]),
                int(a[lane]),
                int(b[lane]),
                desc,
                bool(enable[lane]),
                a_in_tmem,
                group,
                scale,
                disabled,
            )

    def _smem_operand(self, bits: int, rows: int, mn_major: bool, what: str):
        desc = decode_tcgen05(bits)
        if desc.problem:
            self.report("illegal descriptor", f"{what} descriptor {bits:#018x}: {desc.problem}", key=what)
            return None
        if desc.base_offset:
            self.machine.unsupported(self, f"{what} descriptor with base offset {desc.base_offset}")
        index, words = operand_index(desc, rows, mn_major)
        if words[-1] * 4 + 4 > self.cta.smem.size:
            self.report("out of bounds", f"{what} reaches shared offset {int(words[-1]) * 4 + 3:#x}; "
                        f"the CTA has {self.cta.smem.size:#x}", key=what)  # fmt: skip
            return None
        return index, words

    def _issue_mma(
        self,
        d: int,
        a: int,
        b: int,
        desc,
        accumulate: bool,
        a_in_tmem: bool,
        group: int,
        scale: int,
        disabled,
    ) -> None:
        w, cluster = self.W, self.cta.cluster
        pair = (
            [self.cta] if group == 1 else [cluster.ctas[self.cta.rank & ~1], cluster.ctas[self.cta.rank | 1]]
        )
        m, n = desc.m, desc.n
        self.say(f"D[{m}x{n}] at column {d & 0xFFFF} {'+' if accumulate else ''}= A B")
        b_operand = self._smem_operand(b, n // group, desc.b_mn, "B")
        a_operand = None if a_in_tmem else self._smem_operand(a, m // group, desc.a_mn, "A")
        if b_operand is None or (a_operand is None and not a_in_tmem):
            return
        column, lane0 = d & 0xFFFF, d >> 16
        maps = accumulator_map(m, group, n)
        width = n // 2 if group == 2 and m == 128 else n
        if lane0 and not (m == 64 and lane0 == 16):
            self.report("wrong lane window", f"D at lane {lane0}; M = {m} needs lane 0")
            return
        w.mma_issued += 1
        for cta in pair:
            if not self._tmem_owned(cta.tmem, column, width, "tcgen05.mma D"):
                return
            cells = self._mma_cells(m, group, lane0, column, width)
            if accumulate:
                hit = cta.tmem.shadow.uninitialised(cells)
                if hit is not None:
                    self.report("uninitialised tmem", f"tcgen05.mma accumulates onto column {hit % COLUMNS}, "
                                "which nothing has written")  # fmt: skip
            self._tmem_check(cta.tmem, cells, True, "tcgen05.mma D", w.mma_column)
            self._mma_order(cta.tmem, cells)
            cta.tmem.shadow.write(cells, w.mma_column, w.mma_issued, TCGEN05, self.at)
            self._mma_read(cta, b_operand[1], "tcgen05.mma B")
            if a_in_tmem:
                if not self._tmem_owned(cta.tmem, a & 0xFFFF, 8, "tcgen05.mma A"):
                    return
                a_cells = self._mma_cells(m, group, a >> 16, a & 0xFFFF, 8)
                hit = cta.tmem.shadow.uninitialised(a_cells)
                if hit is not None:
                    self.report("uninitialised tmem", f"tcgen05.mma A reads column {hit % COLUMNS}, "
                                "which nothing has written")  # fmt: skip
                self._tmem_check(cta.tmem, a_cells, False, "tcgen05.mma A", w.mma_column)
                cta.tmem.shadow.read(a_cells, w.mma_column, w.mma_issued, self.at)
            else:
                assert a_operand is not None
                self._mma_read(cta, a_operand[1], "tcgen05.mma A")

        a_index = None if a_operand is None else a_operand[0]

        def run() -> None:
            b_parts = [halves_to_f32(cta.smem.views[2][b_operand[0]], desc.b_type) for cta in pair]
            b_matrix = b_parts[0] if group == 1 else np.concatenate(b_parts)
            if desc.b_neg:
                b_matrix = -b_matrix
            for cta, (_, _, lanes, columns) in zip(pair, maps, strict=True):
                if a_in_tmem:
                    a_lanes = self._a_lanes(m, group, a >> 16)
                    packed = np.ascontiguousarray(cta.tmem.cells[a_lanes, (a & 0xFFFF) : (a & 0xFFFF) + 8])
                    halves = packed.view(np.uint16)
                else:
                    halves = cta.smem.views[2][a_index]
                a_matrix = halves_to_f32(halves, desc.a_type)
                if desc.a_neg:
                    a_matrix = -a_matrix
                product = a_matrix @ b_matrix.T
                self._accumulate(
                    cta.tmem,
                    product,
                    lanes + lane0,
                    column + columns,
                    desc.d_type,
                    accumulate,
                    scale,
                    disabled,
                    m,
                    group,
                )

        self.machine.post(("mma", id(w)), run)

    def _mma_order(self, tmem, cells) -> None:
        """D over an A that an earlier MMA of this thread may still read: the ISA orders no such pair."""
        reads = tmem.shadow.reads.get(self.W.mma_column)
        if reads is not None and (reads[cells] > self.clock[ORDER, self.W.mma_column]).any():
            at = tmem.shadow.read_at[self.W.mma_column]
            self.strict(
                "MMA order",
                "tcgen05.mma D overwrites tensor memory that the tcgen05.mma at PTX line "
                f"{self.machine.program.instrs[at].line} reads as A, with no commit waited for between",
            )

    @staticmethod
    def _accumulate(
        tmem, product, lanes, columns, d_type: str, accumulate: bool, scale: int, disabled, m, group
    ):
        fast = group == 1 and m == 128
        where = (
            (slice(None), slice(int(columns[0, 0]), int(columns[0, -1]) + 1)) if fast else (lanes, columns)
        )
        old = tmem.cells[where]
        if accumulate:
            if d_type == "f32":
                base = old.view(np.float32) if fast else np.ascontiguousarray(old).view(np.float32)
            else:
                base = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
            product = product + (base * np.float32(2.0**-scale) if scale else base)
        if d_type == "f32":
            new = product.astype(np.float32).view(np.uint32)
        else:
            new = product.astype(np.float16).view(np.uint16).astype(np.uint32)
        if disabled is not None:
            bits = np.array(disabled, np.uint32).view(np.uint8)
            keep = np.unpackbits(bits, bitorder="little").astype(bool)[np.broadcast_to(lanes, new.shape)]
            new = np.where(keep, old, new)
        tmem.cells[where] = new

    @staticmethod
    def _a_lanes(m: int, group: int, lane0: int) -> np.ndarray:
        if m == 64 and group == 1:
            r = np.arange(64)
            return 32 * (r // 16) + r % 16 + lane0
        return np.arange(64 if (m == 128 and group == 2) else 128)

    @staticmethod
    @lru_cache(1024)
    def _mma_cells(m: int, group: int, lane0: int, column: int, width: int) -> np.ndarray:
        if m == 64 and group == 1:
            return np.concatenate([region(32 * q + lane0, 16, column, width) for q in range(4)])
        return region(0, 128, column, width)

    def _mma_read(self, cta, words: np.ndarray, what: str) -> None:
        self._async_read(cta, words, what, self.W.mma_column, self.W.mma_issued)

    def tcgen05_commit(self, mask, address, group: int, multicast) -> None:
        for lane in np.flatnonzero(mask):
            self._one_group(group)
            first = int(address[lane])
            if multicast is None:
                targets = [first]
            else:
                bits = int(multicast[lane])
                targets = [r << 24 | first & 0xFFFFFF for r in range(16) if bits >> r & 1]
            bars = [x for x in (self._engine_barrier(t, "tcgen05.commit") for t in targets) if x is not None]
            w = self.W
            np.maximum(self.clock[CARRY], self.clock[ORDER], out=self.clock[CARRY])
            payload = self.issue_payload()
            payload[ORDER, w.mma_column] = payload[CARRY, w.mma_column] = w.mma_issued

            def arrive(bars=bars, payload=payload, at=self.at) -> None:
                for bar in bars:
                    self.at = at
                    self.engine_arrive(bar, payload)

            self.machine.post(("mma", id(w)), arrive)
