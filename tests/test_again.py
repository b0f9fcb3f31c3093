"""Calls made ready: they serve their like, and nothing else."""

from __future__ import annotations

import gc
import math
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import videoattn
from videoattn import again
from videoattn.attention import attend
from videoattn.dispatch import choose
from videoattn.kernels import reference as exact
from videoattn.kernels import sdpa


def reference(q, k, v, *, scale=None, kv_lengths=None):
    scale = scale or 1 / math.sqrt(q.shape[3])
    return exact.run(q, k, v, scale=scale, kv_lengths=kv_lengths, mask=None, return_lse=True)


def inputs(q_len=37, kv_len=53, batch=2, heads=3, head_dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, length, heads, head_dim, generator=generator) for length in (q_len, kv_len, kv_len)
    ]


@pytest.fixture
def served(monkeypatch):
    """SDPA learns to make calls ready; how many were served so."""
    calls = []

    def prepare(q, k, v, **options):
        def call(q, k, v, kv_lengths):
            calls.append(options)
            return sdpa.run(q, k, v, mask=None, **{**options, "kv_lengths": kv_lengths})

        return call

    monkeypatch.setattr(sdpa, "prepare", prepare, raising=False)
    choose.cache_clear()
    yield calls
    choose.cache_clear()


def agrees(result, q, k, v, **options):
    torch.testing.assert_close(result, reference(q, k, v, **options)[0], atol=1e-5, rtol=1e-5)


def test_this_torch_has_the_guards():
    assert again.AVAILABLE


def test_a_call_like_an_earlier_one_is_served_so(served):
    for seed in range(3):
        q, k, v = inputs(seed=seed)
        agrees(videoattn.attention(q, k, v), q, k, v)
        assert len(served) == seed
    # At another offset of a larger storage, laid out alike.
    whole = torch.randn(5, 37, 3, 64)
    agrees(videoattn.attention(whole[3:], k, v), whole[3:], k, v)
    assert len(served) == 3


def test_any_other_call_is_not(served):
    q, k, v = inputs()
    lengths = torch.tensor([7, 53], dtype=torch.int32)
    videoattn.attention(q, k, v)
    fused = torch.randn(2, 37, 6, 64)
    others = {
        "strides of q": (fused[:, :, ::2], k, v),
        "strides of k": (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        "strides of v": (q, k, v.flip(3).transpose(2, 3).contiguous().transpose(2, 3)),
        "q_len": inputs(q_len=36),
        "kv_len": inputs(kv_len=52),
        "batch": inputs(batch=1),
        "heads": inputs(heads=2),
        "head_dim": inputs(head_dim=32),
        "dtype": [t.double() for t in (q, k, v)],
        "one tensor twice": (q, v, v),
        "repeated keys": (q, k[:, :1].expand(-1, 53, -1, -1), v),
    }
    for name, tensors in others.items():
        torch.testing.assert_close(
            videoattn.attention(*tensors),
            reference(*(t.contiguous() for t in tensors))[0].to(tensors[0].dtype),
            atol=1e-5,
            rtol=1e-5,
            msg=name,
        )
    agrees(videoattn.attention(q, k, v, scale=0.3), q, k, v, scale=0.3)
    agrees(videoattn.attention(q, k, v, kv_lengths=lengths), q, k, v, kv_lengths=lengths)
    agrees(videoattn.attention(q, k, v, return_lse=True)[0], q, k, v)
    agrees(videoattn.attention(q, k, v, kernel="sdpa"), q, k, v)
    agrees(attend(q, k, v)[0], q, k, v)
    agrees(attend(q, k, v, kind="video_self")[0], q, k, v)
    assert served == []
    # Lengths are values of a tensor, and no part of what was made ready.
    lengths = torch.tensor([53, 9], dtype=torch.int32)
    agrees(videoattn.attention(q, k, v, kv_lengths=lengths), q, k, v, kv_lengths=lengths)
    result = videoattn.attention(q, k, v, return_lse=True)
    assert len(result) == 2
    torch.testing.assert_close(result[1], reference(q, k, v)[1], atol=1e-5, rtol=1e-5)
    assert len(served) == 2
    mask = torch.zeros(2, 1, 1, 53)
    mask[..., 20:] = -math.inf
    torch.testing.assert_close(
        attend(q, k, v, mask=mask)[0], videoattn.attention(q, k[:, :20], v[:, :20]), atol=1e-5, rtol=1e-5
    )
    assert len(served) == 2


def test_gated_calls_are_ready_for_gated_ones_alone(served, monkeypatch):
    def run(q, k, v, *, gate=None, **options):
        out, lse = plain(q, k, v, **options)
        return out if gate is None else out * gate[..., None], lse

    plain = sdpa.run
    monkeypatch.setattr(sdpa, "run", run)
    q, k, v = inputs()
    gate = torch.randn(2, 37, 3)
    # A kernel that knows no gates is made ready for no gated call.
    for _ in range(2):
        attend(q, k, v, gate=gate)
    assert served == []
    monkeypatch.setattr(sdpa, "GATES", True, raising=False)
    prepare = sdpa.prepare  # type: ignore[attr-defined]

    def gated(q, k, v, gate=None, **options):
        call = prepare(q, k, v, **options)

        def ready(q, k, v, kv_lengths, gate=None):
            out, lse = call(q, k, v, kv_lengths)
            return out if gate is None else out * gate[..., None], lse

        return ready

    monkeypatch.setattr(sdpa, "prepare", gated)
    expected = reference(q, k, v)[0]

    def close(out, gate=None):
        want = expected if gate is None else expected * gate[..., None]
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)

    lengths = torch.full((2,), 53, dtype=torch.int32)
    close(attend(q, k, v, gate=gate)[0], gate)
    close(attend(q, k, v)[0])
    close(attend(q, k, v, kv_lengths=lengths)[0])
    assert served == []
    for count in (1, 2):
        other = torch.randn(2, 37, 3)
        close(attend(q, k, v, gate=other)[0], other)
        assert len(served) == count
    close(attend(q, k, v)[0])
    with videoattn.record_timing():
        close(attend(q, k, v, gate=gate)[0], gate)
    assert len(served) == 4
    # Of another layout, and one that wants a gradient.
    wide = torch.randn(2, 37, 5)[..., :3]
    close(attend(q, k, v, gate=wide)[0], wide)
    wanting = gate.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            close(attend(q, k, v, gate=wanting)[0], wanting)
    assert len(served) == 4


def test_a_scale_that_can_change_is_no_key(served):
    q, k, v = inputs()
    scale = torch.tensor(0.1)
    for value in (0.1, 0.4):
        scale.fill_(value)
        agrees(videoattn.attention(q, k, v, scale=scale), q, k, v, scale=value)  # type: ignore[call-overload]
    assert served == []


def test_calls_that_nobody_checked_check_nothing_for_others(served):
    q, k, v = inputs()
    for _ in range(2):
        attend(q, k, v[..., :32])
    with pytest.raises(ValueError, match="k and v must have one shape"):
        videoattn.attention(q, k, v[..., :32])
    with pytest.raises(ValueError, match="kv_lengths must be int32"):
        videoattn.attention(q, k, v, kv_lengths=torch.ones(2, dtype=torch.int64))
    videoattn.attention(q, k, v, kv_lengths=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="kv_lengths must be int32"):
        videoattn.attention(q, k, v, kv_lengths=torch.ones(2, dtype=torch.int64))


class Ops(TorchDispatchMode):
    """Notes the ops a block runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Watched(torch.Tensor):
    pass


def test_who_watches_still_sees_the_op(served):
    q, k, v = inputs()
    for _ in range(2):
        videoattn.attention(q, k, v)
    assert len(served) == 1
    with Ops() as seen:
        videoattn.attention(q, k, v)
    assert "videoattn.attention.default" in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        videoattn.attention(q, k, v)
    assert "videoattn::attention" in {event.name for event in profile.events()}
    with torch.device("cpu"), videoattn.record_timing():
        videoattn.attention(q, k, v)
    assert isinstance(videoattn.attention(q.as_subclass(Watched), k, v), Watched)
    assert videoattn.attention(*(t.to("meta") for t in (q, k, v))).is_meta
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(lambda q: videoattn.attention(q, k, v), q, check_trace=False)
    assert "videoattn::attention" in str(traced.graph)
    together = torch.vmap(lambda q, k, v: videoattn.attention(q, k, v))(*(t[None] for t in (q, k, v)))
    agrees(together[0], q, k, v)
    negated = torch.complex(q, -q).conj().imag
    assert negated.is_neg()
    assert negated.stride() != q.stride()
    agrees(videoattn.attention(negated, k, v), q, k, v)
    compiled = torch.compile(videoattn.attention, fullgraph=True, backend="eager")
    agrees(compiled(q, k, v), q, k, v)
    before = len(served)
    videoattn.attention(q, k, v)
    assert len(served) == before + 1


def test_a_recorded_call_is_ready_too_and_makes_its_row(served):
    first, later = inputs(seed=0), inputs(seed=1)
    with videoattn.record_timing() as recording:
        attend(*first, kind="video_self")
        assert not served
        agrees(attend(*later, kind="video_self")[0], *later)
        assert len(served) == 1
        agrees(videoattn.attention(*later), *later)
        agrees(videoattn.attention(*first), *first)
        assert len(served) == 2
    assert [row.kind for row in recording.rows] == ["video_self", "video_self", None, None]
    assert {row.kernel for row in recording.rows} == {"sdpa"}
    assert all(row.milliseconds > 0 for row in recording.rows)


def test_shadow_arms_run_beside_a_ready_call(served):
    q, k, v = inputs()
    with videoattn.record_timing(compare="reference") as recording:
        for _ in range(2):
            agrees(videoattn.attention(q, k, v), q, k, v)
    assert len(served) == 1
    arms = [row.arms["reference"] for row in recording.rows]
    assert all(arm.milliseconds > 0 and arm.max_abs_diff < 1e-5 for arm in arms)


def test_a_gradient_is_refused_as_ever(served):
    q, k, v = inputs()
    for _ in range(2):
        videoattn.attention(q, k, v)
    wanting = q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        videoattn.attention(wanting, k, v)
    with torch.no_grad():
        for _ in range(2):
            agrees(videoattn.attention(wanting, k, v), wanting, k, v)
    with pytest.raises(RuntimeError, match="no backward"):
        videoattn.attention(wanting, k, v)
    with torch.inference_mode():
        for _ in range(2):
            assert videoattn.attention(q, k, v).is_inference()
    assert not videoattn.attention(q, k, v).is_inference()


def test_a_new_choice_ends_what_was_made_ready(served):
    q, k, v = inputs()
    for _ in range(2):
        videoattn.attention(q, k, v)
    choose.cache_clear()
    videoattn.attention(q, k, v)
    assert len(served) == 1


def test_no_tensor_is_kept_and_no_more_than_a_few_calls(served):
    alive = []
    for length in range(2, 40):
        q, k, v = inputs(q_len=length)
        videoattn.attention(q, k, v)
        alive += [weakref.ref(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert not any(kept() is not None for kept in alive)
    (calls,) = choose.again._calls.values()
    assert len(calls) == again.REMEMBERED
    videoattn.attention(*inputs(q_len=39))
    assert len(served) == 1


def test_threads_share_what_is_ready(served):
    given = [inputs(q_len=length, seed=length) for length in range(20, 32)]
    expected = [reference(*each)[0] for each in given]
    wrong = []

    def work(start):
        for step in range(60):
            index = (start + step * 5) % len(given)
            result = videoattn.attention(*given[index])
            if (result - expected[index]).abs().max() > 1e-5:
                wrong.append(index)
            if step == 30 and start == 0:
                choose.cache_clear()

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert served
