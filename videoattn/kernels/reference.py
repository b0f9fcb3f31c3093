"""Attention in fp32 throughout: slow, any device, any mask; the truth that other kernels are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from videoattn.kernels.sdpa import clear_past_lengths

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

# Bounds the fp32 score matrix held at a time (elements).
SCORE_CHUNK = 1 << 26


def supports(call: AttentionCall) -> str | None:
    """Floating-point calls up to fp32, where fp32 products are not made of TF32."""
    if not call.dtype.is_floating_point:
        return f"{call.dtype} is not a floating-point type"
    if call.dtype == torch.float64:
        return "float64 inputs are more precise than it is"
    if call.device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "TF32 is on: set torch.backends.cuda.matmul.fp32_precision = 'ieee'"
    return None


def untrusted(call: AttentionCall) -> str | None:
    """It defines what is right."""
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
    """Softmax of the scaled scores times V, all in fp32, rounded once to the dtype of `q`."""
    if kv_lengths is not None:
        k, v, mask = clear_past_lengths(k, v, kv_lengths)
    key, value = k.float().permute(0, 2, 3, 1), v.float().transpose(1, 2)
    batch, q_len, heads, _ = q.shape
    out = q.new_empty((batch, q_len, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
    step = max(1, SCORE_CHUNK // (batch * heads * k.shape[1]))
    # Autocast would make bf16 of what must stay fp32.
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, q_len, step):
            rows = slice(start, start + step)
            scores = q[:, rows].transpose(1, 2).float() @ key * scale
            if mask is not None:
                part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
            row_lse = torch.logsumexp(scores, dim=-1)
            # A row without keys has LSE -inf and a zero output.
            weights = torch.exp(scores - torch.where(row_lse.isneginf(), 0, row_lse)[..., None])
            out[:, rows] = (weights @ value).transpose(1, 2).to(q.dtype)
            lse[:, :, rows] = row_lse
    return out, lse if return_lse else None
