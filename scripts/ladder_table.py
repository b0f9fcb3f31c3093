"""Prints the tables of csrc/ladder/README.md: what each step is, what ptxas gave it, what the simulator says.

    python scripts/ladder_table.py [--step NAME ...] [--write]

The article's columns are its authors' figures on their GPUs, copied from steps.json; the rest is measured
here. Needs nvcc, no GPU. --write puts the tables between the README's markers.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from datetime import date

from videoattn.kernels.library import find_compiler
from videoattn.kernels.ptxas import compile_ptx, compile_report
from videoattn.ptxsim import Module, Schedule
from videoattn.ptxsim.ladder import LADDER, Step, load_steps, run_step

HEADS, KV_LEN, CTAS = 2, 384, 2
SCHEDULES = ("early", "late", "random:1")
BEGIN, END = "<!-- ladder_table.py -->", "<!-- end -->"


def measure(step: Step) -> dict[str, str]:
    """Registers, spills and stack by ptxas; barriers, findings and error by the simulator."""
    resources = compile_report(step.source, step.arch[0])[step.kernel]
    module = Module.from_file(compile_ptx(step.source, step.arch[0]))
    outcomes = [
        run_step(
            step,
            module,
            heads=HEADS,
            q_len=step.q_rows_per_cta,
            kv_len=KV_LEN,
            ctas=CTAS,
            schedule=Schedule.named(name),
        )
        for name in SCHEDULES
    ]
    findings = sum(len(outcome.report.findings) for outcome in outcomes)
    counts = outcomes[0].report.counts["all"]
    inits = sum(n for opcode, n in counts.items() if opcode.startswith("mbarrier.init"))
    errors = [outcome.errors for outcome in outcomes]
    worst, bound = max(one.max_abs for one in errors), errors[0].max_abs_limit
    relative, limit = max(one.relative_l2 for one in errors), errors[0].relative_l2_limit
    verdict = "" if all(one.passed for one in errors) else ", **too much**"
    return {
        "barriers": str(inits // CTAS),
        "registers": str(resources.registers),
        "spills": spills(step),
        "stack": str(resources.stack),
        "smem": f"{(step.dynamic_smem + resources.static_smem) / 1024:.0f} KB",
        "instructions": f"{outcomes[0].report.instructions / CTAS / (KV_LEN / 128):.0f}",
        "findings": "clean" if findings == 0 else f"{findings} findings",
        "error": f"{worst:.1e} of {bound:.1e}",
        "relative": f"{relative:.1e} of {limit:.0e}{verdict}",
    }


def spills(step: Step) -> str:
    """Bytes stored and loaded by the first architecture's build, and by others where they differ."""
    found = {}
    for arch in step.arch:
        resources = compile_report(step.source, arch)[step.kernel]
        found[arch] = f"{resources.spill_stores}/{resources.spill_loads}"
    first = found.pop(step.arch[0])
    return ", ".join([first, *(f"{arch} {bytes_}" for arch, bytes_ in found.items() if bytes_ != first)])


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(title: list[str], rows: list[list[str]]) -> str:
    return "\n".join([row(title), row(["---"] * len(title)), *map(row, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", nargs="*", help="only steps whose names start with one of these")
    parser.add_argument("--write", action="store_true", help="put the tables into csrc/ladder/README.md")
    arguments = parser.parse_args()
    chosen = arguments.step
    described = json.loads((LADDER / "steps.json").read_text())
    steps = {step.name: step for step in load_steps() if not chosen or step.name.startswith(tuple(chosen))}
    measured = {name: measure(step) for name, step in steps.items()}

    def cells(entry: dict) -> list[str]:
        m = measured[entry["name"]]
        link = f"[{entry['name']}]({entry['source']})"
        places = [entry["tmem"], f"{entry['smem']} ({m['smem']})"]
        return [
            link,
            entry["idea"],
            entry["warps"],
            m["barriers"],
            *places,
            m["registers"],
            m["spills"],
            m["stack"],
        ]

    def said(entry: dict) -> list[str]:
        m = measured[entry["name"]]
        return [m["instructions"], m["findings"], m["error"], m["relative"]]

    common = ["step", "idea", "warps", "barriers", "TMEM columns", "shared memory", "registers"]
    common += ["spills st/ld (B)", "stack (B)"]
    simulated = ["warp instructions a tile", "simulator", "max error of limit", "relative L2 of limit"]
    figures = {
        "steps": (
            "article: % of FA4 at 4k / 8k / 16k",
            lambda e: " / ".join(map(str, e["article_percent_of_fa4"])),
        ),
        "branches": ("article: TFLOPS on B300", lambda e: f"{e['article_tflops']:.2f}"),
    }
    parts = []
    for kind, (heading, figure) in figures.items():
        entries = [entry for entry in described[kind] if entry["name"] in steps]
        rows = [[*cells(entry), figure(entry), *said(entry)] for entry in entries]
        parts.append(table([*common, heading, *simulated], rows))
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    shape = f"{HEADS} heads, {KV_LEN} keys, {CTAS} CTAs"
    parts.append(
        f"{date.today()}, {platform.machine()}, {find_compiler().version}, commit {asked.stdout.strip()}, "
        f"`python scripts/ladder_table.py`; simulated with {shape}, schedules {', '.join(SCHEDULES)}."
    )
    text = "\n\n".join(parts)
    print(text)
    if arguments.write:
        readme = LADDER / "README.md"
        before, rest = readme.read_text().split(BEGIN)
        after = rest.split(END)[1]
        readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
