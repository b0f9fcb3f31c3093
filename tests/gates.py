"""What a kernel with gates must give, bit for bit."""

from __future__ import annotations

import torch

# Of the sigmoids: those that may differ from torch's in the last of 16 bits, since approximate exponentials
# and reciprocals may fall on the other side of where they round.
OTHERWISE_ROUNDED = 0.01


def draw(shape, dtype=torch.bfloat16, seed=0, device="cpu"):
    """Logits `(batch, seq, heads)` in a wider tensor; some that saturate, and zero."""
    batch, length, heads = shape
    generator = torch.Generator().manual_seed(seed)
    whole = 3 * torch.randn(batch, length + 2, heads + 3, generator=generator)
    logits = whole.to(dtype).to(device)[:, 1:-1, 2 : 2 + heads]
    logits[:, 0], logits[:, -1], logits[:, length // 2] = 0.0, 40.0, -40.0
    return logits


def assert_gated(out, plain, logits):
    """`out` is `plain`, the same kernel's without gates, as `gate_twin` gates it."""
    sigmoid = torch.sigmoid(logits)
    same = []
    for bits in (0, -1, 1):
        gates = 2.0 * (sigmoid.view(torch.int16) + bits).view(sigmoid.dtype)
        same.append((out == plain * gates[..., None]).all(dim=3))
    exact, below, above = same
    assert (exact | below | above).all()
    assert (~exact).float().mean() < OTHERWISE_ROUNDED
