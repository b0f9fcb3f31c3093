"""How much of a model an install serves, and what a level asks of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from videoattn.processors.projections import are_side_by_side, lay_side_by_side, take_apart
from videoattn.processors.sites import Site, execution_device
from videoattn.processors.untouched import hooked

if TYPE_CHECKING:
    from videoattn.processors.fused import Engine, Fusion

Level = Literal["call", "attention", "block"]
LEVELS: tuple[Level, ...] = get_args(Level)
CALL: Level = "call"

_RUNS_FUSED = {
    "attention": "QK norm with rotary embedding, head gates",
    "block": "QK norm with rotary embedding, head gates, residual with norm and modulation, linear with GELU",
}


def fusion_for(level: Level, under_compile: Engine, parts: Iterable[tuple[Any, list[Site]]]) -> Fusion | None:
    """What runs the fused work of that level on these models, None at level `call`.

    Raises as `install` says.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: choose from {', '.join(LEVELS)}")
    if level == CALL:
        return None
    from videoattn.processors import blocks, fused

    fusion = fused.Fusion(under_compile)
    for part, sites in parts:
        if execution_device(part).type == "cuda" and not fusion.available:
            raise RuntimeError(fused.NO_TRITON)
        for site in sites:
            _require_norms(site, level)
        if level == "block":
            blocks.require(part)
    return fusion


def _require_norms(site: Site, level: Level) -> None:
    for name in ("norm_q", "norm_k"):
        norm = getattr(site.module, name)
        if type(norm) is not torch.nn.RMSNorm:
            kind = type(norm)
            raise ValueError(
                f"level={level!r} does not know {kind.__module__}.{kind.__qualname__} at {site.path}.{name}: "
                "use level='call'"
            )
        if hooked(norm):
            raise RuntimeError(
                f"level={level!r} reads the weights of {site.path}.{name}, whose forward is wrapped, by "
                "offloading or casting layer by layer: use level='call', or offload whole blocks"
            )


def join_projections(parts: Iterable[tuple[Any, list[Site]]]) -> None:
    """Lay the weights of projections that read the same tensor side by side, where they are on a GPU.

    Compiled code has a product each anyway. Where memory for it is short, the rest stays as it is; `says`
    counts.
    """
    attentions = [
        site.module
        for part, sites in parts
        if all(module._compiled_call_impl is None for module in part.modules())
        for site in sites
        if getattr(getattr(site.module.to_q, "weight", None), "is_cuda", False)
    ]
    _move(lay_side_by_side, attentions)


def separate_projections(attentions: Iterable[Any]) -> None:
    """Undo `join_projections`, as far as memory lasts."""
    _move(take_apart, attentions)


def _move(how: Callable[[Any], bool], attentions: Iterable[Any]) -> None:
    moved = False
    for attn in attentions:
        before = _addresses(attn)
        try:
            how(attn)
        except torch.OutOfMemoryError:
            break
        moved |= _addresses(attn) != before
    if moved and torch.cuda.is_initialized():
        # What the weights left behind is in pieces that hardly anything else fits into.
        torch.cuda.empty_cache()


def _addresses(attn: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in attn.parameters()]


def says(level: Level, fusion: Fusion | None, device: torch.device, sites: Sequence[Site]) -> str:
    """One phrase on what runs fused, and by what; empty where nothing does."""
    if fusion is None:
        return ""
    engine = "fused by Triton" if fusion.engine(device) == "triton" else f"by torch, on {device.type}"
    compiled = "" if fusion.under_compile == "triton" else "; under torch.compile by torch"
    joined = sum(are_side_by_side(site.module) for site in sites)
    of = f" in {joined} of {len(sites)} attentions" if joined < len(sites) else ""
    projections = f"; projections of one tensor in one product{of}, except in compiled code" if joined else ""
    return f"level {level}: {_RUNS_FUSED[level]}, {engine}{projections}{compiled}"
