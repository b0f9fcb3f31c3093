"""Device, Module, Kernel and Report: the public face of the simulator."""

from __future__ import annotations

import struct
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from videoattn.kernels.library import BuildError, find_compiler

from .errors import ExecutionError, LaunchError
from .findings import ERROR, Finding, FirstFinding, Where
from .machine import Machine
from .memory import Buffer, GlobalMemory
from .parser import parse_ptx
from .program import Program
from .ptx import Entry, ParsedModule, Variable
from .schedule import Schedule
from .tensormap import TensorMap
from .trace import Trace

REGISTER_FILE = 65536
GRID_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA C++ Programming Guide, technical specifications
ARCHITECTURES = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}


class Kernel:
    """One entry of a module, decoded on first launch."""

    def __init__(self, module: ParsedModule, entry: Entry):
        self.module, self.entry, self.name = module, entry, entry.name
        self._programs: dict[bool, Program] = {}

    def program(self, traced: bool = False) -> Program:
        """The decoded form, with or without the calls that record events."""
        if traced not in self._programs:
            self._programs[traced] = Program(self.module, self.entry, traced)
        return self._programs[traced]

    def unsupported(self) -> list:
        """UnsupportedInstruction for every instruction outside the model, executed or not."""
        return self.program().unsupported()


class Module:
    """A parsed PTX file; `entries` maps names to kernels."""

    def __init__(self, parsed: ParsedModule):
        self.parsed, self.target = parsed, parsed.target
        self.entries = {name: Kernel(parsed, e) for name, e in parsed.entries.items()}

    @classmethod
    def from_ptx(cls, text: str) -> Module:
        """Parse PTX text; raises PtxSyntaxError."""
        return cls(parse_ptx(text))

    @classmethod
    def from_file(cls, path: str | Path) -> Module:
        """Parse a .ptx file."""
        return cls.from_ptx(Path(path).read_text())

    @classmethod
    def from_cuda(cls, path: str | Path, arch: str = "sm_100a", flags: tuple[str, ...] = ()) -> Module:
        """Compile a .cu file with the nvcc that builds the library, and parse the PTX.

        Raises LaunchError if there is no compiler, or with its message.
        """
        try:
            compiler = find_compiler()
        except BuildError as error:
            raise LaunchError(str(error)) from None
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "kernel.ptx"
            command = [
                str(compiler.path),
                *compiler.flags,
                f"-arch={arch}",
                "-ptx",
                "-std=c++17",
                "-O3",
                "-lineinfo",
                *flags,
                str(path),
                "-o",
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip()).splitlines()
                raise LaunchError(f"nvcc failed on {path}: {said[0] if said else done.returncode}")
            return cls.from_ptx(out.read_text())

    def entry(self, name: str) -> Kernel:
        """A kernel by its exact name, or by a part of it that only one has."""
        if name in self.entries:
            return self.entries[name]
        near = [n for n in self.entries if name in n]
        if len(near) == 1:
            return self.entries[near[0]]
        raise LaunchError(f"no entry {name!r}; the module has {', '.join(self.entries) or 'none'}")


@dataclass
class Report:
    """Outcome of a launch.

    findings: defects, errors first. counts: executed warp instructions for each opcode, by role if roles were
    named (else under "all"). instructions: their sum. seconds: wall time. trace: events, when asked for.
    """

    findings: list[Finding]
    counts: dict[str, Counter]
    instructions: int
    seconds: float
    schedule: Schedule
    trace: Trace | None = None

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity error."""
        return [f for f in self.findings if f.severity == ERROR]

    def __str__(self) -> str:
        head = f"{self.instructions} warp instructions in {self.seconds:.2f} s, schedule {self.schedule}"
        return "\n".join([head, *map(str, self.findings)]) if self.findings else f"{head}: clean"


class Device:
    """A simulated GPU: arch is sm_90a, sm_100a or sm_103a."""

    def __init__(self, arch: str = "sm_100a"):
        if arch not in ARCHITECTURES:
            raise LaunchError(f"architecture {arch!r} is not one of {', '.join(ARCHITECTURES)}")
        self.arch, self.sm_count = arch, ARCHITECTURES[arch]
        self.memory = GlobalMemory()

    def upload(self, array, name: str = "") -> Buffer:
        """Copy a numpy array or a torch CPU tensor into device memory."""
        return self.memory.upload(array, name or f"buffer {len(self.memory.buffers)}")

    def launch(
        self,
        kernel: Kernel,
        *,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        cluster=(1, 1, 1),
        dynamic_smem: int = 0,
        args=(),
        schedule: Schedule | None = None,
        registers: int | None = None,
        roles=None,
        trace: bool = False,
        limit: int = 50_000_000,
        stop: bool = False,
    ) -> Report:
        """Run a kernel to its end, or until nothing can move.

        args: Buffer, TensorMap, int or float by the declared type, bytes for structs and opaque parameters.
        registers: ptxas's count a thread, for setmaxnreg arithmetic. roles: role name -> warp indices, for
        counts. trace: keep events in the report. limit: basic blocks after which a launch counts as endless.
        stop: end at the first finding. Raises LaunchError for impossible launches, UnsupportedInstruction
        when execution reaches something outside the model.
        """
        program = kernel.program(trace)
        grid, block, cluster = (
            triple(x, n) for x, n in ((grid, "grid"), (block, "block"), (cluster, "cluster"))
        )
        self._check(kernel, grid, block, cluster, registers)
        if dynamic_smem < 0:
            raise LaunchError(f"{dynamic_smem} bytes of dynamic shared memory; must be 0 or more")
        params, keep = _pack(kernel.entry, args)
        schedule = schedule or Schedule.early()
        machine = Machine(program, grid, block, cluster, dynamic_smem, params, schedule, self, registers)
        machine.max_steps = limit
        machine.log.stop = stop
        machine.trace = Trace(program) if trace else None
        start = time.perf_counter()
        try:
            machine.run()
        except FirstFinding:
            pass
        except ExecutionError as error:
            machine.log.stop = False
            machine.log.add(
                "stopped", ERROR, str(error), machine.running.where() if machine.running else Where()
            )
        del keep
        counts, total = _counts(program, machine, roles)
        return Report(machine.log.list(), counts, total, time.perf_counter() - start, schedule, machine.trace)

    def _check(self, kernel: Kernel, grid, block, cluster, registers: int | None) -> None:
        threads = block[0] * block[1] * block[2]
        if not 1 <= threads <= 1024:
            raise LaunchError(f"block {block} has {threads} threads; must be 1..1024")
        if registers is not None and not 1 <= registers <= 255:
            raise LaunchError(f"{registers} registers a thread; must be 1..255")
        if registers is not None and -(-registers // 8) * 8 * -(-threads // 32) * 32 > REGISTER_FILE:
            raise LaunchError(
                f"{threads} threads of {registers} registers; an SM has {REGISTER_FILE} registers"
            )
        if any(size > limit for size, limit in zip(grid, GRID_LIMITS, strict=True)):
            raise LaunchError(f"grid {grid} is larger than {GRID_LIMITS}")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise LaunchError(f"grid {grid} is not a multiple of the cluster {cluster}")
        if cluster[0] * cluster[1] * cluster[2] > 16:
            raise LaunchError(f"cluster {cluster} is larger than 16 CTAs")
        directives = kernel.entry.directives
        for name in ("maxntid", "reqntid"):
            if name in directives:
                want = 1
                for x in directives[name]:
                    want *= x
                if threads > want or (name == "reqntid" and threads != want):
                    raise LaunchError(f"block {block} against .{name} {directives[name]} of {kernel.name}")
        if directives.get("reqnctapercluster"):
            want = (*directives["reqnctapercluster"], 1, 1)[:3]
            if tuple(want) != cluster:
                raise LaunchError(f"cluster {cluster}, but {kernel.name} needs {want}")
        target = kernel.module.target
        if target[-1] in "af" and target.rstrip("af") != self.arch.rstrip("a"):
            raise LaunchError(f"{kernel.name} is built for {target}, the device is {self.arch}")


def triple(value, name: str) -> tuple[int, int, int]:
    """Up to three sizes as three; raises LaunchError."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(items) > 3 or any(type(item) is not int or item < 1 for item in items):
        raise LaunchError(f"{name} {value!r} is not up to three positive sizes")
    x, y, z = [*items, 1, 1, 1][:3]
    return x, y, z


_INT = {"u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"}


def _pack(entry: Entry, args) -> tuple[bytes, list]:
    """Parameter bytes, and the objects that must outlive the launch."""
    if len(args) != len(entry.params):
        raise LaunchError(f"{entry.name} takes {len(entry.params)} arguments, {len(args)} were given")
    size = max([p.address + p.size for p in entry.params], default=0)
    data, keep = bytearray(size), []
    for i, (p, value) in enumerate(zip(entry.params, args, strict=True)):
        raw = _argument(i, p, value)
        data[p.address : p.address + len(raw)] = raw
        keep.append(value)
    return bytes(data), keep


def _argument(i: int, p: Variable, value) -> bytes:
    what = f"argument {i} (.{p.type}{f'[{p.size}]' if p.type == 'b8' and p.size > 1 else ''})"
    if isinstance(value, TensorMap):
        if p.size != 128:
            raise LaunchError(f"{what} is no tensor map: it has {p.size} bytes, not 128")
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        if len(value) != p.size:
            raise LaunchError(f"{what} has {p.size} bytes, {len(value)} were given")
        return bytes(value)
    if isinstance(value, Buffer):
        if p.size != 8:
            raise LaunchError(f"{what} cannot hold a pointer")
        return struct.pack("<Q", value.address)
    if isinstance(value, (bool, np.bool_)):
        value = int(value)
    if isinstance(value, (int, np.integer)):
        if p.type in ("f32", "f64"):
            return _float_bytes(what, p.type == "f32", value)
        if p.type not in _INT or p.size > 8 or (p.type == "b8" and p.size > 1):
            raise LaunchError(f"{what} cannot hold the integer {value}; give bytes")
        if not -(2 ** (8 * p.size - 1)) <= value < 2 ** (8 * p.size):
            raise LaunchError(f"{what} cannot hold {value}")
        return (int(value) & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")
    if isinstance(value, (float, np.floating)):
        if p.type not in ("f32", "f64", "b32", "b64"):
            raise LaunchError(f"{what} cannot hold the float {value}")
        return _float_bytes(what, p.size == 4, value)
    raise LaunchError(
        f"{what}: a {type(value).__name__} cannot be passed; use Buffer, TensorMap, int, float or bytes"
    )


def _float_bytes(what: str, single: bool, value: float | np.integer | np.floating) -> bytes:
    try:
        return struct.pack("<f" if single else "<d", float(value))
    except OverflowError:
        raise LaunchError(f"{what} cannot hold {value}") from None


def _counts(program: Program, machine: Machine, roles) -> tuple[dict[str, Counter], int]:
    opcodes = [Counter(ins.opcode for ins in program.instrs[b.first : b.last]) for b in program.blocks]
    names = {w: name for name, warps in (roles or {}).items() for w in warps}
    out: dict[str, Counter] = {}
    total = 0
    for warp, counts in machine.block_counts.items():
        counter = out.setdefault(names.get(warp, "other" if roles else "all"), Counter())
        for block, n in zip(opcodes, counts, strict=True):
            if n:
                for opcode, k in block.items():
                    counter[opcode] += k * int(n)
                    total += k * int(n)
    return out, total
