"""What a batch will need, before it runs: seconds, GPU memory, disk. Predictions, except where clips tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from videoattn.batch.plan import Planned
from videoattn.batch.view import cost
from videoattn.jobs import JobState, StoreReader
from videoattn.render.checks import expected_bytes
from videoattn.render.job import RenderJob
from videoattn.render.settings import SIGMAS_FULL, SIGMAS_HALF, forwards_per_step, is_guided
from videoattn.render.sources import compression, vae_config

_TEXT_TOKENS = {"ltx": 128, "ltx2": 1024}
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
# Assumed share of the device's measured GEMM rate that a whole denoise step reaches.
_EFFICIENCY = 0.4
# A poster is a PNG of natural content: about two thirds of its raw size.
_POSTER_BYTES = 2
# Live activations of a block in tokens × width: residual, normed, q, k, v, out, hidden layer (4), output.
_ACTIVATIONS = 12
# Resident size of a render process beside weights and activations: docs/measured/batch.md.
_PROCESS_BYTES = 440 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds to render (`measured`: scaled from clips in this folder), bytes of memory and of disk.

    Seconds leave loading out; memory is the device's in the largest stage, main memory for the CPU
    (`on_gpu` false). None where the model's files don't tell.
    """

    seconds: float | None
    measured: bool
    memory_bytes: int | None
    disk_bytes: int
    on_gpu: bool


def estimate(jobs: Sequence[Planned], output: Path, device: str) -> list[Estimate]:
    """An estimate for each job.

    Seconds come from finished clips of the same model in `output`, scaled by work; without any, from the
    matrix FLOPs of the transformer and the GEMM rate of the device, measured here in under a second, at an
    assumed efficiency of 0.4, decode left out.
    """
    paces = _paces(output)
    found = []
    for planned in jobs:
        job = planned.job
        pace = paces.get(job.model)
        seconds = cost(job) * pace if pace is not None else _predicted_seconds(planned, device)
        width, height, frames = job.width or 0, job.height or 0, job.num_frames or 0
        disk = expected_bytes(width, height, frames) + _POSTER_BYTES * width * height
        memory = _memory_bytes(planned, device)
        found.append(Estimate(seconds, pace is not None, memory, disk, device != "cpu"))
    return found


def _paces(output: Path) -> dict[str, float]:
    """Seconds per unit of `cost` by model, the median of the finished clips."""
    try:
        store = StoreReader(output)
    except RuntimeError:
        return {}
    seen: dict[str, list[float]] = {}
    with store:
        for job in store.ended(JobState.DONE, limit=200):
            report = store.report(job.id) or {}
            if report.get("total_seconds"):
                settings = RenderJob.model_validate(report["job"])
                seen.setdefault(settings.model, []).append(report["total_seconds"] / cost(settings))
    return {model: statistics.median(each) for model, each in seen.items()}


def _predicted_seconds(planned: Planned, device: str) -> float:
    job = planned.job
    samples = forwards_per_step(job) + is_guided(job)
    tokens = _tokens(planned)
    if job.recipe == "distilled":
        steps = [(len(SIGMAS_HALF), tokens // 4), (len(SIGMAS_FULL), tokens)]
    else:
        steps = [(job.num_inference_steps or 1, tokens)]
    flops = sum(number * samples * _forward_flops(planned, count) for number, count in steps)
    return flops / (_gemm_rate(device, _dtype(job, device)) * _EFFICIENCY)


def _forward_flops(planned: Planned, tokens: int) -> float:
    """Matrix FLOPs of one transformer forward for one sample; sound is left out."""
    width = math.prod(planned.prepared.info.video_heads)
    text = _TEXT_TOKENS[planned.prepared.info.family]
    linear = 2 * tokens * 14 * width**2 + 2 * text * 2 * width**2
    attention = 4 * tokens * (tokens + text) * width
    return planned.prepared.info.layers * float(linear + attention)


def _tokens(planned: Planned) -> int:
    job = planned.job
    pixels, frames = _compression(planned.prepared.source.folder)
    width, height, count = job.width or 1, job.height or 1, job.num_frames or 1
    return (width // pixels) * (height // pixels) * ((count - 1) // frames + 1)


def _memory_bytes(planned: Planned, device: str) -> int | None:
    """The larger of denoising and decoding: weights on the device and the activations beside them."""
    job, folder = planned.job, planned.prepared.source.folder
    transformer, vae, text = (_parameters(folder / part) for part in ("transformer", "vae", "text_encoder"))
    if not transformer or not vae or text is None:
        return None
    item = _ITEM_BYTES[_dtype(job, device)]
    weights = transformer * (1 if job.dtype == "fp8" else item)
    if job.offload == "group":
        weights //= planned.prepared.info.layers
    width = math.prod(planned.prepared.info.video_heads)
    samples = 1 + is_guided(job)
    activations = samples * _tokens(planned) * width * item * _ACTIVATIONS
    denoise = weights + activations
    # A decoded clip in the compute dtype, and as much again in the last blocks.
    pixels = 2 * 3 * (job.width or 0) * (job.height or 0) * (job.num_frames or 0) * item
    decode = vae * item + pixels
    if device == "cpu":
        return _PROCESS_BYTES + weights + (vae + text) * item + max(activations, pixels)
    if job.offload == "none":
        return max(text * item, denoise + vae * item, weights + decode)
    return max(text * item if job.offload == "model" else 0, denoise, decode)


@cache
def _compression(folder: Path) -> tuple[int, int]:
    return compression(vae_config(folder))


@cache
def _parameters(folder: Path) -> int | None:
    """Parameters of a component by the headers of its safetensors files; None if one of them is damaged."""
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                names = file.keys()
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError):
            return None
    return total


def _dtype(job: RenderJob, device: str) -> str:
    if job.dtype != "auto":
        return job.dtype
    return "fp32" if device == "cpu" else "bf16"


@cache
def _gemm_rate(device: str, dtype: str) -> float:
    """FLOP/s of a square matrix product on the device, the best of a few."""
    import time

    import torch

    kind = {"fp32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16)
    size = 1024 if device == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=kind, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        torch.matmul(matrix, matrix)
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
