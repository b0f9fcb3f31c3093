"""Calls of one distilled LTX-2.3 clip: the released configuration, counted call by call.

3168 in the transformer (48 layers × 6 calls × 11 forwards), 1056 of them with head dim 128, and 32 in the
connectors (8 layers × 2 modalities, once in each of the two stages).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch.utils._python_dispatch import TorchDispatchMode

import videoattn
from videoattn.dispatch import KINDS
from videoattn.timing import load

# The released config.json files where they differ from the constructors' defaults.
TRANSFORMER = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
CONNECTORS = {
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 8,
    "audio_gated_attn": True,
    "rope_type": "split",
    "per_modality_projections": True,
    "proj_bias": True,
}
TRANSFORMER_KINDS = tuple(kind for kind in KINDS if "connector" not in kind)
STEPS = {"denoise_half": 8, "denoise_full": 3}
FRAMES, AUDIO_TOKENS, TEXT_TOKENS = 32, 259, 1024


def one_head():
    """Both models with every layer and both head dims, but one head of each modality: small enough to run."""
    torch.manual_seed(0)
    transformer = LTX2VideoTransformer3DModel(
        **TRANSFORMER,
        num_attention_heads=1,
        cross_attention_dim=128,
        audio_num_attention_heads=1,
        audio_cross_attention_dim=64,
    )
    connectors = LTX2TextConnectors(
        **CONNECTORS
        | {
            "caption_channels": 16,
            "text_proj_in_factor": 2,
            "video_connector_num_attention_heads": 1,
            "audio_connector_num_attention_heads": 1,
            "video_hidden_dim": 128,
            "audio_hidden_dim": 64,
        }
    )
    return transformer.eval(), connectors.eval()


def arguments(config, grid, audio_tokens, text_tokens, device="cpu"):
    """One sample's arguments of a transformer forward on a latent grid (frames, height, width)."""
    tokens = grid[0] * grid[1] * grid[2]
    return {
        "hidden_states": torch.randn(1, tokens, config.in_channels, device=device),
        "audio_hidden_states": torch.randn(1, audio_tokens, config.audio_in_channels, device=device),
        "encoder_hidden_states": torch.randn(1, text_tokens, config.cross_attention_dim, device=device),
        "audio_encoder_hidden_states": torch.randn(
            1, text_tokens, config.audio_cross_attention_dim, device=device
        ),
        "timestep": torch.full((1, tokens), 900.0, device=device),
        "audio_timestep": torch.full((1, audio_tokens), 900.0, device=device),
        "sigma": torch.full((1,), 900.0, device=device),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "audio_num_frames": audio_tokens,
        "return_dict": False,
    }


class Pipe:
    """What install() needs of a pipeline."""

    def __init__(self, transformer, connectors):
        self.transformer = transformer
        self.connectors = connectors


@pytest.mark.slow
@torch.inference_mode()
def test_a_distilled_clip_makes_3168_calls_and_32_in_the_connectors(tmp_path):
    transformer, connectors = one_head()
    grids = {"denoise_half": (2, 1, 2), "denoise_full": (2, 2, 4)}
    path = tmp_path / "timing.jsonl"
    with (
        videoattn.install(Pipe(transformer, connectors)) as handle,
        videoattn.record_timing(path) as recording,
    ):
        for stage, steps in STEPS.items():
            recording.enter(clip="clip.mp4", stage=stage, layers=handle.layers)
            connectors(torch.randn(1, 128, 32), torch.ones(1, 128))
            for step in range(steps):
                recording.step = step
                transformer(**arguments(transformer.config, grids[stage], 5, 128))
    rows = load(path).rows
    assert rows == recording.rows

    inside = [row for row in rows if row.kind in TRANSFORMER_KINDS]
    assert len(inside) == 3168
    assert sum(row.head_dim == 128 for row in inside) == 1056
    assert len(rows) - len(inside) == 32
    assert Counter((row.stage, row.kind) for row in inside) == {
        (stage, kind): 48 * steps for stage, steps in STEPS.items() for kind in TRANSFORMER_KINDS
    }
    # Every call has its own place: kind, stage, step and layer name it, and a forward is a step here.
    places = {(row.stage, row.kind, row.step, row.layer) for row in inside}
    assert places == {
        (stage, kind, step, layer)
        for stage, steps in STEPS.items()
        for kind in TRANSFORMER_KINDS
        for step in range(steps)
        for layer in range(48)
    }
    assert all(row.forward == row.step for row in inside)
    outside = [row for row in rows if row.kind not in TRANSFORMER_KINDS]
    assert Counter((row.stage, row.kind, row.head_dim, row.step) for row in outside) == {
        (stage, kind, head_dim, None): 8
        for stage in STEPS
        for kind, head_dim in (("video_connector", 128), ("audio_connector", 64))
    }
    assert sorted(row.layer for row in outside) == sorted([*range(8)] * 4)
    report = recording.summary()
    assert report.total.calls == 3200
    assert all(0 < line.share < 1 for line in report.lines)


class Shapes(TorchDispatchMode):
    """Counts the calls of the attention op by kind and shape, on any device."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.videoattn.attention.default:
            q, k, mask, kind = args[0], args[1], args[5], args[8]
            batch, q_len, heads, head_dim = q.shape
            assert mask is None
            self.calls[kind, batch, heads, q_len, k.shape[1], head_dim] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height", "video_tokens"), [(768, 512, 3072), (768, 512, 12288)])
def test_the_released_widths_on_the_meta_device(width, height, video_tokens):
    """One forward of the full configuration at a 768×512 clip's two stages, 249 frames, in shapes only."""
    scale = 2 if video_tokens == 3072 else 1
    grid = (FRAMES, height // scale // 32, width // scale // 32)
    assert grid[0] * grid[1] * grid[2] == video_tokens
    with torch.device("meta"):
        transformer = LTX2VideoTransformer3DModel(**TRANSFORMER)
    with torch.no_grad(), videoattn.install(transformer) as handle, Shapes() as shapes:
        transformer(**arguments(transformer.config, grid, AUDIO_TOKENS, TEXT_TOKENS, "meta"))
    assert handle.layers == dict.fromkeys(handle.layers, 48)
    assert set(handle.layers) == set(TRANSFORMER_KINDS)
    assert shapes.calls == {
        (kind, 1, 32, q_len, kv_len, head_dim): 48
        for kind, q_len, kv_len, head_dim in (
            ("video_self", video_tokens, video_tokens, 128),
            ("video_text", video_tokens, TEXT_TOKENS, 128),
            ("audio_self", AUDIO_TOKENS, AUDIO_TOKENS, 64),
            ("audio_text", AUDIO_TOKENS, TEXT_TOKENS, 64),
            ("audio_to_video", video_tokens, AUDIO_TOKENS, 64),
            ("video_to_audio", AUDIO_TOKENS, video_tokens, 64),
        )
    }
