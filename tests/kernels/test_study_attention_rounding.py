"""The study of roundings emulates attention, not something near it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import study_attention_rounding as study

from videoattn.kernels import native, plan, simulated


def tensors(kv_len: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(kv_len)
    shapes = [(1, 2, 40, 64), (1, 2, kv_len, 64), (1, 2, kv_len, 64)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * spread).to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("policy", [study.EXACT, *study.POLICIES])
@pytest.mark.parametrize("kv_len", [8, 130, 576])
# With the larger spread references move, and rows hang on single keys.
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_every_policy_is_attention(policy, kv_len, spread):
    q, k, v = tensors(kv_len, spread)
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    out = study.attention(policy, q, k, v, 64**-0.5)
    assert out.dtype == q.dtype
    assert (out.double() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("policy", list(study.POLICIES))
def test_only_the_rounding_of_p_is_emulated(policy):
    q, k, v = tensors(576, dtype=torch.float32)
    exact = study.attention(study.EXACT, q, k, v, 64**-0.5)
    assert torch.allclose(study.attention(policy, q, k, v, 64**-0.5), exact, rtol=1e-4, atol=1e-5)


def test_a_lagging_reference_rounds_what_the_maximum_leaves_alone():
    # One key has all the weight, beyond the block that comes first.
    q, k, v = tensors(576)
    k[:, :, 10] = 0
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, 10, 0] = 40.0
    errors = {
        name: (study.attention(name, q, k, v, 0.05).double() - v[:, :, 10:11].double()).abs().max().item()
        for name in ("cudnn", "ours", "ours+sum")
    }
    assert errors["cudnn"] == errors["ours+sum"] == 0
    assert 0 < errors["ours"] < 0.04


def test_the_mode_serves_unmasked_calls_alone():
    q, k, v = tensors(130)
    mask = torch.zeros(40, 130, dtype=torch.bool)
    mask[:, :5] = True
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with study.Rounding("ours"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), plain)
        served = F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.1)
    assert torch.equal(served, study.attention("ours", q, k, v, 0.1))


@pytest.mark.slow
def test_ours_is_what_the_kernel_rounds():
    """576 keys, the demo model's, by the kernel's own PTX: nearly every bit, where the others miss many."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 64, generator=generator) for length in (64, 576, 576))
    q, k, v = (x.to(torch.bfloat16) for x in (3 * q, k, v))
    call = native.fill_call(q, k, v, torch.empty_like(q), scale=0.125, arch=90, num_sms=132)
    size, *_ = study.POLICIES["ours"]
    assert plan.plan(call).kernel.decode() == f"videoattn_hopper_d64_n{size}_bf16"
    out, *_ = simulated.run(q, k, v, scale=0.125, arch=90)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    same = {
        name: (study.attention(name, *heads_first, 0.125) == out.transpose(1, 2)).float().mean().item()
        for name in study.POLICIES
    }
    assert same.pop("ours") > 0.99
    assert max(same.values()) < 0.98
