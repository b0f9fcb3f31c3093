"""The planner: what it computes, what it refuses, and that ctypes and C agree about its structs."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from videoattn.kernels import abi, library, native, plan

ARCH, SMS = 90, 132
MAX_SMEM = 232448


def make_call(q, k, v, out=None, **options):
    options = {"arch": ARCH, "num_sms": SMS, "scale": 0.125, **options}
    return native.fill_call(q, k, v, torch.empty_like(q) if out is None else out, **options)


def tensors(batch=2, heads=3, q_len=200, kv_len=300, head_dim=128, dtype=torch.bfloat16):
    q = torch.randn(batch, q_len, heads, head_dim).to(dtype)
    k = torch.randn(batch, kv_len, heads, head_dim).to(dtype)
    return q, k, torch.randn_like(k)


def read_box(tensor_map, coordinates, storage_address):
    """One TMA box as 16-bit integers, zero outside the tensor: the copy engine in plain Python."""
    shape = [tensor_map.box[i] for i in range(tensor_map.rank)]
    flat = []
    for index in range(math.prod(shape)):
        address, inside, rest = tensor_map.address, True, index
        for i, size in enumerate(shape):
            position = coordinates[i] + rest % size
            rest //= size
            inside &= 0 <= position < tensor_map.dims[i]
            address += position * (2 if i == 0 else tensor_map.byte_strides[i - 1])
        flat.append(ctypes.c_int16.from_address(address).value if inside else 0)
    assert tensor_map.address >= storage_address
    return torch.tensor(flat, dtype=torch.int16).view(shape[::-1])


@st.composite
def strided(draw, batch, seq, heads, head_dim):
    """A BSHD view of a larger buffer: any order of the outer dimensions, padded by multiples of 8."""
    sizes = {0: batch, 1: seq, 2: heads}
    order = draw(st.permutations([0, 1, 2]))
    strides, step = {}, head_dim
    for dimension in order:
        step += 8 * draw(st.integers(0, 3))
        strides[dimension] = step
        step *= sizes[dimension]
    offset = 8 * draw(st.integers(0, 4))
    storage = torch.randint(-(2**15), 2**15, (step + offset,), dtype=torch.int16)
    shape = (batch, seq, heads, head_dim)
    return storage.as_strided(shape, (strides[0], strides[1], strides[2], 1), offset)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), head_dim=st.sampled_from([64, 128]))
def test_boxes_hold_the_rows_they_name(data, head_dim):
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    q_len, kv_len = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 300))
    views = [data.draw(strided(batch, length, heads, head_dim)) for length in (q_len, kv_len, kv_len, q_len)]
    q, k, v, out = (view.view(torch.bfloat16) for view in views)
    made = plan.plan(make_call(q, k, v, out))
    assert made.num_maps == 4
    for index, view in enumerate(views):
        tensor_map = made.maps[index]
        rows = tensor_map.box[1]
        b, h = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, heads - 1))
        row = data.draw(st.integers(0, (view.shape[1] - 1) // rows)) * rows
        got = read_box(tensor_map, (0, row, 0, h, b), view.data_ptr())
        wanted = torch.zeros(rows, head_dim, dtype=torch.int16)
        held = view[b, row : row + rows, h]
        wanted[: len(held)] = held
        blocks = wanted.view(rows, head_dim // 64, 64).transpose(0, 1)
        assert torch.equal(got, blocks[None, None])


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 9),
    heads=st.integers(1, 64),
    q_len=st.integers(1, 100_000),
    kv_len=st.integers(1, 100_000),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    grid=st.integers(0, 300),
)
def test_plans_obey_the_hardware(batch, heads, q_len, kv_len, head_dim, dtype, grid):
    q = torch.empty(batch, q_len, heads, head_dim, dtype=dtype, device="meta")
    k = torch.empty(batch, kv_len, heads, head_dim, dtype=dtype, device="meta")
    call = make_call(q, k, k, q, grid=grid)
    for tensor in (call.q, call.k, call.v, call.out):
        tensor.data = 1 << 20
    made = plan.plan(call)
    name = made.kernel.decode()
    tile_keys = made.maps[1].box[1]
    type_name = "bf16" if dtype == torch.bfloat16 else "fp16"
    short = "_short" if kv_len <= (256 if head_dim == 128 else 288) else ""
    assert name == f"videoattn_hopper_d{head_dim}_n{tile_keys}{short}_{type_name}"
    tile_rows = (made.block[0] // 128 - 1) * 64
    tiles = batch * heads * math.ceil(q_len / tile_rows)
    assert list(made.grid) == [min(grid or SMS, tiles), 1, 1]
    assert made.dynamic_smem <= MAX_SMEM
    assert made.block[0] <= 1024
    for tensor_map in made.maps[: made.num_maps]:
        assert tensor_map.address % 16 == 0
        assert all(1 <= size <= 2**32 for size in tensor_map.dims[: tensor_map.rank])
        assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in tensor_map.byte_strides)
        assert all(1 <= size <= 256 for size in tensor_map.box)
        assert tensor_map.box[0] * 2 <= 128
        assert tensor_map.swizzle == 3
        assert tensor_map.dtype == (9 if dtype == torch.bfloat16 else 6)
    end = max(p.offset + p.bytes for p in made.params[: made.num_params] if p.tensor_map < 0)
    assert end == made.args_bytes <= len(made.args)


def test_arguments_carry_the_call():
    q, k, v = tensors()
    lse = torch.empty(2, 3, 200)
    lengths = torch.tensor([5, 300], dtype=torch.int32)
    made = plan.plan(make_call(q, k, v, lse=lse, kv_lengths=lengths, scale=0.25))
    fields = arguments(made)
    assert fields[:3] == (lse.data_ptr(), lengths.data_ptr(), 0)
    batch, heads, _, _, q_len, kv_len, q_tiles, _, _, splits, _, _, tiles, share, more, scale_log2 = fields[
        3:
    ]
    assert (batch, heads, q_len, kv_len, q_tiles, splits, tiles) == (2, 3, 200, 300, 2, 1, 12)
    assert (share, more) == (12 // made.grid[0], 12 % made.grid[0])
    assert scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)


def arguments(made):
    """The first fields of the Hopper kernel's Args; a Divisor is three of them."""
    (blob,) = [p for p in made.params[: made.num_params] if p.tensor_map < 0]
    return struct.unpack_from("<QQQi iIi ii iIi iIi iii f", bytes(made.args), blob.offset)


@settings(max_examples=200, deadline=None)
@given(heads=st.integers(1, 2_147_000_000), quotient=st.integers(0, 2**31 - 1), rest=st.integers(-2, 2))
def test_divisors_divide(heads, quotient, rest):
    """By the kernel's formula, at the edges between quotients, for everything below 2^31."""
    value, multiplier, shift = arguments(plan.plan(meta_call(1, heads, 1, 1, grid=1)))[4:7]
    assert value == heads
    for n in (quotient, quotient // heads * heads + rest, 2**31 - 1):
        if 0 <= n < 2**31:
            total = (n * multiplier >> 32) + n
            assert total < 2**32
            assert total >> shift == n // heads


def meta_call(batch, heads, q_len, kv_len, head_dim=64, **options):
    """A call about tensors that nobody reads."""
    q = torch.empty(batch, q_len, heads, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, kv_len, heads, head_dim, dtype=torch.bfloat16, device="meta")
    call = make_call(q, k, k, q, **options)
    for tensor in (call.q, call.k, call.v, call.out):
        tensor.data = 1 << 20
    return call


def test_short_queries_split_their_keys():
    call = meta_call(1, 32, 259, 12288)
    assert plan.workspace_bytes(call) > 0
    assert plan.plan(call).grid[0] == 96, "without a workspace nothing is split"
    assert plan.plan_merge(call) is None
    call.workspace = 1 << 30
    made, merge = plan.plan(call), plan.plan_merge(call)
    assert merge is not None
    assert made.grid[0] > 100, "the device is filled"
    assert merge.kernel == b"videoattn_merge_d64_bf16"
    assert merge.num_maps == 0
    rows = 32 * 259
    assert (merge.grid[0] - 1) * merge.block[0] < rows * 8 <= merge.grid[0] * merge.block[0]
    splits = plan.workspace_bytes(call) // (rows * 65 * 4)
    assert plan.workspace_bytes(call) == splits * rows * 65 * 4


def test_few_tiles_are_spread_over_the_device():
    """Tiles have as many rows as fill it best; where a batch fills it anyway, the most."""
    audio = {batch: plan.plan(meta_call(batch, 32, 259, 1024)) for batch in (1, 2, 3, 8)}
    assert {batch: made.block[0] for batch, made in audio.items()} == {1: 384, 2: 512, 3: 512, 8: 512}
    assert {batch: made.grid[0] for batch, made in audio.items()} == {1: 96, 2: 128, 3: 132, 8: 132}
    assert plan.workspace_bytes(meta_call(1, 32, 259, 1024)) == 0
    assert plan.plan(meta_call(1, 32, 64, 1024)).block[0] == 384
    assert plan.plan(meta_call(1, 32, 12288, 259)).block[0] == 512
    assert plan.plan(meta_call(1, 32, 12288, 12288)).block[0] == 512
    assert plan.plan(meta_call(1, 1, 64, 64, head_dim=128)).block[0] == 384, "it has no other tile"


def test_gates_of_short_keys_take_the_kernel_that_has_them():
    for head_dim, kernel in ((128, "d128_n128_bf16"), (64, "d64_n96_short_bf16")):
        call = meta_call(1, 2, 500, 250 if head_dim == 128 else 288, head_dim)
        assert plan.plan(call).kernel.decode().endswith("_short_bf16")
        call.gate.data, call.gate.stride_batch, call.gate.stride_seq = 1 << 20, 1000, 2
        assert plan.plan(call).kernel.decode() == f"videoattn_hopper_{kernel}"


@settings(max_examples=100, deadline=None)
@given(
    heads=st.integers(1, 40),
    q_len=st.integers(1, 3000),
    kv_len=st.integers(1, 3000),
    head_dim=st.sampled_from((64, 128)),
    splits=st.integers(0, 5),
)
def test_gates_need_no_other_workspace(heads, q_len, kv_len, head_dim, splits):
    """It is asked for without saying whether gates will come."""
    call = meta_call(1, heads, q_len, kv_len, head_dim, splits=splits)
    plain = plan.workspace_bytes(call)
    call.gate.data, call.gate.stride_batch, call.gate.stride_seq = 1 << 20, q_len * heads, heads
    assert plan.workspace_bytes(call) == plain


@pytest.mark.parametrize(("rows", "block"), [(128, 384), (192, 512)])
def test_rows_may_be_given(rows, block):
    made = plan.plan(meta_call(1, 2, 500, 700, rows=rows))
    assert made.block[0] == block
    assert made.grid[0] == 2 * math.ceil(500 / rows)


def test_splits_do_not_depend_on_the_batch():
    for q_len, kv_len in ((259, 12288), (128, 40_000), (1, 1000)):
        one, five = (plan.workspace_bytes(meta_call(batch, 8, q_len, kv_len)) for batch in (1, 5))
        assert 0 < one * 5 == five


def test_filled_devices_split_nothing():
    for shape in ((1, 32, 12288, 12288), (1, 32, 12288, 259), (1, 32, 259, 100), (8, 32, 1024, 1024)):
        assert plan.workspace_bytes(meta_call(*shape)) == 0


def test_one_element_dimensions_may_have_any_stride():
    q, k, v = tensors(batch=1, heads=1, q_len=1)
    odd = q.as_strided(q.shape, (3, 5, 7, 1))
    made = plan.plan(make_call(odd, k, v))
    assert all(stride % 16 == 0 and stride > 0 for stride in made.maps[0].byte_strides)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"arch": 80}, "compute capability 8.0"),
        ({"num_sms": 0}, "num_sms"),
        ({"batch": 2**30, "q_len": 2**20}, "query tiles"),
        ({"grid": -1}, "grid"),
        ({"splits": 33}, "splits is 33"),
        ({"rows": 150, "head_dim": 64}, "rows is 150; this kernel takes multiples of 64, 128 .. 192"),
        ({"rows": 256, "head_dim": 64}, "rows is 256"),
        ({"rows": 64, "head_dim": 64}, "rows is 64"),
        ({"rows": -128, "head_dim": 64}, "rows is -128"),
        ({"rows": 192}, "rows is 192; this kernel takes multiples of 64, 128 .. 128"),
        ({"rows": 64, "arch": 100}, "rows is 64; this kernel has 256"),
        ({"grid": 70000}, "grid is 70000; it must lie in 0 .. 65535"),
        ({"grid": 70000, "arch": 100}, "grid is 70000; it must lie in 0 .. 65535"),
        ({"grid": -1}, "grid is -1; it must lie in 0 .. 65535"),
        ({"reserved": 1}, "reserved is 1"),
        ({"workspace": 8}, "workspace"),
        ({"gate": abi.Gate(1 << 20 | 1, 0, 3)}, "gate does not start at a multiple of 2"),
        ({"gate": abi.Gate(1 << 20, -64, 3)}, "gate has a negative stride"),
        ({"gate": abi.Gate(1 << 20, 64, -3)}, "gate has a negative stride"),
        ({"struct_bytes": 8}, "bytes"),
        ({"dtype": 7}, "dtype code 7"),
        ({"q_len": 0}, "q_len is 0"),
        ({"kv_len": 2**31}, "kv_len is 2147483648"),
        ({"head_dim": 96}, "head_dim is 96"),
    ],
)
def test_refusals(change, reason):
    call = make_call(*tensors())
    for field, value in change.items():
        setattr(call, field, value)
    with pytest.raises(plan.PlanRefused, match=re.escape(reason)):
        plan.plan(call)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_refused_layouts(name):
    def refusal(change):
        q, k, v = tensors()
        named = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
        named[name] = change(named[name])
        with pytest.raises(plan.PlanRefused) as refused:
            plan.plan(make_call(**named))
        assert str(refused.value).startswith(f"{name} ")
        return str(refused.value)

    assert "seq stride of 0" in refusal(lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1))
    assert "head stride of 0" in refusal(lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1))
    assert "multiple of 16 bytes" in refusal(
        lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
    )
    odd = refusal(lambda x: torch.empty(*x.shape[:3], x.shape[3] + 4, dtype=x.dtype)[..., : x.shape[3]])
    assert "no multiple of 16" in odd


def test_python_copies_what_tma_refuses():
    x = torch.randn(2, 40, 3, 64).to(torch.bfloat16)
    assert native.placement(x) == (x.data_ptr(), 40 * 3 * 64, 3 * 64, 64)
    assert None is not native.placement(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert None is native.placement(x[:, :1].expand(-1, 40, -1, -1))
    assert None is native.placement(x.transpose(2, 3).contiguous().transpose(2, 3))
    assert None is native.placement(torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x))


def test_packed_calls_are_the_struct():
    q, k, v = tensors()
    lse = torch.empty(2, 3, 200)
    gate = torch.empty(2, 200, 7, dtype=q.dtype)[..., :3]
    call = make_call(q, k, v, lse=lse, splits=3, grid=7, stream=1 << 40, device=2, gate=gate)
    call.workspace = 1 << 41
    values = []
    for name, kind in abi.Call._fields_:
        value = getattr(call, name)
        parts = [getattr(value, f[0]) for f in kind._fields_] if hasattr(kind, "_fields_") else [value]
        values += [part or 0 for part in parts]
    assert abi.PACKED_CALL.pack(*values) == bytes(call)


def test_structs_match_the_header(tmp_path):
    """sizeof and every offsetof, as the C compiler sees them."""
    structs = {
        "VideoattnTensor": abi.Tensor,
        "VideoattnGate": abi.Gate,
        "VideoattnCall": abi.Call,
        "VideoattnTensorMap": abi.TensorMap,
        "VideoattnParam": abi.Param,
        "VideoattnPlan": abi.Plan,
    }
    lines = []
    for name, kind in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{f[0]} %zu\\n", offsetof({name}, {f[0]}));' for f in kind._fields_]
    source = tmp_path / "layout.c"
    header = library.SOURCES / "api.h"
    source.write_text(
        f'#include <stdio.h>\n#include "{header}"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    subprocess.run(["cc", "-std=c99", "-Wall", "-Werror", "-o", tmp_path / "layout", source], check=True)
    reported = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    for line in reported.splitlines():
        name, value = line.split()
        struct_name, _, field = name.partition(".")
        kind = structs[struct_name]
        assert (getattr(kind, field).offset if field else ctypes.sizeof(kind)) == int(value), name
