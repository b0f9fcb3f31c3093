"""The hand-written Hopper kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from videoattn.dispatch import AttentionCall


def supports(call: AttentionCall) -> str | None:
    """None of this kernel's code is part of this version."""
    return "this version of videoattn does not contain it yet"


def untrusted(call: AttentionCall) -> str | None:
    """Nothing to trust before there is a kernel."""
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unreachable while `supports` refuses every call."""
    raise RuntimeError("the Hopper kernel is not part of this version")
