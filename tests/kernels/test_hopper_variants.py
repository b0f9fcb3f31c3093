"""Variants of the Hopper kernel that tune_hopper.py times, in the simulator: right, without findings."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import tune_hopper

from tests import hopper_inputs
from tests.blackwell.mutants import keep_kernel
from videoattn.kernels import abi, library, plan, simulated
from videoattn.kernels.accuracy import compare
from videoattn.ptxsim import Schedule

pytestmark = pytest.mark.slow

# Together every choice that config.h offers beside the product's.
CHECKED = {
    name: tune_hopper.VARIANTS[name]
    for name in (
        "d128_two_query_buffers",
        "d128_queries_in_smem",
        "d64_no_turns",
        "d128short_n64",
        "d64short_two_consumers",
    )
}


@contextmanager
def sources_at(root, monkeypatch):
    """The planner and the simulator work on this csrc."""
    monkeypatch.setattr(library, "SOURCES", root)
    planner = abi.declare(ctypes.CDLL(str(plan.build(root))))
    monkeypatch.setattr(plan, "load", lambda: planner)
    simulated.module.cache_clear()
    yield
    simulated.module.cache_clear()


@pytest.fixture(params=CHECKED, scope="module")
def variant(request, tmp_path_factory):
    chosen = CHECKED[request.param]
    sources = chosen.write(tmp_path_factory.mktemp(request.param))
    keep_kernel(sources, f"{chosen.kernel}_bf16")
    with pytest.MonkeyPatch.context() as monkeypatch, sources_at(sources, monkeypatch):
        yield chosen


def inputs(batch, heads, q_len, kv_len, head_dim):
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    sizes = [(batch, length, heads, head_dim) for length in (q_len, kv_len, kv_len)]
    q, k, v = (torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes)
    return q, k, v


def check(q, k, v, *, kv_lengths=None, schedule=None, **options):
    scale = q.shape[-1] ** -0.5
    out, lse, reports = simulated.run(
        q, k, v, scale=scale, arch=90, kv_lengths=kv_lengths, schedule=schedule, **options
    )
    for report in reports:
        assert not report.findings, str(report)
    errors = compare(out, lse, q, k, v, scale=scale, kv_lengths=kv_lengths)
    assert errors.passed, str(errors)
    return out, lse


def blocks(variant):
    """Key blocks of a call for which the planner takes the variant's kernel."""
    usual = {"D128N128": 3, "D64N112": 4, "D128N128Short": 2, "D64N96Short": 3}[variant.config]
    return variant.choices.get("kStages", usual) if variant.config.endswith("Short") else usual


def test_tiles_one_after_the_other(variant):
    """Two heads of two query tiles on one CTA."""
    kv_len = blocks(variant) * variant.tile - 3
    check(*inputs(1, 2, 202, kv_len, variant.head_dim), grid=1, schedule=Schedule.late())


def test_key_lengths_and_parts(variant):
    lengths = torch.tensor([0, 1, variant.tile, 9999], dtype=torch.int32)
    kv_len = blocks(variant) * variant.tile - 5
    q, k, v = inputs(len(lengths), 1, 64, kv_len, variant.head_dim)
    past = torch.arange(k.shape[1]) >= lengths[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], torch.nan) for x in (k, v))
    out, lse = check(q, k, v, kv_lengths=lengths, grid=2, splits=2, schedule=Schedule.random(2))
    assert (out[0] == 0).all()
    assert lse is not None
    assert lse[0].isneginf().all()


def test_scores_that_leap(variant):
    """Blocks run from the last to the first; some rows leap by tens of powers of two, some by hundreds."""
    q, k, v = inputs(1, 1, 30, blocks(variant) * variant.tile, variant.head_dim)
    q[:, ::5] *= 4
    q[:, 1::16] *= 40
    growth = torch.linspace(6, 0.02, k.shape[1])[None, :, None, None]
    check(q, (k * growth).to(k.dtype), v)


@pytest.mark.parametrize("scale_power", [0, 3])
def test_scores_leap_by_a_hundred_powers_of_two(variant, scale_power):
    """A thread sums 16 to 36 exponentials of a row, by the key tile; none of the sums may overflow."""
    q, k, v, scale = hopper_inputs.leaps(
        variant.head_dim, variant.tile, blocks(variant), torch.bfloat16, scale_power=scale_power
    )
    out, lse, reports = simulated.run(q, k, v, scale=scale, arch=90, grid=2)
    assert not any(report.findings for report in reports), str(reports)
    hopper_inputs.assert_rows(out, lse, q, k, v, scale)


def test_keys_that_are_not_finite(variant):
    """A NaN or an infinite score shows, wherever its key lies; past a key length it does not."""
    q, k, v, lengths = hopper_inputs.not_finite(
        variant.head_dim, variant.tile, blocks(variant), torch.bfloat16
    )
    scale = q.shape[-1] ** -0.5
    out, lse, reports = simulated.run(q, k, v, scale=scale, arch=90, kv_lengths=lengths, grid=4)
    assert not any(report.findings for report in reports), str(reports)
    hopper_inputs.assert_not_finite_shows(out, lse, q, k, v, scale, lengths)
