"""The real command in a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ["--width", "128", "--height", "96", "--num-frames", "17", "--num-inference-steps", "2"]


def environment() -> dict[str, str]:
    """The environment of a user without a hub: paths, and OpenMP that does not spin."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


def start(*arguments: str | Path, cwd: Path, **options) -> subprocess.Popen[str]:
    """Start `python -m videoattn` with these arguments."""
    return subprocess.Popen(
        [*options.pop("before", []), sys.executable, "-m", "videoattn", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: str | Path, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    process = start(*arguments, cwd=cwd, **options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@cache
def _forks() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.forks"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_forked(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `run`, in a fork of a process that has imported everything; for what a start has no part in."""
    server = _forks()
    with tempfile.TemporaryDirectory() as folder:
        said = {name: Path(folder, name) for name in ("out", "err")}
        for path in said.values():
            path.touch()
        request = {"arguments": list(map(str, arguments)), "folder": str(cwd)}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request | {name: str(path) for name, path in said.items()}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in said.values()))


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failed command; asserts that nothing else was said."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("videoattn: ")]
    assert "Traceback" not in result.stderr, result.stderr
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0]), result.stderr
    assert result.stdout == ""
    return lines[0]
