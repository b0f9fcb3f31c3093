"""Runs the full tier of the simulator tests and prints one line for docs/measured.md.

    python scripts/simulate_full.py [PATH ...]

Paths default to tests/ladder and tests/blackwell. Needs nvcc, no GPU; about half an hour on two cores.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    paths = sys.argv[1:] or ["tests/ladder", "tests/blackwell"]
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count()), "--dist", "loadfile", *paths]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "VIDEOATTN_FULL": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    found = {
        word: number
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", done.stdout)
    }
    cells = ", ".join(f"{number} {word}" for word, number in found.items())
    what = f"`scripts/simulate_full.py` {' '.join(paths)}"
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"| {date.today()} | {where} | {what} | {cells} | {minutes:.0f} min |")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
