"""Loads, stores and atomics of a context, with bounds, alignment, initialisation and race checks."""

from __future__ import annotations

import numpy as np

from .errors import ExecutionError
from .hb import GENERIC
from .inflight import SharedLoad
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .mma_sync import ldmatrix_lanes, mma_m16n8
from .ops_global import GlobalOps

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}


class MemoryOps(GlobalOps):
    """Mixed into Context."""

    # ---- shared

    def _shared_target(self, lanes, addr: np.ndarray, nbytes: int, what: str):
        """(CTA, offsets of the lanes that may go on, those lanes) of a shared access."""
        a = addr[lanes].astype(np.int64)
        rank = int(a[0]) >> 24
        cluster = self.cta.cluster
        if (a >> 24 != rank).any():
            raise ExecutionError(f"PTX line {self.where().line}: lanes reach shared memory of different CTAs")
        if rank >= cluster.size:
            self.report(
                "out of bounds", f"shared address {int(a[0]):#x} names CTA rank {rank} of {cluster.size}"
            )
            return self.cta, a[:0], lanes[:0]
        cta = cluster.ctas[rank]
        off = a & 0xFFFFFF
        bad = (off + nbytes > cta.smem.size) | (off < 0)
        if bad.any():
            first = int(off[np.flatnonzero(bad)[0]])
            self.report(
                "out of bounds",
                f"{what} of {nbytes} bytes at shared offset {first:#x}; the CTA has {cta.smem.size:#x}",
            )
            off, lanes = off[~bad], lanes[~bad]
        if cta is not self.cta and cta.exited:
            self.report("exited CTA", f"{what} in shared memory of CTA rank {rank}, which has exited")
        return cta, off, lanes

    def ld_shared(self, mask, addr, size: int, count: int, order: str) -> list[np.ndarray] | SharedLoad:
        lanes = np.flatnonzero(mask)
        out = [np.zeros(32, _UINT[size]) for _ in range(count)]
        if not len(lanes) or self._misaligned(addr[lanes], size * count, "ld.shared"):
            return out
        cta, off, lanes = self._shared_target(lanes, addr, size * count, "ld.shared")
        if not len(lanes):
            return out
        view, index = cta.smem.views[size], off >> _SHIFT[size]
        if "acquire" in order:
            self.acquire(cta.sync_points.get(int(off[0])))
        self._check_shared_read(cta, off, size * count)

        def read() -> list[np.ndarray]:
            for i in range(count):
                out[i][lanes] = view[index + i]
            return out

        if "acquire" in order:
            return read()
        return SharedLoad(self, cta.smem, off, size * count, "ld.shared", read)

    def _words(self, off: np.ndarray, nbytes: int) -> np.ndarray:
        words = off >> 2
        if nbytes <= 4:
            return words
        return (words[:, None] + np.arange(nbytes // 4)).ravel()

    def _check_shared_read(self, cta, off: np.ndarray, nbytes: int) -> None:
        shadow, words = cta.smem.shadow, self._words(off, nbytes)
        known = self.order_row()
        hit = shadow.uninitialised(words)
        if hit is not None:
            self.report(
                "uninitialised shared memory",
                f"ld.shared of {cta.smem.name(hit * 4)} before any write",
                key="uninit",
            )
        conflict = shadow.unordered_write(known, words)
        if conflict is not None:
            self.report(
                "race",
                f"ld.shared of {cta.smem.name(conflict.cell * 4)} is not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )
        shadow.read(words, self.W.column, self.W.now, self.at)
        self.W.unsynced |= self.mask

    def st_shared(self, mask, addr, size: int, values: tuple, order: str) -> None:
        lanes = np.flatnonzero(mask)
        nbytes = size * len(values)
        if not len(lanes) or self._misaligned(addr[lanes], nbytes, "st.shared"):
            return
        cta, off, lanes = self._shared_target(lanes, addr, nbytes, "st.shared")
        if not len(lanes):
            return
        self._check_shared_write(cta, off, nbytes, "st.shared")
        view, index = cta.smem.views[size], off >> _SHIFT[size]
        for i, v in enumerate(values):
            view[index + i] = v.view(_UINT[size])[lanes]
        if "release" in order:
            self._publish(cta, int(off[0]))

    def _publish(self, cta, off: int) -> None:
        payload = self.release()
        before = cta.sync_points.get(off)
        cta.sync_points[off] = payload if before is None else np.maximum(before, payload)
        self.machine.progress()

    def _check_shared_write(self, cta, off: np.ndarray, nbytes: int, what: str) -> None:
        if cta.smem.unread:
            cta.smem.settle()
        shadow, words = cta.smem.shadow, self._words(off, nbytes)
        known = self.order_row()
        conflict = shadow.unordered_write(known, words) or shadow.unordered_read(known, words)
        if conflict is not None:
            self.report(
                "race",
                f"{what} to {cta.smem.name(conflict.cell * 4)} is not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )
        if cta.smem.barriers:
            for start in cta.smem.barriers:
                if ((off < start + 8) & (off + nbytes > start)).any():
                    self.report(
                        "barrier misuse", f"{what} into the live mbarrier {cta.smem.name(start)}", key=start
                    )
        shadow.write(words, self.W.column, self.W.now, GENERIC, self.at)
        self.W.unsynced |= self.mask

    # ---- local

    def ld_local(self, mask, addr, size: int, count: int, order: str) -> list[np.ndarray]:
        memory = self._local(size)
        lanes = np.flatnonzero(mask)
        index = addr[lanes].astype(np.int64) >> _SHIFT[size]
        out = [np.zeros(32, _UINT[size]) for _ in range(count)]
        if len(lanes) and (index + count > memory.shape[1]).any():
            self.report("out of bounds", "ld.local past the thread's local memory")
            return out
        for i in range(count):
            out[i][lanes] = memory[lanes, index + i]
        return out

    def st_local(self, mask, addr, size: int, values: tuple, order: str) -> None:
        memory = self._local(size)
        lanes = np.flatnonzero(mask)
        index = addr[lanes].astype(np.int64) >> _SHIFT[size]
        if len(lanes) and (index + len(values) > memory.shape[1]).any():
            self.report("out of bounds", "st.local past the thread's local memory")
            return
        for i, v in enumerate(values):
            memory[lanes, index + i] = v.view(_UINT[size])[lanes]

    def _local(self, size: int) -> np.ndarray:
        w = self.W
        if w.local is None:
            w.local = np.full((32, -(-self.machine.local_size // 16) * 16), 0xCD, np.uint8)
        return w.local.view(_UINT[size])

    # ---- generic

    def _window(self, lanes, addr) -> tuple[str, int]:
        first = int(addr[lanes[0]])
        if SHARED_WINDOW <= first < LOCAL_WINDOW:
            return "shared", SHARED_WINDOW
        if LOCAL_WINDOW <= first < 0x7E00_0000_0000:
            return "local", LOCAL_WINDOW
        return "global", 0

    def ld_generic(self, mask, addr, size: int, count: int, order: str) -> list[np.ndarray] | SharedLoad:
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return [np.zeros(32, _UINT[size]) for _ in range(count)]
        space, base = self._window(lanes, addr)
        if int(addr[lanes[0]]) >= 0x7E00_0000_0000:
            raise ExecutionError(f"PTX line {self.where().line}: generic load from parameter space")
        local = addr - np.uint64(base)
        return getattr(self, f"ld_{space}")(mask, local, size, count, order)

    def st_generic(self, mask, addr, size: int, values: tuple, order: str) -> None:
        lanes = np.flatnonzero(mask)
        if len(lanes):
            space, base = self._window(lanes, addr)
            getattr(self, f"st_{space}")(mask, addr - np.uint64(base), size, values, order)

    def ld_const(self, mask, addr, size: int, count: int, order: str) -> list[np.ndarray]:
        return self.ld_global(mask, addr, size, count, order)

    def is_space(self, space: str, addr: np.ndarray) -> np.ndarray:
        shared = (addr >= SHARED_WINDOW) & (addr < LOCAL_WINDOW)
        local = (addr >= LOCAL_WINDOW) & (addr < 0x7E00_0000_0000)
        if space.startswith("shared"):
            return shared
        return local if space == "local" else ~shared & ~local

    # ---- atomics, one lane after the other

    def atomic(self, space: str, action: str, mask, addr, dtype, values: tuple, order: str) -> np.ndarray:
        lanes = np.flatnonzero(mask)
        out = np.zeros(32, dtype)
        size = np.dtype(dtype).itemsize
        if not len(lanes) or self._misaligned(addr[lanes], size, "atom"):
            return out
        if space == "generic":
            space, base = self._window(lanes, addr)
            addr = addr - np.uint64(base)
        if space == "shared":
            cta, off, some = self._shared_target(lanes, addr, size, "atom.shared")
            view, targets = cta.smem.data, [(cta.smem.views[size], off, some)]
            key = int(off[0]) if len(off) else 0
            owner = cta
            cta.smem.settle()
            cta.smem.shadow.write(off >> 2, 0, 0, GENERIC, self.at)
        else:
            targets = [
                (b.views[size], off, some) for b, off, some in self._global_target(lanes, addr, size, "atom")
            ]
            key, owner = int(addr[lanes[0]]), self.cta.cluster.ctas[0]
        if order in ("acquire", "acq_rel"):
            self.acquire(owner.sync_points.get(key))
        for view, off, some in targets:
            typed = view.view(dtype)
            index = off >> _SHIFT[size]
            for k, lane in enumerate(some):
                old = typed[index[k]]
                out[lane] = old
                typed[index[k]] = _apply(action, old, [v[lane] for v in values])
        if order in ("release", "acq_rel"):
            payload = self.release()
            before = owner.sync_points.get(key)
            owner.sync_points[key] = payload if before is None else np.maximum(before, payload)
        self.machine.progress()
        self.machine.ordered_globally |= space == "global"
        return out

    # ---- matrix fragments

    def ldmatrix(self, mask, addr, count: int, trans: bool) -> list[np.ndarray] | SharedLoad:
        if not mask.any():
            return [np.zeros(32, np.uint32) for _ in range(count)]
        self._converged(mask, "ldmatrix")
        rows = addr[: 8 * count].astype(np.int64)
        if (rows & 15).any():
            self.report("misaligned", "ldmatrix row address is not a multiple of 16 bytes")
            return [np.zeros(32, np.uint32) for _ in range(count)]
        lanes = np.arange(8 * count)
        cta, off, lanes = self._shared_target(lanes, addr, 16, "ldmatrix")
        if len(lanes) < 8 * count:
            return [np.zeros(32, np.uint32) for _ in range(count)]
        self._check_shared_read(cta, off, 16)
        halves = (off >> 1)[:, None] + np.arange(8)

        def read() -> list[np.ndarray]:
            matrices = cta.smem.views[2][halves].reshape(count, 8, 8)
            return [ldmatrix_lanes(m.T if trans else m) for m in matrices]

        return SharedLoad(self, cta.smem, off, 16, "ldmatrix", read)

    def stmatrix(self, mask, addr, values: tuple, trans: bool) -> None:
        if not mask.any():
            return
        self._converged(mask, "stmatrix")
        count = len(values)
        lanes = np.arange(8 * count)
        if (addr[lanes] & 15).any():
            self.report("misaligned", "stmatrix row address is not a multiple of 16 bytes")
            return
        cta, off, lanes = self._shared_target(lanes, addr, 16, "stmatrix")
        if len(lanes) < 8 * count:
            return
        self._check_shared_write(cta, off, 16, "stmatrix")
        for k, v in enumerate(values):
            m = v.view(np.uint16).reshape(8, 8)
            cta.smem.views[2][(off[8 * k : 8 * k + 8] >> 1)[:, None] + np.arange(8)] = m.T if trans else m

    def mma_sync(self, mask, k: int, typ: str, a: tuple, b: tuple, c: tuple) -> list[np.ndarray]:
        self._converged(mask, "mma")
        return mma_m16n8(k, typ, a, b, c)


def _apply(action: str, old, v: list):
    if action == "add":
        return old + v[0]
    if action == "exch":
        return v[0]
    if action == "cas":
        return v[1] if old == v[0] else old
    if action == "min":
        return min(old, v[0])
    if action == "max":
        return max(old, v[0])
    if action == "and":
        return old & v[0]
    if action == "or":
        return old | v[0]
    if action == "xor":
        return old ^ v[0]
    if action == "inc":
        return old.dtype.type(0) if old >= v[0] else old + old.dtype.type(1)
    return v[0] if old == 0 or old > v[0] else old - old.dtype.type(1)
