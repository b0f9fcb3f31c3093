"""tcgen05.mma and commit, with the instruction descriptor of kind::f16 (PTX ISA 9.7.16)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .hb import CARRY, ORDER, TCGEN, TCGEN05
from .layouts import decode_tcgen05, operand_index
from .mma_sync import halves_to_f32
from .ops_tmem import TensorMemoryOps
from .tmem import COLUMNS, accumulator_map, region


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


class Tcgen05Ops(TensorMemoryOps):
    """Mixed into Context."""

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
        column = self.W.mma_column
        reads = tmem.shadow.reads.get(column)
        if reads is None:
            return
        last = int(reads[cells].max())
        line = self.machine.program.instrs[tmem.shadow.read_at[column]].line
        if last > self.clock[ORDER, column]:
            self.strict(
                "MMA order",
                f"tcgen05.mma D overwrites tensor memory that the tcgen05.mma at PTX line {line} reads as A, "
                "with no commit waited for between",
            )
        elif last > self.clock[TCGEN, column]:
            self.strict(
                "missing tcgen05 fence",
                "tcgen05.mma D needs tcgen05.fence::after_thread_sync after the wait for the tcgen05.mma at "
                f"PTX line {line}, which reads there as A",
                key="order",
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
