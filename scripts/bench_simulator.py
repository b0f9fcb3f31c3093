"""How fast the simulator executes the ladder: CPU seconds and warp instructions per second of one CTA.

    python scripts/bench_simulator.py --steps all --shape 256x1024 --jobs 2

`first` is a kernel's first run, which also compiles its blocks; `again` repeats it. The last line is the
wall and CPU time of the whole table, compilation by nvcc included.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from videoattn.ptxsim import Schedule
from videoattn.ptxsim.ladder import LADDER, compile_step, find_step, load_steps, run_step


def measure(name: str, folder: Path, shape: tuple[int, int], schedules: list[str], repeat: bool) -> list[str]:
    """A row for each schedule of one step; raises SystemExit if a run is not clean and right."""
    step = find_step(load_steps(folder), name)
    kernel = compile_step(step).entry(step.kernel)
    rows = []
    for schedule in schedules:
        seconds, outcome = [], None
        for _ in range(1 + repeat):
            start = time.process_time()
            outcome = run_step(
                step, kernel, q_len=shape[0], kv_len=shape[1], schedule=Schedule.named(schedule), ctas=1
            )
            seconds.append(time.process_time() - start)
            if not outcome.passed:
                raise SystemExit(f"{name}, {schedule}: {outcome.report}, error {outcome.max_error}")
        assert outcome is not None
        n = outcome.report.instructions
        again = f"{seconds[-1]:7.2f} {n / seconds[-1]:8.0f}" if repeat else f"{'':7} {'':8}"
        rows.append(f"{name:28} {schedule:9} {n:8} {seconds[0]:7.2f} {again}")
    return rows


def cpu_seconds() -> float:
    """User and system time of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ladder", type=Path, default=LADDER, help="folder with steps.json")
    parser.add_argument("--steps", default="all", help="numbers or names, comma-separated; all is 1 to 18")
    parser.add_argument("--shape", default="256x1024", help="q_len x kv_len")
    parser.add_argument("--schedules", default="early,late,random:1")
    parser.add_argument("--jobs", type=int, default=1, help="steps measured at a time")
    parser.add_argument("--once", action="store_true", help="no second run")
    args = parser.parse_args()
    q_len, kv_len = map(int, args.shape.split("x"))
    steps = load_steps(args.ladder)
    chosen = [str(n) for n in range(1, 19)] if args.steps == "all" else args.steps.split(",")
    names = [find_step(steps, name).name for name in chosen]
    work = partial(measure, folder=args.ladder, shape=(q_len, kv_len), schedules=args.schedules.split(","),
                   repeat=not args.once)  # fmt: skip
    start = time.monotonic()
    print(f"{'step':28} {'schedule':9} {'instr':>8} {'first':>7} {'again':>7} {'instr/s':>8}")
    with ProcessPoolExecutor(args.jobs) as pool:
        for rows in pool.map(work, names):
            print("\n".join(rows), flush=True)
    took = f"{time.monotonic() - start:.0f} s wall in {args.jobs} processes, {cpu_seconds():.0f} s CPU"
    print(f"{len(names)} steps, schedules {args.schedules}, {args.shape}: {took}")


if __name__ == "__main__":
    main()
