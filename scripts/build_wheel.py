"""Builds a wheel that carries the compiled kernels, by way of the source distribution.

    python scripts/build_wheel.py FOLDER

Needs nvcc; the library comes from the build cache if it is there. The platform tag is this machine's: the
oldest glibc that has every symbol the library asks for. Prints the paths of both distributions.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from videoattn.kernels import library

ROOT = Path(__file__).resolve().parents[1]
# What PEP 600 lets a library of a manylinux wheel link to, as far as ours could.
SYSTEM = re.compile(r"(libc|libm|libpthread|libdl|librt|libgcc_s|ld-linux[-\w]*)\.so\.\d+")


def platform_tag(path: Path) -> str:
    """`manylinux_<major>_<minor>_<machine>` by the newest glibc symbol of the library at `path`.

    RuntimeError if it needs a library that a manylinux system need not have.
    """
    said = subprocess.run(["objdump", "-p", "-T", path], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"^ +NEEDED +(\S+)", said, re.MULTILINE):
        if not SYSTEM.fullmatch(name):
            raise RuntimeError(f"{path} needs {name}, which other systems may not have")
    major, minor = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", said))
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def build(folder: Path) -> tuple[Path, Path]:
    """Source distribution and wheel, in `folder`.

    Raises BuildError if there is no library, RuntimeError if it can't go into a wheel.
    """
    compiled = library.build()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build.") as scratch:
        # In two steps, and with the metadata outside: the checkout stays as it was.
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            "--egg-base",
            scratch,
            "sdist",
            "-d",
            scratch,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            words = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"the source distribution failed: {words[-1]}")
        (source,) = Path(scratch).glob("*.tar.gz")
        environment = {
            **os.environ,
            "VIDEOATTN_WHEEL_LIBRARY": str(compiled),
            "VIDEOATTN_WHEEL_PLATFORM": platform_tag(compiled),
        }
        # pip unpacks the source distribution in a place of its own: nothing of an earlier build gets in.
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", scratch, source], env=environment, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        return source.replace(folder / source.name), wheel.replace(folder / wheel.name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the distributions go")
    try:
        made = build(parser.parse_args().folder.resolve())
    except (RuntimeError, OSError) as error:
        print(f"no wheel: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path}, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
