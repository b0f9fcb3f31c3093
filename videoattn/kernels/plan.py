"""The planner alone: shapes and strides to tensor maps, grid and arguments, without nvcc, CUDA or a GPU.

The launcher inside the library and the simulator run the same plans. This module builds the planner's sources
with the machine's C++ compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from videoattn.kernels import abi, library

FLAGS = ("-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", "-static-libstdc++", "-static-libgcc")


class PlanRefused(ValueError):
    """The kernel can't take these arguments; the message is the planner's reason."""


def build(sources: Path = library.SOURCES) -> Path:
    """The planner's shared library, compiled first if the cache does not hold it.  Raises BuildError."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise library.BuildError("there is no C++ compiler: install g++ or set CXX")
    units = [path for path in library.source_files(sources) if path.suffix == ".cpp"]
    headers = [path for path in library.source_files(sources) if path.suffix == ".h"]
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for path in [*units, *headers]:
        digest.update(path.read_bytes())
    target = library.cache_root() / "planner" / f"{digest.hexdigest()[:24]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "planner.so"
        command = [compiler, *FLAGS, *map(str, units), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            raise library.BuildError(f"{compiler} failed: {(done.stderr.splitlines() or ['no message'])[0]}")
        os.replace(made, target)
    return target


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The loaded planner, built on first use.  Raises BuildError."""
    return abi.declare(ctypes.CDLL(str(build())))


def plan(call: abi.Call) -> abi.Plan:
    """What would be launched for the call; `call.arch` and `call.num_sms` must be set.

    Raises PlanRefused with the kernel's reason, BuildError if there is no planner.
    """
    return _ask(load().videoattn_plan, call)


def plan_merge(call: abi.Call) -> abi.Plan | None:
    """The kernel launched after it where the keys are split over `call.workspace`, else None.

    Raises as `plan`.
    """
    result = _ask(load().videoattn_plan_merge, call)
    return result if result.grid[0] else None


def workspace_bytes(call: abi.Call) -> int:
    """Bytes of `call.workspace` that splitting the keys takes; 0: they are not split."""
    return load().videoattn_workspace_bytes(ctypes.byref(call))


def _ask(planner, call: abi.Call) -> abi.Plan:
    result = abi.Plan()
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    status = planner(ctypes.byref(call), ctypes.byref(result), text, abi.MESSAGE_BYTES)
    if status != abi.OK:
        raise PlanRefused(text.value.decode(errors="replace"))
    return result
