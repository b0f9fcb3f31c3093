"""The Hopper kernel on the GPU and its PTX in the simulator give the same output, to rounding.

Both execute the same instructions on the same inputs. What may differ is the order of the tensor cores' f32
sums and the last bits of ex2.approx: an element of P then rounds to the other side now and then, and an
output by one unit in its last place.
"""

from __future__ import annotations

import pytest
import torch

import videoattn
from videoattn.kernels import simulated
from videoattn.ptxsim import Schedule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

UNIT = {
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}  # last place, relative to the power of two


def inputs(heads: int, q_len: int, kv_len: int, head_dim: int, dtype: torch.dtype):
    """Normal q, k, v (1, length, heads, head_dim) on the CPU."""
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    lengths = (q_len, kv_len, kv_len)
    return [torch.randn(1, n, heads, head_dim, generator=generator).to(dtype) for n in lengths]


def in_simulator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """(output, LSE) of a clean simulated launch."""
    out, lse, reports = simulated.run(q, k, v, scale=q.shape[-1] ** -0.5, arch=90, schedule=Schedule.late())
    for report in reports:
        assert not report.findings, str(report)
    assert lse is not None
    return out, lse


def disagreement(a: torch.Tensor, b: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """(largest difference in units of what rounding explains, share of elements that differ at all)."""
    a32, b32 = a.float(), b.float()
    power = torch.exp2(torch.floor(torch.log2(torch.maximum(a32.abs(), b32.abs()).clamp_min(2.0**-20))))
    allowed = UNIT[a.dtype] * power + 1e-4 * values.float().abs().max()
    return float(((a32 - b32).abs() / allowed).max()), float((a != b).float().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "head_dim"),
    [(1, 64, 64, 64), (2, 100, 300, 64), (1, 130, 259, 128), (2, 192, 384, 128)],
)
def test_gpu_and_simulator_agree(heads, q_len, kv_len, head_dim, dtype):
    q, k, v = inputs(heads, q_len, kv_len, head_dim, dtype)
    out, lse = videoattn.attention(*(x.cuda() for x in (q, k, v)), kernel="hopper", return_lse=True)
    want, want_lse = in_simulator(q, k, v)
    worst, share = disagreement(out.cpu(), want, v)
    print(f"{q_len} x {kv_len}, {head_dim}, {dtype}: {worst:.2f} roundings at most, {share:.2%} differ")
    assert worst <= 1
    assert share < 0.2
    assert (lse.cpu() - want_lse).abs().max() < 1e-4
