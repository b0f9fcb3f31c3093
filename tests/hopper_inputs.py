"""Inputs on which the Hopper kernel could overflow or lose a NaN, for the simulator and for a GPU."""

from __future__ import annotations

import math

import torch

from videoattn.kernels.accuracy import L2_LIMIT, LSE_LIMIT

# Of each of the product's kernels head dim, key tile, and for how many blocks of keys the planner takes it.
TILES = {
    "d128_n128": (128, 128, 3),
    "d64_n112": (64, 112, 3),
    "d64_n96": (64, 96, 4),
    "d128_n128_short": (128, 128, 2),
    "d64_n96_short": (64, 96, 3),
    "d64_n64_short": (64, 64, 4),
}

# Powers of two by which scores leap, one for each warp's 16 rows: a warp decides for all of its rows at once.
LEAPS = (100, 118, 121, 121.5, 122, 122.5, 123, 123.5, 124, 125.5, 126.5, 128)

# What leaps in each head, and whether every row does or one of a warp's. The last block comes first.
KINDS = (
    ("block", True),  # all keys of all blocks but the last
    ("block", False),
    ("few", True),  # one key of a block
    ("few", False),
    ("again", True),  # every block above the one before, up to the fifth
    ("inside", False),  # some keys of the last block, and later keys above those
)


def levels(kind: str, tile: int, blocks: int) -> torch.Tensor:
    """How many leaps each key's scores are above the rest."""
    place = torch.arange(tile * blocks)
    block, column = place // tile, place % tile
    last = block == blocks - 1
    if kind == "block":
        return (~last).float()
    if kind == "few":
        return (~last & (column == 7 + 40 * block % tile)).float()
    if kind == "again":
        return (blocks - 1 - block).clamp(max=4).float()
    return torch.where(last, (column % 2).float(), torch.where((block == 0) & (column % 3 == 0), 2.0, 0.0))


def leaps(
    head_dim: int, tile: int, blocks: int, dtype: torch.dtype, *, scale_power: int = 0, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Queries, keys, values and scale: a head for each of KINDS, `repeats` times 16 rows for each of LEAPS.

    Scores are exact multiples of the leaps, in every second head 300 powers of two lower; in the last two
    heads with noise. With `scale_power` n the scale is 2^n times smaller and the queries as much larger.
    """
    generator = torch.Generator().manual_seed(head_dim + tile)
    heads, rows = len(KINDS), 16 * len(LEAPS) * repeats
    q = torch.zeros(1, rows, heads, head_dim)
    k = torch.zeros(1, tile * blocks, heads, head_dim)
    amount = torch.tensor(LEAPS).repeat_interleave(16).repeat(repeats)
    for head, (kind, every) in enumerate(KINDS):
        q[0, :, head, 0] = amount if every else torch.where(torch.arange(rows) % 16 == 5, amount, 0)
        k[0, :, head, 0] = levels(kind, tile, blocks)
        if head % 2 == 1:
            q[0, :, head, 1], k[0, :, head, 1] = 1, -300
        if head >= heads - 2:
            q[0, :, head, 2:] = torch.randn(rows, head_dim - 2, generator=generator) / 4
            k[0, :, head, 2:] = torch.randn(tile * blocks, head_dim - 2, generator=generator) / 4
    v = torch.randn(k.shape, generator=generator)
    return (q * 2**scale_power).to(dtype), k.to(dtype), v.to(dtype), math.log(2) / 2**scale_power


def assert_rows(out, lse, q, k, v, scale: float) -> None:
    """Every row against fp64, by the accuracy rule's limits for relative L2 and LSE."""
    query, key, value = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(-1, -2) * scale
    want = scores.softmax(-1) @ value
    got = out.double().transpose(1, 2)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    wrong = ~(errors <= L2_LIMIT[q.dtype])
    assert not wrong.any(), f"(batch, head, row) {wrong.nonzero()[:4].tolist()} of {int(wrong.sum())}"
    gaps = (lse.double() - scores.logsumexp(-1)).abs()
    wrong = ~(gaps <= LSE_LIMIT)
    assert not wrong.any(), f"LSE of (batch, head, row) {wrong.nonzero()[:4].tolist()} of {int(wrong.sum())}"


def not_finite(
    head_dim: int, tile: int, blocks: int, dtype: torch.dtype, *, rows: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and key lengths; in every entry one key is not finite, or those past the length.

    The first half of the rows is positive, the second negative: an infinite key's scores have both signs.
    """
    kv_len = tile * blocks
    columns = (2, tile // 2 - 3, tile - 7)
    inside = [(tile * block + column, kv_len) for block in (0, blocks - 1) for column in columns]
    cases = [(place, value, length) for place, length in inside for value in (torch.nan, torch.inf)]
    cases.append((tile // 2, -torch.inf, kv_len))
    cases += [(kv_len - 9, value, kv_len - 9) for value in (torch.nan, torch.inf, -torch.inf)]
    generator = torch.Generator().manual_seed(head_dim + tile)
    q = torch.randn(len(cases), rows, 1, head_dim, generator=generator).abs().clamp(min=0.05)
    q[:, rows // 2 :] *= -1
    k, v = (torch.randn(len(cases), kv_len, 1, head_dim, generator=generator) for _ in range(2))
    for entry, (place, value, length) in enumerate(cases):
        k[entry, place] = value
        k[entry, length:] = value
        v[entry, length:] = torch.nan
    lengths = torch.tensor([length for *_, length in cases], dtype=torch.int32)
    return q.to(dtype), k.to(dtype), v.to(dtype), lengths


def nothing_at_first(
    head_dim: int, tile: int, blocks: int, dtype: torch.dtype, *, rows: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Queries, keys, values and scale: all scores of the last block, which comes first, are -inf.

    Each head has the others at another level, every second row the first of them 60 higher than the rest.
    """
    levels = (0, -20, -150, -1000, 80)
    generator = torch.Generator().manual_seed(head_dim + tile)
    q = torch.rand(1, rows, len(levels), head_dim, generator=generator) + 0.1
    k = torch.randn(1, tile * blocks, len(levels), head_dim, generator=generator) / 4
    v = torch.randn(k.shape, generator=generator)
    q[..., 0] = 1
    q[..., 1] = torch.arange(rows)[:, None] % 2
    k[..., 0] = torch.tensor(levels)
    k[:, :tile, :, 1], k[:, tile:, :, 1] = 60, 0
    k[:, tile * (blocks - 1) :] = -torch.inf
    # Of 0 times infinity there would be NaN.
    k[:, tile * (blocks - 1) :, :, 1] = 0
    return q.to(dtype), k.to(dtype), v.to(dtype), 1.0


def assert_not_finite_shows(out, lse, q, k, v, scale: float, lengths) -> None:
    """Rows and LSEs are finite exactly where they should be, and rows right there."""
    for entry, length in enumerate(lengths.tolist()):
        query, key, value = (x[entry].double().transpose(0, 1) for x in (q, k[:, :length], v[:, :length]))
        want = ((query @ key.transpose(-1, -2) * scale).softmax(-1) @ value).transpose(0, 1)
        got = out[entry].double()
        finite = want.isfinite().all(-1)
        wrong = got.isfinite().all(-1) != finite
        assert not wrong.any(), f"entry {entry}: rows {wrong[:, 0].nonzero()[:4].tolist()}"
        wrong = finite != lse[entry].isfinite().T
        assert not wrong.any(), f"entry {entry}: LSE of rows {wrong[:, 0].nonzero()[:4].tolist()}"
        error = (got - want)[finite].norm(dim=-1) / want[finite].norm(dim=-1)
        assert (error <= L2_LIMIT[q.dtype]).all(), f"entry {entry}"
