"""How many bugs planted in clean kernels the simulator catches.

    python scripts/mutate_simulator_kernels.py --steps 4,12,18 --per-operator 7 --seed 1

Each mutant drops or alters one instruction of a ladder step's PTX; it counts as caught when one of four
runs (late, early and random schedules, three sets of inputs) yields a finding or wrong values. A fault of the
simulator itself is reported and counts as a survivor. Prints one table and the survivors.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import numpy as np

from videoattn.ptxsim import Schedule, UnsupportedInstruction
from videoattn.ptxsim.ladder import (
    LADDER,
    compile_step,
    decode,
    encode,
    find_step,
    inputs,
    load_steps,
    run_step,
)
from videoattn.ptxsim.mutate import OPERATORS, Mutant, mutants

RUNS = (
    ("rising", Schedule.late()),
    ("normal", Schedule.early()),
    ("rising", Schedule.random(7)),
    ("one tile", Schedule.early()),
)


def rising(operands, step):
    """Keys that grow from tile to tile, so that row maxima rise and every rescale runs.

    Queries of all sizes, so that some rows still weigh every tile.
    """
    q, k, v = operands
    grow = 1 + 2 * (np.arange(k.shape[1]) // step.kv_rows_per_tile)
    size = np.random.default_rng(0).permutation(np.linspace(0.05, 1.5, q.shape[1]))
    parts = (q * size[None, :, None], k * grow[None, :, None])
    return *(decode(encode(x, step.dtype), step.dtype) for x in parts), v


def judge(step, mutant: Mutant, shape: dict, operands, limit: int) -> tuple[str, str]:
    """("finding" | "values" | "survived", what was seen)"""
    wrong = ""
    for values, schedule in RUNS:
        try:
            outcome = run_step(
                step,
                mutant.kernel,
                schedule=schedule,
                operands=operands[values],
                limit=limit,
                stop=True,
                **(shape | {"kv_len": operands[values][1].shape[1]}),
            )
        except UnsupportedInstruction as error:
            return "finding", f"refused: {error}"
        except Exception as error:  # one fault must not end an hour's run, nor pass as a catch
            return "survived", f"simulator fault: {error!r}"
        if outcome.report.findings:
            return "finding", str(outcome.report.findings[0])
        if not outcome.errors.passed:
            wrong = wrong or f"{outcome.errors}, {values} inputs, schedule {schedule}"
    return ("values", wrong) if wrong else ("survived", "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ladder", type=Path, default=LADDER, help="folder with steps.json")
    parser.add_argument("--steps", default="4,12,18")
    parser.add_argument("--per-operator", type=int, default=7, help="mutants of each operator in each kernel")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-len", type=int, default=384)
    parser.add_argument("--verbose", action="store_true", help="print every mutant")
    args = parser.parse_args()
    steps = [find_step(load_steps(args.ladder), name) for name in args.steps.split(",")]
    tally: Counter[tuple[str, str]] = Counter()
    survivors, start = [], time.perf_counter()
    for step in steps:
        kernel = compile_step(step).entry(step.kernel)
        heads = 3 if step.persistent else 1
        shape = {"heads": heads, "q_len": step.q_rows_per_cta, "kv_len": args.kv_len, "ctas": 1}
        normal = inputs(heads, step.q_rows_per_cta, args.kv_len, step.dtype, seed=args.seed)
        one_tile = inputs(heads, step.q_rows_per_cta, step.kv_rows_per_tile, step.dtype, seed=args.seed)
        operands = {"normal": normal, "rising": rising(normal, step), "one tile": one_tile}
        executed = 0
        for values in operands.values():
            clean = run_step(step, kernel, operands=values, **shape | {"kv_len": values[1].shape[1]})
            if not clean.passed:
                raise SystemExit(
                    f"{step.name} is not clean to begin with: {clean.report}, error {clean.max_error}"
                )
            executed = max(executed, clean.report.instructions)
        limit = max(20_000, executed)
        for operator in args.operators.split(","):
            for mutant in mutants(kernel, operator, args.per_operator, args.seed):
                verdict, seen = judge(step, mutant, shape, operands, limit)
                tally[operator, verdict] += 1
                line = f"{step.name}, PTX line {mutant.line}: {operator}: {mutant.text}"
                if verdict == "survived":
                    survivors.append(f"{line} {seen}".rstrip())
                if args.verbose:
                    print(f"{verdict:9} {line}: {seen}", flush=True)
    print(f"{'operator':20} {'mutants':>8} {'finding':>8} {'values':>8} {'survived':>8}")
    total: Counter[str] = Counter()
    for operator in args.operators.split(","):
        row = [tally[operator, v] for v in ("finding", "values", "survived")]
        print(f"{operator:20} {sum(row):8} {row[0]:8} {row[1]:8} {row[2]:8}")
        total.update(dict(zip(("finding", "values", "survived"), row, strict=True)))
    everything = sum(total.values())
    caught = total["finding"] + total["values"]
    print(f"{'all':20} {everything:8} {total['finding']:8} {total['values']:8} {total['survived']:8}")
    print(
        f"caught {caught} of {everything} ({100 * caught / max(everything, 1):.1f} %) "
        f"in {time.perf_counter() - start:.0f} s"
    )
    for line in survivors:
        print("survivor:", line)


if __name__ == "__main__":
    main()
