"""The hand-written Hopper kernel (sm_90a)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from videoattn.kernels import native, verify

if TYPE_CHECKING:
    import torch

    from videoattn.dispatch import AttentionCall

CAPABILITIES = {(9, 0)}
GATES = True


def supports(call: AttentionCall) -> str | None:
    """bf16 and fp16, head dims 64 and 128, unmasked or with key lengths, on compute capability 9.0."""
    return native.refusal(call, CAPABILITIES)


def untrusted(call: AttentionCall) -> str | None:
    """Why `auto` must not bind it yet: no passed self-check for this GPU, driver and build."""
    return verify.untrusted("hopper", call.device)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    return_lse: bool,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch on the current stream; inputs whose strides TMA can't take are copied first."""
    return native.run(q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, arch=90, gate=gate)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None,
    return_lse: bool,
    gate: torch.Tensor | None = None,
) -> native.Again | None:
    """`run` for tensors laid out as these, on their device; None where a run copies them."""
    return native.prepare(
        q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, arch=90, gate=gate
    )
