"""`attention(q, k, v, …)`: the functional front door, and the one torch op behind it."""

from __future__ import annotations

import math

import torch

from videoattn import kernels
from videoattn.dispatch import AttentionCall, MaskForm, choose
from videoattn.timing import recorder

_library = torch.library.Library("videoattn", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? kv_lengths, Tensor? mask, bool return_lse, "
    "str kernel, str kind) -> (Tensor, Tensor)"
)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kv_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    return_lse: bool,
    kernel: str,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    # This body is opaque to torch.compile: choosing and timing happen at run time, never while tracing.
    form: MaskForm = "dense" if mask is not None else "kv_lengths" if kv_lengths is not None else "none"
    call = AttentionCall.of(q, k, mask=form, return_lse=return_lse, kind=kind or None)
    choice = choose(call, kernel)

    def launch(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kernels.get(name).run(
            q, k, v, scale=scale, kv_lengths=kv_lengths, mask=mask, return_lse=return_lse
        )

    active = recorder.active()
    if active is None:
        out, lse = launch(choice.kernel)
    else:
        out, lse = active.record(call, choice, launch, device=q.device, kv_lengths=kv_lengths)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


@torch.library.impl(_library, "attention", "CPU")
def _run_cpu(*args):
    return _run(*args)


@torch.library.impl(_library, "attention", "CUDA")
def _run_cuda(*args):
    return _run(*args)


@torch.library.register_fake("videoattn::attention", lib=_library)
def _fake(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind):
    batch, q_len, heads, _ = q.shape
    out = q.new_empty((batch, q_len, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, q_len) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    kind: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op without argument checks, with a dense mask and a kind: what the processors call.

    Shapes as in `attention`; the second result is empty unless `return_lse`.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    return torch.ops.videoattn.attention(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Non-causal scaled dot-product attention, forward only.

    Args:
        q: `(batch, q_len, heads, head_dim)`; any strides.
        k, v: `(batch, kv_len, heads, head_dim)`, dtype and device of `q`.
        scale: factor on the scores; `1/sqrt(head_dim)` by default.
        kv_lengths: int32 `(batch,)` on the device of `q`: keys at and past an entry's length are ignored,
            whatever they hold; length 0 gives a zero output and LSE −inf. Values are read on the device only.
        return_lse: also return the natural-log LSE, fp32 `(batch, heads, q_len)`.
        kernel: a kernel's name or `auto`. A named kernel never falls back.

    Returns:
        The output, shaped and typed like `q`, or `(output, lse)`.

    Raises:
        ValueError: shapes, dtypes, devices or the kernel's name do not fit.
        RuntimeError: an input requires grad while grad mode is on.
        KernelUnavailable: the named kernel cannot serve the call; the message says why.
    """
    _check(q, k, v, kv_lengths, kernel)
    out, lse = attend(q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, kernel=kernel)
    return (out, lse) if return_lse else out


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_lengths: torch.Tensor | None, kernel: str
) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "videoattn.attention has no backward: call it under torch.no_grad() or detach its inputs"
        )
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k and v must be (batch, seq, heads, head_dim), got {q.dim()}, {k.dim()} and {v.dim()} dims"
        )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch, heads or head_dim "
            "(grouped-query attention is not supported)"
        )
    if min(q.shape) < 1 or k.shape[1] < 1:
        raise ValueError(f"empty attention: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if kv_lengths is not None:
        if kv_lengths.dtype != torch.int32 or kv_lengths.shape != (q.shape[0],):
            raise ValueError(
                f"kv_lengths must be int32 of shape ({q.shape[0]},), got {kv_lengths.dtype} "
                f"of shape {tuple(kv_lengths.shape)}"
            )
        if kv_lengths.device != q.device:
            raise ValueError(f"kv_lengths must be on {q.device}, it is on {kv_lengths.device}")
    if kernel != "auto" and kernel not in kernels.NAMES:
        raise ValueError(f"unknown attention kernel '{kernel}': choose from auto, {', '.join(kernels.NAMES)}")
