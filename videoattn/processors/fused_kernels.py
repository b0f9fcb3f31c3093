"""Triton kernels for the element-wise work of an LTX block, and the torch ops around them.

A program takes one row, a token's channels, or several rows in turn, so that every large tensor is read and
written once and per-channel vectors are read once a program. Every operation is computed in fp32 and its
result rounded, in registers, wherever diffusers stores one: without these roundings results are nearer to
fp32's, but farther from stock's. Imported only by `fused`, since it needs Triton.
"""

# A kernel's body is Triton's language and no Python that a type checker could follow.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# torch.library reads the launchers' annotations, so these stay objects: no `from __future__` here.
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

NO_ROPE, SPLIT, INTERLEAVED = 0, 1, 2
# From this many rows on a program takes several, which saves reading the per-channel vectors again; below it
# more programs keep more of the device busy.
MANY_ROWS = 8192
ROWS = 4
# Elements a thread holds of one tensor.
PER_THREAD = 16
# TRITON_INTERPRET=1 when Triton was imported: kernels run on the CPU, by numpy.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(values, a, b, c):
    """fp32 values as torch stores what it computes of tensors at these pointers: in the dtype of all three,
    and where their dtypes differ in fp32."""
    if a.dtype == b.dtype and a.dtype == c.dtype:
        values = values.to(a.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _load_pairs(row, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr):
    """The two elements of every pair in a row, fp32: neighbours, or halves of a head HALF apart."""
    if ROPE == 2:
        column = tl.arange(0, 2 * BLOCK)
        values = tl.load(row + column, mask=column < 2 * PAIRS, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, (BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)
        column = pair // HALF * (2 * HALF) + pair % HALF
        first = tl.load(row + column, mask=pair < PAIRS, other=0.0).to(tl.float32)
        second = tl.load(row + column + HALF, mask=pair < PAIRS, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    row, first, second, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr
):
    dtype = row.dtype.element_ty
    if ROPE == 2:
        column = tl.arange(0, 2 * BLOCK)
        values = tl.reshape(tl.join(first, second), (2 * BLOCK,))
        tl.store(row + column, values.to(dtype), mask=column < 2 * PAIRS)
    else:
        pair = tl.arange(0, BLOCK)
        column = pair // HALF * (2 * HALF) + pair % HALF
        tl.store(row + column, first.to(dtype), mask=pair < PAIRS)
        tl.store(row + column + HALF, second.to(dtype), mask=pair < PAIRS)


@triton.jit
def _load_angles(
    table, head_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr
):
    """cos or sin of one token for the first and for the second element of every pair, fp32."""
    if ROPE == 2:
        return _load_pairs(table, PAIRS, BLOCK, HALF, ROPE)
    pair = tl.arange(0, BLOCK)
    column = pair // HALF * head_stride + pair % HALF
    values = tl.load(table + column, mask=pair < PAIRS, other=0.0).to(tl.float32)
    return values, values


@triton.jit
def _norm_rotate_row(
    source,
    target,
    first_weight,
    second_weight,
    cos1,
    cos2,
    sin1,
    sin2,
    eps,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
):
    first, second = _load_pairs(source, PAIRS, BLOCK, HALF, ROPE)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / (2 * PAIRS) + eps)
    first = _rounded(first * scale * first_weight, source, source, source)
    second = _rounded(second * scale * second_weight, source, source, source)
    if ROPE != 0:
        first, second = first * cos1 - second * sin1, second * cos2 + first * sin2
    _store_pairs(target, first, second, PAIRS, BLOCK, HALF, ROPE)


@triton.jit
def _norm_rotate_rows(
    x,
    x_out,
    x_weight,
    x_eps,
    y,
    y_out,
    y_weight,
    y_eps,
    cos,
    sin,
    x_row_stride,
    y_row_stride,
    angle_head_stride,
    angle_row_stride,
    count,
    AFFINE: tl.constexpr,
    TWO: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
):
    """`count` rows of x, and of y where both share their angles, from where the pointers are."""
    if AFFINE:
        x_weight1, x_weight2 = _load_pairs(x_weight, PAIRS, BLOCK, HALF, ROPE)
        y_weight1, y_weight2 = _load_pairs(y_weight, PAIRS, BLOCK, HALF, ROPE)
    else:
        x_weight1, x_weight2, y_weight1, y_weight2 = 1.0, 1.0, 1.0, 1.0
    for row in range(0, count):
        if ROPE != 0:
            angles = row * angle_row_stride
            cos1, cos2 = _load_angles(cos + angles, angle_head_stride, PAIRS, BLOCK, HALF, ROPE)
            sin1, sin2 = _load_angles(sin + angles, angle_head_stride, PAIRS, BLOCK, HALF, ROPE)
        else:
            cos1, cos2, sin1, sin2 = 1.0, 1.0, 0.0, 0.0
        out = row * (2 * PAIRS)
        _norm_rotate_row(
            x + row * x_row_stride,
            x_out + out,
            x_weight1,
            x_weight2,
            cos1,
            cos2,
            sin1,
            sin2,
            x_eps,
            PAIRS,
            BLOCK,
            HALF,
            ROPE,
        )
        if TWO:
            _norm_rotate_row(
                y + row * y_row_stride,
                y_out + out,
                y_weight1,
                y_weight2,
                cos1,
                cos2,
                sin1,
                sin2,
                y_eps,
                PAIRS,
                BLOCK,
                HALF,
                ROPE,
            )


@triton.jit
def _norm_rotate_kernel(
    x,
    x_out,
    x_weight,
    x_batch_stride,
    x_row_stride,
    x_eps,
    y,
    y_out,
    y_weight,
    y_batch_stride,
    y_row_stride,
    y_eps,
    cos,
    sin,
    angle_batch_stride,
    angle_head_stride,
    angle_row_stride,
    y_cos,
    y_sin,
    y_angle_batch_stride,
    y_angle_head_stride,
    y_angle_row_stride,
    length,
    y_length,
    AFFINE: tl.constexpr,
    TWO: tl.constexpr,
    APART: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """RMSNorm over all heads and rotary embedding of x, and of y: in the same programs where the two share
    their angles (TWO), in programs behind x's where lengths and angles are y's own (APART)."""
    batch = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    x_programs = tl.cdiv(length, ROWS)
    if (not APART) or program < x_programs:
        row = program.to(tl.int64) * ROWS
        out = (batch * length + row) * (2 * PAIRS)
        angles = batch * angle_batch_stride + row * angle_row_stride
        _norm_rotate_rows(
            x + batch * x_batch_stride + row * x_row_stride,
            x_out + out,
            x_weight,
            x_eps,
            y + batch * y_batch_stride + row * y_row_stride,
            y_out + out,
            y_weight,
            y_eps,
            cos + angles,
            sin + angles,
            x_row_stride,
            y_row_stride,
            angle_head_stride,
            angle_row_stride,
            tl.minimum(ROWS, length - program * ROWS),
            AFFINE,
            TWO,
            PAIRS,
            BLOCK,
            HALF,
            ROPE,
        )
    else:
        y_row = (program - x_programs).to(tl.int64) * ROWS
        y_angles = batch * y_angle_batch_stride + y_row * y_angle_row_stride
        _norm_rotate_rows(
            y + batch * y_batch_stride + y_row * y_row_stride,
            y_out + (batch * y_length + y_row) * (2 * PAIRS),
            y_weight,
            y_eps,
            y,
            y_out,
            y_weight,
            y_eps,
            y_cos + y_angles,
            y_sin + y_angles,
            y_row_stride,
            y_row_stride,
            y_angle_head_stride,
            y_angle_row_stride,
            tl.minimum(ROWS, y_length - (program - x_programs) * ROWS),
            AFFINE,
            False,
            PAIRS,
            BLOCK,
            HALF,
            ROPE,
        )


@triton.jit
def _gate_kernel(
    x,
    logits,
    out,
    x_batch_stride,
    x_row_stride,
    logits_batch_stride,
    logits_row_stride,
    length,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Every head of a token times twice the sigmoid of its logit."""
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, dim = tl.arange(0, HEAD_BLOCK), tl.arange(0, DIM_BLOCK)
    at_logits = batch * logits_batch_stride + row * logits_row_stride
    gates = tl.sigmoid(tl.load(logits + at_logits + head, mask=head < HEADS, other=0.0).to(tl.float32))
    gates = 2.0 * _rounded(gates, logits, logits, logits)
    column = head[:, None] * HEAD_DIM + dim[None, :]
    mask = (head[:, None] < HEADS) & (dim[None, :] < HEAD_DIM)
    values = tl.load(x + batch * x_batch_stride + row * x_row_stride + column, mask=mask, other=0.0)
    gated = values.to(tl.float32) * gates[:, None]
    tl.store(out + (batch * length + row) * (HEADS * HEAD_DIM) + column, gated.to(out.dtype.element_ty), mask)


def _rows(batch: int, length: int) -> int:
    return ROWS if batch * length >= MANY_ROWS else 1


def _next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _warps(block: int) -> int:
    return max(1, min(16, block // (32 * PER_THREAD)))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if its channels lie side by side, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: torch.Tensor) -> tuple[int, int, bool]:
    """Batch and row stride of `(batch or 1, length or 1, channels)`, 0 where one entry serves all; and
    whether rows differ."""
    batch = x.stride(0) if x.shape[0] > 1 else 0
    return batch, x.stride(1) if x.shape[1] > 1 else 0, x.shape[1] > 1


def _angles(
    cos: torch.Tensor | None, sin: torch.Tensor | None, absent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """cos, sin and their strides by batch, head and row; `absent` in their place where nothing turns."""
    if cos is None or sin is None:
        return absent, absent, 0, 0, 0
    first = cos.stride(0) if cos.shape[0] > 1 else 0
    if cos.dim() == 4:
        return cos, sin, first, cos.stride(1), cos.stride(2)
    return cos, sin, first, 0, cos.stride(1)


def _norm_rotate(
    x: torch.Tensor,
    y: torch.Tensor | None,
    x_weight: torch.Tensor | None,
    y_weight: torch.Tensor | None,
    x_eps: float,
    y_eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    y_cos: torch.Tensor | None = None,
    y_sin: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    x = _dense_rows(x)
    y = None if y is None else _dense_rows(y)
    batch, length, channels = x.shape
    x_out = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    outs = [x_out]
    y_length = 0
    if y is not None:
        y_length = y.shape[1]
        outs.append(torch.empty((batch, y_length, channels), dtype=y.dtype, device=y.device))
    pairs = channels // 2
    rope, half = NO_ROPE, pairs
    if cos is not None:
        rope, half = (SPLIT, cos.shape[3]) if cos.dim() == 4 else (INTERLEAVED, 1)
    apart = y is not None and (y_length != length or y_cos is not None)
    block = _next_power_of_2(pairs)
    rows = _rows(batch, length)
    programs = (length + rows - 1) // rows
    if apart:
        programs += (y_length + rows - 1) // rows
    # A null pointer cannot be passed, so an absent tensor's place is taken by an input. An output twice would
    # keep torch.compile from writing it in place.
    other, other_out = (x, x) if y is None else (y, outs[1])
    own_weight = x if x_weight is None else x_weight
    wrap_triton(_norm_rotate_kernel)[(programs, batch)](
        x,
        x_out,
        own_weight,
        x.stride(0),
        x.stride(1),
        x_eps,
        other,
        other_out,
        own_weight if y_weight is None else y_weight,
        other.stride(0),
        other.stride(1),
        y_eps,
        *_angles(cos, sin, x),
        *_angles(y_cos, y_sin, x),
        length,
        y_length,
        AFFINE=x_weight is not None,
        TWO=y is not None and not apart,
        APART=apart,
        PAIRS=pairs,
        BLOCK=block,
        HALF=half,
        ROPE=rope,
        ROWS=rows,
        num_warps=_warps(2 * block),
    )
    return outs


def _gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    x, logits = _dense_rows(x), _dense_rows(logits)
    batch, length, channels = x.shape
    heads = logits.shape[2]
    out = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    head_block, dim_block = _next_power_of_2(heads), _next_power_of_2(channels // heads)
    wrap_triton(_gate_kernel)[(length, batch)](
        x,
        logits,
        out,
        x.stride(0),
        x.stride(1),
        logits.stride(0),
        logits.stride(1),
        length,
        HEADS=heads,
        HEAD_BLOCK=head_block,
        HEAD_DIM=channels // heads,
        DIM_BLOCK=dim_block,
        num_warps=_warps(head_block * dim_block),
    )
    return out


def _fake_norm_rotate(x, y, x_weight, y_weight, x_eps, y_eps, cos, sin, y_cos=None, y_sin=None):
    return [x.new_empty(x.shape)] + ([] if y is None else [y.new_empty(y.shape)])


def _fake_gate(x, logits):
    return x.new_empty(x.shape)


def _op(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The torch op of a launcher: transparent to torch.compile on a GPU, opaque under the interpreter, whose
    kernels cannot be traced."""
    if not INTERPRETED:
        return torch.library.triton_op(f"videoattn::{name}", function, mutates_args=())
    op = torch.library.custom_op(f"videoattn::{name}", function, mutates_args=())
    op.register_fake(fake)
    return op


norm_rotate = _op("norm_rotate", _norm_rotate, _fake_norm_rotate)
gate = _op("gate", _gate, _fake_gate)
