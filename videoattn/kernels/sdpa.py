"""PyTorch's `scaled_dot_product_attention`: any device, any mask; the kernel all others are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

# Bounds the fp32 score matrix that the LSE path holds at a time (elements).
LSE_CHUNK = 1 << 24


def supports(call: AttentionCall) -> str | None:
    """Every floating-point call is supported."""
    return None if call.dtype.is_floating_point else f"{call.dtype} is not a floating-point type"


def untrusted(call: AttentionCall) -> str | None:
    """PyTorch's own kernels need no self-check."""
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
    """Attention by `F.scaled_dot_product_attention`; key lengths become a boolean mask."""
    # The op keeps its inputs' dtype, and autocast would make bf16 of the LSE's scores.
    with torch.autocast(q.device.type, enabled=False):
        if kv_lengths is not None:
            k, v, mask = clear_past_lengths(k, v, kv_lengths)
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        if kv_lengths is not None:
            out = torch.where((kv_lengths > 0)[:, None, None, None], out, 0)
        lse = log_sum_exp(query, key, scale, mask) if return_lse else None
    return out.transpose(1, 2).contiguous(), lse


def clear_past_lengths(
    k: torch.Tensor, v: torch.Tensor, kv_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V with zeros past each entry's length, and the mask `(batch, 1, 1, kv_len)` of what is valid.

    A masked NaN is still NaN (NaN + -inf, 0 * NaN), so those rows are cleared, not only masked.
    """
    valid = torch.arange(k.shape[1], device=k.device) < kv_lengths[:, None]
    rows = valid[:, :, None, None]
    return torch.where(rows, k, 0), torch.where(rows, v, 0), valid[:, None, None, :]


def log_sum_exp(
    query: torch.Tensor, key: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """LSE of the scaled scores in fp32, `(batch, heads, q_len)`, from BHSD inputs."""
    batch, heads, q_len, _ = query.shape
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=query.device)
    step = max(1, LSE_CHUNK // max(1, batch * heads * key.shape[2]))
    key = key.float().transpose(-1, -2)
    for start in range(0, q_len, step):
        rows = slice(start, start + step)
        scores = query[:, :, rows].float() @ key * scale
        if mask is not None:
            part = mask[:, :, rows] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        lse[:, :, rows] = torch.logsumexp(scores, dim=-1)
    return lse
