"""Seconds of a denoise forward and of a clip: full-size LTX transformers, random weights, arms interleaved.

An arm is a body with what is added to it: `stock`; `flash3` or `flash4`, stock with that kernel swapped in
and the no-op text mask dropped; `call`, `attention` or `block`, ours at that level. `+compile` compiles the
repeated blocks, `+compile-torch` gives the compiler torch operations in place of the fused kernels,
`+graphs` replays forwards as CUDA graphs, `+overlap` runs the audio beside the video in them. In every round
each arm runs some forwards back to back behind a warm-up; the table has medians over rounds, with the SM
clock and the board's power meanwhile: a card at its power limit lowers the one to hold the other. A clip of
LTX-2.3 is 8 forwards at half size and 3 at full size. The floor is attention at the best rate of any kernel
here plus linear layers at the rate of a large matrix product.

A call that nears --budget-seconds stops and writes what it has; --resume goes on from there.

    python scripts/bench_denoise.py --sizes 1280x704 --profile --json denoise.json --budget-seconds 540
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_attention
import denoise_models
import denoise_profile

import videoattn
from videoattn.dispatch import KernelUnavailable
from videoattn.processors import regions

BODIES = ("stock", "flash3", "flash4", "call", "attention", "block")
ADDED = ("compile", "compile-torch", "graphs", "overlap")
DEFAULT_ARMS = (
    "stock",
    "stock+compile",
    "flash3+compile",
    "flash4+compile",
    "call+compile",
    "block",
    "block+compile",
    "block+compile-torch",
    "block+graphs",
    "block+graphs+overlap",
    "block+compile-torch+graphs",
)
RIVALS = ("stock", "stock+compile", "flash3+compile")


class Arm:
    """One way to run a transformer, from its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.body, *added = name.split("+")
        if self.body not in BODIES or not set(added) <= set(ADDED):
            raise ValueError(f"unknown arm '{name}': one of {', '.join(BODIES)}, then +{' or +'.join(ADDED)}")
        self.compiled = "compile" in added or "compile-torch" in added
        self.under_compile: Any = "torch" if "compile-torch" in added else "triton"
        self.graphs, self.overlap = "graphs" in added, "overlap" in added
        if self.overlap and (self.compiled or not self.graphs or self.body != "block"):
            raise ValueError(f"arm '{name}': +overlap goes with block+graphs alone")

    @contextmanager
    def active(self, transformer: Any) -> Iterator[Any]:
        """Set up inside the block; its value is the CUDA graphs, None without."""
        with ExitStack() as stack:
            if self.body in ("flash3", "flash4"):
                stack.enter_context(videoattn.install(transformer, kernels=self.body))
            elif self.body != "stock":
                level: Any = self.body
                stack.enter_context(
                    videoattn.install(transformer, level=level, under_compile=self.under_compile)
                )
            if self.compiled:
                stack.enter_context(_compiled(transformer))
            graphs = None
            if self.graphs:
                graphs = regions.cuda_graphs(transformer, overlap=self.overlap)
                stack.callback(graphs.release)
            yield graphs


@contextmanager
def _compiled(transformer: Any) -> Iterator[None]:
    """Blocks compiled inside the block, by what the first use made: a later one must not compile again."""
    made = vars(transformer).setdefault("_bench_compiled", {})
    if made:
        for module, compiled in made.items():
            module._compiled_call_impl = compiled
    else:
        regions.compile_blocks(transformer)
        made.update(
            {m: m._compiled_call_impl for m in transformer.modules() if m._compiled_call_impl is not None}
        )
    try:
        yield
    finally:
        for module in made:
            module._compiled_call_impl = None


class Budget:
    """What is left of the seconds that a call may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[Any, float] = {}
        self.spent = False

    def allows(self, what: Any) -> bool:
        """Whether there is time for `what`, judged by how long it took before."""
        self.spent |= time.monotonic() + 1.2 * self._longest.get(what, 0.0) > self._end
        return not self.spent

    def took(self, what: Any, seconds: float) -> None:
        """Remember for the next question."""
        self._longest[what] = max(seconds, self._longest.get(what, 0.0))


def wait(device: torch.device) -> None:
    """Return when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forwards(transformer: Any, given: dict[str, Any], count: int) -> float:
    """Seconds of one forward, over `count` of them back to back."""
    device = transformer.device
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        transformer(**given)
    wait(device)
    return (time.perf_counter() - began) / count


def measure(
    arm: Arm,
    transformer: Any,
    given: dict[str, Any],
    count: int,
    cell: dict,
    profile: bool,
    power: bench_attention.PowerLog | None = None,
) -> None:
    """One round of one arm on one size, into its cell of the report."""
    cuda = transformer.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved() if cuda else 0
    before = regions.compiled_graphs()
    with arm.active(transformer) as graphs:
        began = time.perf_counter()
        # The second forward of a size is the one that is captured; the first round's compiles.
        for _ in range(2 if graphs is not None or not cell["forward_s"] else 1):
            forwards(transformer, given, 1)
        cell["warm_up_s"].append(time.perf_counter() - began)
        warm = regions.compiled_graphs()
        began = time.monotonic()
        cell["forward_s"].append(forwards(transformer, given, count))
        if power is not None:
            for name, value in zip(("sm_mhz", "watts"), power.between(began, time.monotonic()), strict=True):
                if not math.isnan(value):
                    cell[name].append(value)
        cell["graphs_compiled"].append(warm - before)
        cell["recompiled_after_warm_up"] += regions.compiled_graphs() - warm
        if cuda:
            cell["peak_gib"].append(torch.cuda.max_memory_allocated() / 2**30)
            cell["reserved_gib"].append((torch.cuda.memory_reserved() - reserved) / 2**30)
        if graphs is not None:
            cell["capture_s"].append(graphs.capture_seconds)
        if profile and "profile" not in cell:
            cell["profile"] = denoise_profile.breakdown(lambda: transformer(**given), transformer.device)


def new_cell() -> dict[str, Any]:
    lists = ("forward_s", "warm_up_s", "graphs_compiled", "peak_gib", "reserved_gib", "capture_s")
    lists += ("sm_mhz", "watts")
    return {**{name: [] for name in lists}, "recompiled_after_warm_up": 0, "error": None}


def stages(size: str, model: denoise_models.Model) -> dict[str, tuple[int, int]]:
    """The sizes that a clip's forwards run at: full, and half where the clip has such forwards."""
    width, height = (int(part) for part in size.split("x"))
    whole = {"full": (width, height)}
    return {"half": (width // 2, height // 2), **whole} if model.half_forwards else whole


def bench_size(
    size: str,
    batch: int,
    transformer: Any,
    model: denoise_models.Model,
    options: argparse.Namespace,
    report: dict,
    budget: Budget,
    power: bench_attention.PowerLog | None,
) -> None:
    """Every arm at one clip size and batch, as far as the budget goes."""
    block = report["sizes"].setdefault(f"{size} B={batch}", {})
    for stage, (width, height) in stages(size, model).items():
        given = denoise_models.inputs(transformer, width, height, options.frames, batch)
        part = block.setdefault(stage, {"tokens": given["hidden_states"].shape[1], "arms": {}})
        if "floor" not in part and not options.no_floor:
            part["floor"] = denoise_profile.floor(
                model, transformer, given, (width, height, options.frames, batch), options, report
            )
        for number in range(options.rounds):
            # Whoever is first meets a cooler card, so the order turns.
            for name in options.arms[number:] + options.arms[:number]:
                cell = part["arms"].setdefault(name, new_cell())
                if cell["error"] or len(cell["forward_s"]) > number:
                    continue
                what = (size, batch, stage, name)
                if not budget.allows(what):
                    return
                began = time.monotonic()
                try:
                    measure(Arm(name), transformer, given, options.forwards, cell, options.profile, power)
                except (KernelUnavailable, RuntimeError) as error:
                    # An arm that cannot run here is a row in the table; the others go on.
                    cell["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                # A first round compiles; later ones are as long as the second.
                budget.took(what, time.monotonic() - began if number else 0.0)
                save(report, options.json)


def print_report(report: dict, model: denoise_models.Model, arms: list[str]) -> None:
    for title, block in report["sizes"].items():
        print(f"\n{title}, {report['frames']} frames")
        for stage, part in block.items():
            print(f"  {stage}: {part['tokens']} tokens{_floor_text(part.get('floor'))}")
            print(
                f"    {'arm':<28}{'s/forward':>10}{'rounds':>7}{'warm-up s':>10}{'graphs':>7}{'again':>6}"
                f"{'peak GiB':>9}{'SM MHz':>7}{'W':>5}  attention/linear/element-wise/other/idle s"
            )
            for name in arms:
                if name in part["arms"]:
                    print("    " + _row(name, part["arms"][name]))
        clips = {name: seconds for name in arms if (seconds := clip_seconds(block, model, name)) is not None}
        if clips:
            print(f"  clip: {model.half_forwards} half + {model.full_forwards} full forwards")
            for name, seconds in clips.items():
                ratios = "  ".join(
                    f"{clips[rival] / seconds:.3f}x vs {rival}"
                    for rival in RIVALS
                    if rival in clips and rival != name
                )
                print(f"    {name:<28}{seconds:>9.3f} s  {ratios}")
            if (bound := clip_floor(block, model)) is not None:
                print(f"    {'floor (burst)':<28}{bound:>9.3f} s")


def clip_seconds(block: dict, model: denoise_models.Model, arm: str) -> float | None:
    """Denoising one clip, from medians; None where a stage is missing."""
    total = 0.0
    for stage, count in (("half", model.half_forwards), ("full", model.full_forwards)):
        times = block.get(stage, {"arms": {}})["arms"].get(arm, {}).get("forward_s") if count else [0.0]
        if not times:
            return None
        total += count * statistics.median(times)
    return total


def clip_floor(block: dict, model: denoise_models.Model) -> float | None:
    total = 0.0
    for stage, count in (("half", model.half_forwards), ("full", model.full_forwards)):
        floor = block.get(stage, {}).get("floor")
        if count and floor is None:
            return None
        total += count * floor["burst_s"] if count else 0.0
    return total


def _floor_text(floor: dict | None) -> str:
    if floor is None:
        return ""
    kernels = ", ".join(f"{kind} {name}" for kind, name in floor["best"].items())
    return (
        f"; floor {floor['burst_s']:.3f} s = attention {floor['attention_s']:.3f} ({kernels}) + linear "
        f"{floor['linear_burst_s']:.3f} (sustained GEMM: {floor['linear_sustained_s']:.3f})"
    )


def _row(name: str, cell: dict) -> str:
    if cell["error"]:
        return f"{name:<28}did not run: {cell['error'][:150]}"
    if not cell["forward_s"]:
        return f"{name:<28}not reached"
    peak = f"{max(cell['peak_gib']):9.2f}" if cell["peak_gib"] else f"{'–':>9}"
    parts = cell.get("profile")
    where = "/".join(f"{parts[key]:.3f}" for key in denoise_profile.CATEGORIES) if parts else ""
    return (
        f"{name:<28}{statistics.median(cell['forward_s']):>10.4f}{len(cell['forward_s']):>7}"
        f"{cell['warm_up_s'][0]:>10.1f}{max(cell['graphs_compiled']):>7}{cell['recompiled_after_warm_up']:>6}"
        f"{peak}{_mean(cell['sm_mhz']):>7}{_mean(cell['watts']):>5}  {where}"
    )


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.0f}" if values else "–"


def save(report: dict, path: Path | None) -> None:
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(report, indent=1))
        os.replace(beside, path)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ltx2.3", choices=list(denoise_models.MODELS))
    parser.add_argument("--sizes", nargs="+", default=["768x512", "1280x704", "1536x1024"], metavar="WxH")
    parser.add_argument("--frames", type=int, default=249)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="ARM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forwards", type=int, default=3, help="forwards back to back in a round")
    parser.add_argument("--profile", action="store_true", help="say where each arm's time goes")
    parser.add_argument("--no-floor", action="store_true", help="measure no floor")
    parser.add_argument("--sustained", type=float, default=2.0, metavar="SECONDS", help="of the GEMM's block")
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="an earlier call's report, to go on from")
    options = parser.parse_args(arguments)
    for name in options.arms:
        try:
            Arm(name)
        except ValueError as error:
            parser.error(str(error))
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # The DSL under flash4 reads the command line.
    sys.argv = sys.argv[:1]
    budget = Budget(options.budget_seconds)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "scripts/bench_denoise.py", *arguments]),
        "device": name,
        "torch": torch.__version__,
        "config": options.config,
        "frames": options.frames,
        "sizes": {},
    }
    if options.resume is not None:
        before = json.loads(options.resume.read_text())
        same = ("device", "torch", "config", "frames")
        if any(before[key] != report[key] for key in same):
            print(f"{options.resume} is of another machine or model", file=sys.stderr)
            return 2
        report |= {key: before[key] for key in ("sizes", "gemm") if key in before}
    model = denoise_models.MODELS[options.config]
    power = bench_attention.PowerLog() if device.type == "cuda" else None
    print(f"{report['date']}  {name}  torch {report['torch']}  {options.config}, random weights")
    with torch.no_grad():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        transformer = denoise_models.build(model, device, dtype)
        for size in options.sizes:
            for batch in options.batch:
                bench_size(size, batch, transformer, model, options, report, budget, power)
    if power is not None:
        power.stop()
    print_report(report, model, options.arms)
    save(report, options.json)
    reached = Counter(
        bool(part["arms"].get(arm, {}).get("forward_s") or part["arms"].get(arm, {}).get("error"))
        for block in report["sizes"].values()
        for part in block.values()
        for arm in options.arms
    )
    if budget.spent:
        print(f"stopped by --budget-seconds, {reached[True]} cells have a value: go on with --resume")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
