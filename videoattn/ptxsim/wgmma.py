"""wgmma (sm_90a): warpgroup MMA with asynchronous accumulators in registers (PTX ISA 9.7.15)."""

from __future__ import annotations

from functools import lru_cache
from operator import is_

import numpy as np

from .hb import ORDER
from .layouts import decode_wgmma, operand_index
from .mma_sync import halves_to_f32, operand_halves
from .tma import TmaOps

_LANE = np.arange(32)
_A_HALVES = operand_halves(16)[0]


@lru_cache(64)
def accumulator_fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [register, lane] of a warp's 16 x n part of D: d[4j+e] is row lane/4 + 8(e/2), column
    8j + 2(lane%4) + e%2."""
    reg = np.arange(n // 2)[:, None]
    e = reg % 4
    return _LANE // 4 + 8 * (e // 2), 8 * (reg // 4) + 2 * (_LANE % 4) + e % 2


def a_fragment(regs: tuple) -> np.ndarray:
    """The 16 x 16 part of A that a warp holds in four registers, as 16-bit patterns."""
    return np.concatenate(regs).view(np.uint16)[_A_HALVES]


class Accumulator:
    """A warp's D while wgmma operations on it are in flight."""

    __slots__ = ("at", "ctx", "held", "matrix", "n", "pending", "values")

    def __init__(self, ctx, n: int, matrix: np.ndarray):
        self.ctx, self.n, self.matrix = ctx, n, matrix
        self.at = ctx.at
        self.pending = 0
        self.values: np.ndarray | None = None
        self.held = [AccumulatorRegister(self, index) for index in range(n // 2)]

    def registers(self) -> np.ndarray:
        """[register, lane] of the finished accumulator."""
        if self.pending:
            self.ctx.machine.drain(("wgmma", id(self.ctx.W)))
        if self.values is None:
            rows, cols = accumulator_fragment(self.n)
            self.values = self.matrix[rows, cols].view(np.uint32)
        return self.values


class AccumulatorRegister:
    """One register of an accumulator that has not been waited for."""

    __slots__ = ("chain", "index")

    def __init__(self, chain: Accumulator, index: int):
        self.chain, self.index = chain, index

    def _use(self) -> np.ndarray:
        ctx = self.chain.ctx
        if ctx.W.wgmma_open(self.chain):
            current = ctx.machine.current(ctx.W) or ctx
            line = ctx.machine.program.instrs[self.chain.at].line
            current.report(
                "use before wait",
                f"an accumulator of the wgmma at PTX line {line} is touched before wgmma.wait_group",
                key=self.chain.at,
            )
        return self.chain.registers()[self.index]

    def view(self, dtype) -> np.ndarray:
        return self._use().view(dtype)

    def under(self, mask: np.ndarray) -> np.ndarray:
        return self._use()

    def merged(self, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where(mask, new, self._use().view(new.dtype))


class WgmmaOps(TmaOps):
    """Mixed into Context."""

    def _wgmma_warp(self, mask, what: str) -> bool:
        if not self._converged(mask, what):
            return False
        if self.machine.threads % 128:
            self.report(
                "wgmma", f"{what} in a block of {self.machine.threads} threads: needs whole warpgroups"
            )
        return True

    def wgmma_fence(self, mask) -> None:
        if self._wgmma_warp(mask, "wgmma.fence"):
            self.W.wgmma_fenced = True

    def wgmma_commit(self, mask) -> None:
        if self._wgmma_warp(mask, "wgmma.commit_group"):
            w = self.W
            w.wgmma_groups.append((w.mma_issued, w.wgmma_chains))
            w.wgmma_chains = []

    def wgmma_wait(self, mask, n: int) -> None:
        if not self._wgmma_warp(mask, "wgmma.wait_group"):
            return
        w = self.W
        if len(w.wgmma_groups) <= n:
            return
        # What was waited for may be read and written from here on, and the next wgmma must come behind that.
        w.wgmma_fenced = None if w.wgmma_fenced is None else False
        done = w.wgmma_groups[: len(w.wgmma_groups) - n]
        del w.wgmma_groups[: len(done)]
        still = {id(c) for _, chains in w.wgmma_groups for c, _ in chains} | {
            id(c) for c, _ in w.wgmma_chains
        }
        self.machine.drain(("wgmma", id(w)))
        self.clock[ORDER, w.mma_column] = max(self.clock[ORDER, w.mma_column], done[-1][0])
        for _, chains in done:
            for chain, regs in chains:
                if id(chain) in still:
                    continue
                values = chain.registers()
                for r in regs:
                    held = w.R[r]
                    if type(held) is AccumulatorRegister and held.chain is chain:
                        w.R[r] = values[held.index]

    def _wgmma_operand(self, bits: int, rows: int, mn_major: bool, what: str):
        desc = decode_wgmma(bits)
        if desc.problem:
            self.report("illegal descriptor", f"{what} descriptor {bits:#018x}: {desc.problem}", key=what)
            return None
        if desc.base_offset:
            self.machine.unsupported(self, f"{what} descriptor with base offset {desc.base_offset}")
        index, words = operand_index(desc, rows, mn_major)
        if words[-1] * 4 + 4 > self.cta.smem.size:
            self.report(
                "out of bounds", f"{what} reaches shared offset {int(words[-1]) * 4 + 3:#x}", key=what
            )
            return None
        return index, words

    def wgmma_mma(
        self, mask, regs, a, b, scale_d, scale_a, scale_b, trans_a, trans_b, n: int, typ: str
    ) -> None:
        if not self._wgmma_warp(mask, "wgmma.mma_async"):
            return
        w = self.W
        if scale_a not in (1, -1) or scale_b not in (1, -1):
            self.report("wgmma", "imm-scale must be 1 or -1")
            return
        if not w.wgmma_fenced and not self._same_accumulator(regs, n):
            if w.wgmma_fenced is None:
                self.report("missing fence", "wgmma.mma_async before wgmma.fence", key="wgmma")
            else:
                # Right where no register of it was touched since the wait, which is not followed.
                self.strict("missing fence", "wgmma.mma_async behind a wait without wgmma.fence", key="wgmma")
        accumulate = bool(scale_d[0])
        b_operand = self._wgmma_operand(int(b[0]), n, bool(trans_b), "B")
        in_regs = isinstance(a, tuple)
        a_operand = None if in_regs else self._wgmma_operand(int(a[0]), 64, bool(trans_a), "A")
        if b_operand is None or (a_operand is None and not in_regs):
            return
        chain = self._chain(regs, n, accumulate)
        w.mma_issued += 1
        self._async_read(self.cta, b_operand[1], "wgmma B", w.mma_column, w.mma_issued)
        rows = slice(16 * (w.index % 4), 16 * (w.index % 4) + 16)
        if a_operand is not None:
            self._async_read(self.cta, a_operand[1], "wgmma A", w.mma_column, w.mma_issued)
        fragment = a_fragment(a) if in_regs else None
        smem = self.cta.smem
        sign = np.float32(scale_a * scale_b)
        chain.pending += 1
        chain.values = None

        a_index = None if a_operand is None else a_operand[0][rows]

        def run() -> None:
            bits = fragment if fragment is not None else smem.views[2][a_index]
            product = (halves_to_f32(bits, typ) @ halves_to_f32(smem.views[2][b_operand[0]], typ).T) * sign
            chain.matrix = chain.matrix + product if accumulate else product
            chain.pending -= 1

        self.machine.post(("wgmma", id(w)), run)
        w.wgmma_chains.append((chain, regs))
        for r, held in zip(regs, chain.held, strict=True):
            w.R[r] = held

    def _same_accumulator(self, regs, n: int) -> bool:
        first = self.W.R[regs[0]]
        return type(first) is AccumulatorRegister and first.chain.n == n

    def _chain(self, regs, n: int, accumulate: bool) -> Accumulator:
        R = self.W.R
        first = R[regs[0]]
        if type(first) is AccumulatorRegister:
            chain = first.chain
            if chain.n == n and all(map(is_, (R[r] for r in regs), chain.held)):
                return chain
        matrix = np.zeros((16, n), np.float32)
        if accumulate:
            rows, cols = accumulator_fragment(n)
            matrix[rows, cols] = np.array([R[r].view(np.uint32) for r in regs]).view(np.float32)
        return Accumulator(self, n, matrix)
