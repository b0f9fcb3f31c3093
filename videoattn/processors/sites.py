"""Where attention calls sit in the models of diffusers, and which of our processors serves each."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch

from videoattn.dispatch import AttentionCall, Kind, MaskForm, device_capability
from videoattn.processors.base import FUSED_PROJECTIONS, Processor

TRANSFORMERS = ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
CONNECTORS = "LTX2TextConnectors"

_BLOCK_KINDS: dict[str, Kind] = {
    "attn1": "video_self",
    "attn2": "video_text",
    "audio_attn1": "audio_self",
    "audio_attn2": "audio_text",
    "audio_to_video_attn": "audio_to_video",
    "video_to_audio_attn": "video_to_audio",
}
_BLOCK = re.compile(r"transformer_blocks\.\d+\.(\w+)")
_CONNECTOR = re.compile(r"(video|audio)_connector\.transformer_blocks\.\d+\.attn1")

# Receipts describe the calls of a 768×512 clip of 249 frames: 32·16·24 video and 259 audio tokens.
VIDEO_TOKENS = 12288
AUDIO_TOKENS = 259
LTX2_TEXT_TOKENS = 1024
LTX_TEXT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Site:
    """One attention module: its path in the model, its kind, and the processor class that serves it."""

    path: str
    kind: Kind
    module: Any
    processor: type[Processor]


def unwrap(module: Any) -> Any:
    """The module inside torch.compile's wrapper."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module


def family(model: Any) -> str | None:
    """The name of the served class that a model is or derives from, None for any other object."""
    names = [base.__name__ for base in type(model).__mro__]
    return next((name for name in (*TRANSFORMERS, CONNECTORS) if name in names), None)


def models(target: Any) -> tuple[Any, Any | None]:
    """The transformer of a pipeline or of itself, and the pipeline's text connectors if it has some.

    Raises TypeError naming what is served.
    """
    module = unwrap(target)
    if family(module) in TRANSFORMERS:
        return module, None
    transformer = unwrap(getattr(target, "transformer", None))
    if family(transformer) not in TRANSFORMERS:
        found = f"{type(target).__name__}"
        if transformer is not None:
            found += f" with a {type(transformer).__name__}"
        served = " or ".join(TRANSFORMERS)
        raise TypeError(f"videoattn installs on {served}, or a pipeline with one of them, not {found}")
    connectors = unwrap(getattr(target, "connectors", None))
    return transformer, connectors if family(connectors) == CONNECTORS else None


def parts(target: Any) -> list[Any]:
    """The `models` of a target in one list."""
    return [model for model in models(target) if model is not None]


def sites(model: Any) -> list[Site]:
    """Every attention module of a transformer or of the text connectors.

    Raises ValueError for a place or a processor that videoattn does not know.
    """
    result = []
    for path, module in model.named_modules():
        path = path.replace("._orig_mod", "")
        if hasattr(module, "get_processor") and hasattr(module, "to_q"):
            if module.fused_projections:
                raise ValueError(FUSED_PROJECTIONS)
            result.append(Site(path, _kind(model, path), module, _serving(path, module.get_processor())))
    return result


def _kind(model: Any, path: str) -> Kind:
    if family(model) == CONNECTORS:
        if match := _CONNECTOR.fullmatch(path):
            return "video_connector" if match[1] == "video" else "audio_connector"
    elif (match := _BLOCK.fullmatch(path)) and match[1] in _BLOCK_KINDS:
        return _BLOCK_KINDS[match[1]]
    raise ValueError(
        f"unknown attention at {path} of {type(model).__name__}: this diffusers places a call where "
        "videoattn knows none"
    )


def _serving(path: str, processor: Any) -> type[Processor]:
    from videoattn.processors.ltx import LTXVideoProcessor
    from videoattn.processors.ltx2 import LTX2PerturbedProcessor, LTX2Processor

    served: tuple[type[Processor], ...] = (LTXVideoProcessor, LTX2Processor, LTX2PerturbedProcessor)
    for ours in served:
        if type(processor) is ours:
            return ours
        if type(processor) is ours.replaces:
            unknown = set(_parameters(ours.replaces)) - set(_parameters(ours))
            if unknown:
                raise ValueError(
                    f"{ours.replaces.__name__} of this diffusers takes {', '.join(sorted(unknown))}, which "
                    "videoattn does not know: use a diffusers version it was tested with"
                )
            return ours
    kind = type(processor)
    raise ValueError(
        f"{path} uses the attention processor {kind.__module__}.{kind.__qualname__}, which is not diffusers' "
        "own: restore diffusers' processors before install()"
    )


def _parameters(processor: type) -> list[str]:
    return list(inspect.signature(processor.__call__).parameters)


def nominal_call(site: Site, model: Any, device: torch.device, dtype: torch.dtype) -> AttentionCall:
    """The call that stands for a site's kind in receipts: its heads and head dim at a clip's typical lengths.

    Text masks have their usual form: all ones, hence dropped, in LTX-2; right-padded in LTX-Video.
    """
    ltx2 = family(model) != TRANSFORMERS[0]
    text = LTX2_TEXT_TOKENS if ltx2 else LTX_TEXT_TOKENS
    q_len, kv_len = {
        "video_self": (VIDEO_TOKENS, VIDEO_TOKENS),
        "video_text": (VIDEO_TOKENS, text),
        "audio_self": (AUDIO_TOKENS, AUDIO_TOKENS),
        "audio_text": (AUDIO_TOKENS, text),
        "audio_to_video": (VIDEO_TOKENS, AUDIO_TOKENS),
        "video_to_audio": (AUDIO_TOKENS, VIDEO_TOKENS),
        "video_connector": (text, text),
        "audio_connector": (text, text),
    }[site.kind]
    mask: MaskForm = "kv_lengths" if site.kind == "video_text" and not ltx2 else "none"
    return AttentionCall(
        batch=1,
        heads=site.module.heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=site.module.head_dim,
        dtype=dtype,
        device=device.type,
        capability=device_capability(device),
        mask=mask,
        kind=site.kind,
    )


def execution_device(model: torch.nn.Module) -> torch.device:
    """The device a model computes on, seen through diffusers' and accelerate's offloading."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        registry = getattr(module, "_diffusers_hook", None)
        group = registry.get_hook("group_offloading") if registry is not None else None
        if group is not None:
            return torch.device(group.config.onload_device)
    return next(model.parameters()).device
