"""Stock FlashAttention-3 (`fa3_fwd_interface`, `flash_attn_interface`), where one of those is installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

MODULES = ("fa3_fwd_interface", "flash_attn_interface")


@lru_cache(maxsize=1)
def _module() -> str | None:
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def supports(call: AttentionCall) -> str | None:
    """bf16 and fp16 on Hopper, unmasked."""
    if call.capability is None:
        return f"it needs an NVIDIA GPU, the tensors are on {call.device}"
    if call.capability != (9, 0):
        return f"it has no kernel for compute capability {call.capability[0]}.{call.capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim % 8 or call.head_dim > 256:
        return f"it takes head dims up to 256 that 8 divides, not {call.head_dim}"
    if call.mask != "none":
        return "it is used here for unmasked calls only"
    if _module() is None:
        return "no FlashAttention-3 package is installed (fa3-fwd, or flash_attn_interface)"
    return None


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
    """Attention by FlashAttention-3's `flash_attn_func`."""
    interface = importlib.import_module(_module() or MODULES[0])
    result = interface.flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=return_lse)
    return result if isinstance(result, tuple) else (result, None)
