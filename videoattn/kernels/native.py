"""Torch tensors to the library's C call: what the Hopper and Blackwell kernel modules share."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING

import torch

from videoattn.kernels import abi, library

if TYPE_CHECKING:
    from videoattn.dispatch import AttentionCall

DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16}
HEAD_DIMS = (64, 128)
MAX_LENGTH = 2**31 - 512


def refusal(call: AttentionCall, capabilities: Collection[tuple[int, int]]) -> str | None:
    """None, or why the library's kernel can't serve the call; builds the library if needed."""
    if call.capability is None:
        return f"it needs an NVIDIA GPU, the tensors are on {call.device}"
    if call.capability not in capabilities:
        return f"it has no code for compute capability {call.capability[0]}.{call.capability[1]}"
    if call.dtype not in DTYPES:
        return f"it takes bf16 and fp16, not {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim not in HEAD_DIMS:
        return f"it takes head dims 64 and 128, not {call.head_dim}"
    if call.mask == "dense":
        return "it takes no dense mask, only key lengths"
    if max(call.q_len, call.kv_len) > MAX_LENGTH:
        return f"it takes lengths up to {MAX_LENGTH}"
    return library.unavailable(torch.cuda.current_device())


def tma_can_take(x: torch.Tensor) -> bool:
    """Whether a BSHD tensor can be read in place: last dim contiguous, 16-byte aligned start and strides, no
    dimension repeated by stride 0."""
    element = x.element_size()
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(x.size(i) == 1 or (x.stride(i) > 0 and x.stride(i) * element % 16 == 0) for i in (0, 1, 2))
    )


def describe(x: torch.Tensor) -> abi.Tensor:
    """Pointer and strides of a BSHD tensor."""
    return abi.Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def fill_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    arch: int = 0,
    grid: int = 0,
    num_sms: int = 0,
    splits: int = 0,
    device: int = 0,
    stream: int = 0,
) -> abi.Call:
    """The C call of BSHD tensors on any device (the planner reads addresses, not data)."""
    batch, q_len, heads, head_dim = q.shape
    return abi.Call(
        ctypes.sizeof(abi.Call),
        arch,
        device,
        DTYPES[q.dtype],
        batch,
        heads,
        q_len,
        k.shape[1],
        head_dim,
        describe(q),
        describe(k),
        describe(v),
        describe(out),
        None if lse is None else lse.data_ptr(),
        None if kv_lengths is None else kv_lengths.data_ptr(),
        scale,
        grid,
        num_sms,
        splits,
        stream,
        None,
    )


def attach_workspace(call: abi.Call, device: torch.device) -> torch.Tensor | None:
    """Give the call the workspace that splitting its keys needs; keep the tensor until the call is queued.

    `call.arch` and `call.num_sms` must be set.
    """
    count = library.load().videoattn_workspace_bytes(ctypes.byref(call))
    if count == 0:
        return None
    workspace = torch.empty(count, dtype=torch.uint8, device=device)
    call.workspace = workspace.data_ptr()
    return workspace


@cache
def num_sms(device: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(call: abi.Call) -> None:
    """Run the call on its stream; RuntimeError carries the library's message."""
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    if library.load().videoattn_attention(ctypes.byref(call), text, abi.MESSAGE_BYTES) != abi.OK:
        raise RuntimeError(f"videoattn kernel: {text.value.decode(errors='replace')}")


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None,
    return_lse: bool,
    arch: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of BSHD tensors on the current stream: a contiguous output and, if wanted, the LSE."""
    q, k, v = (x if tma_can_take(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32) if return_lse else None
    if kv_lengths is not None:
        kv_lengths = kv_lengths.contiguous()
    call = fill_call(
        q,
        k,
        v,
        out,
        scale=scale,
        kv_lengths=kv_lengths,
        lse=lse,
        arch=arch,
        num_sms=num_sms(q.device.index),
        device=q.device.index,
        stream=torch.cuda.current_stream(q.device).cuda_stream,
    )
    # Freed on return, but to this stream's pool: the launch comes before any reuse.
    workspace = attach_workspace(call, q.device)
    launch(call)
    del workspace
    return out, lse
