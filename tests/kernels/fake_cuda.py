"""The library's host code over a fake CUDA runtime: planner, cache and launcher as they are, no kernel."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from ctypes import c_char, c_int, c_int32, c_uint32, c_uint64
from pathlib import Path

from videoattn.kernels import abi, library

HERE = Path(__file__).parent
HOST_SOURCES = ("api.cu", "common/launch.cu", "common/plan.cpp", "hopper/plan.cpp", "blackwell/plan.cpp")
# The families' lists of kernels, and the file of each.
LISTS = {"HOPPER": "hopper/attention.cu", "BLACKWELL": "blackwell/attention.cu", "MERGE": "common/merge.cu"}
ATTRIBUTES, FUNCTIONS, MAPS, SWITCHES = range(4)  # of counts()


class Launch(ctypes.Structure):
    """One launch as the fake runtime saw it."""

    _fields_ = (
        ("kernel", c_char * 64),
        ("device", c_int32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("dynamic_smem", c_uint32),
        ("stream", c_uint64),
        ("address", c_uint64),
        ("args", c_uint64 * 4),
    )


def build() -> Path:
    """Compile the host sources with the fake; kept in the library's cache."""
    sources = [library.SOURCES / name for name in HOST_SOURCES] + [HERE / "fake_cuda.cpp"]
    entries = "".join(
        f"#define {name}_ENTRIES {' '.join(f'ENTRY({kernel})' for kernel in kernels(path))}\n"
        for name, path in LISTS.items()
    )
    digest = hashlib.sha256(entries.encode())
    for path in [*library.source_files(), *sources]:
        digest.update(path.read_bytes())
    made = library.cache_root() / "fake_cuda" / f"{digest.hexdigest()[:24]}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    compiler = library.find_compiler()
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        Path(scratch, "entries.inc").write_text(entries)
        draft = Path(scratch, "library.so")
        flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC", "-shared", "-cudart", "none", "-x", "c++"]
        includes = [f"-I{library.SOURCES}", f"-I{scratch}"]
        command = [compiler.path, *compiler.flags, *flags, *includes, "-o", draft, *sources]
        subprocess.run(command, check=True, timeout=300)
        draft.replace(made)
    return made


def kernels(path: str) -> list[str]:
    """The kernels that a source of `csrc` lists."""
    return re.findall(r"VIDEOATTN_ENTRY\((videoattn_\w+)\)", (library.SOURCES / path).read_text())


class FakeCuda:
    """The loaded library; `configure` sets what the fake driver says and forgets what it saw."""

    def __init__(self) -> None:
        self.library = abi.declare(ctypes.CDLL(str(build())))
        self.library.fake_attention.argtypes = self.library.videoattn_attention.argtypes

    def serve_cpu_tensors(self) -> None:
        """Take calls of CPU tensors for calls on device 0."""
        self.library.videoattn_attention = self.library.fake_attention

    def configure(
        self, driver: int = 13000, devices: int = 2, launch_error: int = 0, record: bool = True
    ) -> None:
        self.library.fake_configure(driver, devices, launch_error, int(record))

    def lack(self, kernel: str) -> None:
        """Have no image of `kernel`, until `configure`; the library asks once for each kernel and device."""
        self.library.fake_lack(kernel.encode())

    def counts(self) -> list[int]:
        """Device attributes asked for, function attributes set, maps encoded, devices selected."""
        found = (c_int * 4)()
        self.library.fake_counts(found)
        return list(found)

    def launches(self) -> list[Launch]:
        count = self.library.fake_launches(None, 0)
        found = (Launch * count)()
        self.library.fake_launches(found, count)
        return list(found)
