"""Variants of the Hopper kernel side by side: each an edit of `csrc/hopper`, built into a library of its own.

Prints TFLOP/s of every variant and rival on every shape, launches interleaved as in bench_attention.py, and
for some shapes the rate and clock of back-to-back launches.

    python scripts/tune_hopper.py --variants d128_base d128_queries_in_smem --sustained 1
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_attention as bench

from videoattn.kernels import abi, accuracy, library, native

Edit = Callable[[Path], None]


def replace(file: str, pattern: str, text: str) -> Edit:
    """An edit that must match exactly once."""

    def edit(root: Path) -> None:
        path = root / "hopper" / file
        changed, count = re.subn(pattern, text, path.read_text())
        if count != 1:
            raise SystemExit(f"{pattern!r} matches {count} times in {file}")
        path.write_text(changed)

    return edit


def config(name: str, arguments: str) -> Edit:
    """Other arguments for a configuration: consumers, key tile, stages, Q in registers, soft exp2."""
    head_dim = name[1:].split("N")[0]
    tile = arguments.split(",")[1].strip()

    def edit(root: Path) -> None:
        replace("config.h", rf"using {name} = .*", f"using {name} = Config<{head_dim}, {arguments}>;")(root)
        path = root / "hopper" / "attention.cu"
        old = f"videoattn_hopper_{name.lower().replace('n', '_n')}"
        path.write_text(path.read_text().replace(old, f"videoattn_hopper_d{head_dim}_n{tile}"))

    return edit


def no_turns(root: Path) -> None:
    """The consumers issue when they like."""
    replace("attention.cu", re.escape("{ named_sync(4 + group, 256); }"), "{}")(root)
    replace("attention.cu", r"named_arrive\(4 \+ [^;]*;", ";")(root)


VARIANTS: dict[str, list[Edit]] = {
    "d128_base": [],
    "d128_queries_in_smem": [config("D128N128", "2, 128, 2, false, 0")],
    "d128_no_turns": [no_turns],
    "d128_n144": [config("D128N128", "2, 144, 2, false, 0")],
    "d128_n160": [config("D128N128", "2, 160, 2, false, 0")],
    "d128_soft8": [config("D128N128", "2, 128, 2, true, 8")],
    "d64_base": [],
    "d64_hard_exp2": [config("D64N128", "3, 128, 2, false, 0")],
    "d64_soft4": [config("D64N128", "3, 128, 2, false, 4")],
    "d64_no_turns": [no_turns],
    "d64_four_stages": [config("D64N128", "3, 128, 4, false, 8")],
    "d64_two_consumers": [config("D64N128", "2, 128, 2, true, 0")],
    "d64_two_consumers_n192": [config("D64N128", "2, 192, 2, true, 0")],
}
SHAPES = {
    "d128": ["self 12288", "self 6144", "text 12288x1024", "text 28160x1024", "self 28160"],
    "d64": [
        "D64 self 6144",
        "D64 self 14080",
        "audio to video 12288x259",
        "video to audio 259x12288",
        "audio self 259",
    ],
}
SUSTAINED = {"self 28160", "text 12288x1024", "D64 self 14080"}
BY_NAME = {shape.name: shape for group in bench.GROUPS.values() for shape in group}


def build(name: str) -> ctypes.CDLL:
    """The variant's library."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "csrc"
        shutil.copytree(library.SOURCES, root)
        for edit in VARIANTS[name]:
            edit(root)
        return abi.declare(ctypes.CDLL(str(library.build(sources=root))))


def arm(variant: ctypes.CDLL) -> bench.Arm:
    """The variant as a function of q, k and v."""

    def call(q, k, v):
        out = torch.empty_like(q)
        stream = torch.cuda.current_stream().cuda_stream
        sms = native.num_sms(q.device.index)
        made = native.fill_call(q, k, v, out, scale=q.shape[-1] ** -0.5, arch=90, num_sms=sms, stream=stream)
        count = variant.videoattn_workspace_bytes(ctypes.byref(made))
        workspace = torch.empty(count, dtype=torch.uint8, device=q.device) if count else None
        made.workspace = None if workspace is None else workspace.data_ptr()
        text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
        if variant.videoattn_attention(ctypes.byref(made), text, abi.MESSAGE_BYTES) != abi.OK:
            raise RuntimeError(text.value.decode())
        return out

    return call


def tune(
    shape: bench.Shape, arms: dict[str, bench.Arm], options: argparse.Namespace, power: bench.PowerLog
) -> dict:
    """Rates of all arms on one shape; an arm that fails or errs is left out and named."""
    inputs = bench.make_inputs(shape, torch.bfloat16, torch.cuda.get_device_properties(0).L2_cache_size)
    running = {}
    for name, function in arms.items():
        try:
            out = function(*inputs[0])
            torch.cuda.synchronize()
        except Exception as error:  # a row of the table, not the end
            print(f"    {name} did not run: {str(error)[:120]}")
            continue
        two = [x[:, :, :2] for x in inputs[0]]
        errors = accuracy.compare(out[:, :, :2], None, *two, scale=shape.head_dim**-0.5)
        if errors.passed:
            running[name] = function
        else:
            print(f"    {name} is NOT accurate: {errors}")
    times = bench.burst(running, inputs, options.rounds, 0)
    row: dict = {name: {"tflops": shape.flops / statistics.median(t) / 1e12} for name, t in times.items()}
    print(shape.name, " ".join(f"{name}:{row[name]['tflops']:.0f}" for name in row), flush=True)
    if options.sustained > 0 and shape.name in SUSTAINED:
        for name, function in running.items():

            def run(i: int, function=function):
                return function(*inputs[i % len(inputs)])

            row[name]["sustained"] = bench.sustained_block(run, options.sustained, shape.flops, power)
        cells = [
            f"{name}:{row[name]['sustained']['tflops']:.0f}@{row[name]['sustained']['sm_clock_mhz']:.0f}MHz"
            for name in running
        ]
        print("    sustained", " ".join(cells), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--arms", nargs="*", default=["flash3", "flash4", "cudnn"], choices=list(bench.ARMS))
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # the DSL under flash4 reads the command line
    if not torch.cuda.is_available():
        print("tune_hopper needs an NVIDIA GPU", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = dict(zip(options.variants, pool.map(build, options.variants), strict=True))
    power = bench.PowerLog()
    report = {}
    with torch.no_grad():
        for family, names in SHAPES.items():
            arms = {name: arm(lib) for name, lib in built.items() if name.startswith(f"{family}_")}
            arms |= {name: bench.ARMS[name] for name in options.arms}
            for name in names:
                report[name] = tune(BY_NAME[name], arms, options, power)
                torch.cuda.empty_cache()
    power.stop()
    if options.json is not None:
        beside = options.json.with_name(options.json.name + ".part")
        beside.write_text(json.dumps(report, indent=1))
        os.replace(beside, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
