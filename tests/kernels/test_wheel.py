"""`make wheel`: built here, installed into a clean environment without a compiler, loaded and asked."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

import videoattn
from scripts import build_wheel
from videoattn.kernels import library

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder of this run of pytest, and a lock on it: what one worker made serves the others."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "wheel"
    folder.mkdir(exist_ok=True)

    @contextmanager
    def locked():
        with open(folder / "lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder

    return locked


@pytest.fixture(scope="module")
def built(once):
    """Source distribution and wheel."""
    with once() as folder:
        dist = folder / "dist"
        if not dist.exists():
            build_wheel.build(folder / "dist.new")
            (folder / "dist.new").rename(dist)
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return source, wheel


def files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_its_tag_is_what_the_library_needs(built):
    """No newer symbol than the tag's glibc, which is not newer than this machine's."""
    _, wheel = built
    match = re.fullmatch(
        rf"videoattn-{re.escape(videoattn.__version__)}-py3-none-manylinux_2_(\d+)_{platform.machine()}\.whl",
        wheel.name,
    )
    assert match
    assert int(match[1]) <= int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[-1])
    symbols = subprocess.run(["readelf", "-V", library.build()], capture_output=True, text=True, check=True)
    assert max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols.stdout)) == int(match[1])


def test_it_carries_library_sources_weights_and_page(built):
    found = files(built[1])
    tracked = subprocess.run(
        ["git", "ls-files", "csrc", "videoattn"],
        cwd=build_wheel.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {f"videoattn/{path}" if path.startswith("csrc/") else path for path in tracked}
    assert wanted - found == set()
    assert "videoattn/kernels/prebuilt/libvideoattn.so" in found
    assert not [name for name in found if name.startswith(("tests/", "scripts/"))]


def test_the_checkout_keeps_no_library(built):
    assert not library.PREBUILT.exists()
    assert not library.PACKAGED.exists()


def test_without_a_library_the_wheel_is_for_any_platform(built, tmp_path):
    """`pip install .` and the source distribution: the sources come along, to be compiled where a GPU is."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, built[0]], check=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    found = files(wheel)
    assert "videoattn/csrc/hopper/attention.cu" in found
    assert not [name for name in found if name.endswith(".so")]


@pytest.fixture(scope="module")
def installed(built, once):
    """The Python of a clean environment that holds the wheel; its dependencies are this environment's."""
    with once() as shared:
        folder = shared / "clean"
        python = folder / "bin" / "python"
        if not (shared / "installed").exists():
            install(built[1], folder, python)
            (shared / "installed").touch()
    return python


def install(wheel, folder, python):
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, wheel], check=True, env=environment, cwd=folder)
    paths = {"base": folder, "platbase": folder}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    ours = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    (packages / "dependencies.pth").write_text("\n".join(dict.fromkeys(ours)) + "\n")


def ask(python, tmp_path, *command):
    """Run in the clean environment: no nvcc anywhere, no GPU, an empty cache, another folder."""
    environment = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "VIDEOATTN_NVCC": str(tmp_path / "no-nvcc"),
        "VIDEOATTN_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


def test_a_clean_environment_loads_it(installed, tmp_path):
    code = (
        "import json, videoattn\nfrom videoattn.kernels import library\n"
        "loaded = library.load()\n"
        "print(json.dumps([videoattn.__version__, videoattn.__file__, str(library.locate()),\n"
        "                  library.unavailable(0), json.loads(loaded.videoattn_build_info())]))\n"
    )
    done = ask(installed, tmp_path, installed, "-c", code)
    assert done.returncode == 0, done.stderr
    version, package, path, reason, info = json.loads(done.stdout)
    assert version == videoattn.__version__
    assert Path(package).is_relative_to(installed.parents[1])
    assert Path(path) == Path(package).parent / "kernels" / "prebuilt" / "libvideoattn.so"
    assert info["source"] == library.source_hash()
    assert info["archs"].split() == ["90a", "100a", "103a"]
    assert "driver" in reason or "device" in reason
    assert not (tmp_path / "cache").exists()


def test_its_doctor_reports_the_kernels(installed, tmp_path):
    done = ask(installed, tmp_path, installed.with_name("videoattn"), "doctor")
    rows = dict(re.findall(r"^((?:kernel|kernels) ?\w*) +(.*?) *$", done.stdout, re.MULTILINE))
    assert rows["kernels"].startswith("in the package, for sm_90a sm_100a sm_103a, CUDA 1"), done.stdout
    for name in ("hopper", "blackwell"):
        assert "it needs an NVIDIA GPU" in rows[f"kernel {name}"]
    assert "nvcc" not in done.stdout


def test_a_library_of_other_sources_is_refused(installed, tmp_path):
    code = "from videoattn.kernels import library; print(library.SOURCES); print(library.describe())"
    sources, fine = ask(installed, tmp_path, installed, "-c", code).stdout.splitlines()
    assert fine.startswith("in the package")
    # A copy in the folder that the command runs in comes first.
    copy = tmp_path / "videoattn"
    shutil.copytree(Path(sources).parent, copy, ignore=shutil.ignore_patterns("weights", "web"))
    with open(copy / "csrc" / "hopper" / "config.h", "a") as header:
        header.write("// newer\n")
    done = ask(installed, tmp_path, installed, "-c", code)
    sources, refused = done.stdout.splitlines()
    assert Path(sources) == copy / "csrc"
    assert refused.startswith("none: ")
    assert "was built from other sources than" in refused
