"""Predicts what binds the Blackwell kernel: clocks of each unit for a 128x128 tile, from executed PTX.

    python scripts/budget_blackwell.py [--fa4 FOLDER]

Runs a short and a long problem on the simulator and takes the difference, so that set-up cancels. The rates
are those of docs/kernels.md. PTX is counted, not SASS: moves are left out, and ptxas may still fuse or add.
--fa4 puts stock FlashAttention-4 beside it, from the PTX that scripts/validate_simulator.py compiles into
FOLDER. A prediction, no measurement.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHORT, LONG, QUERIES = 384, 1152, 256
TILES = (LONG - SHORT) // 128 * QUERIES // 128
LANES = 32

# Of one SM and clock: results of the MUFU, f32 lanes of the FMA pipe, lanes of the ALU, warp instructions
# issued, bytes of shared memory; clocks of a 128 x 128 x 16 MMA.
MUFU = {"sm_100a": 16, "sm_103a": 32}
FMA_LANES, ALU_LANES, ISSUE, SMEM_BYTES, MMA_CLOCKS = 128, 64, 4, 128, 64

MOVES = ("mov.", "cvta.", "ld.param")
ALU = ("max.", "min.", "and.", "or.", "xor.", "not.", "shl.", "shr.", "shf.", "add.s", "add.u", "sub.s")
ALU += ("setp.", "selp.", "cvt.", "prmt.", "lop3.", "mad.lo", "mul.lo")
FMA = (
    "fma.rn",
    "mul.f32",
    "mul.rn",
    "mul.ftz",
    "add.f32",
    "add.rn",
    "add.ftz",
    "add.rm",
    "sub.f32",
    "sub.rn",
    "sub.ftz",
)


def words(opcode: str) -> int:
    """Columns a tcgen05.ld or .st moves for each lane."""
    match = re.search(r"\.x(\d+)\.", opcode)
    return int(match[1]) if match else 1


def budget(counts: Counter, arch: str, head_dim: int, pair: bool) -> dict[str, float]:
    """Clocks, and bytes of tensor memory, of one 128x128 tile."""
    per_tile = {opcode: n / TILES for opcode, n in counts.items() if n > 0}
    total = fma = alu = mufu = tmem_ld = tmem_st = smem = 0.0
    for opcode, n in per_tile.items():
        if opcode.startswith(MOVES):
            continue
        total += n
        if opcode.startswith(("ex2.", "rcp.", "lg2.", "rsqrt.")):
            mufu += n * LANES / MUFU[arch]
        elif opcode.startswith(FMA) and ("f32" in opcode):
            fma += n * LANES * (2 if "f32x2" in opcode else 1) / FMA_LANES
        elif opcode.startswith(ALU):
            alu += n * LANES / ALU_LANES
        elif opcode.startswith("tcgen05.ld"):
            tmem_ld += n * words(opcode) * LANES * 4
        elif opcode.startswith("tcgen05.st"):
            tmem_st += n * words(opcode) * LANES * 4
        elif re.match(r"(st|ld)\.shared", opcode):
            smem += n * LANES * (16 if ".v4" in opcode else 8 if ".v2" in opcode else 4)
    # QK reads M + N rows of shared memory for each K step, PV the N of V; a pair of CTAs shares the N side.
    share = 2 if pair else 1
    qk = (128 + 128 / share) * 2 * head_dim
    pv = head_dim / share * 2 * 128
    tma = 2 * 128 * head_dim * 2 / (QUERIES / 128) / share
    mma = 2 * head_dim / 16 * MMA_CLOCKS
    smem_clocks = (smem + qk + pv + tma) / SMEM_BYTES
    return {
        "MMA": mma,
        "MUFU": mufu,
        "FMA": fma,
        "ALU": alu,
        "issue": total / ISSUE,
        "shared memory": smem_clocks,
        "TMEM read (KB)": tmem_ld / 1024,
        "TMEM written (KB)": tmem_st / 1024,
    }


def difference(run: Callable[[int], Counter]) -> Counter:
    short, long = run(SHORT), run(LONG)
    return Counter({opcode: long[opcode] - short[opcode] for opcode in long})


def ours(arch: str, head_dim: int) -> Counter:
    from videoattn.kernels import simulated

    def run(kv_len: int) -> Counter:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, n, 1, head_dim, generator=generator).bfloat16() for n in (QUERIES, kv_len, kv_len)
        )
        number = int(arch.removeprefix("sm_").removesuffix("a"))
        _, _, [report] = simulated.run(q, k, v, scale=head_dim**-0.5, arch=number, grid=1, registers=128)
        assert not report.findings, str(report)
        return sum(report.counts.values(), Counter())

    return difference(run)


def flash4(variant: str, ptx: Path) -> Counter:
    import validate_simulator

    from videoattn.ptxsim import Schedule

    ctas = 2 if variant.endswith("2cta") else 1

    def run(kv_len: int) -> Counter:
        report, _, _ = validate_simulator.run(variant, ptx, Schedule.early(), 1, 1, QUERIES * ctas, kv_len)
        return sum(report.counts.values(), Counter())

    return Counter({opcode: n / ctas for opcode, n in difference(run).items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fa4", type=Path, help="folder with sm_100-1cta.ptx and sm_100-2cta.ptx")
    arguments = parser.parse_args()
    rows = {
        f"videoattn {arch} d{d}": budget(ours(arch, d), arch, d, False)
        for arch, d in (("sm_100a", 128), ("sm_103a", 128), ("sm_100a", 64), ("sm_103a", 64))
    }
    if arguments.fa4:
        for variant in ("sm_100-1cta", "sm_100-2cta"):
            counts = flash4(variant, arguments.fa4 / f"{variant}.ptx")
            rows[f"FA4 {variant} d128"] = budget(counts, "sm_100a", 128, variant.endswith("2cta"))
    columns = list(next(iter(rows.values())))
    print("| clocks a 128x128 tile, predicted | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{values[c]:.0f}" for c in columns) + " |")
    print(f"\n{date.today()}, {platform.machine()}, `python {' '.join(sys.argv)}`")


if __name__ == "__main__":
    main()
