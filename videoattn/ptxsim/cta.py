"""Warps with their registers, CTAs with their memories, clusters with their barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .codegen import PARAM_BASE
from .context import Context
from .core import Core
from .errors import ExecutionError
from .hb import Columns
from .memory import SHARED_BASE, SharedMemory
from .ops_barrier import NamedBarrier
from .poison import PoisonRegister
from .tmem import TensorMemory

if TYPE_CHECKING:
    from .inflight import SharedLoad
    from .machine import Machine


class Warp:
    """32 lanes and their registers."""

    def __init__(self, cta: Cta, index: int, threads: int):
        self.cta, self.index = cta, index
        self.machine = cta.machine
        name = f"warp {index}" if cta.cluster.size == 1 else f"CTA {cta.rank} warp {index}"
        columns = cta.cluster.columns
        self.column = columns.new(name)
        self.ld_column = columns.new(f"{name}'s tcgen05.ld")
        self.st_column = columns.new(f"{name}'s tcgen05.st")
        self.mma_column = columns.new(f"{name}'s MMA pipe")
        self.bulk_read_column = columns.new(f"{name}'s bulk stores (reading)")
        self.bulk_write_column = columns.new(f"{name}'s bulk stores (writing)")
        self.init_column = columns.new(f"{name}'s mbarrier.init")
        self.inits = self.inits_published = 0
        self.now = 1
        self.ld_issued = self.st_issued = self.mma_issued = 0
        self.bulk_groups: list[list] = []
        self.bulk_open: list = []
        self.bulk_issued = self.bulk_done = self.bulk_read_done = 0
        self.pending_loads: list = []
        self.loads: dict[tuple[int, int], SharedLoad] = {}  # from shared memory, data not known to be there
        self.loads_issued = 0
        self.wgmma_groups: list = []
        self.wgmma_chains: list = []
        self.wgmma_fenced: bool | None = None  # None: never; False: a wait came since
        self.registers = 0
        self.syncs: dict = {}
        self.phases: dict = {}
        self.unsynced = np.zeros(32, np.bool_)  # lanes with memory accesses since the warp last synchronised
        self.local: np.ndarray | None = None
        program = cta.machine.program
        # nvcc declares several times as many registers as it uses.
        self.R: list = [None] * len(program.entry.regs)
        for k in program.used:
            self.R[k] = PoisonRegister(self, program.entry.regs[k])
        self.live = np.arange(32) < threads
        self.special = self._special_registers(cta, index)
        self.counts = [0] * len(program.blocks)
        self.contexts = [Context(self, self.live.copy(), 0, columns.clock())]

    def wgmma_open(self, chain) -> bool:
        """Whether operations on the accumulator have not been waited for."""
        groups = [chains for _, chains in self.wgmma_groups]
        return any(c is chain for chains in [*groups, self.wgmma_chains] for c, _ in chains)

    @staticmethod
    def _special_registers(cta: Cta, index: int) -> dict[str, np.ndarray]:
        m = cta.machine
        linear = np.arange(32, dtype=np.uint32) + np.uint32(32 * index)
        bx, by, _ = m.block
        out: dict[str, np.ndarray] = {}

        def fill(name: str, value: int) -> None:
            out[name] = np.full(32, value, np.uint32)

        out["%tid.x"] = linear % np.uint32(bx)
        out["%tid.y"] = linear // np.uint32(bx) % np.uint32(by)
        out["%tid.z"] = linear // np.uint32(bx * by)
        lane = np.arange(32, dtype=np.uint32)
        out["%laneid"] = lane
        one = np.uint32(1)
        out["%lanemask_eq"] = one << lane
        out["%lanemask_lt"] = (one << lane) - one
        out["%lanemask_le"] = ((one << lane) - one) | (one << lane)
        out["%lanemask_gt"] = ~out["%lanemask_le"]
        out["%lanemask_ge"] = ~out["%lanemask_lt"]
        clusters = [g // c for g, c in zip(m.grid, m.cluster, strict=True)]
        for i, axis in enumerate("xyz"):
            fill(f"%ntid.{axis}", m.block[i])
            fill(f"%ctaid.{axis}", cta.id[i])
            fill(f"%nctaid.{axis}", m.grid[i])
            fill(f"%clusterid.{axis}", cta.id[i] // m.cluster[i])
            fill(f"%nclusterid.{axis}", clusters[i])
            fill(f"%cluster_ctaid.{axis}", cta.id[i] % m.cluster[i])
            fill(f"%cluster_nctaid.{axis}", m.cluster[i])
        fill("%warpid", index)
        fill("%nwarpid", len(range(0, m.threads, 32)))
        fill("%smid", cta.index)
        fill("%nsmid", m.sm_count)
        fill("%cluster_ctarank", cta.rank)
        fill("%cluster_nctarank", cta.cluster.size)
        fill("%is_explicit_cluster", int(cta.cluster.size > 1))
        fill("%dynamic_smem_size", m.dynamic_smem)
        fill("%total_smem_size", m.smem_end - SHARED_BASE)
        out["%gridid"] = np.zeros(32, np.uint64)
        return out


class Cta:
    """One thread block on its own SM."""

    def __init__(self, cluster: Cluster, rank: int, cta_id: tuple[int, int, int]):
        self.cluster, self.machine, self.rank, self.id = cluster, cluster.machine, rank, cta_id
        m = self.machine
        gx, gy, _ = m.grid
        self.index = cta_id[0] + gx * (cta_id[1] + gy * cta_id[2])
        self.smem = SharedMemory(m.smem_end, m.smem_names)
        self.tmem = TensorMemory()
        self.tmem_group = 0
        self.symbols: dict = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.sync_points: dict = {}
        self.register_pool = 0
        self.warps: list[Warp] = []
        self.exited = False

    def start(self) -> None:
        m = self.machine
        self.warps = [Warp(self, i, min(32, m.threads - 32 * i)) for i in range(-(-m.threads // 32))]
        for w in self.warps:
            w.registers = m.registers
            m.ready.extend(w.contexts)

    def address_of(self, name: str, line: int) -> int:
        m = self.machine
        var = m.program.entry.variables.get(name) or m.program.module.variables.get(name)
        if name in m.param_offsets:
            return PARAM_BASE + m.param_offsets[name]
        if var is None:
            raise ExecutionError(f"PTX line {line}: {name} is not declared")
        if var.space == "shared":
            return (self.rank << 24) + m.smem_addresses[name]
        if var.space == "local":
            return m.local_addresses[name]
        return m.global_addresses[name]

    def lanes_exited(self, ctx: Context) -> None:
        if ctx.W.live.any() or any(w.live.any() for w in self.warps):
            for bar in self.barriers.values():
                bar.lanes_left(self)
            return
        self.exited = True
        if self.tmem.allocations:
            left = ", ".join(f"{n} columns at {c}" for c, n in sorted(self.tmem.allocations.items()))
            ctx.report(
                "tmem leak", f"the CTA exits with tensor memory still allocated: {left}", key=self.index
            )
        self.cluster.cta_exited(self, ctx)


class Cluster:
    """CTAs that may reach each other's shared memory."""

    def __init__(self, machine: Machine, ids: list[tuple[int, int, int]]):
        self.machine, self.size = machine, len(ids)
        self.index = machine.clusters_started
        machine.clusters_started += 1
        warps = -(-machine.threads // 32) * len(ids)
        self.columns = Columns(9 * warps + 160 * len(ids) + 8)
        self.arrived: list[tuple[Core, np.ndarray]] = []
        self.waiting: list[Core] = []
        self.phase = 0
        self.sync_payload = self.columns.payload()
        self.sync_done = self.columns.payload()
        self.ctas = [Cta(self, rank, i) for rank, i in enumerate(ids)]
        for cta in self.ctas:
            cta.start()

    def cta_exited(self, cta: Cta, ctx: Context) -> None:
        self.release_if_complete()

    def _outstanding(self) -> int:
        live = sum(int(w.live.sum()) for cta in self.ctas for w in cta.warps)
        return live - sum(int((mask & c.W.live).sum()) for c, mask in self.arrived)

    def missing(self) -> str:
        return f"{self._outstanding()} threads of the cluster have not arrived"

    def release_if_complete(self) -> None:
        """Complete the cluster barrier's phase once every live thread has arrived."""
        if not self.arrived or self._outstanding():
            return
        np.maximum(self.sync_done, self.sync_payload, out=self.sync_done)
        self.phase += 1
        self.arrived = []
        waiting, self.waiting = self.waiting, []
        for c in waiting:
            self.machine.wake(c)
