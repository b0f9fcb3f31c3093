"""Compiles one kernel file to PTX and reads what ptxas says of it: registers, spills, stack, shared memory.

Results lie in `build/ptx` of a checkout, in the cache for an installed package, named by the hash of the
file, its includes, flags and compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from videoattn.kernels.library import PACKAGED, SOURCES, BuildError, Compiler, cache_root, find_compiler

FLAGS = ("-std=c++17", "-O3", "-lineinfo")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas gave one kernel: registers a thread; bytes of stack, spills and static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    named_barriers: int

    @property
    def spills(self) -> bool:
        return bool(self.spill_stores or self.spill_loads)


def source_closure(source: Path) -> list[Path]:
    """The file and every file it includes by a quoted name, in the order of the first mention."""
    found: list[Path] = []
    pending = [source.resolve()]
    while pending:
        path = pending.pop(0)
        if path in found:
            continue
        found.append(path)
        pending += [(path.parent / name).resolve() for name in _INCLUDE.findall(path.read_text())]
    return found


def compile_ptx(source: Path, arch: str = "sm_100a", defines: tuple[str, ...] = ()) -> Path:
    """The PTX of a kernel file for `arch`, from the cache if nothing it depends on has changed.

    Raises BuildError with the compiler's first error line.
    """
    return _compile(source, arch, defines)[0]


def compile_report(
    source: Path, arch: str = "sm_100a", defines: tuple[str, ...] = ()
) -> dict[str, Resources]:
    """What ptxas says of each kernel of a file compiled for `arch`, by the kernel's name.

    Raises BuildError with the compiler's first error line.
    """
    return parse_report(_compile(source, arch, defines)[1].read_text())


def parse_report(text: str) -> dict[str, Resources]:
    """ptxas's `-v` output, by kernel name."""
    reports = {}
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text):
        entry, stack, used = _ENTRY.search(part), _STACK.search(part), _USED.search(part)
        if not (entry and stack and used):
            continue
        shared, barriers = _SHARED.search(part), _BARRIERS.search(part)
        reports[entry[1]] = Resources(
            registers=int(used[1]),
            stack=int(stack[1]),
            spill_stores=int(stack[2]),
            spill_loads=int(stack[3]),
            static_smem=int(shared[1]) if shared else 0,
            named_barriers=int(barriers[1]) if barriers else 0,
        )
    return reports


def _compile(source: Path, arch: str, defines: tuple[str, ...]) -> tuple[Path, Path]:
    compiler = find_compiler()
    flags = [*FLAGS, f"-arch={arch}", *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256(json.dumps([flags, compiler.version]).encode())
    for path in source_closure(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    builds = cache_root() if SOURCES == PACKAGED else SOURCES.parent / "build"
    folder = builds / "ptx" / f"{source.stem}.{arch}.{digest.hexdigest()[:16]}"
    ptx, report = folder / f"{source.stem}.ptx", folder / "ptxas.txt"
    if not (ptx.is_file() and report.is_file()):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build.") as scratch:
            made, cubin = Path(scratch, ptx.name), Path(scratch, "kernel.cubin")
            said = _run(compiler, [*flags, "-ptx", str(source), "-o", str(made)])
            ptxas = compiler.path.with_name("ptxas")
            command = [ptxas, f"-arch={arch}", "-O3", "-v", str(made), "-o", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise BuildError(f"ptxas failed on {source.name} for {arch}: {_first_error(done.stderr)}")
            told = Path(scratch, report.name)
            told.write_text(said + done.stderr + done.stdout)
            os.replace(told, report)
            os.replace(made, ptx)
    return ptx, report


def _run(compiler: Compiler, arguments: list[str]) -> str:
    done = subprocess.run([compiler.path, *compiler.flags, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc failed: {_first_error(done.stderr + done.stdout)}")
    return done.stderr


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next(
        (line for line in lines if "error" in line.lower() or "fatal" in line.lower()), (lines or [""])[0]
    )
