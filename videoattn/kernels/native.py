"""Torch tensors to the library's C call: what the Hopper and Blackwell kernel modules share."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection
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


def placement(x: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Address and batch, seq and head strides of a BSHD tensor that TMA can take in place, else None.

    It takes a contiguous last dimension, a start and strides that are multiples of 16 bytes, and no dimension
    repeated by stride 0.
    """
    batch, seq, head, last = x.stride()
    address = x.data_ptr()
    if last != 1 or address % 16 != 0:
        return None
    if (batch | seq | head) % 8 != 0 or batch <= 0 or seq <= 0 or head <= 0:
        strides = zip(x.shape, (batch, seq, head), strict=False)
        if any(size != 1 and (stride <= 0 or stride % 8 != 0) for size, stride in strides):
            return None
    return address, batch, seq, head


def placed(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """The tensor, or a contiguous copy where TMA can't take it, and its placement."""
    at = placement(x)
    if at is None:
        x = x.clone(memory_format=torch.contiguous_format)
        at = placement(x)
        assert at is not None
    return x, at


def describe(x: torch.Tensor) -> abi.Tensor:
    """Pointer and strides of a BSHD tensor."""
    return abi.Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def gate_placement(gate: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides by batch and seq of logits `(batch, seq, heads)` whose heads lie side by side."""
    return gate.data_ptr(), gate.stride(0), gate.stride(1)


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
    rows: int = 0,
    device: int = 0,
    stream: int = 0,
    workspace: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
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
        rows,
        0,
        stream,
        None if workspace is None else workspace.data_ptr(),
        abi.Gate() if gate is None else abi.Gate(*gate_placement(gate)),
    )


@cache
def workspace_bytes(
    batch: int, heads: int, q_len: int, kv_len: int, head_dim: int, arch: int, sms: int, splits: int = 0
) -> int:
    """Bytes of the workspace that splitting the keys takes; 0: they are not split."""
    call = abi.Call(ctypes.sizeof(abi.Call), arch, 0, abi.BF16, batch, heads, q_len, kv_len, head_dim)
    call.num_sms, call.splits = sms, splits
    return library.load().videoattn_workspace_bytes(ctypes.byref(call))


@cache
def num_sms(device: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# PACKED_CALL's bytes, with what does not change between calls of one kind as strings.
_AGAIN = struct.Struct("=56sQ24sQ24sQ24sQ24sQQ24sQQ24s")
_GATE = struct.Struct("=Qqq")
# Of q, k, v, key lengths and, if the call has some, the gates' logits.
Again = Callable[..., "tuple[torch.Tensor, torch.Tensor | None] | None"]


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    kv_lengths: torch.Tensor | None,
    return_lse: bool,
    arch: int,
    gate: torch.Tensor | None = None,
) -> Again | None:
    """`run` for tensors that have the shapes, strides, dtype and device of these; None where they are copied.

    It keeps no tensor and no address, and asks for the current stream anew. A call of it gives None, and has
    done nothing, where the start of a tensor is one that TMA can't take.
    """
    if placement(q) is None or placement(k) is None or placement(v) is None:
        return None
    if kv_lengths is not None and not kv_lengths.is_contiguous():
        return None
    if gate is not None and gate.stride(2) != 1:
        return None
    batch, q_len, heads, head_dim = q.shape
    kv_len, device = k.shape[1], q.get_device()
    sms = num_sms(device)
    count = workspace_bytes(batch, heads, q_len, kv_len, head_dim, arch, sms)
    out_strides = q_len * heads * head_dim, heads * head_dim, head_dim
    example = abi.PACKED_CALL.pack(
        *(abi.PACKED_CALL.size, arch, device, DTYPES[q.dtype], batch, heads, q_len, kv_len, head_dim),
        *(0, *q.stride()[:3], 0, *k.stride()[:3], 0, *v.stride()[:3], 0, *out_strides),
        *(0, 0, scale, 0, sms, 0, 0, 0, 0, 0),
        *(0, 0, 0),
    )
    unpacked = _AGAIN.unpack(example)
    head, _, q_strides, _, k_strides, _, v_strides, _, strides, _, _, options, _, _, no_gate = unpacked
    like_q = q.stride() == (*out_strides, 1)
    contiguous, empty_like, pack = torch.contiguous_format, torch.empty_like, _AGAIN.pack
    pack_gate = _GATE.pack
    lse_shape = (batch, heads, q_len)

    def again(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_lengths: torch.Tensor | None,
        gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & 15:
            return None
        # A memory format costs a fifth of the call.
        out = empty_like(q) if like_q else empty_like(q, memory_format=contiguous)
        lse = q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None
        # Freed on return, but to this stream's pool: the launch is queued before any reuse.
        workspace = q.new_empty(count, dtype=torch.uint8) if count else None
        launch(
            pack(
                head,
                q_at,
                q_strides,
                k_at,
                k_strides,
                v_at,
                v_strides,
                out.data_ptr(),
                strides,
                0 if lse is None else lse.data_ptr(),
                0 if kv_lengths is None else kv_lengths.data_ptr(),
                options,
                torch._C._cuda_getCurrentRawStream(device),
                0 if workspace is None else workspace.data_ptr(),
                no_gate if gate is None else pack_gate(*gate_placement(gate)),
            )
        )
        return out, lse

    return again


_entry: Callable[..., int] | None = None


def launch(call: abi.Call | bytes) -> None:
    """Run the call (a struct, or PACKED_CALL's bytes) on its stream.

    RuntimeError carries the library's message.
    """
    global _entry
    if _entry is None:
        _entry = library.load().videoattn_attention
    argument = call if isinstance(call, bytes) else ctypes.byref(call)
    if _entry(argument, None, 0) != abi.OK:
        # Ask again, for the reason. A refused call has launched nothing, and one whose second launch failed
        # does the same work over.
        text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
        if _entry(argument, text, abi.MESSAGE_BYTES) != abi.OK:
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
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of BSHD tensors on the current stream: a contiguous output and, if wanted, the LSE."""
    q, q_at = placed(q)
    k, k_at = placed(k)
    v, v_at = placed(v)
    batch, q_len, heads, head_dim = q.shape
    kv_len = k.shape[1]
    device: int = q.get_device()
    # Half the host cost of new_empty, which parses a size.
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, q_len), dtype=torch.float32) if return_lse else None
    if kv_lengths is not None:
        kv_lengths = kv_lengths.contiguous()
    if gate is not None and gate.stride(2) != 1:
        gate = gate.contiguous()
    sms = num_sms(device)
    count = workspace_bytes(batch, heads, q_len, kv_len, head_dim, arch, sms)
    # Freed on return, but to this stream's pool: the launch is queued before any reuse.
    workspace = q.new_empty(count, dtype=torch.uint8) if count else None
    # As fill_call, at a third of its cost: these lines are most of what the host spends on a call.
    call = abi.PACKED_CALL.pack(
        abi.PACKED_CALL.size,
        arch,
        device,
        DTYPES[q.dtype],
        batch,
        heads,
        q_len,
        kv_len,
        head_dim,
        *q_at,
        *k_at,
        *v_at,
        *(out.data_ptr(), q_len * heads * head_dim, heads * head_dim, head_dim),
        0 if lse is None else lse.data_ptr(),
        0 if kv_lengths is None else kv_lengths.data_ptr(),
        scale,
        0,
        sms,
        0,
        0,
        0,
        torch._C._cuda_getCurrentRawStream(device),
        0 if workspace is None else workspace.data_ptr(),
        *((0, 0, 0) if gate is None else gate_placement(gate)),
    )
    launch(call)
    return out, lse
