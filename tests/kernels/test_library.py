"""Building, caching and loading the kernel library with a real nvcc and real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import triton

from tests.kernels import fake_cuda
from videoattn.kernels import abi, library, native, ptxas

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from pathlib import Path
from videoattn.kernels import library
print(library.build(sources=Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def built():
    """The library, compiled if the cache does not hold it."""
    return library.build()


@pytest.fixture
def small(tmp_path):
    """Sources that compile in seconds: one kernel that does nothing, and a unit without one."""
    sources = tmp_path / "csrc"
    (sources / "hopper").mkdir(parents=True)
    (sources / "hopper" / "nothing.cu").write_text('extern "C" __global__ void nothing() {}\n')
    (sources / "api.cu").write_text('extern "C" int answer() { return 42; }\n')
    return sources


@pytest.fixture
def counting_nvcc(tmp_path, monkeypatch):
    """An empty cache and an nvcc that logs its arguments; a file `slow_link` delays the last step."""
    log = tmp_path / "calls.txt"
    wrapper = tmp_path / "nvcc"
    real = library.find_compiler().path
    wrapper.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\n'
        f'case "$*" in *-shared*) test -e {tmp_path}/slow_link && sleep 60 ;; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    log.touch()
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIDEOATTN_NVCC", str(wrapper))
    return tmp_path


def links(folder):
    return sum("-shared" in line for line in (folder / "calls.txt").read_text().splitlines())


def spawn(sources):
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, sources],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def test_two_processes_share_one_build(counting_nvcc, small):
    processes = [spawn(small) for _ in range(2)]
    paths = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1
    assert links(counting_nvcc) == 1
    assert spawn(small).communicate(timeout=60)[0] in paths
    assert links(counting_nvcc) == 1
    leftovers = [path.name for path in Path(paths.pop().strip()).parent.iterdir()]
    assert sorted(leftovers) == ["libvideoattn.so", "lock"]


def test_a_killed_build_leaves_nothing_that_looks_finished(counting_nvcc, small):
    (counting_nvcc / "slow_link").touch()
    process = spawn(small)
    deadline = time.monotonic() + 240
    while links(counting_nvcc) == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert not list((counting_nvcc / "cache").rglob("libvideoattn.so"))
    (counting_nvcc / "slow_link").unlink()
    assert library.build(sources=small).is_file()


def test_another_source_flag_or_compiler_is_another_build(tmp_path):
    sources = tmp_path / "csrc"
    shutil.copytree(library.SOURCES, sources)
    compiler = library.Compiler(Path("nvcc"), "release 13.0")
    key = library.build_key(compiler, sources)
    assert key == library.build_key(library.Compiler(Path("/other/nvcc"), "release 13.0"), sources)
    assert key != library.build_key(library.Compiler(Path("nvcc"), "release 12.9"), sources)
    assert key != library.build_key(compiler, sources, ("-G",))
    header = sources / "hopper" / "config.h"
    header.write_text(header.read_text() + "\n// changed\n")
    assert key != library.build_key(compiler, sources)


def test_a_failed_compile_is_one_line(tmp_path, small, monkeypatch):
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path / "cache"))
    (small / "hopper" / "plan.cpp").write_text("int broken(\n")
    with pytest.raises(library.BuildError, match=r"^nvcc failed: .*plan\.cpp.*error") as failed:
        library.build(sources=small)
    assert "\n" not in str(failed.value)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOATTN_NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(library.BuildError, match=r"VIDEOATTN_NVCC names .*, which is no file"):
        library.find_compiler()
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(library.BuildError, match="does not run"):
        library.find_compiler()


def test_the_packages_nvcc_serves_where_no_toolkit_is(tmp_path, monkeypatch):
    """What `pip install videoattn[build]` brings is taken last, newest first, with its own folders."""
    for release in ("cu12", "cu13"):
        nvcc = tmp_path / "nvidia" / release / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho release {release}\n")
        nvcc.chmod(0o755)
    for name in ("VIDEOATTN_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "TOOLKIT", tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    compiler = library.find_compiler()
    root = tmp_path / "nvidia" / "cu13"
    assert compiler == library.Compiler(
        root / "bin" / "nvcc", "release cu13", (f"-I{root}/include", f"-L{root}/lib")
    )
    monkeypatch.setattr(library, "TOOLKIT", tmp_path / "nvidia" / "cu12" / "bin" / "nvcc")
    assert library.find_compiler().version == "release cu12"
    monkeypatch.setattr(library, "TOOLKIT", tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    with pytest.raises(library.BuildError, match=r"pip install videoattn\[build\]"):
        library.find_compiler()


def test_without_sources(tmp_path):
    with pytest.raises(library.BuildError, match="sources are not at"):
        library.build(sources=tmp_path / "nowhere")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(library.BuildError, match="can't be written"):
        library.build()
    # As an installed package, whose PTX goes into the cache as well.
    monkeypatch.setattr(ptxas, "PACKAGED", ptxas.SOURCES)
    with pytest.raises(library.BuildError, match="can't be written"):
        ptxas.compile_ptx(library.SOURCES / "ladder" / "01_baseline.cu")


def test_a_broken_library_is_a_reason_and_no_crash(tmp_path):
    """Import and dispatch survive a machine where nothing can be built."""
    code = (
        "from videoattn.kernels import hopper, library\n"
        "print(library.unavailable(0))\nprint(library.unavailable(0))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VIDEOATTN_NVCC": "/nonexistent/nvcc"}
    environment["VIDEOATTN_CACHE"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["VIDEOATTN_NVCC names /nonexistent/nvcc, which is no file"] * 2


def test_a_library_of_other_sources_is_refused(built, small, tmp_path):
    assert library.open_library(built).videoattn_build_info()
    with pytest.raises(library.BuildError, match=r"libvideoattn\.so was built from other sources than"):
        library.open_library(built, small)
    with pytest.raises(library.BuildError, match="is no videoattn library"):
        library.open_library(library.build(sources=small))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(OSError, match=r"text\.so"):
        library.open_library(tmp_path / "text.so")


def test_describe_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOATTN_CACHE", str(tmp_path / "cache"))
    assert library.describe().startswith("not compiled yet; ")
    monkeypatch.setenv("VIDEOATTN_NVCC", str(tmp_path / "nvcc"))
    assert library.describe() == f"none: VIDEOATTN_NVCC names {tmp_path / 'nvcc'}, which is no file"
    assert not (tmp_path / "cache").exists()


def test_the_library_needs_nothing_but_libc(built):
    linked = subprocess.run(["ldd", built], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].split("/")[-1].split(".so")[0] for line in linked.splitlines()}
    assert names <= {
        "linux-vdso",
        "libc",
        "libm",
        "libpthread",
        "libdl",
        "librt",
        "ld-linux-x86-64",
        "libgcc_s",
    }


def test_every_kernel_has_an_image_for_what_it_serves(built):
    """A family's kernels for its architectures, merging for all of them; read out of the finished library."""
    listing = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", built], capture_output=True, text=True, check=True
    ).stdout
    images: dict[str, set[str]] = {}
    for line in listing.splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (videoattn_\w+):", line):
            images.setdefault(arch, set()).add(match[1])
    kernels = {name.lower(): set(fake_cuda.kernels(path)) for name, path in fake_cuda.LISTS.items()}
    assert all(kernels.values())
    assert images == {
        arch: kernels[family] | kernels["merge"] for family, archs in library.ARCHS.items() for arch in archs
    }


def test_the_library_exports_its_interface_only(built):
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    header = (library.SOURCES / "api.h").read_text()
    declared = set(re.findall(r"^VIDEOATTN_EXPORT .*?(videoattn_\w+)\(", header, re.MULTILINE))
    assert declared == exported


def test_it_loads_in_a_bare_process(built):
    """No CUDA path in the environment, no torch, no driver: the library says what is missing."""
    code = (
        "import ctypes, sys\n"
        f"library = ctypes.CDLL({str(built)!r})\n"
        "text = ctypes.create_string_buffer(512)\n"
        "status = library.videoattn_check_device(0, text, 512)\n"
        "library.videoattn_build_info.restype = ctypes.c_char_p\n"
        "print(status, text.value.decode(), library.videoattn_build_info().decode(), sep='|')\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    status, message, info = done.stdout.strip().split("|")
    assert (status == "0" and not message) or "driver" in message
    assert f'"api_version": {abi.VERSION}' in info
    assert "90a" in info


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_launch_without_a_driver_says_so(built):
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^videoattn kernel: .*(driver|device)"):
            native.launch(native.fill_call(q, q, q, q, scale=0.1, arch=90, num_sms=132))
    with pytest.raises(RuntimeError, match="scale is 0"):
        native.launch(native.fill_call(q, q, q, q, scale=0.0, arch=90, num_sms=132))
