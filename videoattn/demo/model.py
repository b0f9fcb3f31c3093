"""Loads the demo model that ships with the package, and says how it is meant to be used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from videoattn.demo.scenes import FRAME_RATE, HEIGHT, NUM_FRAMES, WIDTH
from videoattn.demo.tokenizer import known_words, unknown_words

if TYPE_CHECKING:
    import torch
    from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
    from diffusers.pipelines.ltx.pipeline_ltx_image2video import LTXImageToVideoPipeline

WEIGHTS = Path(__file__).with_name("weights")


# What the model was trained for and is judged at, under diffusers' argument names.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "prompt": "a large yellow star moving right on a blue background",
        "negative_prompt": "",
        "width": WIDTH,
        "height": HEIGHT,
        "num_frames": NUM_FRAMES,
        "frame_rate": FRAME_RATE,
        "num_inference_steps": 16,
        "guidance_scale": 6.0,
    }
)


def weights_path() -> Path:
    """The folder of the shipped weights, in `from_pretrained` layout.

    Raises FileNotFoundError when they are missing from the installation.
    """
    if not (WEIGHTS / "model_index.json").exists():
        raise FileNotFoundError(f"the demo model's weights are missing: {WEIGHTS} has no model_index.json")
    return WEIGHTS


def load_pipeline(
    torch_dtype: torch.dtype | None = None, image: bool = False, weights: Path | None = None
) -> LTXPipeline | LTXImageToVideoPipeline:
    """Load the demo model as an LTXPipeline, or as an LTXImageToVideoPipeline with `image`.

    Left out, `torch_dtype` is fp32 (the files hold fp16) and `weights` is the shipped folder. Nothing is
    fetched. Raises FileNotFoundError when the shipped weights are missing.
    """
    import torch
    from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
    from diffusers.pipelines.ltx.pipeline_ltx_image2video import LTXImageToVideoPipeline

    pipeline_class = LTXImageToVideoPipeline if image else LTXPipeline
    with warnings.catch_warnings():
        # Newer diffusers want `dtype`, which older ones don't know.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        return pipeline_class.from_pretrained(
            weights or weights_path(), torch_dtype=torch_dtype or torch.float32, local_files_only=True
        )


def warn_of_unknown_words(prompt: str) -> list[str]:
    """Warn when a prompt uses words that the demo model doesn't know; returns those words."""
    unknown = unknown_words(prompt)
    if unknown:
        warnings.warn(
            f"the demo model doesn't know {', '.join(map(repr, unknown))}; "
            f"it knows: {', '.join(known_words())}",
            stacklevel=2,
        )
    return unknown
