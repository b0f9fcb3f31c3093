"""Compiles one kernel file to PTX and reads what ptxas says of it: registers, spills, stack, shared memory.

Results lie in `build/ptx` of a checkout, in the cache for an installed package, named by the hash of the
file, its includes, flags and compiler; processes that want the same one wait for one another.
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

from videoattn.kernels.library import (
    PACKAGED,
    SOURCES,
    BuildError,
    Compiler,
    cache_root,
    find_compiler,
    locked,
)

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

    Raises BuildError with the compiler's first error line, or where the cache can't be written.
    """
    return _compile(find_compiler(), source, arch, defines)


def compile_report(
    source: Path, arch: str = "sm_100a", defines: tuple[str, ...] = ()
) -> dict[str, Resources]:
    """What ptxas says of each kernel of a file compiled for `arch`, by the kernel's name.

    Raises BuildError with the compiler's first error line.
    """
    return parse_report(ptxas_output(source, arch, defines))


def ptxas_output(source: Path, arch: str = "sm_100a", defines: tuple[str, ...] = ()) -> str:
    """All that ptxas says of a file compiled for `arch`: resources, and warnings.

    Raises BuildError with the compiler's first error line.
    """
    compiler = find_compiler()
    ptx = _compile(compiler, source, arch, defines)
    report = ptx.with_name("ptxas.txt")
    if report.is_file():
        return report.read_text()
    with locked(ptx.parent):
        if not report.is_file():
            with tempfile.TemporaryDirectory(dir=ptx.parent, prefix="build.") as scratch:
                ptxas, cubin = compiler.path.with_name("ptxas"), Path(scratch, "kernel.cubin")
                command = [ptxas, f"-arch={arch}", "-O3", "-v", str(ptx), "-o", str(cubin)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    raise BuildError(f"ptxas failed on {source.name} for {arch}: {_first_error(done.stderr)}")
                told = Path(scratch, report.name)
                told.write_text(done.stderr + done.stdout)
                os.replace(told, report)
    return report.read_text()


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


def _compile(compiler: Compiler, source: Path, arch: str, defines: tuple[str, ...]) -> Path:
    flags = [*FLAGS, f"-arch={arch}", *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256(json.dumps([flags, compiler.version]).encode())
    for path in source_closure(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    builds = cache_root() if SOURCES == PACKAGED else SOURCES.parent / "build"
    folder = builds / "ptx" / f"{source.stem}.{arch}.{digest.hexdigest()[:16]}"
    ptx = folder / f"{source.stem}.ptx"
    if ptx.is_file():
        return ptx
    with locked(folder):
        if not ptx.is_file():
            with tempfile.TemporaryDirectory(dir=folder, prefix="build.") as scratch:
                made = Path(scratch, ptx.name)
                _run(compiler, [*flags, "-ptx", str(source), "-o", str(made)])
                os.replace(made, ptx)
    return ptx


def _run(compiler: Compiler, arguments: list[str]) -> None:
    done = subprocess.run([compiler.path, *compiler.flags, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc failed: {_first_error(done.stderr + done.stdout)}")


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next(
        (line for line in lines if "error" in line.lower() or "fatal" in line.lower()), (lines or [""])[0]
    )
