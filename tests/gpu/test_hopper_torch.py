"""The Hopper kernel behind the public op: streams, threads, CUDA graphs, torch.compile, copies, refusals."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import videoattn
from videoattn.dispatch import KernelUnavailable
from videoattn.kernels import native, verify
from videoattn.kernels.accuracy import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

LAUNCHES = 10_000
SHAPES = [
    (1, 4, 700, 900, 128),
    (2, 3, 64, 1500, 128),
    (1, 8, 333, 77, 64),
    (3, 2, 1, 1, 64),
    (1, 2, 259, 4000, 64),
    (2, 5, 129, 128, 128),
]


def inputs(batch, heads, q_len, kv_len, head_dim, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(length):
        shape = (batch, length, heads, head_dim)
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return normal(q_len), normal(kv_len), normal(kv_len)


def attend(q, k, v, **options):
    return videoattn.attention(q, k, v, kernel="hopper", **options)


def test_two_threads_and_two_streams():
    """Ten thousand launches of mixed shapes; every output must equal the first of its shape, bit by bit."""
    problems = [inputs(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    wanted = [attend(*problem) for problem in problems]
    for problem, out in zip(problems, wanted, strict=True):
        assert compare(out, None, *problem, scale=problem[0].shape[-1] ** -0.5).passed
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(seed):
        shuffle = random.Random(seed)
        stream = torch.cuda.Stream()
        bad = torch.zeros(len(SHAPES), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(LAUNCHES // 2):
                    index = shuffle.randrange(len(SHAPES))
                    bad[index] += (attend(*problems[index]) != wanted[index]).sum()
                stream.synchronize()
            wrong.extend(f"{SHAPES[i]}: {n} values" for i, n in enumerate(bad.tolist()) if n)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cuda_graph_replays():
    problem = inputs(1, 4, 300, 2000, 64)
    lengths = torch.tensor([2000], dtype=torch.int32, device="cuda")
    for _ in range(2):
        attend(*problem, kv_lengths=lengths, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(*problem, kv_lengths=lengths, return_lse=True)
    for length, seed in ((2000, 1), (777, 2), (0, 3)):
        for static, fresh in zip(problem, inputs(1, 4, 300, 2000, 64, seed=seed), strict=True):
            static.copy_(fresh)
        lengths.fill_(length)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        errors = compare(out, lse, *problem, scale=0.125, kv_lengths=lengths)
        assert errors.passed, f"length {length}: {errors}"


def test_compiles_without_a_graph_break():
    q, k, v = inputs(1, 2, 200, 300, 128)

    @torch.compile(fullgraph=True)
    def block(q, k, v):
        out, lse = attend(q * 1.0, k, v, return_lse=True)
        return out + 1, lse

    out, lse = block(q, k, v)
    eager, eager_lse = attend(q, k, v, return_lse=True)
    assert torch.equal(out, eager + 1)
    assert torch.equal(lse, eager_lse)


def test_what_tma_refuses_is_copied():
    q, k, v = inputs(2, 3, 200, 300, 64)
    cases = [
        (q, k[:, :, :1].expand(-1, -1, 3, -1), v),
        (q.transpose(2, 3).contiguous().transpose(2, 3), k, v),
        (torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view_as(q).copy_(q), k, v),
    ]
    for case in cases:
        assert None in [native.placement(x) for x in case]
        errors = compare(attend(*case), None, *case, scale=0.125)
        assert errors.passed, str(errors)


def test_refusals_name_their_reason():
    q, k, v = inputs(1, 2, 64, 64, 64)
    with pytest.raises(KernelUnavailable, match="bf16 and fp16, not float32"):
        attend(q.float(), k.float(), v.float())
    with pytest.raises(KernelUnavailable, match="head dims 64 and 128, not 32"):
        attend(q[..., :32], k[..., :32], v[..., :32])


def test_the_self_check_passes(tmp_path, monkeypatch):
    assert verify.verify("hopper", torch.device("cuda", 0)).passed
    assert verify.untrusted("hopper", "cuda") is None
