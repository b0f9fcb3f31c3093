"""compute-sanitizer over the Hopper kernel on small shapes: one command, one table.

Runs memcheck, initcheck, synccheck and racecheck on a process that launches every kernel with tails, key
lengths, split keys, many tiles a CTA, gates, LSEs and scores that leap, and holds each result against fp32.
Exit status 1 if a tool reports anything or a result is wrong.

    python scripts/sanitize_hopper.py
    python scripts/sanitize_hopper.py --tools memcheck racecheck --variant d128short_n64 --log reports
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tune_hopper

from tests import hopper_inputs
from videoattn.kernels import accuracy, library

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
# batch, heads, q_len, kv_len, head_dim, splits, CTAs (0: all), rows of a query tile
CASES = (
    (1, 2, 300, 517, 128, 1, 0, 128),
    (1, 3, 200, 128, 128, 1, 1, 128),
    (1, 2, 300, 250, 128, 1, 2, 128),
    (1, 2, 450, 126, 64, 1, 1, 192),
    (2, 2, 130, 700, 64, 1, 3, 192),
    (1, 2, 70, 259, 64, 1, 1, 192),
    (2, 2, 100, 900, 64, 3, 0, 192),
    (1, 2, 100, 900, 128, 2, 0, 128),
    (1, 2, 259, 259, 64, 1, 3, 128),
    (1, 2, 259, 700, 64, 2, 3, 128),
    (1, 2, 200, 1100, 64, 1, 1, 192),
    (1, 2, 200, 1100, 64, 2, 3, 128),
)
DTYPES = (torch.bfloat16, torch.float16)


def calls() -> Iterator[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]]:
    """What to launch: a name, q, k, v on the CPU and the options of the call, key lengths among them."""
    for case, dtype in product(CASES, DTYPES):
        batch, heads, q_len, kv_len, head_dim, splits, grid, rows = case
        generator = torch.Generator().manual_seed(kv_len)
        sizes = [(batch, length, heads, head_dim) for length in (q_len, kv_len, kv_len)]
        tensors = tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)
        lengths = torch.tensor([kv_len // 3, 0][:batch], dtype=torch.int32)
        options = {"splits": splits, "grid": grid, "rows": rows, "scale": head_dim**-0.5}
        yield f"{case} {dtype}", tensors, {**options, "kv_lengths": None}
        yield f"{case} {dtype} with key lengths", tensors, {**options, "kv_lengths": lengths}
    # Scores that pass what fp32 holds, which a warp computes again.
    for tile, (head_dim, keys, blocks) in hopper_inputs.TILES.items():
        *tensors, scale = hopper_inputs.leaps(head_dim, keys, blocks, torch.bfloat16)
        options = {"grid": 2, "splits": 1, "rows": 0, "scale": scale, "kv_lengths": None}
        yield f"{tile} with scores that leap", tuple(tensors), options


def child(variant: str | None) -> int:
    """The process under the sanitizer: every call, with and without gates; the wrong ones."""
    built = tune_hopper.build(variant) if variant else library.load()
    wrong = count = 0
    for name, tensors, options in calls():
        q, k, v = (x.cuda() for x in tensors)
        scale, lengths = options["scale"], options["kv_lengths"]
        options["kv_lengths"] = lengths = None if lengths is None else lengths.cuda()
        batch, q_len, heads, _ = q.shape
        lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device="cuda")
        out = tune_hopper.launch(built, q, k, v, lse=lse, **options)
        torch.cuda.synchronize()
        errors = accuracy.compare(out, lse, q, k, v, scale=scale, kv_lengths=lengths)
        if not errors.passed:
            print(f"WRONG {name}: {errors}")
            wrong += 1
        # By the host: initcheck does not see what torch's kernels write.
        logits = tensors[0][..., 0].contiguous().cuda()
        gated = tune_hopper.launch(built, q, k, v, gate=logits, **options)
        torch.cuda.synchronize()
        expected = out * (2 * torch.sigmoid(logits))[..., None]
        # One other last bit of the sigmoid, and the product's rounding; fp16 has subnormal numbers.
        least = 2**-126 if q.dtype == torch.bfloat16 else 2**-22
        if not torch.allclose(gated, expected, rtol=2**-6, atol=least):
            print(f"WRONG {name}: the gates")
            wrong += 1
        count += 2
    print(f"{count} calls, {wrong} wrong")
    return wrong


def find_sanitizer() -> str | None:
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/compute-sanitizer"))
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    return found or (str(packaged[-1]) if packaged else None)


def only_ours(sanitizer: str, tool: str) -> list[str]:
    """Options that leave this library's kernels alone; their names changed between releases.

    initcheck can't see what torch's kernels wrote then, so it must not judge torch's copies of that.
    """
    done = subprocess.run([sanitizer, "--help"], capture_output=True, text=True)
    offered = done.stdout + done.stderr
    known = [name for name in ("--kernel-regex", "--kernel-name", "--filter") if name in offered]
    chosen = [known[0], "kernel_substring=videoattn"] if known else []
    if tool == "initcheck" and "--check-api-memory-access" in offered:
        chosen += ["--check-api-memory-access", "no"]
    return chosen


def summary(text: str) -> tuple[int | None, str]:
    """The tool's own count of reports, None if it printed no summary, and its summary line."""
    lines = [line for line in text.splitlines() if re.search(r"(ERROR|RACECHECK) SUMMARY", line)]
    if not lines:
        return None, (text.strip().splitlines() or ["no output"])[-1]
    found = re.search(r"SUMMARY: (\d+)", lines[-1])
    return (int(found[1]) if found else None), lines[-1].replace("=", "").strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--variant", default=None, choices=list(tune_hopper.VARIANTS))
    parser.add_argument("--log", type=Path, default=None, metavar="FOLDER", help="keep each tool's output")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return int(child(options.variant) > 0)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "there is no compute-sanitizer: install the CUDA toolkit's, or put it on the path",
            file=sys.stderr,
        )
        return 1
    again = [sys.executable, __file__, "--child"]
    if options.variant:
        again += ["--variant", options.variant]
    print(f"{'tool':<10} {'reports':>7} {'results':<24} summary")
    failed = False
    for tool in options.tools:
        command = [sanitizer, "--tool", tool, *only_ours(sanitizer, tool), *again]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        reports, line = summary(done.stdout + done.stderr)
        results = next((x for x in done.stdout.splitlines() if " calls, " in x), "did not finish")
        failed |= reports != 0 or not results.endswith(" 0 wrong")
        print(f"{tool:<10} {'?' if reports is None else reports:>7} {results:<24} {line}", flush=True)
        if options.log is not None:
            options.log.mkdir(parents=True, exist_ok=True)
            (options.log / f"{tool}.txt").write_text(done.stdout + done.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
