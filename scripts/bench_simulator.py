"""How fast the simulator executes the ladder: CPU seconds and warp instructions per second of one CTA.

python scripts/bench_simulator.py --steps 1,4,8,12,18 --shape 256x1024
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from videoattn.ptxsim import Schedule
from videoattn.ptxsim.ladder import LADDER, compile_step, find_step, load_steps, run_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ladder", type=Path, default=LADDER, help="folder with steps.json")
    parser.add_argument("--steps", default="1,4,8,12,18")
    parser.add_argument("--shape", default="256x1024", help="q_len x kv_len")
    parser.add_argument("--schedules", default="early,late,random:1")
    args = parser.parse_args()
    q_len, kv_len = map(int, args.shape.split("x"))
    steps = load_steps(args.ladder)
    print(f"{'step':28} {'schedule':9} {'instr':>8} {'cpu s':>6} {'first cpu s':>11} {'instr/s':>8}")
    for name in args.steps.split(","):
        step = find_step(steps, name)
        kernel = compile_step(step).entry(step.kernel)
        for schedule in args.schedules.split(","):
            seconds, outcome = [], None
            for _ in range(2):  # the first run compiles the kernel's blocks
                start = time.process_time()
                outcome = run_step(
                    step, kernel, q_len=q_len, kv_len=kv_len, schedule=Schedule.named(schedule), ctas=1
                )
                seconds.append(time.process_time() - start)
            assert outcome is not None
            n = outcome.report.instructions
            print(
                f"{step.name:28} {schedule:9} {n:8} {seconds[1]:6.2f} {seconds[0]:11.2f} "
                f"{n / seconds[1]:8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
