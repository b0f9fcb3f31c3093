"""Attention whose tokens several ranks hold in equal parts: Ulysses, ring, and one inside the other.

Rank r of n holds tokens r·size to (r+1)·size of the sequence, size = ceil(tokens / n); what the last ranks
hold past the end is padding, and is cut off before any kernel sees it. Ranks of one Ulysses group follow each
other in the sequence.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from videoattn.attention import attend

Part = tuple[torch.Tensor, torch.Tensor]

# The first is the name since torch 2.13, where the second warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_names = itertools.count()
_known: weakref.WeakValueDictionary[str, Groups] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Groups:
    """The process groups of a mesh of `ring.size()` by `ulysses.size()` ranks; `whole` is both in one."""

    ring: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    whole: dist.ProcessGroup
    name: str

    @classmethod
    def of(cls, mesh_config: Any) -> Groups:
        """The groups of a `ContextParallelConfig` whose meshes were made."""
        groups = cls(
            mesh_config._ring_mesh.get_group(),
            mesh_config._ulysses_mesh.get_group(),
            mesh_config._flattened_mesh.get_group(),
            f"groups{next(_names)}",
        )
        _known[groups.name] = groups
        return groups


def share(tokens: int, ranks: int) -> int:
    """Tokens that each rank holds, padding included."""
    return -(-tokens // ranks)


def present(tokens: int, start: int, size: int) -> int:
    """How many of the `size` tokens from `start` on are no padding."""
    return max(0, min(size, tokens - start))


@dataclass(frozen=True)
class Call:
    """What every rank knows of one call.

    `tokens` is the length of the sequence that is split; `mask` is additive, whole on every rank, and
    broadcasts to `(batch, heads, q_len, kv_len)` of the whole call.
    """

    tokens: int
    groups: Groups
    mask: torch.Tensor | None
    kernel: str
    kind: str

    def part(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, *, return_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Attention to those of a rank's keys that are no padding; None if all are, or if there is no query.

        `start` is the place of the first of them in the sequence.
        """
        columns = present(self.tokens, start, k.shape[1])
        if not columns or not q.shape[1]:
            return None
        return attend(
            q,
            k[:, :columns],
            v[:, :columns],
            mask=None if self.mask is None else self.mask[..., start : start + columns],
            return_lse=return_lse,
            kernel=self.kernel,
            kind=self.kind,
        )


def self_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention of the whole sequence to itself, each rank with its part in and its part out.

    Tensors are `(batch, size, heads, head_dim)`; the degree of `call.groups.ulysses` divides heads.
    """
    ulysses = call.groups.ulysses
    exchanges = [_Exchange(t, ulysses) for t in (q, k, v)]
    q, k, v = (exchange.wait() for exchange in exchanges)
    out = _ring(q, k, v, call)
    return _return_heads(F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - out.shape[1])), ulysses)


class _Exchange:
    """One Ulysses all-to-all: some tokens of all heads → all the group's tokens of some heads."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._received, self._work = tensor, None
        ranks = group.size()
        if ranks > 1:
            # Destination first: (ranks, batch, size, heads / ranks, head_dim).
            self._sent = tensor.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
            self._received = torch.empty_like(self._sent)
            self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        if self._work is None:
            return self._received
        self._work.wait()
        # Source first, and sources follow each other in the sequence: no copy for a batch of one.
        return self._received.movedim(0, 1).flatten(1, 2)


def _return_heads(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    if ranks == 1:
        return out
    sent = out.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).flatten(2, 3)


def _ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Each rank's queries against every rank's keys, which travel once around; queries without padding."""
    group, size = call.groups.ring, q.shape[1]
    ranks, index = group.size(), group.rank()
    rows = present(call.tokens, index * size, size)
    q = q[:, :rows]
    if call.mask is not None and call.mask.shape[-2] > 1:
        call = replace(call, mask=call.mask.narrow(-2, index * size if rows else 0, rows))
    total: Part | None = None
    for step in range(ranks):
        passing = _Passing(k, v, group) if step + 1 < ranks else None
        result = call.part(q, k, v, (index - step) % ranks * size, return_lse=ranks > 1)
        if result is not None:
            out, lse = result
            if lse is None:
                return out
            total = (out.float(), lse) if total is None else merge(total, (out.float(), lse))
        if passing is not None:
            k, v = passing.wait()
    return torch.zeros_like(q) if total is None else total[0].to(q.dtype)


class _Passing:
    """Keys and values on their way to the next rank of the ring, while those of the one before arrive."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> None:
        index, ranks = group.rank(), group.size()
        following = dist.get_global_rank(group, (index + 1) % ranks)
        before = dist.get_global_rank(group, (index - 1) % ranks)
        self._sent = k.contiguous(), v.contiguous()
        self._received = torch.empty_like(self._sent[0]), torch.empty_like(self._sent[1])
        self._works = dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.isend, each, following, group) for each in self._sent),
                *(dist.P2POp(dist.irecv, each, before, group) for each in self._received),
            ]
        )

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        for work in self._works:
            work.wait()
        return self._received


def split_key_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention of queries that every rank holds whole to keys of which each holds its part.

    Only the partial results travel; every rank merges them in one order, so all get the same bits.
    `q` is `(batch, q_len, heads, head_dim)`, `k` and `v` are `(batch, size, heads, head_dim)`.
    """
    group = call.groups.whole
    partial = q.new_zeros(*q.shape[:3], q.shape[3] + 1, dtype=torch.float32)
    partial[..., -1] = -torch.inf
    result = call.part(q, k, v, group.rank() * k.shape[1])
    if result is not None:
        out, lse = result
        assert lse is not None
        partial[..., :-1], partial[..., -1] = out, lse.transpose(1, 2)
    parts = [(each[..., :-1], each[..., -1].transpose(1, 2)) for each in gather(partial, group)]
    return reduce(merge, parts)[0].to(q.dtype)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' tensors of one shape, stacked along a new first dimension."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=group)
    return gathered


def merge(one: Part, other: Part) -> Part:
    """Attention to the union of two disjoint sets of keys, from the attention to each.

    Each result is an fp32 output `(batch, q_len, heads, head_dim)` and its natural-log LSE
    `(batch, heads, q_len)`; LSE −inf says that there were no keys. out = Σ exp(lseᵢ − lse) outᵢ, where
    lse = log Σ exp(lseᵢ).
    """
    lse = torch.logaddexp(one[1], other[1])
    reference = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = ((part - reference).exp().transpose(1, 2)[..., None] for part in (one[1], other[1]))
    return one[0] * next(weights) + other[0] * next(weights), lse


_library = torch.library.Library("videoattn", "FRAGMENT")
_library.define(
    "split_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt tokens, str groups, str kernel, "
    "str kind) -> Tensor"
)


def _op(q, k, v, mask, tokens, groups, kernel, kind):
    attention = split_key_attention if kind == "video_to_audio" else self_attention
    return attention(q, k, v, Call(tokens, _known[groups], mask, kernel, kind)).contiguous()


_library.impl("split_attention", _op, "CPU")
_library.impl("split_attention", _op, "CUDA")


@torch.library.register_fake("videoattn::split_attention", lib=_library)
def _fake(q, k, v, mask, tokens, groups, kernel, kind):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tokens: int,
    groups: Groups,
    mask: torch.Tensor | None,
    kernel: str,
    kind: str,
) -> torch.Tensor:
    """`self_attention`, or `split_key_attention` for `video_to_audio`; to torch.compile one opaque op."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.videoattn.split_attention.default(q, k, v, mask, tokens, groups.name, kernel, kind)
    return _op(q, k, v, mask, tokens, groups.name, kernel, kind)
