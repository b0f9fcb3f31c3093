"""The hand-written Blackwell kernel (sm_100a and sm_103a)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from videoattn.kernels import native, verify

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

CAPABILITIES = {(10, 0), (10, 3)}
GATES = True


def supports(call: AttentionCall) -> str | None:
    """bf16 and fp16, head dims 64 and 128, unmasked or with key lengths, on sm_100 and sm_103."""
    return native.refusal(call, CAPABILITIES)


def untrusted(call: AttentionCall) -> str | None:
    """Why `auto` must not bind it yet: no passed self-check for this GPU, driver and build."""
    return verify.untrusted("blackwell", call.device)


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
    arch = _arch(q.device.index)
    return native.run(
        q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, arch=arch, gate=gate
    )


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
    arch = _arch(q.device.index)
    return native.prepare(
        q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, arch=arch, gate=gate
    )


@cache
def _arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
