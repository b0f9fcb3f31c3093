"""The attention calls that a clip must make, from the model's configs alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from videoattn.render.checks import Prepared
from videoattn.render.job import RenderJob
from videoattn.render.settings import SIGMAS_FULL, SIGMAS_HALF, is_guided, isolates, perturbs
from videoattn.render.sources import compression

# Downsampling of the mel spectrogram in AutoencoderKLLTX2Audio, which its config does not carry.
AUDIO_DOWNSAMPLE = 4
TEXT_TOKENS = {"ltx": 128, "ltx2": 1024}


class CallShape(NamedTuple):
    """One kind of call in one stage; lengths in tokens."""

    stage: str
    kind: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int


class Forward(NamedTuple):
    """One transformer forward of a step: its batch, and which calls it leaves out."""

    batch: int
    perturbed_blocks: int = 0
    isolated: bool = False


def expected_calls(prepared: Prepared) -> Counter[CallShape]:
    """How often each call happens in one clip of a resolved job."""
    folder, family = prepared.source.folder, prepared.info.family
    configs: dict[str, dict[str, Any]] = {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/config.json")
    }
    calls: Counter[CallShape] = Counter()
    for stage, steps, scale in _stages(prepared.job):
        lengths = _lengths(prepared.job, configs, family, scale)
        for forward in _forwards(prepared.job):
            for shape, count in _forward_calls(
                configs["transformer"], family, stage, forward, lengths
            ).items():
                calls[shape] += count * steps
        if family == "ltx2":
            calls.update(_connector_calls(configs["connectors"], stage, 1 + is_guided(prepared.job)))
    return +calls


def _stages(job: RenderJob) -> list[tuple[str, int, int]]:
    """Stage, steps, and the divisor of the size."""
    if job.recipe == "distilled":
        return [("denoise_half", len(SIGMAS_HALF), 2), ("denoise_full", len(SIGMAS_FULL), 1)]
    return [("denoise", job.num_inference_steps or 0, 1)]


def _forwards(job: RenderJob) -> list[Forward]:
    forwards = [Forward(1 + is_guided(job))]
    if perturbs(job):
        # A perturbed block passes its values through instead of attending.
        forwards.append(Forward(1, perturbed_blocks=len(set(job.spatio_temporal_guidance_blocks or ()))))
    if isolates(job):
        forwards.append(Forward(1, isolated=True))
    return forwards


def _lengths(job: RenderJob, configs: dict[str, dict[str, Any]], family: str, scale: int) -> dict[str, int]:
    assert job.width is not None
    assert job.height is not None
    assert job.num_frames is not None
    assert job.frame_rate is not None
    space, span = compression(configs["vae"])
    step = space * scale * configs["transformer"].get("patch_size", 1)
    frames = (job.num_frames - 1) // span + 1
    lengths = {"video": frames * (job.height // step) * (job.width // step), "text": TEXT_TOKENS[family]}
    if family == "ltx2":
        audio = configs["audio_vae"]
        per_second = audio["sample_rate"] / audio["mel_hop_length"] / AUDIO_DOWNSAMPLE
        lengths["audio"] = round(job.num_frames / float(job.frame_rate) * per_second)
    return lengths


def _forward_calls(
    config: dict[str, Any], family: str, stage: str, forward: Forward, length: dict[str, int]
) -> Counter[CallShape]:
    layers = config["num_layers"]
    video = config["num_attention_heads"], config["attention_head_dim"]
    kinds = [
        ("video_self", layers - forward.perturbed_blocks, video, "video", "video"),
        ("video_text", layers, video, "video", "text"),
    ]
    if family == "ltx2":
        audio = config["audio_num_attention_heads"], config["audio_attention_head_dim"]
        across = 0 if forward.isolated else layers
        kinds += [
            ("audio_self", layers - forward.perturbed_blocks, audio, "audio", "audio"),
            ("audio_text", layers, audio, "audio", "text"),
            ("audio_to_video", across, audio, "video", "audio"),
            ("video_to_audio", across, audio, "audio", "video"),
        ]
    return Counter(
        {
            CallShape(stage, kind, forward.batch, heads, length[query], length[key], head_dim): count
            for kind, count, (heads, head_dim), query, key in kinds
        }
    )


def _connector_calls(config: dict[str, Any], stage: str, batch: int) -> Counter[CallShape]:
    tokens = TEXT_TOKENS["ltx2"]
    calls: Counter[CallShape] = Counter()
    for modality in ("video", "audio"):
        heads = config[f"{modality}_connector_num_attention_heads"]
        head_dim = config[f"{modality}_connector_attention_head_dim"]
        shape = CallShape(stage, f"{modality}_connector", batch, heads, tokens, tokens, head_dim)
        calls[shape] += config[f"{modality}_connector_num_layers"]
    return calls


def counted_calls(rows: Iterable[Any]) -> Counter[CallShape]:
    """The calls of a timing log's rows, in the same form."""
    return Counter(
        CallShape(row.stage, row.kind, row.batch, row.heads, row.q_len, row.kv_len, row.head_dim)
        for row in rows
    )


def differences(expected: Counter[CallShape], counted: Counter[CallShape]) -> list[str]:
    """One line for every shape whose number is not as expected; empty when all agree."""
    return [
        f"{shape.stage} {shape.kind} {shape.batch}x{shape.heads}x{shape.head_dim}, q_len {shape.q_len}, "
        f"kv_len {shape.kv_len}: {counted[shape]} calls, expected {expected[shape]}"
        for shape in sorted(expected | counted)
        if expected[shape] != counted[shape]
    ]
