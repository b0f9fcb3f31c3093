"""Runs the teaching kernels of csrc/ladder, and others described the same way, on the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from videoattn.kernels.library import SOURCES
from videoattn.typed_json import fit, parse

from .errors import LaunchError
from .launch import Device, Kernel, Module, Report
from .scalar import bf16_to_f32, f32_to_bf16
from .schedule import Schedule
from .tensormap import TensorMap

if TYPE_CHECKING:
    from videoattn.kernels.accuracy import Errors

LADDER = SOURCES / "ladder"


@dataclass(frozen=True)
class StepMap:
    """A tensor map of a step: of which tensor, and what TensorMap takes."""

    tensor: Literal["q", "k", "v"]
    box: tuple[int, ...]
    swizzle: str
    l2_promotion: str


@dataclass(frozen=True)
class Step:
    """One kernel of steps.json: where it is, how it is launched, what its maps look like."""

    name: str
    source: Path
    kernel: str
    arch: tuple[str, ...]
    dtype: Literal["bf16", "fp16"]
    q_rows_per_cta: int
    kv_rows_per_tile: int
    persistent: bool
    block: int
    dynamic_smem: int
    maps: dict[str, StepMap]
    args: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.arch:
            raise ValueError("arch names no architecture")
        if min(self.q_rows_per_cta, self.kv_rows_per_tile, self.block) < 1:
            raise ValueError("q_rows_per_cta, kv_rows_per_tile and block are at least 1")
        if unknown := set(self.args) - {*self.maps, "out", "q_len", "kv_len", "work_items"}:
            raise ValueError(f"there is no argument {min(unknown)!r}")


@dataclass(frozen=True)
class _Table:
    steps: tuple[Step, ...]
    branches: tuple[Step, ...] = ()


@dataclass
class Outcome:
    """A run of one step: the report, the output and its errors by the accuracy rule."""

    step: Step
    report: Report
    out: np.ndarray
    errors: Errors

    @property
    def max_error(self) -> float:
        """Largest absolute difference from attention in fp32; infinite where the output is not finite."""
        return self.errors.max_abs if np.isfinite(self.out).all() else math.inf

    @property
    def bound(self) -> float:
        """What the rule allows of it."""
        return self.errors.max_abs_limit

    @property
    def passed(self) -> bool:
        """Whether the run is clean and accurate."""
        return not self.report.findings and self.errors.passed


def load_steps(folder: Path = LADDER) -> list[Step]:
    """The ladder's steps and branches in order; raises LaunchError where steps.json is missing or wrong."""
    table = folder / "steps.json"
    if not table.exists():
        raise LaunchError(f"{table} does not exist; give the folder that holds steps.json")
    try:
        data = fit(_Table, parse(table.read_bytes()))
    except ValueError as error:
        raise LaunchError(f"{table} is no table of steps: {error}") from None
    return [replace(step, source=folder / step.source) for step in (*data.steps, *data.branches)]


def find_step(steps: list[Step], name: str) -> Step:
    """A step by number or by the start of its name; raises LaunchError."""
    key = f"{int(name):02d}_" if name.isdigit() else name
    found = [s for s in steps if s.name.startswith(key)]
    if len(found) != 1:
        raise LaunchError(f"no single step {name!r}; there are {', '.join(s.name for s in steps)}")
    return found[0]


def compile_step(step: Step) -> Module:
    """PTX of a step by nvcc."""
    return Module.from_cuda(step.source, arch=step.arch[0])


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """f32 values as 16-bit patterns of bf16 or fp16."""
    return f32_to_bf16(x.astype(np.float32)) if dtype == "bf16" else x.astype(np.float16).view(np.uint16)


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit patterns as f32."""
    return bf16_to_f32(bits) if dtype == "bf16" else bits.view(np.float16).astype(np.float32)


def errors_of(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Errors:
    """Errors of an output by the accuracy rule; all [heads, len, head_dim], f32 with values of the type."""
    import torch

    from videoattn.kernels.accuracy import compare

    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def bshd(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(element).transpose(0, 1)[None]

    return compare(bshd(out), None, bshd(q), bshd(k), bshd(v), scale=q.shape[-1] ** -0.5)


def reference(q, k, v, dtype: str) -> tuple[np.ndarray, float]:
    """(attention in fp32 of [heads, len, head_dim] operands, the accuracy rule's bound for it)."""
    s = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    ref = (p @ v / p.sum(-1, keepdims=True)).astype(np.float32)
    return ref, errors_of(ref, q, k, v, dtype).max_abs_limit


def inputs(heads: int, q_len: int, kv_len: int, dtype: str, seed: int = 0, head_dim: int = 128):
    """Normal q, k, v [heads, len, head_dim], rounded to the type, as f32."""
    rng = np.random.default_rng(seed)
    shapes = (q_len, kv_len, kv_len)
    return [decode(encode(rng.standard_normal((heads, n, head_dim)), dtype), dtype) for n in shapes]


def run_step(step: Step, module: Module | Kernel, *, heads: int = 1, q_len: int = 256, kv_len: int = 256,
             schedule: Schedule | None = None, operands=None, ctas: int | None = None, roles=None,
             trace: bool = False, limit: int = 50_000_000, stop: bool = False) -> Outcome:  # fmt: skip
    """Launch a step and compare with fp32 attention.

    heads is batch times heads. operands: (q, k, v) f32 arrays [heads, len, 128] holding values of the step's
    type; normal ones by default. ctas limits a persistent kernel's grid. Raises LaunchError for lengths the
    step cannot do.
    """
    if q_len % step.q_rows_per_cta or kv_len % step.kv_rows_per_tile or min(q_len, kv_len) < 1:
        raise LaunchError(
            f"{step.name} needs q_len % {step.q_rows_per_cta} == 0 and kv_len % {step.kv_rows_per_tile} "
            f"== 0, not {q_len} and {kv_len}"
        )
    q, k, v = operands or inputs(heads, q_len, kv_len, step.dtype)
    if q.shape[:2] != (heads, q_len) or k.shape[:2] != (heads, kv_len) or v.shape != k.shape:
        raise LaunchError(
            f"operands {q.shape}, {k.shape}, {v.shape} against {heads} heads, {q_len} x {kv_len}"
        )
    device = Device(step.arch[0])
    element = {"bf16": "bf16", "fp16": "f16"}[step.dtype]
    buffers = {n: device.upload(encode(x, step.dtype), n) for n, x in (("q", q), ("k", k), ("v", v))}
    out = device.upload(np.full((heads, q_len, 128), 0x7FFF, np.uint16), "out")
    items = heads * q_len // step.q_rows_per_cta
    values: dict[str, object] = {"out": out, "q_len": q_len, "kv_len": kv_len, "work_items": items}
    for name, m in step.maps.items():
        buf = buffers[m.tensor]
        rows = heads * (q_len if m.tensor == "q" else kv_len)
        values[name] = TensorMap(buf, dtype=element, dims=(128, rows), strides=(256,), box=m.box,
                                 swizzle=m.swizzle, l2_promotion=m.l2_promotion)  # fmt: skip
    grid = min(items, ctas or device.sm_count) if step.persistent else items
    kernel = module.entry(step.kernel) if isinstance(module, Module) else module
    report = device.launch(
        kernel,
        grid=grid,
        block=step.block,
        dynamic_smem=step.dynamic_smem,
        args=[values[a] for a in step.args],
        schedule=schedule,
        roles=roles,
        trace=trace,
        limit=limit,
        stop=stop,
    )
    got = decode(out.download(), step.dtype)
    return Outcome(step, report, got, errors_of(got, q, k, v, step.dtype))
