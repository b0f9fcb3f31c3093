"""The attention kernels by name, one module each, imported when first asked for.

A kernel module offers `supports(call)` (None, or the reason it can't serve the call), `untrusted(call)`
(None, or the reason `auto` must not pick it yet) and `run(q, k, v, *, scale, kv_lengths, mask, return_lse)`.
Where it also says `GATES = True`, its `run` takes `gate` too: logits `(batch, q_len, heads)`, by twice whose
sigmoids it multiplies the output's heads, rounding what diffusers rounds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from videoattn.dispatch import AttentionCall

NAMES = ("blackwell", "hopper", "flash4", "flash3", "sdpa", "reference")


class Kernel(Protocol):
    """What every module in this folder offers."""

    def supports(self, call: AttentionCall) -> str | None:
        """None, or one phrase saying why this kernel can't serve the call on this machine."""
        ...

    def untrusted(self, call: AttentionCall) -> str | None:
        """None, or one phrase saying why `auto` must not bind this kernel although it supports the call."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        kv_lengths: torch.Tensor | None,
        mask: torch.Tensor | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of BSHD inputs: the output like `q`, and LSE fp32 `(batch, heads, q_len)` if wanted.

        `mask` is as in `F.scaled_dot_product_attention`, broadcastable to `(batch, heads, q_len, kv_len)`.
        """
        ...


def get(name: str) -> Kernel:
    """The kernel module of that name; ValueError names the known ones."""
    if name not in NAMES:
        raise ValueError(f"unknown attention kernel '{name}': choose from auto, {', '.join(NAMES)}")
    return importlib.import_module(f"videoattn.kernels.{name}")  # type: ignore[return-value]
