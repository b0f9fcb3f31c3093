"""Runs the full tier of the simulator tests and prints one line for docs/measured/blackwell.md.

    python scripts/simulate_full.py [--fresh] [PATH ...]

Paths default to tests/ladder and tests/blackwell. Needs nvcc, no GPU; about half an hour on two idle cores,
and it may be stopped: cases that passed are kept in build/simulate_full, named by the hash of the kernels,
the simulator and the tests, and are not run again. --fresh runs them all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from videoattn.kernels import library

ROOT = Path(__file__).resolve().parents[1]

# What the cases of a folder depend on: the kernels with what they include, planner, simulator, tests.
COMMON = tuple(f"csrc/common/{name}.cuh" for name in ("layouts", "ptx", "softmax"))
PLANNER = tuple(f"csrc/{path}" for path in ("api.h", "common/plan.h", "common/plan.cpp", "common/merge.h"))
PYTHON = tuple(f"videoattn/kernels/{name}.py" for name in ("abi", "accuracy", "native", "plan", "simulated"))
SHARED = (*COMMON, "videoattn/ptxsim", "videoattn/kernels/ptxas.py", "tests/blackwell/mutants.py")
CASES = {
    "tests/ladder": ("tests/ladder", "csrc/ladder", *SHARED),
    "tests/blackwell": (
        "tests/blackwell",
        "csrc/blackwell",
        "csrc/common/merge.cu",
        *PLANNER,
        *PYTHON,
        *SHARED,
    ),
}
COMMENT = re.compile(rb"//.*")
DONE = ROOT / "build" / "simulate_full"


def source_key(path: str) -> str:
    """Hash of all that the cases of a folder such as tests/ladder are about, less comments in csrc."""
    digest = hashlib.sha256(library.find_compiler().version.encode())
    for place in CASES[path]:
        top = ROOT / place
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".md":
                text = file.read_bytes()
                if file.suffix in library.SUFFIXES:
                    text = b"\n".join(
                        filter(None, (COMMENT.sub(b"", line).rstrip() for line in text.split(b"\n")))
                    )
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + text + b"\0")
    return digest.hexdigest()[:16]


def kept(path: Path) -> Iterator[dict]:
    """The cases a file remembers; a line that was cut short is no case."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class Memory:
    """A pytest plugin that leaves out the cases kept in `path` and adds those that pass."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = {case["id"] for case in kept(self.path)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with open(self.path, "a") as handle:
                handle.write(json.dumps({"id": report.nodeid, "seconds": round(report.duration, 2)}) + "\n")


def run_folder(path: str, fresh: bool) -> tuple[int, Path]:
    """Run the cases of one folder that have not passed; pytest's status and the file of passed cases."""
    memory = DONE / f"{path.replace('/', '.')}.{source_key(path)}.jsonl"
    memory.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        memory.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--case-memory", str(memory), path]
    environment = {**os.environ, "VIDEOATTN_FULL": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr).returncode, memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=[*CASES], metavar="PATH", help=f"of {', '.join(CASES)}")
    parser.add_argument("--fresh", action="store_true", help="run cases that passed before again")
    parser.add_argument("--case-memory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case_memory:
        plugin = Memory(arguments.case_memory)
        # The plugin's own memory decides; pytest's would only add files.
        return pytest.main(
            ["-v", "-p", "no:cacheprovider", "--timeout", "1800", *arguments.paths], plugins=[plugin]
        )

    if unknown := [path for path in arguments.paths if path not in CASES]:
        parser.error(f"{unknown[0]} has no full tier: choose from {', '.join(CASES)}")
    worst = 0
    seconds, cases = 0.0, Counter[str]()
    for path in arguments.paths:
        status, memory = run_folder(path, arguments.fresh)
        if status != pytest.ExitCode.NO_TESTS_COLLECTED:
            worst = max(worst, status)
        for case in {case["id"]: case for case in kept(memory)}.values():
            cases[path] += 1
            seconds += case["seconds"]
    what = f"`scripts/simulate_full.py {' '.join(arguments.paths)}`"
    where = f"{platform.machine()}, {os.cpu_count()} cores, one process"
    passed = ", ".join(f"{path} {count} passed" for path, count in cases.items())
    verdict = "none failed" if worst == 0 else "SOME FAILED OR ARE MISSING"
    print(f"| {date.today()} | {where} | {what} | {passed}, {verdict} | {seconds / 60:.0f} min of running |")
    return worst


if __name__ == "__main__":
    sys.exit(main())
