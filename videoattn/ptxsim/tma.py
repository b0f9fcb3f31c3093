"""cp.async.bulk: TMA tile loads and stores, bulk copies, bulk groups, multicast."""

from __future__ import annotations

import numpy as np

from .codegen import PARAM_BASE
from .errors import ExecutionError
from .hb import ASYNC, GENERIC, ORDER, PROXY
from .ops_barrier import BarrierOps
from .tensormap import TensorMap


class TmaOps(BarrierOps):
    """Mixed into Context."""

    def _tensor_map(self, address: int) -> TensorMap | None:
        m = self.machine
        if address >= PARAM_BASE:
            raw = m.params[address - PARAM_BASE : address - PARAM_BASE + 128]
        else:
            buf, off = m.device.memory.span(address, 128)
            raw = buf.data[off : off + 128].tobytes()
        if address % 64:
            self.report("misaligned", f"tensor map at {address:#x}; must be 64-byte aligned")
        tm = TensorMap.decode(raw)
        if tm is None:
            self.report("tensor map", f"no tensor map at {address:#x}: the parameter holds something else")
        return tm

    # ---- happens-before of the async proxy on shared memory

    def _async_read(self, cta, cells, what: str, column: int, epoch: int) -> None:
        shadow, smem = cta.smem.shadow, cta.smem
        known = self.order_row()
        hit = shadow.uninitialised(cells)
        if hit is not None:
            self.report(
                "uninitialised shared memory", f"{what} reads {smem.name(hit * 4)} before any write", key="un"
            )
        conflict = shadow.unordered_write(known, cells)
        if conflict is not None:
            self.report(
                "race",
                f"{what} reads {smem.name(conflict.cell * 4)}, not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )
        else:
            self._proxy_check(shadow, smem, cells, what)
        shadow.read(cells, column, epoch, self.at)

    def _proxy_check(self, shadow, smem, cells, what: str) -> None:
        proxy = shadow.unordered_write(self.clock[PROXY], cells, only=GENERIC)
        if proxy is not None:
            self.report(
                "missing fence",
                f"{what} at {smem.name(proxy.cell * 4)} needs fence.proxy.async after "
                f"{self.conflict_name(proxy)}",
                key=("proxy", proxy.column),
            )

    def _async_write(self, cta, cells, what: str, column: int, epoch: int) -> None:
        shadow, smem = cta.smem.shadow, cta.smem
        known = self.order_row()
        conflict = shadow.unordered_write(known, cells) or shadow.unordered_read(known, cells)
        if conflict is not None:
            self.report(
                "race",
                f"{what} overwrites {smem.name(conflict.cell * 4)}, not ordered after "
                f"{self.conflict_name(conflict)}",
                key=conflict.column,
            )
        else:
            self._proxy_check(shadow, smem, cells, what)
            self._loads_in_flight(smem, cells, what, known)
        for start in smem.barriers:
            if isinstance(cells, slice) and cells.start * 4 < start + 8 and cells.stop * 4 > start:
                self.report(
                    "barrier misuse", f"{what} overwrites the live mbarrier {smem.name(start)}", key=start
                )
        shadow.write(cells, column, epoch, ASYNC, self.at)

    def _loads_in_flight(self, smem, cells, what: str, known) -> None:
        """Generic loads that the write may overtake, though it is ordered after their warp's arrival."""
        for key, load in list(smem.escaped.items()):
            if load.done is not None and known[load.warp.column] >= load.done:
                continue
            if load.overlaps(cells):
                del smem.escaped[key]
                self._overtaken(load, what)
        for load in self.W.loads.values():
            if load.smem is smem and load.released is None and load.overlaps(cells):
                self._overtaken(load, what)

    def _overtaken(self, load, what: str) -> None:
        line = self.machine.program.instrs[self.at].line
        if load.released is None:
            between = "no instruction before it has"
        else:
            release = self.machine.program.instrs[load.released].line
            between = f"the warp goes on to release at PTX line {release} without having"
        first = int(load.offsets[0])
        load.overtaken(
            f"{load.what} of {load.smem.name(first)} may still be reading when the {what} at PTX line {line} "
            f"overwrites it: {between} read a loaded register or executed fence.proxy.async",
            self.at,
        )

    def _destination(self, address: int, nbytes: int, align: int, what: str):
        rank, off = address >> 24, address & 0xFFFFFF
        cluster = self.cta.cluster
        if rank >= cluster.size:
            self.report(
                "out of bounds",
                f"{what}: shared address {address:#x} names CTA rank {rank} of {cluster.size}",
            )
            return None, 0
        cta = cluster.ctas[rank]
        if off + nbytes > cta.smem.size:
            self.report(
                "out of bounds",
                f"{what} of {nbytes} bytes at shared offset {off:#x}; the CTA has {cta.smem.size:#x}",
            )
            return None, 0
        if off % align:
            self.report(
                "misaligned", f"{what} at shared offset {off:#x}; must be a multiple of {align} bytes"
            )
            return None, 0
        if (past := cta.smem.overrun(off, nbytes)) is not None:
            self.report(
                "out of bounds",
                f"{what} of {nbytes} bytes at {cta.smem.name(off)} runs past {past[0]}, "
                f"which has {past[1]} bytes",
                key=off,
            )
        return cta, off

    # ---- loads

    def tma_load(self, mask, dst, tmap, coords, bar, multicast, group: int, local: bool) -> None:
        for lane in np.flatnonzero(mask):
            tm = self._tensor_map(int(tmap[lane]))
            if tm is None:
                continue
            if tm.rank != len(coords):
                self.report("tensor map", f"{len(coords)} coordinates for a map of {tm.rank} dimensions")
                continue
            at = tuple(int(c[lane]) for c in coords)
            ranks = None if multicast is None else int(multicast[lane])
            memory = self.machine.device.memory

            def fetch(tm=tm, at=at, memory=memory) -> np.ndarray:
                return tm.load(memory, at)

            if not self._coordinates(tm, at, "TMA load"):
                continue
            self._copy_in(
                int(dst[lane]), tm.box_bytes, int(bar[lane]), ranks, group, fetch, tm, "TMA load", 128
            )

    def _coordinates(self, tm: TensorMap, at: tuple[int, ...], what: str) -> bool:
        if at[0] * tm.elem % 16:
            self.report(
                "tensor map",
                f"{what} at inner coordinate {at[0]} of {tm.elem}-byte elements: {at[0] * tm.elem} bytes, "
                "no multiple of 16; the hardware stops at it as an illegal instruction",
                key="inner coordinate",
            )
        if "store" in what and min(at) < 0:
            self.report("tensor map", f"{what} at negative coordinates {at}: the hardware refuses them")
            return False
        return True

    def bulk_load(self, mask, dst, src, size, bar, multicast) -> None:
        for lane in np.flatnonzero(mask):
            n, a = int(size[lane]), int(src[lane])
            if n % 16 or a % 16:
                self.report(
                    "misaligned", f"cp.async.bulk of {n} bytes from {a:#x}; both must be multiples of 16"
                )
                continue
            memory = self.machine.device.memory
            try:
                buf, off = memory.span(a, n)
            except ExecutionError as error:
                self.report("out of bounds", str(error))
                continue
            ranks = None if multicast is None else int(multicast[lane])

            def fetch(buf=buf, off=off, n=n) -> np.ndarray:
                return buf.data[off : off + n]

            self._copy_in(int(dst[lane]), n, int(bar[lane]), ranks, 0, fetch, None, "cp.async.bulk", 16)

    def bulk_peer(self, mask, dst, src, size, bar) -> None:
        """shared::cta to shared::cluster."""
        for lane in np.flatnonzero(mask):
            n = int(size[lane])
            cta, off = self._destination(int(src[lane]), n, 16, "cp.async.bulk source")
            if cta is None:
                continue
            self._async_read(cta, slice(off >> 2, (off + n) >> 2), "cp.async.bulk", 0, 0)

            def fetch(cta=cta, off=off, n=n) -> np.ndarray:
                return cta.smem.data[off : off + n].copy()

            self._copy_in(int(dst[lane]), n, int(bar[lane]), None, 0, fetch, None, "cp.async.bulk", 16)

    def _copy_in(
        self,
        dst: int,
        nbytes: int,
        bar_address: int,
        ranks: int | None,
        group: int,
        fetch,
        tm: TensorMap | None,
        what: str,
        align: int,
    ) -> None:
        targets = []
        cluster = self.cta.cluster
        if ranks is None:
            targets.append((dst, bar_address))
        else:
            for r in range(16):
                if ranks >> r & 1:
                    if r >= cluster.size:
                        self.report("multicast", f"{what}: the mask names CTA rank {r} of {cluster.size}")
                        continue
                    home = r
                    if group == 2:  # the barrier may be the pair's other CTA's, as bar_address says
                        home = (r & ~1) | ((bar_address >> 24) & 1)
                    targets.append((r << 24 | dst & 0xFFFFFF, home << 24 | bar_address & 0xFFFFFF))
        if ranks is None and group != 2 and dst >> 24 != bar_address >> 24:
            self.report("barrier misuse", f"{what}: destination and mbarrier are in different CTAs")
        jobs = []
        footprint = nbytes if tm is None else tm.image_bytes
        self.say(f"{what} of {nbytes} bytes to {self.cta.smem.name(dst & 0xFFFFFF)}")
        for address, b in targets:
            cta, off = self._destination(address, footprint, align, what)
            bar = self._engine_barrier(b, what)
            if cta is None or bar is None:
                continue
            if cta is not self.cta and cta.exited:
                self.report("exited CTA", f"{what} into CTA rank {cta.rank}, which has exited")
            cells = self._image_cells(tm, off, nbytes)
            self._async_write(cta, cells, what, bar.column, bar.epoch())
            jobs.append((cta, off, bar, bar.phase))
        if not jobs:
            return
        payload = self.issue_payload()
        at = self.at

        def land() -> None:
            data = fetch()
            for cta, off, bar, phase in jobs:
                if tm is None or tm.swizzle == "none":
                    cta.smem.data[off : off + nbytes] = data
                else:
                    cta.smem.data.reshape(-1, 16)[tm.chunks(off)] = data.reshape(-1, 16)
                if bar.phase != phase:
                    self.at = at
                    self.report(
                        "wrong byte count",
                        f"{what} onto {bar.name} lands in phase {bar.phase}, but was issued in phase "
                        f"{phase}: "
                        "the phase completed without its bytes",
                        key=bar.name,
                    )
                self.complete_tx(bar, nbytes, payload)

        m = self.machine
        m.serial += 1
        m.post(("tma", id(self.cta), 0 if m.late else m.serial), land)  # copies complete in any order

    @staticmethod
    def _image_cells(tm: TensorMap | None, off: int, nbytes: int):
        """Shadow cells of a copy's image in shared memory."""
        if tm is None or tm.row_bytes == tm.row_pitch:
            return slice(off >> 2, -(-(off + nbytes) // 4))
        return (tm.chunks(off)[:, None] * 4 + np.arange(4)).ravel()

    # ---- stores

    def tma_store(self, mask, tmap, coords, src, reduce) -> None:
        for lane in np.flatnonzero(mask):
            tm = self._tensor_map(int(tmap[lane]))
            if tm is None:
                continue
            if tm.rank != len(coords):
                self.report("tensor map", f"{len(coords)} coordinates for a map of {tm.rank} dimensions")
                continue
            at = tuple(int(c[lane]) for c in coords)
            n = tm.box_bytes
            cta, off = self._destination(int(src[lane]), tm.image_bytes, 128, "TMA store")
            if cta is None or not self._coordinates(tm, at, "TMA store"):
                continue
            memory = self.machine.device.memory

            def put(tm=tm, at=at, cta=cta, off=off, n=n, memory=memory) -> None:
                if tm.swizzle == "none":
                    data = cta.smem.data[off : off + n].copy()
                else:
                    data = cta.smem.data.reshape(-1, 16)[tm.chunks(off)]
                tm.store(memory, at, np.ascontiguousarray(data).reshape(-1), reduce)

            self._copy_out(cta, self._image_cells(tm, off, n), put, "TMA store")

    def bulk_store(self, mask, dst, src, size, reduce) -> None:
        for lane in np.flatnonzero(mask):
            n, a = int(size[lane]), int(dst[lane])
            cta, off = self._destination(int(src[lane]), n, 16, "cp.async.bulk store")
            if cta is None:
                continue
            if n % 16 or a % 16:
                self.report(
                    "misaligned", f"cp.async.bulk of {n} bytes to {a:#x}; both must be multiples of 16"
                )
                continue
            try:
                buf, start = self.machine.device.memory.span(a, n)
            except ExecutionError as error:
                self.report("out of bounds", str(error))
                continue

            def put(buf=buf, start=start, cta=cta, off=off, n=n) -> None:
                data = cta.smem.data[off : off + n]
                if reduce:
                    total = buf.data[start : start + n].view(np.float32) + data.view(np.float32)
                    buf.data[start : start + n] = total.view(np.uint8)
                else:
                    buf.data[start : start + n] = data

            self._copy_out(cta, self._image_cells(None, off, n), put, "cp.async.bulk store")

    def _copy_out(self, cta, cells, put, what: str) -> None:
        w = self.W
        group = w.bulk_issued + 1
        self._async_read(cta, cells, what, w.bulk_read_column, group)
        self.machine.post(("bulk", id(w), group), put)

    def bulk_commit(self, mask) -> None:
        if mask.any():
            self.W.bulk_issued += 1

    def bulk_wait(self, mask, n: int, read: bool):
        if not mask.any():
            return True
        w = self.W
        done = w.bulk_issued - n
        for group in range(w.bulk_done + 1, done + 1):
            self.machine.drain(("bulk", id(w), group))
        if done > 0:
            w.bulk_done = max(w.bulk_done, done)
            clock = self.clock[ORDER]
            clock[w.bulk_read_column] = max(clock[w.bulk_read_column], done)
            if not read:
                clock[w.bulk_write_column] = max(clock[w.bulk_write_column], done)
        return True
