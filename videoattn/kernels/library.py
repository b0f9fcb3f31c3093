"""Builds `csrc` with nvcc into one shared library, keeps it in a cache and loads it by ctypes.

A build is named by the hash of its sources, flags and compiler, so an edit or another compiler makes another
library. It is compiled beside its place and renamed; processes that want the same build wait for one another.
A wheel may bring a compiled library; it serves only if it was built from the sources beside it. Nothing here
imports torch or needs a GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

from videoattn.kernels import abi

NAME = "libvideoattn.so"
PREBUILT = Path(__file__).with_name("prebuilt") / NAME
# An installed package carries the sources inside; a checkout has them beside the package.
PACKAGED = Path(__file__).resolve().parents[1] / "csrc"
SOURCES = PACKAGED if PACKAGED.is_dir() else PACKAGED.parents[1] / "csrc"
ARCHS = {"hopper": ("90a",), "blackwell": ("100a", "103a")}
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")
LINK_FLAGS = (
    "-shared",
    "-cudart",
    "static",
    "-Xcompiler=-static-libstdc++,-static-libgcc",
    "-Xlinker=--exclude-libs=ALL",
)


class BuildError(RuntimeError):
    """The library can't be had on this machine; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """An nvcc, what it calls itself, and the flags it needs to find its own files."""

    path: Path
    version: str
    flags: tuple[str, ...] = ()


def cache_root() -> Path:
    """`$VIDEOATTN_CACHE`, else `videoattn` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if override := os.environ.get("VIDEOATTN_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "videoattn"


def find_compiler() -> Compiler:
    """nvcc from `$VIDEOATTN_NVCC`, `$CUDA_HOME`, the path, `/usr/local/cuda` or the installed CUDA packages.

    Raises BuildError if there is none or it doesn't run.
    """
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True)
    on_path = shutil.which("nvcc")
    if chosen := os.environ.get("VIDEOATTN_NVCC"):
        candidates = [Path(chosen)]
    else:
        home = os.environ.get("CUDA_HOME")
        candidates = [Path(home, "bin", "nvcc")] if home else []
        candidates += [Path(on_path)] if on_path else []
        candidates += [TOOLKIT, *packaged]
    for path in candidates:
        if path.is_file():
            return _ask_version(path, packaged)
    raise BuildError(
        f"VIDEOATTN_NVCC names {chosen}, which is no file"
        if chosen
        else "there is no nvcc: install a CUDA 13 toolkit or `pip install videoattn[build]`"
    )


def _ask_version(path: Path, packaged: list[Path]) -> Compiler:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{path} does not run: {error}") from None
    flags: tuple[str, ...] = ()
    if path in packaged:
        # The packages keep the runtime's libraries in lib, where nvcc's own profile expects lib64.
        root = path.parents[1]
        flags = (f"-I{root / 'include'}", f"-L{root / 'lib'}")
    return Compiler(path, answer.stdout.strip().splitlines()[-1], flags)


def source_files(sources: Path = SOURCES) -> list[Path]:
    """The files that make up the library, sorted: the interface, `common` and the kernel families."""
    folders = [sources / "common", *(sources / family for family in ARCHS)]
    files = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    files += list(sources.glob("api.*"))
    return sorted(path for path in files if path.suffix in SUFFIXES)


def architectures(sources: Path = SOURCES) -> tuple[str, ...]:
    """The sm_ suffixes that the sources have kernels for."""
    return tuple(
        arch for family, archs in ARCHS.items() for arch in archs if any((sources / family).glob("*.cu"))
    )


def unit_architectures(unit: Path, sources: Path = SOURCES) -> tuple[str, ...]:
    """What a unit is compiled for: its family's architectures, or all where it serves every family."""
    return ARCHS.get(unit.parent.name) or architectures(sources)


def source_hash(sources: Path = SOURCES) -> str:
    """Hash of the library's sources; the library holds the one it was built from."""
    digest = hashlib.sha256()
    for path in source_files(sources):
        digest.update(f"{path.relative_to(sources)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def build_key(compiler: Compiler, sources: Path = SOURCES, extra_flags: tuple[str, ...] = ()) -> str:
    """Hash of the sources, what each is compiled for, the flags and the compiler."""
    targets = [unit_architectures(path, sources) for path in source_files(sources)]
    parts = [source_hash(sources), FLAGS, LINK_FLAGS, targets, extra_flags, compiler.version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def built_path(compiler: Compiler, sources: Path = SOURCES, extra_flags: tuple[str, ...] = ()) -> Path:
    """Where `build` puts the library."""
    return cache_root() / "library" / build_key(compiler, sources, extra_flags) / NAME


def build(
    compiler: Compiler | None = None, sources: Path = SOURCES, extra_flags: tuple[str, ...] = ()
) -> Path:
    """The library's path, compiled first if the cache does not hold it.

    Raises BuildError with the compiler's first error line.
    """
    if not source_files(sources):
        raise BuildError(f"the kernels' sources are not at {sources}")
    compiler = compiler or find_compiler()
    target = built_path(compiler, sources, extra_flags)
    folder = target.parent
    if target.is_file():
        return target
    with locked(folder):
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=folder, prefix="build.") as scratch:
                made = _compile(compiler, sources, Path(scratch), extra_flags)
                os.replace(made, target)
    return target


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder of the build cache, made first, in which nobody else builds meanwhile.

    Raises BuildError where it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise BuildError(f"the build cache {folder} can't be written: {error.strerror}") from None


def _compile(compiler: Compiler, sources: Path, scratch: Path, extra_flags: tuple[str, ...]) -> Path:
    archs = architectures(sources)
    if not archs:
        raise BuildError(f"{sources} holds no kernels")

    source = source_hash(sources)

    def compile_unit(unit: Path) -> Path:
        made = scratch / (str(unit.relative_to(sources)).replace("/", "_") + ".o")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in unit_architectures(unit, sources)]
        defines = [f"-DVIDEOATTN_ARCHS={' '.join(archs)}", f"-DVIDEOATTN_SOURCE_HASH={source}"]
        _nvcc(compiler, [*FLAGS, *extra_flags, *codes, *defines, "-c", str(unit), "-o", str(made)])
        return made

    units = [path for path in source_files(sources) if path.suffix in {".cu", ".cpp"}]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = [str(made) for made in pool.map(compile_unit, units)]
    made = scratch / NAME
    _nvcc(compiler, [*LINK_FLAGS, *objects, "-o", str(made)])
    return made


def _nvcc(compiler: Compiler, arguments: list[str]) -> None:
    command = [compiler.path, *compiler.flags, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).splitlines()
        first = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), None)
        raise BuildError(f"nvcc failed: {first or (lines or ['no message'])[0]}")


def extra_flags() -> tuple[str, ...]:
    """The compiler flags that `$VIDEOATTN_NVCC_FLAGS` adds."""
    return tuple(shlex.split(os.environ.get("VIDEOATTN_NVCC_FLAGS", "")))


def locate() -> Path:
    """The library shipped in the package if there is one, else the built one.

    `$VIDEOATTN_NVCC_FLAGS` adds flags and always builds, for instance `-DVIDEOATTN_BOUNDED_WAITS=1000000`,
    with which a barrier that never completes traps and names itself. Raises BuildError.
    """
    extra = extra_flags()
    return build(extra_flags=extra) if extra or not PREBUILT.is_file() else PREBUILT


_load_lock = Lock()


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        path = locate()
        return open_library(path), str(path)
    except (BuildError, OSError) as error:
        return None, str(error)


def open_library(path: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """Load the library at `path`.

    Raises BuildError if it was built from other sources, or is no library of ours; OSError if it can't be
    loaded.
    """
    library = abi.declare(ctypes.CDLL(str(path)))
    try:
        told = json.loads(library.videoattn_build_info())
    except (AttributeError, ValueError):
        raise BuildError(f"{path} is no videoattn library") from None
    if told["api_version"] != abi.VERSION or told.get("source") != source_hash(sources):
        raise BuildError(
            f"{path} was built from other sources than {sources}: reinstall videoattn, or delete that file "
            "to have the kernels compiled here"
        )
    return library


def describe() -> str:
    """One line for people: which library serves, or why none does; compiles nothing."""
    try:
        place = "in the package"
        if os.environ.get("VIDEOATTN_NVCC_FLAGS") or not PREBUILT.is_file():
            compiler = find_compiler()
            if not built_path(compiler, SOURCES, extra_flags()).is_file():
                if not source_files():
                    raise BuildError(f"the kernels' sources are not at {SOURCES}")
                return f"not compiled yet; {compiler.path} does it at the first use on a GPU"
            place = "compiled here"
        told = json.loads(load().videoattn_build_info())
    except (BuildError, OSError) as error:
        return f"none: {error}"
    archs = " ".join(f"sm_{arch}" for arch in told["archs"].split())
    return f"{place}, for {archs}, CUDA {told['cuda'] // 1000}.{told['cuda'] % 1000 // 10}"


def load() -> ctypes.CDLL:
    """The loaded library, built on first use; a failure is remembered for this process.

    Raises BuildError.
    """
    with _load_lock:
        library, detail = _load()
    if library is None:
        raise BuildError(detail)
    return library


def unavailable(device: int) -> str | None:
    """None, or why no kernel of the library can run on CUDA device `device`."""
    try:
        library = load()
    except BuildError as error:
        return str(error)
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    status = library.videoattn_check_device(device, text, abi.MESSAGE_BYTES)
    return None if status == abi.OK else text.value.decode(errors="replace")


def build_id() -> str:
    """A hash of the loaded library's bytes: what a self-check's verdict belongs to.  Raises BuildError."""
    load()
    return _file_hash(_load()[1])


@lru_cache(maxsize=4)
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:24]
