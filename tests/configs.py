"""The configs of LTX-2.3's parts as it was released, as far as they are read before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Configs = dict[str, dict[str, Any]]

LTX_2_3: Configs = {
    "model_index.json": {
        "_class_name": "LTX2Pipeline",
        "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
        "vocoder": ["ltx2", "LTX2Vocoder"],
    },
    "transformer/config.json": {
        "num_layers": 48,
        "num_attention_heads": 32,
        "attention_head_dim": 128,
        "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64,
        "patch_size": 1,
        "patch_size_t": 1,
        "perturbed_attn": True,
    },
    "vae/config.json": {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8, "patch_size": 4},
    "audio_vae/config.json": {"sample_rate": 16000, "mel_hop_length": 160},
    "connectors/config.json": {
        f"{modality}_connector_{name}": value
        for modality, head_dim in (("video", 128), ("audio", 64))
        for name, value in (("num_attention_heads", 32), ("attention_head_dim", head_dim), ("num_layers", 8))
    },
}


def write(folder: Path, configs: Configs) -> None:
    """A model's folder of these configs and no weights."""
    for name, content in configs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
