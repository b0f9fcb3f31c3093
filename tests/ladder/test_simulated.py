"""Every ladder step's own PTX on the simulator: no finding, and fp32's answer by the accuracy rule."""

import os
from functools import lru_cache

import numpy as np
import pytest

from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Module, Schedule
from videoattn.ptxsim.ladder import Step, decode, encode, inputs, load_steps, run_step

full = pytest.mark.skipif("VIDEOATTN_FULL" not in os.environ, reason="full tier: scripts/simulate_full.py")

STEPS = load_steps()
PERSISTENT = [step for step in STEPS if step.persistent]
DAILY = ("01_baseline", "17_phase_bits")


def by_name(step):
    return step.name


@lru_cache(maxsize=1)
def module(step_name: str) -> Module:
    step = next(step for step in STEPS if step.name == step_name)
    return Module.from_file(compile_ptx(step.source, step.arch[0]))


def run(step: Step, schedule: str, **shape):
    outcome = run_step(step, module(step.name), schedule=Schedule.named(schedule), **shape)
    assert not outcome.report.findings, str(outcome.report)
    return outcome


@pytest.mark.parametrize(
    "step",
    [pytest.param(s, marks=[] if s.name in DAILY else pytest.mark.slow) for s in STEPS],
    ids=by_name,
)
def test_step(step):
    """Two heads, so that a wrong row base shows, and three tiles of keys, so that every ring wraps."""
    outcome = run(step, "random:1", heads=2, q_len=step.q_rows_per_cta, kv_len=3 * 128, ctas=2)
    assert outcome.errors.passed, str(outcome.errors)


@pytest.mark.slow
@pytest.mark.parametrize("kv_len", [128, 256])
@pytest.mark.parametrize("step", PERSISTENT, ids=by_name)
def test_one_cta_takes_several_items(step, kv_len):
    """Items of one tile hand over the row sums without a factor between them."""
    outcome = run(step, "random:2", heads=3, q_len=256, kv_len=kv_len, ctas=1)
    assert outcome.errors.passed, str(outcome.errors)


@full
@pytest.mark.parametrize("schedule", ["early", "late", "random:3", "random:4"])
@pytest.mark.parametrize("step", STEPS, ids=by_name)
def test_step_under_other_schedules(step, schedule):
    outcome = run(step, schedule, heads=1, q_len=2 * step.q_rows_per_cta, kv_len=5 * 128, ctas=1)
    assert outcome.errors.passed, str(outcome.errors)


def hard_operands(name: str, dtype: str, q_len: int, kv_len: int):
    q, k, v = inputs(1, q_len, kv_len, dtype)
    if name == "mean":
        k, v = k + 4, v + 4
    elif name == "outliers":
        # Logits near +-30; the large one comes in the last tile and moves the basis of every row.
        q[..., 0] = 3
        k[:, -10, 0], k[:, 40, 0] = 10 * 128**0.5, -10 * 128**0.5
    elif name == "constant":
        q, k = np.ones_like(q), np.ones_like(k)
    elif name == "one_hot":
        q, k = np.zeros_like(q), np.zeros_like(k)
        q[..., 1] = 30
        k[:, kv_len // 2 + 3, 1] = 4 * 128**0.5
    return [decode(encode(x.astype(np.float32), dtype), dtype) for x in (q, k, v)]


@full
@pytest.mark.parametrize("name", ["mean", "outliers", "constant", "one_hot"])
@pytest.mark.parametrize("step", STEPS, ids=by_name)
def test_hard_inputs(step, name):
    operands = hard_operands(name, step.dtype, step.q_rows_per_cta, 256)
    shape = {"q_len": step.q_rows_per_cta, "kv_len": 256}
    outcome = run(step, "random:5", operands=operands, **shape)
    assert outcome.errors.passed, str(outcome.errors)


@pytest.mark.parametrize("name", ["17_phase_bits", "v16_batched_readback"])
def test_the_basis_moves(name):
    """The rescale of O happens, which normal inputs hardly cause."""
    step = next(step for step in STEPS if step.name == name)
    operands = hard_operands("outliers", step.dtype, step.q_rows_per_cta, 256)
    outcome = run(step, "late", operands=operands, q_len=step.q_rows_per_cta, kv_len=256)
    assert outcome.errors.passed, str(outcome.errors)


@pytest.mark.slow
def test_the_half_accumulator_loses_with_the_length():
    """V20's error grows with the number of tiles until it breaks the rule; V16's stays where it is."""

    def errors(name, *lengths):
        step = next(step for step in STEPS if step.name == name)
        return {kv_len: run(step, "early", q_len=128, kv_len=kv_len).errors for kv_len in lengths}

    v16, v20 = errors("v16_batched_readback", 128, 1024), errors("v20_half_accumulator", 128, 1024, 16384)
    assert all(one.passed for one in v16.values())
    assert [one.passed for one in v20.values()] == [True, True, False]
    assert v16[1024].relative_l2 < 1.2 * v16[128].relative_l2
    assert v20[16384].relative_l2 > 2 * v20[1024].relative_l2
    assert v20[1024].relative_l2 > 1.5 * v20[128].relative_l2 > 2 * v16[128].relative_l2
