"""The accuracy rule: an output is held against fp32, by the error that rounding alone would make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

L2_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_LIMIT = 1e-3
SCORE_CHUNK = 1 << 28  # elements of the fp32 score matrix held at a time


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one output and the limits they must keep; `lse` is None where no LSE was given."""

    max_abs: float
    max_abs_limit: float
    relative_l2: float
    relative_l2_limit: float
    lse: float | None

    @property
    def passed(self) -> bool:
        """Whether every error keeps its limit; NaN does not."""
        lse_ok = self.lse is None or self.lse <= LSE_LIMIT
        return self.max_abs <= self.max_abs_limit and self.relative_l2 <= self.relative_l2_limit and lse_ok

    def __str__(self) -> str:
        lse = "" if self.lse is None else f", LSE {self.lse:.2e} (limit {LSE_LIMIT:.0e})"
        return (
            f"max {self.max_abs:.2e} (limit {self.max_abs_limit:.2e}), "
            f"L2 {self.relative_l2:.2e} (limit {self.relative_l2_limit:.0e}){lse}"
        )


def compare(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None = None,
) -> Errors:
    """Errors of `out` (BSHD) and `lse` against attention in fp32.

    Limits are FA4's rule: twice the error of attention with P rounded to the input dtype and the rest in
    fp32, plus twice the rounding of the reference around 0.3; relative L2 and LSE have fixed limits.
    """
    max_abs = pt_error = atol = lse_error = 0.0
    difference = norm = 0.0
    nan = False
    for batch, head, rows, ref, pt, ref_lse in _reference(q, k, v, scale, kv_lengths):
        got = out[batch, rows, head].float()
        max_abs = max(max_abs, (got - ref).abs().max().item())
        nan |= bool(got.isnan().any())
        pt_error = max(pt_error, (pt.to(q.dtype).float() - ref).abs().max().item())
        rounded = ref.to(q.dtype)
        atol = max(atol, ((rounded + 0.3) - 0.3 - rounded).abs().max().item())
        difference += (got - ref).square().sum(dtype=torch.float64).item()
        norm += ref.square().sum(dtype=torch.float64).item()
        if lse is not None:
            part = lse[batch, head, rows]
            same_infinity = part.isneginf() & ref_lse.isneginf()
            gap = torch.where(same_infinity, 0, (part - ref_lse).abs())
            lse_error = max(lse_error, gap.max().item()) if not gap.isnan().any() else float("nan")
    if nan:
        max_abs = float("nan")
    relative = (difference / norm) ** 0.5 if norm > 0 else (0.0 if difference == 0 else float("inf"))
    limit = 2 * pt_error + 2 * atol
    return Errors(max_abs, limit, relative, L2_LIMIT[q.dtype], None if lse is None else lse_error)


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kv_lengths: torch.Tensor | None
) -> Iterator[tuple[int, int, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each batch entry, head and block of rows: fp32 output, the same with P rounded, and the LSE."""
    batch, q_len, heads, _ = q.shape
    lengths = [k.shape[1]] * batch if kv_lengths is None else kv_lengths.clamp(0, k.shape[1]).tolist()
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        length = int(lengths[b])
        key, value = k[b, :length, h].float(), v[b, :length, h].float()
        step = max(1, SCORE_CHUNK // max(1, length))
        for start in range(0, q_len, step):
            rows = slice(start, min(q_len, start + step))
            query = q[b, rows, h].float()
            if length == 0:
                zero = torch.zeros_like(query)
                yield b, h, rows, zero, zero, torch.full((len(query),), -torch.inf, device=q.device)
                continue
            scores = query @ key.T * scale
            row_max = scores.amax(dim=1, keepdim=True)
            p = torch.exp(scores - row_max)
            row_sum = p.sum(dim=1, keepdim=True)
            ref = p @ value / row_sum
            pt = p.to(q.dtype).float() @ value / row_sum
            yield b, h, rows, ref, pt, (row_max + row_sum.log())[:, 0]
