"""Stock FlashAttention-4 (`flash_attn.cute`), where that package is installed."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

CAPABILITIES = {(9, 0), (10, 0), (10, 3)}


@lru_cache(maxsize=1)
def _missing() -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "the package flash-attn-4 is not installed"
    return None


def supports(call: AttentionCall) -> str | None:
    """bf16 and fp16 on Hopper and Blackwell, unmasked or with key lengths."""
    if call.capability is None:
        return f"it needs an NVIDIA GPU, the tensors are on {call.device}"
    if call.capability not in CAPABILITIES:
        return f"it has no kernel for compute capability {call.capability[0]}.{call.capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim % 8 or call.head_dim > 128:
        return f"it takes head dims up to 128 that 8 divides, not {call.head_dim}"
    if call.mask == "dense":
        return "it takes no dense mask"
    return _missing()


def untrusted(call: AttentionCall) -> str | None:
    """A released package needs no self-check of ours."""
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
    """Attention by `flash_attn.cute.flash_attn_func`, or its varlen form with `seqused_k` for key lengths."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if kv_lengths is None:
        return flash_attn_func(q, k, v, softmax_scale=scale, return_lse=return_lse)
    return flash_attn_varlen_func(q, k, v, seqused_k=kv_lengths, softmax_scale=scale, return_lse=return_lse)
