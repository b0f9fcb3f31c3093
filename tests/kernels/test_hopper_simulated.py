"""The Hopper kernel's compiled PTX in the simulator: right results, no findings, under every schedule."""

from __future__ import annotations

import pytest
import torch

from tests import gates, hopper_inputs
from videoattn.kernels import native, plan, simulated
from videoattn.kernels.accuracy import compare
from videoattn.ptxsim import Schedule

SCHEDULES = {"early": Schedule.early(), "late": Schedule.late(), "random": Schedule.random(7)}
MOSTLY_SLOW = ["early", *(pytest.param(name, marks=pytest.mark.slow) for name in ("late", "random"))]


def inputs(batch, heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    sizes = [(batch, length, heads, head_dim) for length in (q_len, kv_len, kv_len)]
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v


def check(q, k, v, **options):
    out, lse, _ = reported(q, k, v, **options)
    return out, lse


def reported(q, k, v, *, schedule="early", kv_lengths=None, **options):
    """Right values without findings, and the launches' reports."""
    scale = q.shape[-1] ** -0.5
    # Left to the planner, so few tiles would be those of two consumers.
    options.setdefault("rows", 192 if q.shape[-1] == 64 else 128)
    out, lse, reports = simulated.run(
        q, k, v, scale=scale, arch=90, kv_lengths=kv_lengths, schedule=SCHEDULES[schedule], **options
    )
    for report in reports:
        assert not report.findings, str(report)
    errors = compare(out, lse, q, k, v, scale=scale, kv_lengths=kv_lengths)
    assert errors.passed, str(errors)
    return out, lse, reports


def normal(head_dim, keys, blocks):
    """Two heads of three 64-row groups, keys for so many blocks and a part, and the scale."""
    return *inputs(1, 2, 180, keys * blocks - 7, head_dim), head_dim**-0.5


def leaps(head_dim, keys, blocks):
    """Rows whose scores pass what fp32 holds against the reference before them."""
    return hopper_inputs.leaps(head_dim, keys, blocks, torch.bfloat16)


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(("head_dim", "rows"), [(64, 192), (64, 128), (128, 128)])
def test_tails_and_many_tiles(head_dim, rows, schedule):
    """Two heads on one CTA: ragged queries, ragged keys, a tile that follows another."""
    check(*inputs(1, 2, 100, 300, head_dim), schedule=schedule, grid=1, rows=rows)


# Keys that stay in shared memory, with one to four blocks a head; at head dim 64 by both key tiles.
SHORT = [(128, 100), (128, 256), (64, 90), (64, 250), (64, 259)]


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(("head_dim", "kv_len"), SHORT)
def test_short_keys_are_loaded_once_a_head(head_dim, kv_len, schedule):
    """Three heads of several query tiles on two CTAs: both change heads in the middle of their tiles."""
    heads, rows = 3, 128 if head_dim == 128 else 192
    q, k, v = inputs(1, heads, 3 * rows - 20, kv_len, head_dim)
    *_, (report,) = reported(q, k, v, schedule=schedule, grid=2)
    loads = sum(
        count
        for name, count in report.counts["all"].items()
        if name.startswith("cp.async.bulk.tensor") and "shared::cluster.global" in name
    )
    tile = {100: 128, 256: 128, 90: 96, 250: 64, 259: 96}[kv_len]
    loaded_heads = heads + 1  # the second head is shared by both CTAs
    assert loads == 2 * loaded_heads * -(-kv_len // tile) + heads * 3 * rows // 64


@pytest.mark.parametrize("make", [normal, leaps], ids=["", "leaps"])
@pytest.mark.parametrize("tile", [name for name in hopper_inputs.TILES if name.startswith("d64")])
def test_no_bit_depends_on_the_rows_of_a_tile(tile, make):
    """Two and three consumers; rows that leap are computed again by the warp that holds them."""
    head_dim, keys, blocks = hopper_inputs.TILES[tile]
    q, k, v, scale = make(head_dim, keys, blocks)
    options = {"scale": scale, "arch": 90, "grid": 2}
    out, lse, (report,) = simulated.run(q, k, v, rows=192, **options)
    fewer_out, fewer_lse, (fewer_report,) = simulated.run(q, k, v, rows=128, **options)
    assert not report.findings, str(report)
    assert not fewer_report.findings, str(fewer_report)
    assert torch.equal(out, fewer_out)
    assert lse is not None
    assert fewer_lse is not None
    assert torch.equal(lse, fewer_lse)


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize("kv_len", [120, 300])
def test_two_consumers_with_key_lengths_and_parts(kv_len, schedule):
    lengths = torch.tensor([0, 150, 96, 1000], dtype=torch.int32)
    q, k, v = inputs(len(lengths), 1, 150, kv_len, 64)
    past = torch.arange(kv_len) >= lengths[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], torch.nan) for x in (k, v))
    check(q, k, v, kv_lengths=lengths, schedule=schedule, grid=2, splits=2, rows=128)


def check_gates(q, k, v, logits, *, schedule="early", **options):
    options |= {"scale": q.shape[-1] ** -0.5, "arch": 90, "schedule": SCHEDULES[schedule]}
    plain, plain_lse, _ = simulated.run(q, k, v, **options)
    out, lse, reports = simulated.run(q, k, v, gate=logits, **options)
    for report in reports:
        assert not report.findings, str(report)
    gates.assert_gated(out, plain, logits)
    assert torch.equal(lse, plain_lse)
    return out, reports


# By rows and kernel: long and short keys of both head dims, two consumers and three.
GATED = [(128, 128, 300), (64, 192, 300), (64, 128, 370), (128, 128, 200), (64, 192, 90), (64, 128, 250)]


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(("head_dim", "rows", "kv_len"), GATED)
def test_gates(head_dim, rows, kv_len, schedule):
    """Two entries of two heads on one CTA: tile after tile, ragged ends; logits of a wider tensor."""
    dtype = torch.float16 if kv_len in (370, 200) else torch.bfloat16
    q, k, v = inputs(2, 2, 2 * rows - 50, kv_len, head_dim, dtype)
    logits = gates.draw(q.shape[:3], dtype)
    check_gates(q, k, v, logits, schedule=schedule, grid=1, rows=rows)


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(
    ("head_dim", "kv_len", "splits"), [(64, 300, 1), (128, 300, 2), (128, 200, 1), (64, 250, 2)]
)
def test_gates_with_key_lengths_and_parts(head_dim, kv_len, splits, schedule):
    """Entries without keys stay zero whatever their logits; parts are gated where they are merged."""
    lengths = torch.tensor([0, 150, 0, 1000], dtype=torch.int32)
    q, k, v = inputs(len(lengths), 1, 150, kv_len, head_dim)
    logits = gates.draw(q.shape[:3])
    options = {"kv_lengths": lengths, "schedule": schedule, "grid": 2, "splits": splits}
    out, reports = check_gates(q, k, v, logits, **options)
    assert len(reports) == 1 + (splits > 1)
    for entry in (0, 2):
        assert (out[entry] == 0).all()


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(
    ("head_dim", "kv_len"),
    [(64, 300), (128, 300), (64, 260), (128, 256), pytest.param(64, 250, marks=pytest.mark.slow)],
)
def test_key_lengths_hide_nan(head_dim, kv_len, schedule):
    """Empty entries, lengths inside a block, at its end and past the tensor; what lies past them is NaN."""
    lengths = torch.tensor([0, 150, 128, 0, 1, 1000, 257], dtype=torch.int32)
    q, k, v = inputs(len(lengths), 1, 64, kv_len, head_dim)
    past = torch.arange(kv_len) >= lengths[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], torch.nan) for x in (k, v))
    out, lse = check(q, k, v, kv_lengths=lengths, schedule=schedule, grid=2)
    assert lse is not None
    for entry in (0, 3):
        assert (out[entry] == 0).all()
        assert lse[entry].isneginf().all()


def test_half_precision_and_the_short_key_tile():
    """fp16, and 370 keys, which take the 96-key tile."""
    check(*inputs(1, 1, 130, 370, 64, torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_split_keys(head_dim):
    check(*inputs(1, 1, 64, 600, head_dim), splits=3)
    check(*inputs(1, 2, 300, 250, head_dim), splits=2, grid=2)


def test_views_of_a_fused_tensor():
    packed = torch.randn(1, 140, 3, 2, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    check(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])


@pytest.mark.slow
def test_no_lse_and_a_strided_output():
    q, k, v = inputs(1, 2, 70, 64, 64)
    storage = torch.full((1, 2, 70, 72), torch.nan, dtype=q.dtype)
    _, lse = check(q, k, v, return_lse=False, out=storage[..., :64].transpose(1, 2))
    assert lse is None
    assert storage[..., 64:].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_maximum_that_moves(head_dim):
    """Blocks run from the last to the first: keys that grow towards the first move some rows' reference."""
    q, k, v = inputs(1, 1, 64, 500, head_dim)
    q[:, ::5] *= 6
    check(q, k * torch.linspace(4, 0.1, 500)[None, :, None, None].to(k.dtype), v)


def product(tile, dtype, make, **options):
    """The tile's head dim, key tile and inputs; the planner must take it for them."""
    head_dim, keys, blocks = hopper_inputs.TILES[tile]
    made = make(head_dim, keys, blocks, dtype, **options)
    q, k = made[:2]
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    planned = plan.plan(native.fill_call(q, k, k, q, scale=1.0, arch=90, grid=1, splits=1, num_sms=1))
    assert planned.kernel.decode() == f"videoattn_hopper_{tile}_{kind}"
    return made


PRODUCTS = [
    ("d128_n128", torch.bfloat16),
    ("d64_n112", torch.float16),
    ("d64_n96", torch.bfloat16),
    ("d128_n128_short", torch.float16),
    ("d64_n96_short", torch.bfloat16),
    ("d64_n64_short", torch.float16),
    pytest.param("d128_n128", torch.float16, marks=pytest.mark.slow),
    pytest.param("d64_n112", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("d64_n96", torch.float16, marks=pytest.mark.slow),
    pytest.param("d128_n128_short", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("d64_n96_short", torch.float16, marks=pytest.mark.slow),
    pytest.param("d64_n64_short", torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS)
def test_scores_leap_by_a_hundred_powers_of_two(tile, dtype):
    """Against the reference before them, some blocks' sums pass what fp32 holds, and some single values."""
    q, k, v, scale = product(tile, dtype, hopper_inputs.leaps, scale_power=2 if dtype == torch.float16 else 0)
    out, lse, reports = simulated.run(q, k, v, scale=scale, arch=90, grid=2)
    assert not any(report.findings for report in reports), str(reports)
    hopper_inputs.assert_rows(out, lse, q, k, v, scale)


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS)
def test_a_first_block_without_a_finite_score(tile, dtype):
    """Rows begin with the block that has one, however low or high its scores are."""
    q, k, v, scale = product(tile, dtype, hopper_inputs.nothing_at_first, rows=16)
    # In the last part there may be nothing else.
    for splits in (1, hopper_inputs.TILES[tile][-1]):
        out, lse, reports = simulated.run(q, k, v, scale=scale, arch=90, grid=2, splits=splits)
        assert not any(report.findings for report in reports), str(reports)
        hopper_inputs.assert_rows(out, lse, q, k, v, scale)


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS)
def test_keys_that_are_not_finite(tile, dtype):
    """A NaN or an infinite score shows, wherever its key lies; past a key length it does not."""
    q, k, v, lengths = product(tile, dtype, hopper_inputs.not_finite)
    scale = q.shape[-1] ** -0.5
    out, lse, reports = simulated.run(q, k, v, scale=scale, arch=90, kv_lengths=lengths, grid=4)
    assert not any(report.findings for report in reports), str(reports)
    hopper_inputs.assert_not_finite_shows(out, lse, q, k, v, scale, lengths)
