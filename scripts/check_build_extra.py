"""Checks that the `build` extra is a compiler: a clean environment with its packages alone compiles a kernel.

    python scripts/check_build_extra.py [--keep FOLDER]

Installs the packages that pyproject.toml lists, from the package index, with no other CUDA toolkit in reach,
and builds a small library for every architecture through videoattn.kernels.library. Prints what it took.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Runs inside: find_compiler must take the packages' nvcc, and the library must load without a driver.
INSIDE = """
import ctypes, sys, time
from pathlib import Path
from videoattn.kernels import library
library.TOOLKIT = Path("no toolkit")
compiler = library.find_compiler()
assert compiler.path.is_relative_to(sys.prefix), f"{compiler.path} lies outside {sys.prefix}"
start = time.monotonic()
made = library.build(compiler, Path(sys.argv[1]))
ctypes.CDLL(str(made)).videoattn_build_info
print(f"{compiler.version}: {time.monotonic() - start:.0f} s for sm_100a, sm_103a and sm_90a")
"""

KERNELS = """
#include "../common/launch.h"
namespace videoattn {
KernelList %s_kernels() { return {nullptr, 0}; }
}
extern "C" __global__ void %s_nothing() {}
"""


def packages() -> list[str]:
    with open(ROOT / "pyproject.toml", "rb") as handle:
        return tomllib.load(handle)["project"]["optional-dependencies"]["build"]


def small_sources(folder: Path) -> Path:
    """csrc with its large kernels emptied: the host code, the merge kernels and a kernel for each family."""
    for path in sorted((ROOT / "csrc").rglob("*")):
        kept = folder / path.relative_to(ROOT)
        if path.is_file() and "ladder" not in path.parts:
            kept.parent.mkdir(parents=True, exist_ok=True)
            family = path.parent.name
            large = path.name == "attention.cu"
            kept.write_text(KERNELS.replace("%s", family) if large else path.read_text())
    return folder / "csrc"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="make the environment here and leave it")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as scratch:
        place = keep or Path(scratch, "environment")
        start = time.monotonic()
        venv.create(place, with_pip=True)
        python = place / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages()], check=True)
        installed = time.monotonic() - start
        size = sum(p.lstat().st_size for p in place.rglob("*") if p.is_file() and not p.is_symlink())
        # Nothing of the caller's toolkit: the path holds the system's own commands, for the host compiler.
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "VIDEOATTN_CACHE": str(Path(scratch, "cache")),
            "HOME": scratch,
        }
        command = [python, "-c", INSIDE, small_sources(Path(scratch))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            return 1
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        took = f"{len(packages())} packages, {size / 1e6:.0f} MB, installed in {installed:.0f} s"
        print(f"{datetime.date.today()}, {machine}: {took}; {done.stdout.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
