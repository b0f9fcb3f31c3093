"""Triton kernels for a residual with the norm and modulation that follow it, of one or two tensors a launch.

As in `fused_kernels`: a program takes one row or several in turn, and rounds wherever diffusers does.
Imported only by `fused`, since it needs Triton.
"""

# A kernel's body is Triton's language and no Python that a type checker could follow.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# torch.library reads the launchers' annotations, so these stay objects: no `from __future__` here.
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from videoattn.processors.fused_kernels import (
    _dense_rows,
    _next_power_of_2,
    _op,
    _rounded,
    _rows,
    _strides,
    _warps,
)


@triton.jit
def _parameter(table, embedding, column, mask):
    """A modulation parameter of every channel: the layer's own plus the timestep's."""
    own = tl.load(table + column, mask=mask, other=0.0).to(tl.float32)
    value = own + tl.load(embedding + column, mask=mask, other=0.0).to(tl.float32)
    return _rounded(value, table, embedding, embedding)


@triton.jit
def _factor(table, embedding, column, mask):
    """What a modulation multiplies every channel with: 1 plus a parameter."""
    return _rounded(1.0 + _parameter(table, embedding, column, mask), table, embedding, embedding)


@triton.jit
def _product(values, factors, a, b, c):
    """Rounded before anything is added to it: a plain product of two bf16 the compiler would turn into a bf16
    instruction, and fuse that with the sum behind it. It does not see one in a multiply-add of fp32."""
    return _rounded(tl.fma(values, factors, tl.zeros_like(values)), a, b, c)


@triton.jit
def _residual_norm_rows(
    x,
    branch,
    gate_table,
    gate,
    weight,
    scale_table,
    scale,
    shift_table,
    shift,
    scale2_table,
    scale2,
    shift2_table,
    shift2,
    x_out,
    out,
    out2,
    x_batch_stride,
    x_row_stride,
    branch_batch_stride,
    branch_row_stride,
    gate_batch_stride,
    gate_row_stride,
    scale_batch_stride,
    scale_row_stride,
    eps,
    length,
    program,
    BRANCH: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    AFFINE: tl.constexpr,
    MODULATIONS: tl.constexpr,
    GATE_PER_ROW: tl.constexpr,
    SCALE_PER_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x + gate · branch, its RMSNorm, and that times (1 + scale) plus shift, for one or two pairs."""
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < CHANNELS
    gate += batch * gate_batch_stride
    scale += batch * scale_batch_stride
    shift += batch * scale_batch_stride
    scale2 += batch * scale_batch_stride
    shift2 += batch * scale_batch_stride
    gates, factors, shifts, factors2, shifts2, weights = 1.0, 1.0, 0.0, 1.0, 0.0, 1.0
    if GATED and not GATE_PER_ROW:
        gates = _parameter(gate_table, gate, column, mask)
    if AFFINE:
        weights = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if MODULATIONS > 0 and not SCALE_PER_ROW:
        factors = _factor(scale_table, scale, column, mask)
        shifts = _parameter(shift_table, shift, column, mask)
    if MODULATIONS > 1 and not SCALE_PER_ROW:
        factors2 = _factor(scale2_table, scale2, column, mask)
        shifts2 = _parameter(shift2_table, shift2, column, mask)
    begin = program.to(tl.int64) * ROWS
    for number in range(0, tl.minimum(ROWS, length - begin)):
        row = begin + number
        at = (batch * length + row) * CHANNELS + column
        values = tl.load(x + batch * x_batch_stride + row * x_row_stride + column, mask=mask, other=0.0)
        values = values.to(tl.float32)
        if BRANCH:
            at_branch = batch * branch_batch_stride + row * branch_row_stride
            added = tl.load(branch + at_branch + column, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                row_gates = gates
                if GATE_PER_ROW:
                    row_gates = _parameter(gate_table, gate + row * gate_row_stride, column, mask)
                added = _product(added, row_gates, branch, gate_table, gate)
            values = _rounded(values + added, x_out, x_out, x_out)
            tl.store(x_out + at, values.to(x_out.dtype.element_ty), mask)
        if NORM:
            mean = tl.sum(tl.where(mask, values * values, 0.0), axis=0) / CHANNELS
            # To the weight's dtype before the product with it, as diffusers' RMSNorm does; without one, x is
            # in its place.
            values = _rounded(values * tl.rsqrt(mean + eps), weight, weight, weight)
            if AFFINE:
                values = _rounded(values * weights, weight, weight, weight)
        if MODULATIONS > 0:
            row_factors, row_shifts = factors, shifts
            if SCALE_PER_ROW:
                row_factors = _factor(scale_table, scale + row * scale_row_stride, column, mask)
                row_shifts = _parameter(shift_table, shift + row * scale_row_stride, column, mask)
            result = _product(values, row_factors, weight, scale_table, scale) + row_shifts
            tl.store(out + at, result.to(out.dtype.element_ty), mask)
        elif NORM:
            tl.store(out + at, values.to(out.dtype.element_ty), mask)
        if MODULATIONS > 1:
            row_factors, row_shifts = factors2, shifts2
            if SCALE_PER_ROW:
                row_factors = _factor(scale2_table, scale2 + row * scale_row_stride, column, mask)
                row_shifts = _parameter(shift2_table, shift2 + row * scale_row_stride, column, mask)
            result = _product(values, row_factors, weight, scale2_table, scale2) + row_shifts
            tl.store(out2 + at, result.to(out2.dtype.element_ty), mask)


@triton.jit
def _residual_norm_kernel(
    x,
    branch,
    gate_table,
    gate,
    weight,
    scale_table,
    scale,
    shift_table,
    shift,
    scale2_table,
    scale2,
    shift2_table,
    shift2,
    x_out,
    out,
    out2,
    x_batch_stride,
    x_row_stride,
    branch_batch_stride,
    branch_row_stride,
    gate_batch_stride,
    gate_row_stride,
    scale_batch_stride,
    scale_row_stride,
    eps,
    length,
    BRANCH: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    AFFINE: tl.constexpr,
    MODULATIONS: tl.constexpr,
    GATE_PER_ROW: tl.constexpr,
    SCALE_PER_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    _residual_norm_rows(
        x,
        branch,
        gate_table,
        gate,
        weight,
        scale_table,
        scale,
        shift_table,
        shift,
        scale2_table,
        scale2,
        shift2_table,
        shift2,
        x_out,
        out,
        out2,
        x_batch_stride,
        x_row_stride,
        branch_batch_stride,
        branch_row_stride,
        gate_batch_stride,
        gate_row_stride,
        scale_batch_stride,
        scale_row_stride,
        eps,
        length,
        tl.program_id(0),
        BRANCH,
        GATED,
        NORM,
        AFFINE,
        MODULATIONS,
        GATE_PER_ROW,
        SCALE_PER_ROW,
        CHANNELS,
        BLOCK,
        ROWS,
    )


@triton.jit
def _residual_norm_pair_kernel(
    a_x,
    a_branch,
    a_gate_table,
    a_gate,
    a_weight,
    a_scale_table,
    a_scale,
    a_shift_table,
    a_shift,
    a_scale2_table,
    a_scale2,
    a_shift2_table,
    a_shift2,
    a_x_out,
    a_out,
    a_out2,
    a_x_batch_stride,
    a_x_row_stride,
    a_branch_batch_stride,
    a_branch_row_stride,
    a_gate_batch_stride,
    a_gate_row_stride,
    a_scale_batch_stride,
    a_scale_row_stride,
    a_eps,
    a_length,
    b_x,
    b_branch,
    b_gate_table,
    b_gate,
    b_weight,
    b_scale_table,
    b_scale,
    b_shift_table,
    b_shift,
    b_scale2_table,
    b_scale2,
    b_shift2_table,
    b_shift2,
    b_x_out,
    b_out,
    b_out2,
    b_x_batch_stride,
    b_x_row_stride,
    b_branch_batch_stride,
    b_branch_row_stride,
    b_gate_batch_stride,
    b_gate_row_stride,
    b_scale_batch_stride,
    b_scale_row_stride,
    b_eps,
    b_length,
    A_BRANCH: tl.constexpr,
    A_GATED: tl.constexpr,
    A_NORM: tl.constexpr,
    A_AFFINE: tl.constexpr,
    A_MODULATIONS: tl.constexpr,
    A_GATE_PER_ROW: tl.constexpr,
    A_SCALE_PER_ROW: tl.constexpr,
    A_CHANNELS: tl.constexpr,
    A_BLOCK: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_BRANCH: tl.constexpr,
    B_GATED: tl.constexpr,
    B_NORM: tl.constexpr,
    B_AFFINE: tl.constexpr,
    B_MODULATIONS: tl.constexpr,
    B_GATE_PER_ROW: tl.constexpr,
    B_SCALE_PER_ROW: tl.constexpr,
    B_CHANNELS: tl.constexpr,
    B_BLOCK: tl.constexpr,
    B_ROWS: tl.constexpr,
):
    """Two of them side by side: the programs of b behind those of a."""
    program = tl.program_id(0)
    a_programs = tl.cdiv(a_length, A_ROWS)
    if program < a_programs:
        _residual_norm_rows(
            a_x,
            a_branch,
            a_gate_table,
            a_gate,
            a_weight,
            a_scale_table,
            a_scale,
            a_shift_table,
            a_shift,
            a_scale2_table,
            a_scale2,
            a_shift2_table,
            a_shift2,
            a_x_out,
            a_out,
            a_out2,
            a_x_batch_stride,
            a_x_row_stride,
            a_branch_batch_stride,
            a_branch_row_stride,
            a_gate_batch_stride,
            a_gate_row_stride,
            a_scale_batch_stride,
            a_scale_row_stride,
            a_eps,
            a_length,
            program,
            A_BRANCH,
            A_GATED,
            A_NORM,
            A_AFFINE,
            A_MODULATIONS,
            A_GATE_PER_ROW,
            A_SCALE_PER_ROW,
            A_CHANNELS,
            A_BLOCK,
            A_ROWS,
        )
    else:
        _residual_norm_rows(
            b_x,
            b_branch,
            b_gate_table,
            b_gate,
            b_weight,
            b_scale_table,
            b_scale,
            b_shift_table,
            b_shift,
            b_scale2_table,
            b_scale2,
            b_shift2_table,
            b_shift2,
            b_x_out,
            b_out,
            b_out2,
            b_x_batch_stride,
            b_x_row_stride,
            b_branch_batch_stride,
            b_branch_row_stride,
            b_gate_batch_stride,
            b_gate_row_stride,
            b_scale_batch_stride,
            b_scale_row_stride,
            b_eps,
            b_length,
            program - a_programs,
            B_BRANCH,
            B_GATED,
            B_NORM,
            B_AFFINE,
            B_MODULATIONS,
            B_GATE_PER_ROW,
            B_SCALE_PER_ROW,
            B_CHANNELS,
            B_BLOCK,
            B_ROWS,
        )


def results_of(norm: bool, modulation: Sequence[torch.Tensor]) -> int:
    """How many tensors come out besides the sum: one a modulation, without any the normed one if there is."""
    return max(int(norm), len(modulation) // 4)


def _prepare(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: list[torch.Tensor],
    norm: bool,
    weight: torch.Tensor | None,
    eps: float,
    modulation: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[Any], dict[str, Any]]:
    """Fresh results, and the kernel's arguments and constants."""
    x = _dense_rows(x)
    branch = None if branch is None else _dense_rows(branch)
    batch, length, channels = x.shape
    results = results_of(norm, modulation)
    outs = [
        torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
        for _ in range((branch is not None) + results)
    ]
    gate_strides = _strides(gate[1]) if gate else (0, 0, False)
    scale_strides = _strides(modulation[1]) if modulation else (0, 0, False)
    added = x if branch is None else branch
    # A null pointer cannot be passed, so an absent tensor's place is taken by an input.
    arguments = [
        x,
        added,
        *(gate or [x, x]),
        x if weight is None else weight,
        *modulation,
        *[x] * (8 - len(modulation)),
        x if branch is None else outs[0],
        x if results == 0 else outs[-results],
        x if results < 2 else outs[-1],
        x.stride(0),
        x.stride(1),
        added.stride(0),
        added.stride(1),
        gate_strides[0],
        gate_strides[1],
        scale_strides[0],
        scale_strides[1],
        eps,
        length,
    ]
    constants = {
        "BRANCH": branch is not None,
        "GATED": len(gate) > 0,
        "NORM": norm,
        "AFFINE": weight is not None,
        "MODULATIONS": len(modulation) // 4,
        "GATE_PER_ROW": gate_strides[2],
        "SCALE_PER_ROW": scale_strides[2],
        "CHANNELS": channels,
        "BLOCK": _next_power_of_2(channels),
        "ROWS": _rows(batch, length),
    }
    return outs, arguments, constants


def _residual_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: list[torch.Tensor],
    norm: bool,
    weight: torch.Tensor | None,
    eps: float,
    modulation: list[torch.Tensor],
) -> list[torch.Tensor]:
    outs, arguments, constants = _prepare(x, branch, gate, norm, weight, eps, modulation)
    rows, block = constants["ROWS"], constants["BLOCK"]
    grid = ((x.shape[1] + rows - 1) // rows, x.shape[0])
    wrap_triton(_residual_norm_kernel)[grid](*arguments, **constants, num_warps=_warps(block))
    return outs


def _residual_norm_pair(
    a: torch.Tensor,
    a_branch: torch.Tensor | None,
    a_gate: list[torch.Tensor],
    a_norm: bool,
    a_weight: torch.Tensor | None,
    a_eps: float,
    a_modulation: list[torch.Tensor],
    b: torch.Tensor,
    b_branch: torch.Tensor | None,
    b_gate: list[torch.Tensor],
    b_norm: bool,
    b_weight: torch.Tensor | None,
    b_eps: float,
    b_modulation: list[torch.Tensor],
) -> list[torch.Tensor]:
    first = _prepare(a, a_branch, a_gate, a_norm, a_weight, a_eps, a_modulation)
    second = _prepare(b, b_branch, b_gate, b_norm, b_weight, b_eps, b_modulation)
    constants, programs = {}, 0
    for letter, x, own in (("A", a, first[2]), ("B", b, second[2])):
        constants |= {f"{letter}_{name}": value for name, value in own.items()}
        programs += (x.shape[1] + own["ROWS"] - 1) // own["ROWS"]
    block = max(first[2]["BLOCK"], second[2]["BLOCK"])
    wrap_triton(_residual_norm_pair_kernel)[(programs, a.shape[0])](
        *first[1], *second[1], **constants, num_warps=_warps(block)
    )
    return first[0] + second[0]


def _fake_residual_norm(x, branch, gate, norm, weight, eps, modulation):
    return [x.new_empty(x.shape) for _ in range((branch is not None) + results_of(norm, modulation))]


def _fake_residual_norm_pair(*arguments):
    return _fake_residual_norm(*arguments[:7]) + _fake_residual_norm(*arguments[7:])


residual_norm = _op("residual_norm", _residual_norm, _fake_residual_norm)
residual_norm_pair = _op("residual_norm_pair", _residual_norm_pair, _fake_residual_norm_pair)
