"""The machine: memory layout of a launch, the scheduler, asynchronous jobs, deadlock detection."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .context import Context
from .core import Core, lane_list, runs
from .cta import Cluster, Warp
from .errors import ExecutionError, LaunchError, UnsupportedInstruction
from .findings import ERROR, FindingLog, Where
from .memory import SHARED_BASE
from .program import Program
from .ptx import Instr
from .schedule import Schedule
from .trace import Trace

_QUANTUM = 4000
_PATIENCE = 1000  # turns of other warps after which a slow one runs all the same, should they poll for it


class Machine:
    """One launch in execution."""

    def __init__(
        self,
        program: Program,
        grid,
        block,
        cluster,
        dynamic_smem: int,
        params: bytes,
        schedule: Schedule,
        device,
        registers: int | None,
    ):
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster
        self.device = device
        self.params = params
        self.dynamic_smem = dynamic_smem
        self.threads = block[0] * block[1] * block[2]
        self.schedule, self.rng = schedule, schedule.rng()
        self.early, self.late = schedule.mode == "early", schedule.mode == "late"
        self.passed_over = 0
        self.sm_count = device.sm_count
        self.log = FindingLog()
        self.ready: deque[Any] = deque()
        self.queues: dict[object, deque[Callable[[], object]]] = {}
        self.jobs = 0
        self.serial = 0
        self.steps = 0
        self.max_steps = 50_000_000
        self.trace: Trace | None = None
        self.running: Context | None = None
        self.registers = registers or self._register_guess()
        self.param_offsets = {p.name: p.address for p in program.entry.params}
        self.global_shadows: dict = {}
        self.ordered_globally = False  # atomics or releases may order CTAs of different clusters
        self._lay_out_memory()
        cx, cy, cz = cluster
        gx, gy, gz = grid
        # One by one: of a grid that never ends in time few are ever needed.
        self.pending = (
            [(x * cx + i, y * cy + j, z * cz + k) for k in range(cz) for j in range(cy) for i in range(cx)]
            for z in range(gz // cz)
            for y in range(gy // cy)
            for x in range(gx // cx)
        )
        self.clusters: list[Cluster] = []
        self.clusters_started = 0
        self.block_counts: dict[int, np.ndarray] = {}

    def _register_guess(self) -> int:
        """Registers a thread at launch when ptxas's count is not known.

        The file divided over the threads that the kernel is compiled for; a launch may have fewer.
        """
        directives = self.program.entry.directives
        compiled = directives.get("reqntid") or directives.get("maxntid") or (self.threads,)
        return min(255, 65536 // max(math.prod(compiled), 1) // 8 * 8)

    def _lay_out_memory(self) -> None:
        program = self.program
        variables = {**program.module.variables, **program.entry.variables}
        self.smem_addresses: dict[str, int] = {}
        self.local_addresses: dict[str, int] = {}
        self.global_addresses: dict[str, int] = {}
        self.smem_names: list[tuple[int, int, str]] = []
        offset, local = SHARED_BASE, 0
        used = self._used_symbols()
        for var in variables.values():
            if var.name not in used:
                continue
            if var.space == "shared" and var.size:
                offset = -(-offset // var.align) * var.align
                self.smem_addresses[var.name] = offset
                self.smem_names.append((offset, var.size, var.name))
                offset += var.size
            elif var.space == "local":
                local = -(-local // var.align) * var.align
                self.local_addresses[var.name] = local
                local += var.size
            elif var.space in ("global", "const"):
                raw = np.zeros(max(var.size, 1), np.uint8)
                raw[: len(var.init)] = np.frombuffer(var.init, np.uint8)
                buf = self.device.memory.add(raw, (np.uint8, raw.shape, "numpy"), var.name)
                self.global_addresses[var.name] = buf.address
        dynamic = [v for v in variables.values() if v.space == "shared" and not v.size and v.name in used]
        for var in dynamic:
            start = -(-offset // max(var.align, 16)) * max(var.align, 16)
            self.smem_addresses[var.name] = start
            self.smem_names.append((start, 0, var.name))
        start = max([offset, *(self.smem_addresses[v.name] for v in dynamic)])
        self.smem_end = start + self.dynamic_smem
        self.local_size = local
        if self.smem_end - SHARED_BASE > 232448:
            raise LaunchError(
                f"{self.smem_end - SHARED_BASE} bytes of shared memory; "
                "a CTA can have at most 232448 (227 KiB)"
            )
        if self.dynamic_smem and not dynamic:
            pass  # the kernel simply does not use it

    def _used_symbols(self) -> set[str]:
        from .ptx import Mem, Sym

        used = set()
        for ins in self.program.instrs:
            for o in ins.operands:
                base = o.base if isinstance(o, Mem) else o
                if isinstance(base, Sym):
                    used.add(base.name)
        return used

    def source(self, ins: Instr) -> str:
        if not ins.loc:
            return ""
        files = self.program.module.files

        def one(k: int, line: int) -> str:
            return f"{files.get(k, '?').rsplit('/', 1)[-1]}:{line}"

        inner = one(*ins.loc[:2])
        return f"{one(*ins.loc[2:4])} ({inner})" if len(ins.loc) > 2 else inner

    def unsupported(self, ctx: Core, detail: str) -> None:
        """Stop at something outside the model."""
        ins = self.program.instrs[ctx.at]
        raise UnsupportedInstruction(ins.opcode, ins.line, detail)

    # ---- asynchronous jobs

    def post(self, queue: object, job: Callable[[], object]) -> None:
        """Hand work to an asynchronous agent; jobs of one queue keep their order."""
        if self.trace is not None:
            trace, event, work = self.trace, self.trace.job(queue, self.running), job

            def traced() -> None:
                work()
                trace.done(event)

            job = traced
        if self.early:
            job()
            return
        self.queues.setdefault(queue, deque()).append(job)
        self.jobs += 1

    def drain(self, queue: object) -> None:
        """Complete everything a queue holds."""
        jobs = self.queues.pop(queue, None)
        while jobs:
            self.jobs -= 1
            jobs.popleft()()

    def advance(self) -> None:
        """Let one agent complete one job."""
        if not self.queues:
            return
        key = next(iter(self.queues)) if self.late else self.rng.choice(list(self.queues))
        jobs = self.queues.pop(key)
        job = jobs.popleft()
        if jobs:
            self.queues[key] = jobs  # at the end: agents take turns
        self.jobs -= 1
        job()

    # ---- scheduling

    def current(self, warp: Warp) -> Context | None:
        """The context of `warp` that executes right now."""
        return self.running if self.running is not None and self.running.W is warp else None

    def wake(self, ctx: Core) -> None:
        ctx.state, ctx.wait = "ready", None
        self.ready.append(ctx)

    def run(self) -> None:
        """Execute the launch to its end, or until nothing can move."""
        with np.errstate(all="ignore"):
            while True:
                if self.ready:
                    self._run_one()
                elif self.jobs:
                    self.advance()
                elif not self._unstick() and not self._start_cluster():
                    break
        live = [c for cl in self.clusters for cta in cl.ctas for w in cta.warps for c in w.contexts]
        if live:
            self._deadlock(live)
        for cl in self.clusters:
            self._collect(cl)

    def _run_one(self) -> None:
        if self.schedule.mode == "random":
            if self.jobs and self.rng.random() < 0.5:
                self.advance()
            self.ready.rotate(self.rng.randrange(len(self.ready)))
            quantum = self.rng.choice((1, 3, 10, 40))
        elif self.schedule.mode == "slow":
            quantum = self._slow_turn()
            if not quantum:
                return
        else:
            quantum = _QUANTUM
        ctx = self.ready.popleft()
        if ctx.state == "ready":
            self._execute(ctx, quantum)

    def _slow_turn(self) -> int:
        """Put who runs next first in line; returns how many blocks it may run, 0 if an agent went instead."""
        slow = self.schedule.warps
        places = {c.W.index in slow: i for i, c in reversed([*enumerate(self.ready)])}
        if False in places and not (True in places and self.passed_over == _PATIENCE):
            self.passed_over += True in places
            self.ready.rotate(-places[False])
            return 40
        if False not in places and self.jobs:
            self.advance()
            return 0
        self.passed_over = 0
        self.ready.rotate(-places[True])
        return 1

    def _execute(self, ctx: Context, quantum: int) -> None:
        warp = ctx.W
        program, R = self.program, warp.R
        functions = program.full if ctx.full else program.masked
        counts, end, join, pc = warp.counts, program.end, ctx.join_pc, ctx.pc
        start = quantum
        self.running = ctx
        while True:
            if pc == join:
                ctx.pc = pc
                ctx.arrive_join()
                break
            if pc == end:
                ctx.exit()
                break
            if not quantum:
                ctx.pc = pc
                self.ready.append(ctx)
                if not self.early:
                    self.advance()
                if self.steps > self.max_steps:
                    raise ExecutionError(f"no end after {self.max_steps} blocks: {ctx!r} still runs")
                break
            quantum -= 1
            ctx.pc = pc
            counts[pc] += 1
            after = functions[pc](ctx, R, warp)
            if after < 0:
                if after == -1:
                    counts[pc] -= 1
                    if ctx.state == "ready":  # a spurious miss, not a wait
                        self.ready.append(ctx)
                elif after == -2:
                    self.ready.append(ctx)
                break
            pc = after
        self.running = None
        self.steps += start - quantum

    def _unstick(self) -> bool:
        """Nothing runs: give up soft waits, then release lanes that wait for others of their warp."""
        blocked = [c for cl in self.clusters for cta in cl.ctas for w in cta.warps for c in w.contexts]
        soft = [c for c in blocked if c.state == "blocked" and c.wait is not None and c.wait.soft]
        if soft and self.soft_misses < 200:
            self.soft_misses += 1
            for c in soft:
                c.give_up = True
                self.wake(c)
            return True
        for c in blocked:
            if c.state == "join":
                join = c.joins[-1]
                group, join.waiting = join.waiting, []
                for x in group:
                    join.expected = join.expected & ~x.mask
                    x.joins = x.joins[:-1]
                    x.set_mask(x.mask)
                    self.wake(x)
                return True
        return False

    soft_misses = 0

    def progress(self) -> None:
        """Something changed that a polling lane could see."""
        self.soft_misses = 0

    def _start_cluster(self) -> bool:
        if (ctas := next(self.pending, None)) is None:
            return False
        for cl in [c for c in self.clusters if all(cta.exited for cta in c.ctas)]:
            self._collect(cl)
            self.clusters.remove(cl)
        self.clusters.append(Cluster(self, ctas))
        return True

    def _collect(self, cluster: Cluster) -> None:
        for cta in cluster.ctas:
            for w in cta.warps:
                counts = np.array(w.counts, np.int64)
                if w.index in self.block_counts:
                    self.block_counts[w.index] += counts
                else:
                    self.block_counts[w.index] = counts

    def _deadlock(self, live: list[Context]) -> None:
        groups: dict[tuple[int, str, str], list[int]] = {}
        for c in live:
            if c.wait is not None:
                text = c.wait.text() if callable(c.wait.text) else c.wait.text
            else:
                text = "for the other lanes of its warp"
            lanes = "all lanes" if c.full else f"lanes {lane_list(c.mask)}"
            groups.setdefault((c.cta.index, lanes, text), []).append(c.W.index)
        lines = []
        for (cta, lanes, text), warps in groups.items():
            who, verb = (f"warp {warps[0]}", "waits") if len(warps) == 1 else (f"warps {runs(warps)}", "wait")
            lines.append(f"CTA {cta} {who} ({lanes}) {verb} {text}")
        first = next((c for c in live if c.state == "blocked"), live[0])
        ins = self.program.instrs[first.at]
        where = Where(ins.line, ins.opcode, self.source(ins), first.cta.index, first.W.index)
        self.log.stop = False
        self.log.add("deadlock", ERROR, "nothing can move: " + "; ".join(lines), where)
