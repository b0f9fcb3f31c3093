"""The Blackwell kernel's PTX on the simulator: no finding, and fp32's answer by the accuracy rule."""

import os

import pytest
import torch

from tests import gates
from tests.blackwell.simulate import simulate
from videoattn.kernels.accuracy import compare
from videoattn.ptxsim import Schedule

full = pytest.mark.skipif("VIDEOATTN_FULL" not in os.environ, reason="full tier: scripts/simulate_full.py")

BF16, FP16 = torch.bfloat16, torch.float16


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(batch, q_len, kv_len, heads, head_dim, dtype=BF16, seed=0):
    lengths = (q_len, kv_len, kv_len)
    return [normal(batch, n, heads, head_dim, dtype=dtype, seed=seed + i) for i, n in enumerate(lengths)]


def check(q, k, v, *, scale=None, kv_lengths=None, schedule="early", **options):
    """Simulate and hold output and LSE against fp32; returns both."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, report = simulate(
        q, k, v, scale=scale, kv_lengths=kv_lengths, lse=True, schedule=Schedule.named(schedule), **options
    )
    assert not report.findings, str(report)
    errors = compare(out, lse, q, k, v, scale=scale, kv_lengths=kv_lengths)
    assert errors.passed, str(errors)
    return out, lse


SCHEDULES = ("early", "late", "random:1")
MOSTLY_SLOW = [SCHEDULES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES[1:])]


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, FP16)])
def test_two_whole_tiles(head_dim, dtype, schedule):
    check(*operands(1, 256, 256, 1, head_dim, dtype), schedule=schedule)


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, FP16)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (127, 129), (129, 255), (200, 40)])
def test_lengths_that_end_inside_a_tile(q_len, kv_len, head_dim, dtype):
    check(*operands(1, q_len, kv_len, 1, head_dim, dtype), schedule="random:2")


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
@pytest.mark.parametrize(("head_dim", "dtype", "splits"), [(128, BF16, 1), (64, FP16, 1), (64, BF16, 2)])
def test_gates(head_dim, dtype, splits, schedule):
    """Items of one Q tile and of two after one another, an entry without keys, logits of a wider tensor."""
    q, k, v = operands(2, 270, 140, 1, head_dim, dtype)
    logits = gates.draw(q.shape[:3], dtype)
    options = {
        "kv_lengths": torch.tensor([0, 140], dtype=torch.int32),
        "lse": True,
        "schedule": Schedule.named(schedule),
        "splits": splits,
    }
    plain, plain_lse, _ = simulate(q, k, v, **options)
    out, lse, report = simulate(q, k, v, gate=logits, **options)
    assert not report.findings, str(report)
    gates.assert_gated(out, plain, logits)
    assert torch.equal(lse, plain_lse)
    assert (out[0] == 0).all()


@full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(127, 129), (257, 383), (300, 513), (126, 1024), (512, 127)])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, BF16), (128, FP16), (64, FP16)])
def test_lengths_over_several_tiles(q_len, kv_len, head_dim, dtype, schedule):
    check(*operands(1, q_len, kv_len, 1, head_dim, dtype), schedule=schedule)


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
def test_one_cta_takes_several_items(schedule):
    """Batch entries and heads follow one another through one CTA, with one tile of keys and with three."""
    check(*operands(2, 130, 100, 2, 64), grid=1, schedule=schedule)
    check(*operands(1, 130, 300, 2, 64), grid=1, schedule=schedule)


@pytest.mark.slow
def test_ctas_stride_over_the_items():
    check(*operands(1, 100, 100, 5, 64), grid=2, schedule="random:3")


def poisoned(lengths, q_len, kv_len, heads, head_dim):
    """Operands whose keys and values past each entry's length are NaN, and the lengths as a tensor."""
    q, k, v = operands(len(lengths), q_len, kv_len, heads, head_dim)
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = float("nan")
    return (q, k, v), torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize(
    ("head_dim", "length", "schedule"),
    [
        (64, 100, "slow:12"),
        (128, 100, "slow:12"),
        (64, 200, "random:10"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *((64, 200, f"random:{seed}") for seed in (16, 18, 21)),
                *((d, 200, s) for d in (64, 128) for s in ("slow:12", "slow:0-3", "late")),
            ]
        ),
    ],
)
def test_the_clearing_warp_may_be_several_items_ahead(head_dim, length, schedule):
    """The ring holds several items of one or two key tiles, and each of them has a V to clear."""
    (q, k, v), lengths = poisoned([length], 128, 300, 4, head_dim)
    check(q, k, v, kv_lengths=lengths, schedule=schedule)


ROLES = {"softmax0": "0-3", "softmax1": "4-7", "correction": "8-11", "mma": "12", "load": "13", "clear": "14"}


# Both head dims have the same barriers; at 128 the clearing warp's test has slow roles as well.
@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=full)])
def test_a_slow_role_is_waited_for(head_dim, role):
    """Short items of both Q tiles, with a role that falls as far behind as the barriers let it."""
    (q, k, v), lengths = poisoned([100, 0, 200, 290, 33], 200, 300, 1, head_dim)
    check(q, k, v, kv_lengths=lengths, schedule=f"slow:{ROLES[role]}")
    check(*operands(1, 300, 100, 3, head_dim), schedule=f"slow:{ROLES[role]}")


@pytest.mark.parametrize("schedule", MOSTLY_SLOW)
def test_key_lengths_with_poisoned_padding(schedule):
    """NaN and Inf past each entry's length stay there; an entry without keys gives zeros and -inf."""
    q, k, v = operands(5, 140, 200, 1, 64)
    lengths = torch.tensor([0, 1, 130, 200, 144], dtype=torch.int32)
    for x, fill in ((k, float("nan")), (v, float("inf"))):
        for b, n in enumerate(lengths.tolist()):
            x[b, n:] = fill
            x[b, n::2] = float("nan")
    out, lse = check(q, k, v, kv_lengths=lengths, grid=1, schedule=schedule)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert lse is not None
    assert lse[0].isneginf().all()


def test_key_lengths_are_clamped():
    q, k, v = operands(2, 64, 96, 1, 64)
    lengths = torch.tensor([-3, 500], dtype=torch.int32)
    check(q, k, v, kv_lengths=lengths, grid=1)


def test_fused_qkv_is_read_in_place():
    """q, k and v as views of one (batch, seq, 3, heads, head_dim) projection."""
    fused = normal(2, 150, 3, 2, 64)
    q, k, v = fused.unbind(2)
    assert not q.is_contiguous()
    check(q, k, v, grid=3, schedule="random:4")


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, FP16)])
def test_split_keys(head_dim, dtype):
    """Short q over many keys: parts of the keys side by side, merged in a fixed order."""
    check(*operands(1, 130, 600, 2, head_dim, dtype), splits=3, grid=3, schedule="random:6")


def test_split_keys_with_lengths():
    """Parts without a key add nothing; nor does an entry without any."""
    q, k, v = operands(3, 64, 400, 1, 64)
    lengths = torch.tensor([0, 100, 390], dtype=torch.int32)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = v[b, n:] = float("nan")
    out, _ = check(q, k, v, kv_lengths=lengths, splits=4, grid=2, schedule="late")
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("key", [5, 14])
def test_nan_is_not_swallowed(key):
    """NaN in a valid key reaches every row, by the hardware exponential (key 5) and the software one (14)."""
    q, k, v = operands(1, 64, 64, 1, 64)
    k[0, key] = float("nan")
    out, _, report = simulate(q, k, v)
    assert not report.findings, str(report)
    assert not out.isfinite().any()


def test_scale_is_an_argument():
    check(*operands(1, 128, 128, 1, 64), scale=0.3)


@pytest.mark.parametrize("name", ["mean", "outliers", "constant", "one_hot"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, FP16)])
def test_hard_inputs(name, head_dim, dtype):
    q, k, v = (x.float() for x in operands(1, 128, 300, 1, head_dim, dtype))
    if name == "mean":
        k, v = k + 4, v + 4
    elif name == "outliers":
        # Two keys whose logits are near +-30, late enough that the basis has to move.
        q[..., 0] = 3.0
        k[:, 290, :, 0], k[:, 40, :, 0] = 10 * head_dim**0.5, -10 * head_dim**0.5
    elif name == "constant":
        q, k = torch.ones_like(q), torch.ones_like(k)
    else:
        q = torch.zeros_like(q)
        k = torch.zeros_like(k)
        q[..., 1] = 30.0
        k[:, 200, :, 1] = 4 * head_dim**0.5
    check(q.to(dtype), k.to(dtype), v.to(dtype))


@pytest.mark.slow
def test_a_neighbour_changes_nothing():
    """The bits of a batch entry's result do not depend on what else is in the batch, nor on the schedule."""
    q, k, v = operands(3, 140, 200, 1, 64)
    lengths = torch.tensor([200, 77, 200], dtype=torch.int32)
    together, _, _ = simulate(q, k, v, kv_lengths=lengths, grid=1, schedule=Schedule.random(5))
    alone, _, _ = simulate(q[1:2], k[1:2, :77], v[1:2, :77])
    assert torch.equal(together[1:2].view(torch.int16), alone.view(torch.int16))


def test_without_lse_nothing_is_written():
    q, k, v = operands(1, 64, 64, 1, 64)
    out, lse, report = simulate(q, k, v)
    assert lse is None
    assert not report.findings
    assert not out.isnan().any()


@pytest.mark.parametrize("arch", [103])
def test_b300_build(arch):
    check(*operands(1, 140, 260, 1, 128), arch=arch, schedule="late")
