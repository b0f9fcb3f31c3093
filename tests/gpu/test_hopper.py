"""The Hopper kernel on a Hopper GPU, held against fp32 by the accuracy rule."""

from __future__ import annotations

import math

import pytest
import torch

from tests import gates, hopper_inputs
from videoattn.kernels import library, native
from videoattn.kernels.accuracy import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

GUARD = 4096  # elements before and after the output that must keep their poison
DTYPES = (torch.bfloat16, torch.float16)


def normal(*shape, dtype, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def guarded_like(shape, dtype):
    """A contiguous NaN tensor inside a larger NaN buffer, and that buffer."""
    count = math.prod(shape)
    buffer = torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype, device="cuda")
    return buffer[GUARD : GUARD + count].view(shape), buffer


def launch(q, k, v, *, out=None, **options):
    """Outputs and LSEs of the kernel by each of its query tiles, which must agree to the last bit."""
    made = []
    for rows in (128, 192) if q.shape[-1] == 64 else (0,):
        if out is not None:
            out.fill_(torch.nan)
        one, lse = launch_once(q, k, v, rows=rows, out=out, **options)
        made.append((one.clone(), lse))
    for one, lse in made[1:]:
        assert torch.equal(one.view(torch.int16), made[0][0].view(torch.int16))
        assert (lse is None) == (made[0][1] is None)
        assert lse is None or torch.equal(lse.view(torch.int32), made[0][1].view(torch.int32))
    return made[0]


def launch_once(
    q, k, v, *, scale=None, kv_lengths=None, grid=0, splits=1, rows=0, out=None, lse=True, gate=None
):
    """Run the kernel into NaN-poisoned buffers and check the poison around them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out_buffer = None
    if out is None:
        out, out_buffer = guarded_like(q.shape, q.dtype)
    lse_tensor, lse_buffer = guarded_like((q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    count = native.workspace_bytes(
        q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3], 90, 132, splits
    )
    workspace = torch.full((count,), 255, dtype=torch.uint8, device="cuda") if count else None  # fp32 NaN
    call = native.fill_call(
        q,
        k,
        v,
        out,
        scale=scale,
        kv_lengths=kv_lengths,
        lse=lse_tensor if lse else None,
        arch=90,
        num_sms=132,
        grid=grid,
        splits=splits,
        rows=rows,
        stream=torch.cuda.current_stream().cuda_stream,
        workspace=workspace,
        gate=gate,
    )
    native.launch(call)
    torch.cuda.synchronize()
    for buffer in (out_buffer, lse_buffer):
        if buffer is not None:
            assert buffer[:GUARD].isnan().all(), "bytes before a buffer were written"
            assert buffer[-GUARD:].isnan().all(), "bytes after a buffer were written"
    if not lse:
        assert lse_buffer.isnan().all()
    return out, lse_tensor if lse else None


def check(q, k, v, *, scale=None, kv_lengths=None, **options):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    got, got_lse = launch(q, k, v, scale=scale, kv_lengths=kv_lengths, **options)
    errors = compare(got, got_lse, q, k, v, scale=scale, kv_lengths=kv_lengths)
    assert errors.passed, f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}: {errors}"
    return got, got_lse


def inputs(batch, heads, q_len, kv_len, head_dim, dtype, seed=0):
    q = normal(batch, q_len, heads, head_dim, dtype=dtype, seed=seed)
    k = normal(batch, kv_len, heads, head_dim, dtype=dtype, seed=seed + 1)
    v = normal(batch, kv_len, heads, head_dim, dtype=dtype, seed=seed + 2)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "splits"),
    [(700, 1000, 1), (700, 1000, 3), (5000, 120, 1), (5000, 250, 2), (99, 1, 1)],
)
def test_gates(q_len, kv_len, splits, head_dim, dtype):
    """Long and short keys, whole and in parts, an entry without keys; many tiles on few CTAs."""
    q, k, v = inputs(3, 4, q_len, kv_len, head_dim, dtype)
    logits = gates.draw(q.shape[:3], dtype, device="cuda")
    lengths = torch.tensor([kv_len, 0, (kv_len + 1) // 2], dtype=torch.int32, device="cuda")
    for grid in (0, 5):
        options = {"kv_lengths": lengths, "splits": splits, "grid": grid}
        plain, plain_lse = launch(q, k, v, **options)
        out, lse = launch(q, k, v, gate=logits, **options)
        gates.assert_gated(out, plain, logits)
        assert torch.equal(lse, plain_lse)
        assert (out[1] == 0).all()


def test_library_loads():
    assert library.unavailable(0) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 128), (192, 256), (1024, 1024), (256, 128), (300, 517)])
def test_small(q_len, kv_len, head_dim, dtype):
    check(*inputs(1, 2, q_len, kv_len, head_dim, dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tail(head_dim):
    edges = [n + d for n in (16, 64, 128, 176, 192, 256, 352, 384, 512) for d in (-1, 0, 1)]
    lengths = [1, 2, 7, 8, 9, *edges, 96, 600]
    for i, q_len in enumerate(lengths):
        check(*inputs(1, 2, q_len, lengths[-1 - i], head_dim, DTYPES[i % 2], seed=i))
    for i, kv_len in enumerate(range(1, 600, 13)):
        check(*inputs(2, 1, 70 + i, kv_len, head_dim, DTYPES[i % 2], seed=i))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("grid", [1, 2, 7, 132])
@pytest.mark.parametrize("kv_len", [90, 128, 250, 333])
def test_many_tiles_per_cta(head_dim, grid, kv_len):
    check(*inputs(2, 3, 700, kv_len, head_dim, torch.bfloat16), grid=grid)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_len", [120, 250, 700])
def test_key_lengths_hide_nan(head_dim, dtype, kv_len):
    values = [0, 1, 127, 128, 129, 333, 700, 9999, -5, 64]
    q, k, v = inputs(len(values), 2, 260, kv_len, head_dim, dtype)
    lengths = torch.tensor(values, dtype=torch.int32, device="cuda")
    past = torch.arange(kv_len, device="cuda") >= lengths[:, None]
    k = k.masked_fill(past[:, :, None, None], torch.nan)
    v = v.masked_fill(past[:, :, None, None], torch.inf)
    v[:, 1::2] = v[:, 1::2].masked_fill(past[:, 1::2, None, None], torch.nan)
    for grid in (0, 1, 5):
        out, lse = check(q, k, v, kv_lengths=lengths, grid=grid)
        assert lse is not None
        for entry in (0, 8):
            assert (out[entry] == 0).all()
            assert lse[entry].isneginf().all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_keys(head_dim, splits):
    q, k, v = inputs(3, 2, 259, 1500, head_dim, torch.bfloat16)
    whole, _ = check(q, k, v, splits=splits)
    again, _ = check(q, k, v, splits=splits, grid=3)
    assert torch.equal(whole, again)
    lengths = torch.tensor([0, 130, 1500], dtype=torch.int32, device="cuda")
    past = torch.arange(1500, device="cuda") >= lengths[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], torch.nan) for x in (k, v))
    out, lse = check(q, k, v, kv_lengths=lengths, splits=splits)
    assert (out[0] == 0).all()
    assert lse is not None
    assert lse[0].isneginf().all()
    storage = torch.full((3, 2, 259, head_dim), torch.nan, dtype=q.dtype, device="cuda")
    check(q, k, v, kv_lengths=lengths, splits=splits, out=storage.transpose(1, 2), lse=False)


def test_the_planner_splits_short_queries():
    """Through the public path: few query tiles, many keys."""
    for shape in ((1, 32, 259, 12288, 64), (2, 4, 126, 5000, 128)):
        q, k, v = inputs(*shape, torch.bfloat16)
        out, lse = native.run(q, k, v, scale=0.1, kv_lengths=None, return_lse=True, arch=90)
        assert lse is not None
        errors = compare(out, lse, q, k, v, scale=0.1)
        assert errors.passed, str(errors)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fused_qkv_views(head_dim):
    packed = normal(2, 391, 3, 4, head_dim, dtype=torch.bfloat16)
    check(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
    bhsd = normal(3, 2, 4, 391, head_dim, dtype=torch.float16).transpose(2, 3)
    check(bhsd[0], bhsd[1], bhsd[2])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_strided_output(head_dim):
    q, k, v = inputs(2, 3, 200, 300, head_dim, torch.bfloat16)
    buffer = torch.full((2, 3, 200, head_dim), torch.nan, dtype=q.dtype, device="cuda")
    check(q, k, v, out=buffer.transpose(1, 2))
    padded = torch.full((2, 200, 3, head_dim + 8), torch.nan, dtype=q.dtype, device="cuda")
    check(q, k, v, out=padded[..., :head_dim])
    assert padded[..., head_dim:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hard_inputs(head_dim, dtype):
    q, k, v = inputs(1, 2, 400, 900, head_dim, dtype)
    check(q + 2, k + 2, v + 2)
    check(q, k, v, scale=1.0)
    check(q, k, v, scale=0.01)
    spiky = k.clone()
    spiky[:, ::97] *= 30 * head_dim**0.5 / (q[:, :1] * k[:, ::97]).sum(-1, keepdim=True).abs().clamp(min=1)
    check(q, spiky, v)
    check(torch.ones_like(q), torch.ones_like(k), v)
    one_hot = torch.zeros_like(k)
    one_hot[:, :head_dim] = 40 * torch.eye(head_dim, dtype=dtype, device="cuda")[None, :, None]
    check(one_hot[:, : q.shape[1]], one_hot, v)
    rising = torch.linspace(0, 8, 900, device="cuda").to(dtype)[None, :, None, None]
    check(torch.ones_like(q), torch.ones_like(k) * rising, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", hopper_inputs.TILES)
def test_scores_leap_by_a_hundred_powers_of_two(tile, dtype):
    """Against the reference before them, some blocks' sums pass what fp32 holds, and some single values."""
    head_dim, keys, blocks = hopper_inputs.TILES[tile]
    for more in (1, 20):  # past 1024 keys there is one tile of a head dim
        for scale_power in (0, 3):
            *made, scale = hopper_inputs.leaps(
                head_dim, keys, more * blocks, dtype, scale_power=scale_power, repeats=5
            )
            q, k, v = (x.cuda() for x in made)
            for options in ({}, {"grid": 3}, {"splits": 2}):
                out, lse = launch(q, k, v, scale=scale, **options)
                hopper_inputs.assert_rows(out, lse, q, k, v, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", hopper_inputs.TILES)
def test_a_first_block_without_a_finite_score(tile, dtype):
    """Rows begin with the block that has one, however low or high its scores are."""
    *made, scale = hopper_inputs.nothing_at_first(*hopper_inputs.TILES[tile], dtype, rows=300)
    q, k, v = (x.cuda() for x in made)
    for options in ({}, {"grid": 3}, {"splits": hopper_inputs.TILES[tile][-1]}):
        out, lse = launch(q, k, v, scale=scale, **options)
        hopper_inputs.assert_rows(out, lse, q, k, v, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", hopper_inputs.TILES)
def test_keys_that_are_not_finite(tile, dtype):
    """A NaN or an infinite score shows, wherever its key lies; past a key length it does not."""
    head_dim, keys, blocks = hopper_inputs.TILES[tile]
    for more in (1, 20):
        *made, lengths = hopper_inputs.not_finite(head_dim, keys, more * blocks, dtype, rows=300)
        q, k, v = (x.cuda() for x in made)
        scale = head_dim**-0.5
        for options in ({}, {"grid": 3}, {"splits": 2}):
            out, lse = launch(q, k, v, scale=scale, kv_lengths=lengths.cuda(), **options)
            hopper_inputs.assert_not_finite_shows(out, lse, q, k, v, scale, lengths)


def test_repeats_bitwise_and_ignores_neighbours():
    for head_dim in (64, 128):
        for kv_len in (200, 1000):
            q, k, v = inputs(3, 2, 500, kv_len, head_dim, torch.bfloat16)
            out, lse = launch(q, k, v)
            assert lse is not None
            again, lse_again = launch(q, k, v, grid=5)
            assert torch.equal(out, again)
            assert torch.equal(lse, lse_again)
            for entry in range(3):
                alone, _ = launch(q[entry : entry + 1], k[entry : entry + 1], v[entry : entry + 1])
                assert torch.equal(alone[0], out[entry])


def test_no_lse():
    check(*inputs(1, 2, 300, 300, 128, torch.bfloat16), lse=False)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 4, 4096, 4096, 128),
        (2, 4, 6144, 1024, 64),
        (1, 8, 5525, 5525, 128),
        (1, 8, 259, 12288, 64),
        (2, 32, 12288, 128, 128),
        (1, 32, 12288, 259, 64),
    ],
)
def test_video_shapes(shape):
    check(*inputs(*shape, torch.bfloat16))


def test_offsets_past_32_bits():
    """Rows whose element offsets need more than 31 bits."""
    rows, step = 40, 1 << 26
    storage = torch.empty(rows * step, dtype=torch.bfloat16, device="cuda")
    views = [storage.as_strided((1, rows, 1, 128), (rows * step, step, 128, 1), 128 * i) for i in range(4)]
    for i, view in enumerate(views[:3]):
        view.copy_(normal(1, rows, 1, 128, dtype=torch.bfloat16, seed=i))
    check(views[0], views[1], views[2], out=views[3])
