"""The attention calls that a clip must make, from the model's configs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from videoattn.render.checks import Prepared
from videoattn.render.job import RenderJob
from videoattn.render.settings import SIGMAS_FULL, SIGMAS_HALF, is_guided, isolates, perturbs
from videoattn.render.sources import (
    Size,
    TransformerConfig,
    compression,
    read_config,
    transformer_config,
    vae_config,
)

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


@dataclass(frozen=True, slots=True)
class AudioVaeConfig:
    """What is read of audio_vae/config.json."""

    sample_rate: Size
    mel_hop_length: Size


@dataclass(frozen=True, slots=True)
class ConnectorsConfig:
    """What is read of connectors/config.json."""

    video_connector_num_attention_heads: Size
    video_connector_attention_head_dim: Size
    video_connector_num_layers: Size
    audio_connector_num_attention_heads: Size
    audio_connector_attention_head_dim: Size
    audio_connector_num_layers: Size


def expected_calls(prepared: Prepared) -> Counter[CallShape]:
    """How often each call happens in one clip of a resolved job."""
    folder, family = prepared.source.folder, prepared.info.family
    transformer = transformer_config(folder)
    calls: Counter[CallShape] = Counter()
    for stage, steps, scale in _stages(prepared.job):
        lengths = _lengths(prepared.job, folder, family, scale)
        for forward in _forwards(prepared.job):
            for shape, count in _forward_calls(transformer, family, stage, forward, lengths).items():
                calls[shape] += count * steps
        if family == "ltx2":
            calls.update(_connector_calls(folder, stage, 1 + is_guided(prepared.job)))
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


def _lengths(job: RenderJob, folder: Path, family: str, scale: int) -> dict[str, int]:
    assert job.width is not None
    assert job.height is not None
    assert job.num_frames is not None
    assert job.frame_rate is not None
    space, span = compression(vae_config(folder))
    step = space * scale * transformer_config(folder).patch_size
    frames = (job.num_frames - 1) // span + 1
    lengths = {"video": frames * (job.height // step) * (job.width // step), "text": TEXT_TOKENS[family]}
    if family == "ltx2":
        path = folder / "audio_vae" / "config.json"
        audio = read_config(AudioVaeConfig, path, f"{folder} lacks audio_vae/config.json")
        per_second = audio.sample_rate / audio.mel_hop_length / AUDIO_DOWNSAMPLE
        lengths["audio"] = round(job.num_frames / float(job.frame_rate) * per_second)
    return lengths


def _forward_calls(
    config: TransformerConfig, family: str, stage: str, forward: Forward, length: dict[str, int]
) -> Counter[CallShape]:
    layers = config.num_layers
    video = config.num_attention_heads, config.attention_head_dim
    kinds = [
        ("video_self", layers - forward.perturbed_blocks, video, "video", "video"),
        ("video_text", layers, video, "video", "text"),
    ]
    if family == "ltx2":
        audio = config.audio_num_attention_heads, config.audio_attention_head_dim
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


def _connector_calls(folder: Path, stage: str, batch: int) -> Counter[CallShape]:
    path = folder / "connectors" / "config.json"
    config = read_config(ConnectorsConfig, path, f"{folder} lacks connectors/config.json")
    tokens = TEXT_TOKENS["ltx2"]
    calls: Counter[CallShape] = Counter()
    for kind, heads, head_dim, layers in (
        (
            "video_connector",
            config.video_connector_num_attention_heads,
            config.video_connector_attention_head_dim,
            config.video_connector_num_layers,
        ),
        (
            "audio_connector",
            config.audio_connector_num_attention_heads,
            config.audio_connector_attention_head_dim,
            config.audio_connector_num_layers,
        ),
    ):
        calls[CallShape(stage, kind, batch, heads, tokens, tokens, head_dim)] += layers
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
