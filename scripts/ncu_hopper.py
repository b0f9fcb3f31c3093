"""What bounds a class: hardware counters of attention kernels, by Nsight Compute.

Every arm runs each shape once under ncu, at the clocks it would have alone (no clock lock). A counter that
this GPU does not have is left out and named. Needs `ncu` and the permission to read counters.

    python scripts/ncu_hopper.py --shapes text d64 --arms hopper flash3
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_attention as bench

# Name in the table: the counter. Percentages are of the peak while the SM is active.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "SM MHz": "sm__cycles_elapsed.avg.per_second",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor(hmma) %": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "MUFU %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "FMA %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "ALU %": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "smem %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "L2 %": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "L2 GB/s": "lts__t_bytes.sum.per_second",
    "L2 hit %": "lts__t_sector_hit_rate.pct",
    "HBM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
SCALES = {"us": 1e-3, "SM MHz": 1e-6, "L2 GB/s": 1e-9}  # from ns, Hz and byte/s


def child(arm: str, shape: bench.Shape) -> None:
    """The process that ncu watches: a warm-up outside the watched range, then one call inside."""
    inputs = bench.make_inputs(shape, torch.bfloat16, torch.cuda.get_device_properties(0).L2_cache_size)
    with torch.no_grad():
        for _ in range(3):
            bench.ARMS[arm](*inputs[0])
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        bench.ARMS[arm](*inputs[-1])
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def available(ncu: str) -> set[str]:
    """Base names of the counters this ncu knows for the GPU in this machine."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    return {line.split()[0] for line in done.stdout.splitlines() if "__" in line}


def parse(text: str) -> dict[str, float]:
    """Counter values of the longest kernel in ncu's CSV (base units), by counter."""
    start = text.find('"ID"')
    if start < 0:
        raise ValueError((text.strip().splitlines() or ["ncu printed nothing"])[-1])
    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(io.StringIO(text[start:])):
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue  # "n/a": counted on this chip under another name
        kernels[row["ID"]][row["Metric Name"]] = value
    if not kernels:
        raise ValueError("ncu saw no kernel")
    return max(kernels.values(), key=lambda values: values.get(COUNTERS["us"], 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*bench.GROUPS, *bench.BY_NAME]
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["long", "text", "d64", "audio"],
        choices=names,
        metavar="NAME",
        help=f"groups or shapes, of {', '.join(names)}",
    )
    parser.add_argument("--arms", nargs="+", default=["hopper", "flash3"], choices=list(bench.ARMS))
    parser.add_argument("--child", nargs=2, metavar=("ARM", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        arm, text = options.child
        sys.argv = sys.argv[:1]  # the DSL under flash4 reads the command line
        child(arm, bench.parse_shape(text))
        return 0
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        print("there is no ncu: install Nsight Compute, or put it on the path", file=sys.stderr)
        return 1
    known = available(ncu)
    counters = {name: counter for name, counter in COUNTERS.items() if counter.split(".")[0] in known}
    missing = [counter for name, counter in COUNTERS.items() if name not in counters]
    if missing:
        print(f"not on this GPU: {', '.join(missing)}")
    print(f"{'shape':<26} {'arm':<8} " + " ".join(f"{name:>14}" for name in counters))
    failed = False
    for shape in (
        shape for name in options.shapes for shape in bench.GROUPS.get(name) or [bench.BY_NAME[name]]
    ):
        for arm in options.arms:
            command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none"]
            command += ["--profile-from-start", "off", "--metrics", ",".join(counters.values())]
            command += [sys.executable, __file__, "--child", arm, str(shape)]
            done = subprocess.run(command, capture_output=True, text=True)
            try:
                values = parse(done.stdout)
            except ValueError as error:
                print(f"{shape.name:<26} {arm:<8} {error}")
                failed = True
                continue
            cells = [
                f"{values[counter] * SCALES.get(name, 1):14.1f}" if counter in values else f"{'-':>14}"
                for name, counter in counters.items()
            ]
            print(f"{shape.name:<26} {arm:<8} " + " ".join(cells), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
