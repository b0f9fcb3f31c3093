"""Attention forward kernels side by side on one GPU: burst and sustained rates, paired ratios, accuracy.

Burst: in every round each arm runs once, in an order drawn anew, behind a delay that lets the host run
ahead; inputs rotate so that L2 is cold. Sustained: each arm runs back to back for some seconds, arms in ABBA
order, with clock and energy. A ratio is the rival's time over ours in one round (above 1: we are faster);
its bounds are a bootstrap over rounds. The best rival has the lowest median time of this run.

    python scripts/bench_attention.py --shapes long text --arms hopper flash3 --refcheck --json out.json
    python scripts/bench_attention.py --sustained 2 --json all.json  # every class, both modes
    python scripts/bench_attention.py --floor --sustained 2   # only what the card itself does
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from videoattn.kernels import accuracy, flash3, flash4, hopper


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem; lengths in tokens."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    name: str = "custom"

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.batch * self.heads * (self.q_len + self.kv_len) * self.head_dim

    def __str__(self) -> str:
        return f"{self.batch},{self.heads},{self.q_len},{self.kv_len},{self.head_dim}"


def parse_shape(text: str) -> Shape:
    """The shape of `B,H,Sq,Skv,D`, named by that text.  Raises ValueError."""
    batch, heads, q_len, kv_len, head_dim = (int(word) for word in text.split(","))
    return Shape(batch, heads, q_len, kv_len, head_dim, text)


GROUPS: dict[str, list[Shape]] = {
    "paper": [
        Shape(8, 16, 4096, 4096, 128, "paper 4k"),
        Shape(4, 16, 8192, 8192, 128, "paper 8k"),
        Shape(2, 16, 16384, 16384, 128, "paper 16k"),
    ],
    "long": [
        Shape(1, 32, 12288, 12288, 128, "self 12288"),
        Shape(1, 32, 14080, 14080, 128, "self 14080"),
        Shape(1, 32, 28160, 28160, 128, "self 28160"),
        Shape(1, 32, 49152, 49152, 128, "self 49152"),
    ],
    "short": [
        Shape(1, 32, 6144, 6144, 128, "self 6144"),
        Shape(1, 32, 5525, 5525, 128, "self 5525 ragged"),
    ],
    "text": [
        Shape(1, 32, 12288, 1024, 128, "text 12288x1024"),
        Shape(1, 32, 28160, 1024, 128, "text 28160x1024"),
        Shape(1, 32, 12288, 256, 128, "text 12288x256"),
        Shape(1, 32, 12288, 128, 128, "text 12288x128"),
    ],
    "d64": [
        Shape(2, 32, 6144, 6144, 64, "D64 self 6144"),
        Shape(1, 32, 14080, 14080, 64, "D64 self 14080"),
    ],
    "audio": [
        Shape(1, 32, 259, 259, 64, "audio self 259"),
        Shape(1, 32, 12288, 259, 64, "audio to video 12288x259"),
        Shape(1, 32, 259, 12288, 64, "video to audio 259x12288"),
        Shape(1, 32, 259, 49152, 64, "video to audio 259x49152"),
        Shape(1, 32, 259, 1024, 64, "audio text 259x1024"),
    ],
}

BY_NAME = {shape.name: shape for group in GROUPS.values() for shape in group}

# What our time over the best rival's is to reach in each group (the lower bound counts from 0.02 below it).
GOALS = {"long": 1.00, "paper": 1.00, "short": 1.04, "text": 1.08, "d64": 1.08, "audio": 1.30}

Arm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def kernel_arm(module) -> Arm:
    def call(q, k, v):
        return module.run(q, k, v, scale=q.shape[-1] ** -0.5, kv_lengths=None, mask=None, return_lse=False)[0]

    return call


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


ARMS: dict[str, Arm] = {
    "hopper": kernel_arm(hopper),
    "flash3": kernel_arm(flash3),
    "flash4": kernel_arm(flash4),
    "cudnn": cudnn,
    "sdpa": sdpa,
}
OURS = "hopper"


@dataclass(slots=True)
class Result:
    """What one arm did on one shape; times in seconds."""

    burst_s: list[float] = field(default_factory=list)
    tflops: float = math.nan
    spread: float = math.nan  # (q75 - q25) / median of the burst times
    sustained_tflops: float | None = None
    sustained_blocks: list[dict[str, float]] = field(default_factory=list)
    accuracy: str | None = None
    accurate: bool | None = None
    error: str | None = None


class PowerLog:
    """SM clock and board power, sampled by nvidia-smi until stopped."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        try:
            self._process = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--query-gpu=clocks.sm,power.draw",
                    "--format=csv,noheader,nounits",
                    "-lms",
                    "100",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                clock, power = (float(word) for word in line.split(",")[:2])
            except ValueError:
                continue
            self.samples.append((time.monotonic(), clock, power))

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Mean clock in MHz and power in W; NaN without samples."""
        chosen = [s for s in self.samples if start <= s[0] <= end]
        if not chosen:
            return math.nan, math.nan
        return statistics.fmean(s[1] for s in chosen), statistics.fmean(s[2] for s in chosen)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def make_inputs(shape: Shape, dtype: torch.dtype, l2_bytes: int) -> list[tuple[torch.Tensor, ...]]:
    """Enough sets of q, k, v that the one used next has left the L2."""
    sets = max(2, min(16, math.ceil(3 * l2_bytes / shape.bytes)))
    made = []
    for index in range(sets):
        generator = torch.Generator(device="cuda").manual_seed(index)
        lengths = (shape.q_len, shape.kv_len, shape.kv_len)
        sizes = [(shape.batch, length, shape.heads, shape.head_dim) for length in lengths]
        made.append(tuple(torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes))
    return made


def burst(
    arms: dict[str, Arm], inputs: Sequence[tuple[torch.Tensor, ...]], rounds: int, seed: int
) -> dict[str, list[float]]:
    """Seconds of every arm in every round."""
    order = list(arms)
    shuffle = random.Random(seed)
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    step = 0
    for number in range(rounds + 2):
        shuffle.shuffle(order)
        # About 1 ms in which the host enqueues the whole round, so that its own cost is not in the times.
        torch.cuda._sleep(2_000_000)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            arms[name](*inputs[step % len(inputs)])
            end.record()
            step += 1
            if number >= 2:
                events.append((name, start, end))
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for name, start, end in events:
        times[name].append(start.elapsed_time(end) / 1e3)
    return times


def sustained_block(
    run: Callable[[int], object], seconds: float, flops: int, power: PowerLog
) -> dict[str, float]:
    """Back-to-back launches for about `seconds`: rate, clock, energy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.monotonic()
    launches = 0
    start.record()
    while time.monotonic() - begun < seconds:
        for _ in range(16):
            run(launches)
            launches += 1
        fence = torch.cuda.Event()
        fence.record()
        fence.synchronize()
    end.record()
    torch.cuda.synchronize()
    elapsed = start.elapsed_time(end) / 1e3
    # The first half second is the clock's way to its level.
    clock, watts = power.between(begun + min(0.5, seconds / 4), time.monotonic())
    return {
        "tflops": launches * flops / elapsed / 1e12,
        "sm_clock_mhz": clock,
        "watts": watts,
        "joules_per_launch": watts * elapsed / launches,
    }


def bootstrap(ratios: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float, float]:
    """Median of the ratios and the 2.5 % and 97.5 % points of the resampled median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def gemm(size: int = 8192) -> tuple[Callable[[int], object], int]:
    """The bf16 matrix product that stands for the card's practical ceiling, and its FLOPs."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda _: torch.mm(a, b, out=out), 2 * size**3


def measure_floor(seconds: float, rounds: int, power: PowerLog) -> dict[str, dict[str, float]]:
    """What nothing on this card can beat: matrix products, burst and (`seconds` > 0) sustained; and a copy.

    Rates in TFLOP/s, the copy's in TB/s read and written.
    """
    floor: dict[str, dict[str, float]] = {}
    for size in (4096, 8192):
        run, flops = gemm(size)
        for warm in range(3):
            run(warm)
        times = burst({"gemm": lambda *_, run=run: run(0)}, [()], rounds, 0)["gemm"]  # type: ignore[dict-item, return-value]
        row = {"burst": flops / statistics.median(times) / 1e12}
        if seconds > 0:
            row |= sustained_block(run, seconds, flops, power)
        floor[f"GEMM {size}^3 bf16"] = row
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = burst({"copy": lambda *_: target.copy_(source)}, [()], rounds, 0)["copy"]
    floor["copy of 1 GiB"] = {"burst": 2 * source.numel() / statistics.median(times) / 1e12}
    return floor


def print_floor(floor: dict[str, dict[str, float]]) -> None:
    print(f"{'floor':<18} {'burst':>7} {'sustained':>9} {'MHz':>6} {'W':>5} {'J/launch':>9}")
    for name, row in floor.items():
        cells = [f"{name:<18} {row['burst']:7.1f}"]
        if "tflops" in row:
            cells.append(f"{row['tflops']:9.1f} {row['sm_clock_mhz']:6.0f} {row['watts']:5.0f}")
            cells.append(f"{row['joules_per_launch']:9.3f}")
        print(" ".join(cells), flush=True)


def goal(name: str) -> float | None:
    """The ratio the shape's group is to reach, if it is one of the named shapes."""
    return next((GOALS[group] for group, shapes in GROUPS.items() if name in {s.name for s in shapes}), None)


def bench_shape(shape: Shape, names: Sequence[str], options: argparse.Namespace, power: PowerLog) -> dict:
    """All arms on one shape."""
    dtype = getattr(torch, options.dtype)
    inputs = make_inputs(shape, dtype, torch.cuda.get_device_properties(0).L2_cache_size)
    results = {name: Result() for name in names}
    arms: dict[str, Arm] = {}
    for name in names:
        try:
            out = ARMS[name](*inputs[0])
            torch.cuda.synchronize()
        except Exception as error:  # a rival that can't run this shape is a row in the table, not the end
            results[
                name
            ].error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        arms[name] = ARMS[name]
        if options.refcheck:
            q, k, v = inputs[0]
            errors = accuracy.compare(out, None, q, k, v, scale=shape.head_dim**-0.5)
            results[name].accuracy, results[name].accurate = str(errors), errors.passed
        del out
    for name, times in burst(arms, inputs, options.rounds, options.seed).items():
        ordered = sorted(times)
        median = statistics.median(times)
        results[name].burst_s = times
        results[name].tflops = shape.flops / median / 1e12
        results[name].spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / median
    if options.sustained > 0:
        for name in [*arms, *reversed(arms)]:
            arm = arms[name]
            block = sustained_block(
                lambda i, arm=arm: arm(*inputs[i % len(inputs)]), options.sustained, shape.flops, power
            )
            results[name].sustained_blocks.append(block)
        for name in arms:
            results[name].sustained_tflops = statistics.fmean(
                block["tflops"] for block in results[name].sustained_blocks
            )
    row: dict = {"shape": asdict(shape), "arms": {name: asdict(result) for name, result in results.items()}}
    rivals = [name for name in arms if name not in (OURS, "sdpa")]
    if OURS in arms and rivals:
        best = min(rivals, key=lambda name: statistics.median(results[name].burst_s))
        ratios = [b / a for a, b in zip(results[OURS].burst_s, results[best].burst_s, strict=True)]
        median, low, high = bootstrap(ratios)
        row["ratio"] = {"best_rival": best, "median": median, "low": low, "high": high}
        row["goal"] = goal(shape.name)
        if options.sustained > 0:
            best = max(rivals, key=lambda name: results[name].sustained_tflops or 0)
            ours, theirs = results[OURS].sustained_tflops, results[best].sustained_tflops
            if ours and theirs:
                row["sustained_ratio"] = {"best_rival": best, "mean": ours / theirs}
    return row


def print_row(row: dict, names: Sequence[str], gemm_tflops: float) -> None:
    shape = row["shape"]
    cells = [f"{shape['name']:<26}"]
    for name in names:
        result = row["arms"][name]
        cells.append("     -" if result["error"] else f"{result['tflops']:6.0f}")
    ours = row["arms"].get(OURS)
    cells.append(f"{ours['tflops'] / gemm_tflops:6.2f}" if ours and not ours["error"] else "     -")
    if ratio := row.get("ratio"):
        cells.append(
            f"{ratio['median']:6.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] {ratio['best_rival']:<7}"
        )
        if row["goal"] is not None:
            met = ratio["median"] >= row["goal"] and ratio["low"] >= row["goal"] - 0.02
            cells.append(f"{'met' if met else 'missed':<6} {row['goal']:.2f}")
    if sustained := row.get("sustained_ratio"):
        cells.append(
            f"| {row['arms'][OURS]['sustained_tflops']:.0f} {sustained['mean']:.3f} {sustained['best_rival']}"
        )
    print(" ".join(cells), flush=True)
    for name in names:
        blocks = row["arms"][name]["sustained_blocks"]
        if blocks:
            means = {key: statistics.fmean(block[key] for block in blocks) for key in blocks[0]}
            print(
                f"    {name:<8} sustained {means['tflops']:6.1f} TFLOP/s {means['sm_clock_mhz']:5.0f} MHz "
                f"{means['watts']:4.0f} W {means['joules_per_launch']:9.4f} J a launch"
            )
    for name in names:
        result = row["arms"][name]
        if result["error"]:
            print(f"    {name} did not run: {result['error'][:160]}")
        elif result["accurate"] is False:
            print(f"    {name} is NOT accurate: {result['accuracy']}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=[], metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--shape", action="append", default=[], metavar="B,H,Sq,Skv,D")
    parser.add_argument(
        "--arms", nargs="+", default=["hopper", "flash3", "flash4", "cudnn"], choices=list(ARMS)
    )
    parser.add_argument("--rounds", type=int, default=20, help="burst rounds")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS", help="per block; 0: none")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--floor", action="store_true", help="only what the card itself does")
    parser.add_argument("--refcheck", action="store_true", help="hold every arm against fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = [group for group in options.shapes if group not in GROUPS]
    if unknown:
        parser.error(f"unknown shape groups {', '.join(unknown)}: choose from {', '.join(GROUPS)}")
    return options


def write_json(path: Path, report: object, indent: int | None = 1) -> None:
    """Write beside the file and rename: a killed run leaves nothing that looks finished."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=indent))
    os.replace(beside, path)


def main() -> int:
    options = parse(sys.argv[1:])
    command = " ".join(["python", *sys.argv])
    sys.argv = sys.argv[:1]  # the DSL under flash4 reads the command line
    if not torch.cuda.is_available():
        print("bench_attention needs an NVIDIA GPU", file=sys.stderr)
        return 1
    shapes = [shape for group in options.shapes for shape in GROUPS[group]]
    shapes += [parse_shape(text) for text in options.shape]
    if not shapes:
        shapes = [shape for group in GROUPS.values() for shape in group]

    power = PowerLog()
    with torch.no_grad():
        floor = measure_floor(options.sustained, 10, power)
        gemm_tflops = floor["GEMM 8192^3 bf16"]["burst"]
        report: dict = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command,
            "gpu": torch.cuda.get_device_name(),
            "host": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "floor": floor,
            "rows": [],
        }
        print(f"{report['date']}  {report['gpu']}  torch {report['torch']}")
        print_floor(floor)
        if options.floor:
            shapes = []
        else:
            names = " ".join(f"{name:>6}" for name in options.arms)
            print(f"\n{'shape':<26} {names}  /GEMM  ratio to best rival, goal")
        for shape in shapes:
            row = bench_shape(shape, options.arms, options, power)
            report["rows"].append(row)
            print_row(row, options.arms, gemm_tflops)
            # At every shape: a run that a time limit ends keeps what it has.
            if options.json is not None:
                write_json(options.json, report)
            torch.cuda.empty_cache()
    power.stop()
    if options.json is not None:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
