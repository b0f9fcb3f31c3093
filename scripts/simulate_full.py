"""Runs the full tier of the simulator tests and prints one line for docs/measured/blackwell.md.

    python scripts/simulate_full.py [--fresh] [PATH ...]

Paths default to tests/ladder and tests/blackwell. Needs nvcc, no GPU; about half an hour on two idle cores,
and it may be stopped: cases that passed are kept in build/simulate_full with a hash of what they depend on,
kernels, simulator and test module, and are not run again until that changes. --fresh runs them all.
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
from collections.abc import Callable, Iterable
from datetime import date
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from videoattn.kernels import library

ROOT = Path(__file__).resolve().parents[1]

# What the cases of a folder depend on besides their modules: kernels, planner, simulator, and their includes.
PLANNER = ("csrc/common/plan.cpp", "csrc/common/merge.cu")
PYTHON = tuple(f"videoattn/kernels/{name}.py" for name in ("abi", "accuracy", "native", "plan", "simulated"))
SHARED = ("videoattn/ptxsim", "videoattn/kernels/ptxas.py")
CASES = {
    "tests/ladder": ("csrc/ladder", *SHARED),
    "tests/blackwell": ("csrc/blackwell", *PLANNER, *PYTHON, *SHARED),
}
COMMENT = re.compile(rb"//.*")
IMPORT = re.compile(r"^from (tests\.[\w.]+) import", re.MULTILINE)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
DONE = ROOT / "build" / "simulate_full"


def closure(paths: Iterable[Path], needs: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """Files, what they need, and what that needs."""
    found: set[Path] = set()
    pending = list(paths)
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += needs(path)
    return found


def imported(module: Path) -> list[Path]:
    """The modules of `tests` that a test module imports."""
    return [ROOT / (name.replace(".", "/") + ".py") for name in IMPORT.findall(module.read_text())]


def included(source: Path) -> list[Path]:
    """What a CUDA or C++ file includes of csrc."""
    if source.suffix not in library.SUFFIXES:
        return []
    return [(source.parent / name).resolve() for name in INCLUDE.findall(source.read_text())]


@cache
def source_key(path: Path) -> str:
    """Hash of all that the cases of a test module are about, less comments in csrc."""
    folder = str(path.parent.relative_to(ROOT))
    sources: set[Path] = set()
    for top in (ROOT / place for place in CASES[folder]):
        sources |= {top} if top.is_file() else {file for file in top.rglob("*") if file.is_file()}
    files = closure([path], imported) | closure(sources, included)
    digest = hashlib.sha256(library.find_compiler().version.encode())
    for file in sorted(files):
        if file.suffix not in {".pyc", ".md"}:
            text = file.read_bytes()
            if file.suffix in library.SUFFIXES:
                lines = (COMMENT.sub(b"", line).rstrip() for line in text.splitlines())
                text = b"\n".join(filter(None, lines))
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + text + b"\0")
    return digest.hexdigest()[:16]


class Memory:
    """The cases of a folder that have passed; as a pytest plugin it leaves them out and adds to them."""

    def __init__(self, folder: str) -> None:
        self.path = DONE / f"{folder.replace('/', '.')}.jsonl"

    def passed(self) -> dict[str, float]:
        """Seconds that each passed case took, by id, as long as what it depends on has not changed."""
        found: dict[str, float] = {}
        for line in self.path.read_text().splitlines() if self.path.is_file() else ():
            try:
                case = json.loads(line)
            except ValueError:  # cut short
                continue
            module = ROOT / case["id"].split("::")[0]
            if module.is_file() and case["key"] == source_key(module):
                found[case["id"]] = case["seconds"]
        return found

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = self.passed()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            key = source_key(ROOT / report.nodeid.split("::")[0])
            case = {"id": report.nodeid, "key": key, "seconds": round(report.duration, 2)}
            with open(self.path, "a") as handle:
                handle.write(json.dumps(case) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=[*CASES], metavar="PATH", help=f"of {', '.join(CASES)}")
    parser.add_argument("--fresh", action="store_true", help="run cases that passed before again")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [path for path in arguments.paths if path not in CASES]:
        parser.error(f"{unknown[0]} has no full tier: choose from {', '.join(CASES)}")
    if arguments.inside:
        # The plugin's own memory decides; pytest's would only add files.
        (folder,) = arguments.paths
        options = ["-v", "-p", "no:cacheprovider", "--timeout", "1800"]
        return pytest.main([*options, folder], plugins=[Memory(folder)])

    worst = 0
    seconds, counts = 0.0, []
    DONE.mkdir(parents=True, exist_ok=True)
    for folder in arguments.paths:
        memory = Memory(folder)
        if arguments.fresh:
            memory.path.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--inside", folder]
        environment = {**os.environ, "VIDEOATTN_FULL": "1", "PYTHONPATH": str(ROOT)}
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr).returncode
        if status != pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them passed before
            worst = max(worst, status)
        cases = memory.passed()
        counts.append(f"{folder} {len(cases)} passed")
        seconds += sum(cases.values())
    what = f"`scripts/simulate_full.py {' '.join(arguments.paths)}`"
    where = f"{platform.machine()}, {os.cpu_count()} cores, one process"
    verdict = "none failed" if worst == 0 else "SOME FAILED OR DID NOT RUN"
    said = ", ".join([*counts, verdict])
    print(f"| {date.today()} | {where} | {what} | {said} | {seconds / 60:.0f} min of running |")
    return worst


if __name__ == "__main__":
    sys.exit(main())
