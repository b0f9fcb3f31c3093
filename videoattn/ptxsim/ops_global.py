"""Global loads and stores of a context: bounds, alignment, and races within a launch."""

from __future__ import annotations

import numpy as np

from .hb import GENERIC, Shadow
from .ops_warp import WarpOps

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}


class GlobalShadow:
    """Who wrote each word of a buffer in this launch; clusters share no clock, so the cluster is kept too."""

    def __init__(self, nbytes: int):
        words = nbytes // 4 + 2
        self.shadow = Shadow(words, initialised=True)
        self.cluster = np.full(words, -1, np.int32)


class GlobalOps(WarpOps):
    """Mixed into Context."""

    def _misaligned(self, addr, nbytes: int, what: str) -> bool:
        if (addr & (addr.dtype.type(nbytes - 1))).any():
            self.report("misaligned", f"{what} of {nbytes} bytes at address {int(addr[0]):#x}")
            return True
        return False

    def _global_target(self, lanes, addr, nbytes: int, what: str):
        """(buffer, offsets, lanes) of a global access; lanes that miss are reported and dropped."""
        a = addr[lanes]
        memory = self.machine.device.memory
        buf = memory.find(int(a[0]))
        lo, hi = int(a.min()), int(a.max()) + nbytes
        if buf is not None and lo >= buf.address and hi <= buf.address + buf.nbytes:
            return [(buf, (a - np.uint64(buf.address)).astype(np.int64), lanes)]
        groups: dict[int, list[int]] = {}
        for k, x in enumerate(a):
            b = memory.find(int(x))
            if b is None or int(x) + nbytes > b.address + b.nbytes:
                self.report(
                    "out of bounds",
                    f"{what} of {nbytes} bytes at global {memory.describe(int(x))}",
                    key="oob",
                )
                continue
            groups.setdefault(memory.buffers.index(b), []).append(k)
        out = []
        for i, ks in groups.items():
            b = memory.buffers[i]
            out.append((b, (a[ks] - np.uint64(b.address)).astype(np.int64), lanes[ks]))
        return out

    def ld_global(self, mask, addr, size: int, count: int, order: str) -> list[np.ndarray]:
        lanes = np.flatnonzero(mask)
        out = [np.zeros(32, _UINT[size]) for _ in range(count)]
        if not len(lanes) or self._misaligned(addr[lanes], size * count, "ld.global"):
            return out
        for buf, off, some in self._global_target(lanes, addr, size * count, "ld.global"):
            index = off >> _SHIFT[size]
            for i in range(count):
                out[i][some] = buf.views[size][index + i]
            if "acquire" in order:
                self.acquire(self.cta.cluster.ctas[0].sync_points.get((buf.address, int(off[0]))))
            elif not order and size * count >= 4:
                self._check_global_read(buf, off, size * count)
        return out

    def st_global(self, mask, addr, size: int, values: tuple, order: str) -> None:
        lanes = np.flatnonzero(mask)
        nbytes = size * len(values)
        if not len(lanes) or self._misaligned(addr[lanes], nbytes, "st.global"):
            return
        for buf, off, some in self._global_target(lanes, addr, nbytes, "st.global"):
            index = off >> _SHIFT[size]
            for i, v in enumerate(values):
                new = v.view(_UINT[size])[some]
                buf.views[size][index + i] = new
                if (buf.views[size][index + i] != new).any():
                    self.report("race", f"lanes of one st.global differ at one place of {buf.name}")
            if "release" in order:
                self.cta.cluster.ctas[0].sync_points[buf.address, int(off[0])] = self.release()
                self.machine.ordered_globally = True
            elif not order and nbytes >= 4:
                self._check_global_write(buf, off, nbytes)
        self.machine.progress()

    def _global_words(self, buf, off: np.ndarray, nbytes: int) -> tuple[GlobalShadow, np.ndarray]:
        shadows = self.machine.global_shadows
        record = shadows.get(buf.address)
        if record is None:
            record = shadows[buf.address] = GlobalShadow(buf.nbytes)
        words = off >> 2
        return record, words if nbytes <= 4 else (words[:, None] + np.arange(nbytes // 4)).ravel()

    def _other_cluster(self, record: GlobalShadow, words: np.ndarray) -> bool:
        """Whether another cluster wrote these words, with no ordering between clusters in the launch."""
        if self.machine.ordered_globally:
            return False
        owner = record.cluster[words]
        return bool(((owner >= 0) & (owner != self.cta.cluster.index)).any())

    def _check_global_read(self, buf, off: np.ndarray, nbytes: int) -> None:
        if buf.address not in self.machine.global_shadows:
            return
        record, words = self._global_words(buf, off, nbytes)
        if self._other_cluster(record, words):
            self.report(
                "race",
                f"ld.global of {buf.name} reads what another CTA writes in the same launch",
                key=buf.name,
            )
            return
        mine = words[record.cluster[words] == self.cta.cluster.index]
        conflict = record.shadow.unordered_write(self.order_row(), mine) if len(mine) else None
        if conflict is not None:
            self.report(
                "race",
                f"ld.global of {buf.name}+{conflict.cell * 4:#x} is not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )

    def _check_global_write(self, buf, off: np.ndarray, nbytes: int) -> None:
        record, words = self._global_words(buf, off, nbytes)
        if self._other_cluster(record, words):
            self.report("race", f"two CTAs write the same place of {buf.name}", key=buf.name)
        else:
            mine = words[record.cluster[words] == self.cta.cluster.index]
            conflict = record.shadow.unordered_write(self.order_row(), mine) if len(mine) else None
            if conflict is not None:
                place = f"{buf.name}+{conflict.cell * 4:#x}"
                self.report(
                    "race",
                    f"st.global to {place} is not ordered after {self.conflict_name(conflict)}",
                    key=conflict.column,
                )
        record.cluster[words] = self.cta.cluster.index
        record.shadow.write(words, self.W.column, self.W.now, GENERIC, self.at)
