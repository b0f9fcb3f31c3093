"""Where a forward's time goes by kernels' names, and the least it could take on this card."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import bench_attention
import denoise_models
import torch
from torch.profiler import ProfilerActivity, profile

CATEGORIES = ("attention", "linear", "element-wise", "other", "idle")
# Inductor names a kernel after what it fused, whose neighbours may be attention or a product.
_GENERATED = re.compile(r"^triton_(?!tem)")
_ATTENTION = re.compile(r"flash|sdpa|fmha|attention|videoattn_", re.IGNORECASE)
_LINEAR = re.compile(
    r"gemm|nvjet|cutlass|cublas|splitk|addmm|aten::mm|aten::linear|matmul|triton_tem", re.IGNORECASE
)
_OTHER = re.compile(r"memcpy|memset|aten::(empty|copy_|to$|view|reshape|as_strided)", re.IGNORECASE)
_BY_NAME = (
    (_GENERATED, "element-wise"),
    (_ATTENTION, "attention"),
    (_LINEAR, "linear"),
    (_OTHER, "other"),
)
# Rounds in which each attention kernel runs once, for the floor.
ROUNDS = 5


def category(name: str) -> str:
    """What a kernel, or on a CPU an operation, works on, told by its name."""
    for pattern, found in _BY_NAME:
        if pattern.search(name):
            return found
    return "element-wise"


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def breakdown(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of one `run` by category; idle is what no kernel covers between the first and the last.

    On a CPU, which is never idle, seconds are those of operations without what they call.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    seconds: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    if not cuda:
        for event in recorded.key_averages():
            seconds[category(event.key)] += event.self_cpu_time_total / 1e6
        return seconds
    intervals = []
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            intervals.append((event.time_range.start, event.time_range.end))
            seconds[category(event.name)] += event.time_range.elapsed_us() / 1e6
    if intervals:
        span = max(last for _, last in intervals) - min(first for first, _ in intervals)
        seconds["idle"] = (span - covered(intervals)) / 1e6
    return seconds


def gemm_rates(sustained: float) -> dict[str, float]:
    """TFLOP/s of a large bf16 matrix product: single ones, and back to back for some seconds."""
    power = bench_attention.PowerLog()
    rates = bench_attention.measure_floor(sustained, 10, power)["GEMM 8192^3 bf16"]
    power.stop()
    return {"burst": rates["burst"], "sustained": rates["tflops"]}


def floor(
    model: denoise_models.Model,
    transformer: Any,
    given: dict[str, Any],
    size: tuple[int, int, int, int],
    options: argparse.Namespace,
    report: dict,
) -> dict[str, Any] | None:
    """The least a forward could take: every attention call by its fastest kernel, linear layers at the rate
    of a large matrix product. None without a GPU."""
    if transformer.device.type != "cuda":
        return None
    if "gemm" not in report:
        report["gemm"] = gemm_rates(options.sustained)
    calls = denoise_models.attention_calls(transformer, given)
    seconds, best = 0.0, {}
    for call in dict.fromkeys(calls):
        shape = bench_attention.Shape(call.batch, call.heads, call.q_len, call.kv_len, call.head_dim)
        times = fastest(shape)
        best[call.kind] = min(times, key=times.__getitem__)
        seconds += calls.count(call) * times[best[call.kind]]
    flops = denoise_models.linear_flops(model, *size)
    linear = {name: flops / rate / 1e12 for name, rate in report["gemm"].items()}
    return {
        "attention_s": seconds,
        "attention_tflop": sum(call.flops for call in calls) / 1e12,
        "linear_tflop": flops / 1e12,
        "best": best,
        "linear_burst_s": linear["burst"],
        "linear_sustained_s": linear["sustained"],
        "burst_s": seconds + linear["burst"],
    }


def fastest(shape: bench_attention.Shape) -> dict[str, float]:
    """Median seconds of every attention kernel that runs that shape."""
    made = bench_attention.make_inputs(
        shape, torch.bfloat16, torch.cuda.get_device_properties(0).L2_cache_size
    )
    arms = {}
    for name, arm in bench_attention.ARMS.items():
        try:
            arm(*made[0])
            torch.cuda.synchronize()
        except Exception:  # a kernel that is not here, or not for this shape, sets no floor
            continue
        arms[name] = arm
    times = bench_attention.burst(arms, made, ROUNDS, 0)
    return {name: statistics.median(values) for name, values in times.items()}
