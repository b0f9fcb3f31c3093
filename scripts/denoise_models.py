"""LTX transformers of full size with random weights, and the inputs of one forward; no weights are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel, LTXVideoTransformer3DModel
from measure_log_overhead import FRAME_RATE, LTX_2_3, TEXT_TOKENS
from torch.utils.flop_counter import FlopCounterMode

from videoattn.dispatch import AttentionCall
from videoattn.processors.sites import sites

T5_TOKENS = 128
# Of T5's places, as many as a prompt of two sentences fills; the rest is padding.
T5_FILLED = 48
AUDIO_TOKENS_A_SECOND = 25

# LTX-Video 0.9.7 where it differs from the constructor's defaults (the released config.json).
LTX_13B = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
_TINY = {"num_layers": 2, "num_attention_heads": 2, "caption_channels": 32}


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer to build: its class, config, and the forwards a clip takes at half and at full size."""

    cls: type
    config: dict[str, Any]
    half_forwards: int
    full_forwards: int


MODELS: dict[str, Model] = {
    "ltx2.3": Model(LTX2VideoTransformer3DModel, LTX_2_3, 8, 3),
    "ltx13b": Model(LTXVideoTransformer3DModel, LTX_13B, 0, 8),
    "tiny": Model(
        LTX2VideoTransformer3DModel,
        {
            **LTX_2_3,
            **_TINY,
            "cross_attention_dim": 256,
            "audio_num_attention_heads": 2,
            "audio_cross_attention_dim": 128,
        },
        8,
        3,
    ),
    "tiny-ltx": Model(
        LTXVideoTransformer3DModel, {**_TINY, "attention_head_dim": 64, "cross_attention_dim": 128}, 0, 8
    ),
}


def build(model: Model, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """The transformer, weights drawn on its device: linear layers keep their input's size, norms are 1."""
    with torch.device("meta"):
        transformer = model.cls(**model.config).to(dtype)
    transformer.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                # Tables are (count, channels), biases and the rest (channels,).
                fan_in = parameter.shape[-1]
                parameter.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator)
    return transformer.eval()


def inputs(
    transformer: Any, width: int, height: int, frames: int, batch: int, seed: int = 1
) -> dict[str, Any]:
    """The arguments that a pipeline gives one forward of a clip; sizes in pixels and frames."""
    config, device = transformer.config, transformer.device
    grid = ((frames - 1) // 8 + 1, height // 32, width // 32)
    tokens = math.prod(grid)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=transformer.dtype)

    time = torch.full((batch,), 909.0, device=device)
    given = {
        "hidden_states": noise(batch, tokens, config.in_channels),
        "timestep": time,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "return_dict": False,
    }
    if isinstance(transformer, LTXVideoTransformer3DModel):
        mask = (torch.arange(T5_TOKENS, device=device) < T5_FILLED).expand(batch, -1)
        return {
            **given,
            "encoder_hidden_states": noise(batch, T5_TOKENS, config.caption_channels),
            "encoder_attention_mask": mask,
            "rope_interpolation_scale": (8 / FRAME_RATE, 32, 32),
        }
    audio_tokens = round(frames / FRAME_RATE * AUDIO_TOKENS_A_SECOND)
    mask = torch.ones((batch, TEXT_TOKENS), dtype=torch.int64, device=device)
    return {
        **given,
        "audio_hidden_states": noise(batch, audio_tokens, config.audio_in_channels),
        "encoder_hidden_states": noise(batch, TEXT_TOKENS, config.cross_attention_dim),
        "audio_encoder_hidden_states": noise(batch, TEXT_TOKENS, config.audio_cross_attention_dim),
        "sigma": time,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "fps": float(FRAME_RATE),
        "audio_num_frames": audio_tokens,
        "video_coords": transformer.rope.prepare_video_coords(
            batch, *grid, torch.device("cpu"), fps=float(FRAME_RATE)
        ).to(device),
        "audio_coords": transformer.audio_rope.prepare_audio_coords(batch, audio_tokens, device),
    }


def attention_calls(transformer: Any, given: dict[str, Any]) -> list[AttentionCall]:
    """Every attention call of that forward, unmasked."""
    batch, video = given["hidden_states"].shape[:2]
    text = given["encoder_hidden_states"].shape[1]
    audio = given["audio_hidden_states"].shape[1] if "audio_hidden_states" in given else 0
    lengths = {
        "video_self": (video, video),
        "video_text": (video, text),
        "audio_self": (audio, audio),
        "audio_text": (audio, text),
        "audio_to_video": (video, audio),
        "video_to_audio": (audio, video),
    }
    calls = []
    for site in sites(transformer):
        q_len, kv_len = lengths[site.kind]
        call = AttentionCall(
            batch=batch,
            heads=site.module.heads,
            q_len=q_len,
            kv_len=kv_len,
            head_dim=site.module.head_dim,
            dtype=transformer.dtype,
            device=given["hidden_states"].device.type,
            kind=site.kind,
        )
        calls.append(call)
    return calls


def linear_flops(model: Model, width: int, height: int, frames: int, batch: int) -> int:
    """FLOPs of a forward's linear layers: counted without data on one and two layers, the rest are alike."""
    counts = [_linear_flops(model, layers, width, height, frames, batch) for layers in (1, 2)]
    return counts[0] + (model.config.get("num_layers", 48) - 1) * (counts[1] - counts[0])


def _linear_flops(model: Model, layers: int, *size: int) -> int:
    with torch.device("meta"):
        transformer = model.cls(**{**model.config, "num_layers": layers})
    products = ("aten.addmm", "aten.mm")
    given = _on_meta(inputs, transformer, *size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer(**given)
    totals = counter.get_flop_counts()["Global"]
    return sum(count for op, count in totals.items() if str(op) in products)


def _on_meta(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    return {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in function(*arguments).items()
    }
