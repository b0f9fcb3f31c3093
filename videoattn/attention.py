"""`attention(q, k, v, …)`: the functional front door, and the one torch op behind it."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch._C._functorch import maybe_current_level as _transform_level
from torch.autograd import profiler

from videoattn import kernels
from videoattn.again import Call, can_keep
from videoattn.dispatch import Bound, choose
from videoattn.timing import recorder

_library = torch.library.Library("videoattn", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? kv_lengths, Tensor? mask, bool return_lse, "
    "str kernel, str kind, Tensor? gate=None) -> (Tensor, Tensor)"
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
    gate: torch.Tensor | None = None,
    key: tuple | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Opaque to torch.compile: choosing and timing happen at run time, never while tracing.
    again = choose.again
    bound = choose.bind(q, k, kv_lengths, mask, return_lse, kernel, kind)
    active = recorder.active()
    if gate is not None:
        _check_gate(gate, q)
    # The kernel's own; or done after it, which also keeps it comparable with arms that know no gates.
    gates: dict[str, Any] = {}
    if gate is not None and getattr(bound.kernel, "GATES", False) and not (active and active.compare):
        gates["gate"] = gate
    if active is None:
        results = bound.kernel.run(
            q, k, v, scale=scale, kv_lengths=kv_lengths, mask=mask, return_lse=return_lse, **gates
        )
    else:
        results = _recorded(active, bound, q, k, v, scale, kv_lengths, mask, return_lse, gates)
    if gate is not None and not gates:
        return _gated(results[0], gate), results[1]
    prepare = getattr(bound.kernel, "prepare", None)
    if key is not None and prepare is not None and can_keep(q, k, v, gate):
        call = prepare(q, k, v, scale=scale, kv_lengths=kv_lengths, return_lse=return_lse, **gates)
        if call is not None:
            tensors = (q, k, v) if kv_lengths is None else (q, k, v, kv_lengths)
            again.keep(key, tensors if gate is None else (*tensors, gate), (bound, scale, call))
    return results


def _check_gate(gate: torch.Tensor, q: torch.Tensor) -> None:
    if gate.shape != q.shape[:3] or gate.dtype != q.dtype or gate.device != q.device:
        raise ValueError(
            f"gate must be {tuple(q.shape[:3])}, {q.dtype} on {q.device}, not {tuple(gate.shape)}, "
            f"{gate.dtype} on {gate.device}"
        )


def _gated(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Every head times twice the sigmoid of its logit."""
    # Triton's, where the processors have registered it: one pass over the output.
    op = getattr(torch.ops.videoattn, "gate", None) if out.is_cuda else None
    if op is None:
        return out * (2.0 * torch.sigmoid(gate)).unsqueeze(-1)
    with torch.cuda.device(out.device):
        return op(out.flatten(2, 3), gate).unflatten(2, out.shape[2:])


def _recorded(
    active: recorder.CallRecorder,
    bound: Bound,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kv_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    return_lse: bool,
    gates: dict[str, Any],
    ready: Call | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Through the recording; `ready` is the chosen kernel's call made ready, if there is one."""

    def launch(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if ready is not None and name == bound.choice.kernel:
            results = ready(q, k, v, kv_lengths, **gates)
            if results is not None:
                return results
        kernel = bound.kernel if name == bound.choice.kernel else kernels.get(name)
        return kernel.run(
            q, k, v, scale=scale, kv_lengths=kv_lengths, mask=mask, return_lse=return_lse, **gates
        )

    return active.record(bound.call, bound.choice, launch, device=q.device, kv_lengths=kv_lengths)


def _again(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lengths: torch.Tensor | None,
    return_lse: bool,
    key: tuple,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The result of a call like an earlier one; None where there was none, or somebody watches this one."""
    if _function_modes() or profiler._is_profiler_enabled:
        return None
    tensors = (q, k, v) if kv_lengths is None else (q, k, v, kv_lengths)
    found = choose.again.find(key, tensors if gate is None else (*tensors, gate))
    if found is None:
        return None
    bound, scale, call = found
    active = recorder.active()
    if active is None:
        return call(q, k, v, kv_lengths) if gate is None else call(q, k, v, kv_lengths, gate)
    if gate is not None and active.compare:
        return None
    gates = {} if gate is None else {"gate": gate}
    return _recorded(active, bound, q, k, v, scale, kv_lengths, None, return_lse, gates, call)


def _op(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, gate=None):
    out, lse = _run(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, gate)
    # An op's results can't be None.
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


_library.impl("attention", _op, "CPU")
_library.impl("attention", _op, "CUDA")


@torch.library.register_fake("videoattn::attention", lib=_library)
def _fake(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, gate=None):
    batch, q_len, heads, _ = q.shape
    out = q.new_empty((batch, q_len, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, q_len) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor | None) -> bool:
    """Whether the dispatcher would do nothing but call the op's body: eager tensors of CPU or CUDA, and
    nobody who watches or transforms ops (modes, functorch, tracing, autograd, profiler)."""
    return (
        type(q) is torch.Tensor
        and type(k) is torch.Tensor
        and type(v) is torch.Tensor
        and (q.is_cuda or q.is_cpu)
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and (gate is None or (type(gate) is torch.Tensor and not gate.is_neg() and not gate.requires_grad))
        and _dispatch_modes() == 0
        and _function_modes() == 0
        and _transform_level() is None
        and not _tracing()
        and not profiler._is_profiler_enabled
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    )


_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._is_tracing


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
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The op without argument checks, with a dense mask, gates and a kind: what the processors call.

    Shapes as in `attention`; the second result is None unless `return_lse`. `gate` holds logits `(batch,
    q_len, heads)` of dtype and device of `q`: every head of the rounded output is multiplied by twice the
    sigmoid of its own.
    """
    key = None
    if mask is None and not torch.compiler.is_dynamo_compiling() and _kept_by(scale):
        key = kernel, kind, return_lse, scale, kv_lengths is None
        if gate is not None:
            key = (*key, "gate")
        done = _again(q, k, v, kv_lengths, return_lse, key, gate)
        if done is not None:
            return done
    return _attend(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, key, gate)


def _kept_by(scale: float | None) -> bool:
    # A number that can change in place is no key.
    return scale is None or type(scale) is float


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    kv_lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    return_lse: bool,
    kernel: str,
    kind: str,
    key: tuple | None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    # The dispatcher costs an eager call as much as all the rest of the op; a compiled one needs the op.
    if not torch.compiler.is_dynamo_compiling() and _plain(q, k, v, gate):
        return _run(q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, gate, key)
    out, lse = torch.ops.videoattn.attention.default(
        q, k, v, scale, kv_lengths, mask, return_lse, kernel, kind, gate
    )
    return out, lse if return_lse else None


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    kernel: str = "auto",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: Literal[True],
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    key = None
    if not torch.compiler.is_dynamo_compiling() and _kept_by(scale):
        # Apart from `attend`, whose calls nobody checked.
        key = kernel, None, return_lse, scale, kv_lengths is None
        done = _again(q, k, v, kv_lengths, return_lse, key)
        if done is not None:
            return done if return_lse else done[0]  # type: ignore[return-value]
    _check(q, k, v, kv_lengths, kernel)
    out, lse = _attend(q, k, v, scale, kv_lengths, None, return_lse, kernel, "", key)
    return out if lse is None else (out, lse)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_lengths: torch.Tensor | None, kernel: str
) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "videoattn.attention has no backward: call it under torch.no_grad() or detach its inputs"
        )
    # Each question to a tensor makes a Python object, so none is asked twice.
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4):
        raise ValueError(
            f"q, k and v must be (batch, seq, heads, head_dim), got {q.dim()}, {k.dim()} and {v.dim()} dims"
        )
    if k_shape != v_shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k_shape)} and {tuple(v_shape)}")
    batch, q_len, heads, head_dim = q_shape
    k_batch, kv_len, k_heads, k_head_dim = k_shape
    if batch != k_batch or heads != k_heads or head_dim != k_head_dim:
        raise ValueError(
            f"q {tuple(q_shape)} and k {tuple(k_shape)} differ in batch, heads or head_dim "
            "(grouped-query attention is not supported)"
        )
    if batch < 1 or q_len < 1 or heads < 1 or head_dim < 1 or kv_len < 1:
        raise ValueError(f"empty attention: q {tuple(q_shape)}, k {tuple(k_shape)}")
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"q, k and v must have one dtype, got {dtype}, {k.dtype} and {v.dtype}")
    device = q.device
    if k.device != device or v.device != device:
        raise ValueError(f"q, k and v must be on one device, got {device}, {k.device} and {v.device}")
    if kv_lengths is not None:
        if kv_lengths.dtype != torch.int32 or kv_lengths.shape != (batch,):
            raise ValueError(
                f"kv_lengths must be int32 of shape ({batch},), got {kv_lengths.dtype} "
                f"of shape {tuple(kv_lengths.shape)}"
            )
        if kv_lengths.device != device:
            raise ValueError(f"kv_lengths must be on {device}, it is on {kv_lengths.device}")
    if kernel != "auto" and kernel not in kernels.NAMES:
        raise ValueError(f"unknown attention kernel '{kernel}': choose from auto, {', '.join(kernels.NAMES)}")
