"""Every variant that tune_hopper.py times is right on a Hopper GPU before anybody looks at its speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tune_hopper

from videoattn.kernels.accuracy import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.fixture(params=list(tune_hopper.VARIANTS), scope="module")
def variant(request):
    chosen = tune_hopper.VARIANTS[request.param]
    return chosen, tune_hopper.build(request.param), chosen.head_dim


def inputs(batch, heads, q_len, kv_len, head_dim):
    generator = torch.Generator(device="cuda").manual_seed(q_len * 1000 + kv_len)
    sizes = [(batch, length, heads, head_dim) for length in (q_len, kv_len, kv_len)]
    return tuple(torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16) for size in sizes)


def check(built, q, k, v, *, kv_lengths=None, **options):
    out = tune_hopper.launch(built, q, k, v, kv_lengths=kv_lengths, **options)
    torch.cuda.synchronize()
    errors = compare(out, None, q, k, v, scale=q.shape[-1] ** -0.5, kv_lengths=kv_lengths)
    assert errors.passed, f"q {tuple(q.shape)}, k {tuple(k.shape)}, {options}: {errors}"
    return out


def test_lengths_and_grids(variant):
    chosen, built, head_dim = variant
    lengths = ((1, 1), (129, chosen.tile), (300, chosen.tile + 1), (900, 250), (777, 1024), (4000, 3000))
    for q_len, kv_len in lengths:
        for grid in (0, 1, 6):
            check(built, *inputs(2, 3, q_len, kv_len, head_dim), grid=grid)


def test_key_lengths_and_parts(variant):
    _, built, head_dim = variant
    lengths = torch.tensor([0, 1, 127, 333, 700, 9999], dtype=torch.int32, device="cuda")
    for kv_len in (250, 700):
        q, k, v = inputs(len(lengths), 2, 260, kv_len, head_dim)
        past = torch.arange(kv_len, device="cuda") >= lengths[:, None]
        k, v = (x.masked_fill(past[:, :, None, None], torch.nan) for x in (k, v))
        for splits in (1, 3):
            out = check(built, q, k, v, kv_lengths=lengths, splits=splits, grid=5)
            assert (out[0] == 0).all()


def test_scores_that_leap(variant):
    chosen, built, head_dim = variant
    for kv_len in (2 * chosen.tile, 5 * chosen.tile):
        q, k, v = inputs(1, 2, 300, kv_len, head_dim)
        q[:, ::5] *= 4
        q[:, 1::16] *= 40
        growth = torch.linspace(6, 0.02, k.shape[1], device="cuda")[None, :, None, None]
        check(built, q, (k * growth).to(k.dtype), v)


def test_repeats_bitwise_and_ignores_neighbours(variant):
    _, built, head_dim = variant
    for kv_len in (200, 1000):
        q, k, v = inputs(3, 2, 500, kv_len, head_dim)
        whole = check(built, q, k, v)
        for _ in range(20):
            assert torch.equal(whole, tune_hopper.launch(built, q, k, v))
        assert torch.equal(whole, tune_hopper.launch(built, q, k, v, grid=6))
        for entry in range(3):
            one = slice(entry, entry + 1)
            assert torch.equal(tune_hopper.launch(built, q[one], k[one], v[one])[0], whole[entry])
