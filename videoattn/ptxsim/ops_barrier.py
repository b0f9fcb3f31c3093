"""mbarriers, named barriers, cluster barriers, fences, setmaxnreg."""

from __future__ import annotations

import numpy as np

from .core import Wait, lane_list
from .hb import CARRY, ORDER, PROXY, TCGEN
from .mbarrier import MAX_COUNT, Mbarrier
from .ops_memory import MemoryOps


class NamedBarrier:
    """The threads that have arrived at one of a CTA's 16 barriers (bar, barrier)."""

    def __init__(self, ident: int, columns):
        self.ident, self.columns = ident, columns
        self.reset()

    def reset(self) -> None:
        self.threads = 0
        self.needed: int | None = None
        self.payload = self.columns.payload()
        self.waiting: list = []
        self.warps: dict[int, np.ndarray] = {}  # lanes that have arrived
        self.votes: list = []

    def count(self, warp, mask: np.ndarray, aligned: bool) -> None:
        """Lanes arrive: a whole warp counts 32 threads, part of one (unaligned forms only) its lanes."""
        before = self.warps.get(warp.index, np.zeros(32, np.bool_))
        both = before | mask
        whole = aligned or not (warp.live & ~both).any()
        self.threads += (32 if whole else int(both.sum())) - int(before.sum())
        self.warps[warp.index] = both

    def lanes_left(self, cta) -> None:
        """Exited threads no longer count for barriers of the whole CTA."""
        if self.waiting and self.needed is None:
            live = sum(32 for w in cta.warps if w.live.any())
            if self.threads >= live:
                self.finish()

    def finish(self) -> None:
        waiting, payload, votes = self.waiting, self.payload, self.votes
        self.reset()
        for c in waiting:
            c.acquire(payload)
            c.bar_passed = True
            c.bar_votes = votes
            c.machine.wake(c)


class BarrierOps(MemoryOps):
    """Mixed into Context."""

    # ---- named barriers

    def bar(self, action: str, mask, ident, count, aligned: bool, vote=None):
        if self.bar_passed:
            self.bar_passed = False
            return True
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return True
        if aligned:
            self._converged_live(mask, "bar." + action)
        number = int(ident[lanes[0]])
        if number > 15:
            self.report("barrier misuse", f"barrier id {number}; there are 16")
            return True
        cta = self.cta
        if number not in cta.barriers:
            cta.barriers[number] = NamedBarrier(number, cta.cluster.columns)
        b = cta.barriers[number]
        needed = None if count is None else int(count[lanes[0]])
        if needed is not None and (needed == 0 or needed % 32):
            self.report(
                "barrier misuse",
                f"barrier {number} with {needed} threads; the count must be a multiple of 32",
            )
            return True
        if b.warps and b.needed != needed:
            self.report(
                "barrier misuse",
                f"barrier {number} is used with {needed or 'all'} threads "
                f"while others use {b.needed or 'all'}",
            )
        if self.W.index in b.warps and (b.warps[self.W.index] & mask).any():
            self.strict("barrier misuse", f"the warp arrives twice at barrier {number} before it completes")
            b.threads += 32
        else:
            b.count(self.W, mask, aligned)
        b.needed = needed
        self.W.unsynced = self.W.unsynced & ~mask
        np.maximum(b.payload, self.release(), out=b.payload)
        if vote is not None:
            b.votes.append((vote & mask, mask.copy()))
        total = needed if needed is not None else sum(32 for w in cta.warps if w.live.any())
        if b.threads >= total:
            if b.threads > total:
                self.report(
                    "barrier misuse", f"barrier {number} gets {b.threads} threads, {total} were announced"
                )
            payload, self.bar_votes = b.payload, b.votes
            b.finish()
            if action == "sync":
                self.acquire(payload)
            return True
        if action == "arrive":
            return True
        b.waiting.append(self)

        def text() -> str:
            here = ", ".join(str(w) for w in sorted(b.warps))
            return f"at barrier {number}: {b.threads} of {b.needed or total} threads are there (warps {here})"

        self.block(Wait(text))
        return None

    def _converged_live(self, mask, what: str) -> None:
        missing = self.W.live & ~mask
        if missing.any():
            self.report(
                "divergent aligned instruction",
                f"{what} needs the whole warp; lanes {lane_list(missing)} are elsewhere",
            )

    def bar_red(self, kind: str, mask, ident, count, p):
        if self.bar("sync", mask, ident, count, True, p) is None:
            return None
        votes = self.bar_votes
        if kind == "popc":
            return np.full(32, sum(int(v.sum()) for v, _ in votes), np.uint32)
        value = any(v.any() for v, _ in votes) if kind == "or" else all((v == m).all() for v, m in votes)
        return np.full(32, value, np.bool_)

    # ---- cluster barrier

    def cluster_arrive(self, mask, release: bool) -> None:
        cluster = self.cta.cluster
        if not mask.any():
            return
        if self.cluster_token is not None:
            self.report("barrier misuse", "barrier.cluster.arrive twice without a wait between")
        self.cluster_token = cluster.phase
        payload = self.release()
        if release:
            np.maximum(cluster.sync_payload, payload, out=cluster.sync_payload)
        else:  # only the mbarrier initialisations that fence.mbarrier_init published travel along
            column = self.W.init_column
            cluster.sync_payload[ORDER, column] = max(
                cluster.sync_payload[ORDER, column], self.W.inits_published
            )
        cluster.arrived.append((self, mask.copy()))
        cluster.release_if_complete()

    def cluster_wait(self, mask):
        cluster = self.cta.cluster
        if not mask.any():
            return True
        if self.cluster_token is None:
            self.report("barrier misuse", "barrier.cluster.wait without an arrive")
            return True
        if cluster.phase > self.cluster_token:
            self.cluster_token = None
            self.acquire(cluster.sync_done)
            return True
        cluster.waiting.append(self)
        self.block(Wait(lambda: f"at the cluster barrier: {cluster.missing()}"))
        return None

    # ---- fences

    def fence(self, mask) -> None:
        # order among generic accesses follows the releases and acquires around it
        if self.W.loads and mask.any():
            self._finish_loads()

    def _finish_loads(self) -> None:
        for load in list(self.W.loads.values()):
            load.finish()

    def fence_proxy_async(self, mask, space: str) -> None:
        if not mask.any():
            return
        w = self.W
        if w.loads and space != "global":
            self._finish_loads()
        self.clock[ORDER, w.column] = w.now
        w.now += 1
        if space != "global":
            np.maximum(self.clock[PROXY], self.clock[ORDER], out=self.clock[PROXY])
            self._publish_inits()

    def fence_mbarrier_init(self, mask) -> None:
        if mask.any():
            self._publish_inits()

    def _publish_inits(self) -> None:
        for bar in self.cta.smem.barriers.values():
            if bar.init_column == self.W.init_column:
                bar.fenced = True
        self.W.inits_published = self.W.inits

    def tmem_fence(self, mask, before: bool) -> None:
        if not mask.any():
            return
        if before:
            np.maximum(self.clock[CARRY], self.clock[ORDER], out=self.clock[CARRY])
        else:
            np.maximum(self.clock[TCGEN], self.clock[CARRY], out=self.clock[TCGEN])

    # ---- setmaxnreg

    def setmaxnreg(self, action: str, mask, value: int):
        cta, w = self.cta, self.W
        if not mask.any():
            return True
        if not 24 <= value <= 256 or value % 8:
            self.report("setmaxnreg", f"{value} registers; must be a multiple of 8 in 24..256")
            return True
        self._converged_live(mask, "setmaxnreg")
        if action == "dec":
            if value > w.registers:
                self.report("setmaxnreg", f"dec to {value} while the warp has {w.registers}")
            cta.register_pool += max(w.registers - value, 0) * 32
            w.registers = value
            for c in [
                c for v in cta.warps for c in v.contexts if c.wait is not None and c.wait.key == "registers"
            ]:
                self.machine.wake(c)
            return True
        if value < w.registers:
            self.report("setmaxnreg", f"inc to {value} while the warp has {w.registers}")
            return True
        need = (value - w.registers) * 32
        if need > cta.register_pool:
            text = f"for {need} registers at setmaxnreg.inc {value}; the CTA's pool holds"
            self.block(Wait(lambda: f"{text} {cta.register_pool}", "registers"))
            return None
        cta.register_pool -= need
        w.registers = value
        return True

    # ---- mbarrier

    def _barrier_at(self, address: int, what: str, local: bool = False) -> Mbarrier | None:
        rank, off = address >> 24, address & 0xFFFFFF
        cluster = self.cta.cluster
        if rank >= cluster.size or off + 8 > cluster.ctas[rank].smem.size:
            self.report("out of bounds", f"{what} at shared address {address:#x}")
            return None
        cta = cluster.ctas[rank]
        if local and cta is not self.cta:
            self.report("barrier misuse", f"{what} on a barrier of CTA rank {rank}: only the CTA itself may")
            return None
        if off % 8:
            self.report("misaligned", f"{what} at shared offset {off:#x}: an mbarrier is 8-byte aligned")
            return None
        bar = cta.smem.barriers.get(off)
        if bar is None:
            self.report(
                "barrier misuse",
                f"{what} on {cta.smem.name(off)}, which is not an initialised mbarrier",
                key=off,
            )
            return None
        if cta is not self.cta and cta.exited:
            self.report("exited CTA", f"{what} on {bar.name} of CTA rank {rank}, which has exited")
        if self.clock[ORDER, bar.init_column] < bar.init_epoch and bar.init_column != self.W.init_column:
            self.report(
                "missing synchronisation",
                f"{what} on {bar.name}: its initialisation is not ordered before",
                key=off,
            )
        return bar

    def _engine_barrier(self, address: int, what: str) -> Mbarrier | None:
        """A barrier that an asynchronous engine will arrive on."""
        bar = self._barrier_at(address, what)
        if bar is not None and not bar.fenced:
            self.strict(
                "missing fence",
                f"{what} on {bar.name}: no fence.mbarrier_init or fence.proxy.async followed "
                "its initialisation",
                key=bar.name,
            )
        return bar

    def mbarrier_init(self, mask, addr, count) -> None:
        for lane in np.flatnonzero(mask):
            address, n = int(addr[lane]), int(count[lane])
            off, smem = address & 0xFFFFFF, self.cta.smem
            name = smem.name(off)
            if address >> 24 != self.cta.rank:
                self.report("barrier misuse", f"mbarrier.init of {name} in another CTA")
                continue
            if off % 8 or off + 8 > smem.size:
                self.report("misaligned", f"mbarrier.init at shared offset {off:#x}")
                continue
            if not 1 <= n <= MAX_COUNT:
                self.report("barrier misuse", f"mbarrier.init of {name} with count {n}; must be in 1..2^20-1")
                continue
            if off in smem.barriers:
                self.report(
                    "barrier misuse", f"mbarrier.init of {name}, which is initialised already", key=off
                )
            columns = self.cta.cluster.columns
            key = ("column", off)
            column = self.cta.sync_points.get(key)
            if column is None:
                column = self.cta.sync_points[key] = columns.new(f"the copy onto {name}")
            bar = Mbarrier(name, n, columns, column)
            bar.phase_base = self.cta.sync_points.get(("phase", off), 0)
            self.W.inits += 1
            bar.init_column, bar.init_epoch = self.W.init_column, self.W.inits
            smem.barriers[off] = bar

    def mbarrier_inval(self, mask, addr, _value) -> None:
        for lane in np.flatnonzero(mask):
            bar = self._barrier_at(int(addr[lane]), "mbarrier.inval", local=True)
            if bar is not None:
                if bar.waiters:
                    self.report("barrier misuse", f"mbarrier.inval of {bar.name} while a thread waits on it")
                off = int(addr[lane]) & 0xFFFFFF
                self.cta.sync_points["phase", off] = bar.epoch()
                del self.cta.smem.barriers[off]

    def mbarrier_expect_tx(self, mask, addr, value) -> None:
        for lane in np.flatnonzero(mask):
            bar = self._barrier_at(int(addr[lane]), "mbarrier.expect_tx")
            if bar is not None:
                self._expect(bar, int(value[lane]))

    def mbarrier_complete_tx(self, mask, addr, value) -> None:
        for lane in np.flatnonzero(mask):
            bar = self._barrier_at(int(addr[lane]), "mbarrier.complete_tx")
            if bar is not None:
                self.complete_tx(bar, int(value[lane]), self.release())

    def _expect(self, bar: Mbarrier, n: int) -> None:
        bar.tx += n
        bar.expected_tx += n
        if abs(bar.tx) > MAX_COUNT:
            self.report("barrier misuse", f"{bar.name}: transaction count {bar.tx} leaves +-(2^20-1)")

    def complete_tx(self, bar: Mbarrier, n: int, payload: np.ndarray) -> None:
        bar.tx -= n
        bar.gather(payload)
        self._settle(bar)

    def engine_arrive(self, bar: Mbarrier, payload: np.ndarray) -> None:
        """tcgen05.commit's arrival."""
        self._arrive(bar, 1, payload)

    def _arrive(self, bar: Mbarrier, count: int, payload: np.ndarray) -> None:
        bar.gather(payload)
        bar.arrivals.append(repr(self))
        self.say(f"arrives on {bar.name} (phase {bar.phase}, {bar.pending} pending, {bar.tx} bytes expected)")
        if not bar.arrive(count):
            self.report(
                "barrier misuse",
                f"{bar.name}: {count} arrivals where {bar.pending} of {bar.expected} are pending",
                key=bar.name,
            )
            bar.pending = 0
        self._settle(bar)

    def _settle(self, bar: Mbarrier) -> None:
        if bar.complete():
            waiters, bar.waiters = bar.waiters, []
            for c in waiters:
                if c.state == "blocked" and c.wait is not None and c.wait.key is bar:
                    self.machine.wake(c)
            self.machine.progress()

    def mbarrier_arrive(self, mask, addr, arg, kind: str, drop: bool, order: bool) -> np.ndarray:
        state = np.zeros(32, np.uint64)
        lanes = np.flatnonzero(mask)
        payload = None
        phases: dict[int, int] = {}
        behind = self.W.unsynced & ~mask
        if len(lanes) and order and kind != "expect_tx" and behind.any():
            self.strict(
                "missing warp synchronisation",
                f"lanes {lane_list(mask)} arrive for their warp, but no bar.warp.sync followed the accesses "
                f"of lanes {lane_list(behind)}",
            )
        for lane in lanes:
            bar = self._barrier_at(int(addr[lane]), "mbarrier.arrive")
            if bar is None:
                continue
            if phases.setdefault(id(bar), bar.phase) != bar.phase:
                self.report(
                    "barrier misuse",
                    f"{bar.name}: the lanes of one instruction arrive {len(lanes)} times "
                    "and complete the phase early; "
                    f"{bar.expected} arrivals are expected",
                    key=bar.name,
                )
            state[lane] = bar.phase
            if payload is None:
                payload = self.release()
                if not order:
                    payload[:] = 0
            value = 1 if arg is None else int(arg[lane])
            count = 1 if kind == "expect_tx" else value
            if kind == "expect_tx":
                self._expect(bar, value)
            if drop:
                bar.expected -= count
            if kind == "noComplete" and bar.pending <= count:
                self.report("barrier misuse", f"{bar.name}: arrive.noComplete completes the phase")
            if not 1 <= count <= MAX_COUNT:
                self.report("barrier misuse", f"{bar.name}: arrive with count {count}")
                continue
            self._arrive(bar, count, payload)
        return state

    def mbarrier_try_wait(self, mask, addr, value, parity: bool, order: bool, index: int):
        return self._wait(mask, addr, value, parity, order, index, soft=False)

    def mbarrier_test_wait(self, mask, addr, value, parity: bool, order: bool, index: int):
        return self._wait(mask, addr, value, parity, order, index, soft=True)

    def _wait(self, mask, addr, value, parity: bool, order: bool, index: int, soft: bool):
        lanes = np.flatnonzero(mask)
        out = np.ones(32, np.bool_)
        done: dict[tuple[int, int], bool] = {}
        for lane in lanes:
            key = int(addr[lane]), int(value[lane])
            if key not in done:
                bar = self._barrier_at(key[0], "mbarrier wait", local=True)
                if bar is None:
                    done[key] = True
                    continue
                passed = bar.parity_passes(key[1] & 1) if parity else bar.phase > key[1]
                if passed:
                    bar.observed = True
                    self.say(f"passes {bar.name}, phase {bar.phase - 1} done")
                    self._check_parity(bar, key[1], parity)
                    if order:
                        self.acquire(bar.done)
                elif not self.give_up and not (self.machine.late and index not in self.spurious and not soft):
                    return self._park(bar, key[1], parity, soft)
                done[key] = passed
            out[lane] = done[key]
        if (
            not all(done.values()) and not self.give_up
        ):  # late schedule: one spurious miss, so that waits must loop
            self.spurious.add(index)
        else:
            self.spurious.discard(index)
        self.give_up = False
        return out

    def _check_parity(self, bar: Mbarrier, value: int, parity: bool) -> None:
        """A wait that passes on a barrier that has run ahead: the lane's own count of phases tells."""
        if not parity:
            return
        seen = self.W.phases.get((id(bar), int(self.mask.argmax())))
        passed = bar.phase - 1  # the phase whose completion this parity names
        if seen is not None and passed - seen >= 2 and (passed - seen) % 2 == 0:
            self.strict(
                "parity two behind",
                f"{bar.name} completed phases {seen + 1}..{passed} since this warp's last wait; "
                "parity cannot tell them apart",
                key=bar.name,
            )
        self.W.phases[id(bar), int(self.mask.argmax())] = passed

    def _park(self, bar: Mbarrier, value: int, parity: bool, soft: bool):
        what = f"parity {value & 1}" if parity else f"phase {value}"
        self.say(f"waits on {bar.name} for {what}")
        if self not in bar.waiters:
            bar.waiters.append(self)
        self.block(Wait(lambda: f"on {bar.name} for {what} ({bar.describe()})", bar, soft))
        return None
