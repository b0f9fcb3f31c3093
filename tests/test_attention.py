"""The functional front door against an fp32 reference, its errors, and its behaviour under torch.compile."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import videoattn
from videoattn.attention import _plain, attend
from videoattn.dispatch import AttentionCall, KernelUnavailable, choose
from videoattn.kernels import flash3, sdpa
from videoattn.processors.fused import gate_twin


def reference(q, k, v, scale=None, kv_lengths=None):
    """fp32 attention and LSE, one batch entry at a time so that lengths are slices, not masks."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs, lses = [], []
    for b in range(q.shape[0]):
        n = k.shape[1] if kv_lengths is None else int(kv_lengths[b])
        scores = torch.einsum("qhd,khd->hqk", q[b].float(), k[b, :n].float()) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[b, :n].float()))
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs), torch.stack(lses)


def inputs(batch=2, q_len=37, kv_len=53, heads=3, head_dim=64, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(batch, n, heads, head_dim) for n in (q_len, kv_len, kv_len)]
    return [torch.randn(s, dtype=dtype) + 0.5 for s in shapes]


@pytest.fixture
def small_chunks(monkeypatch):
    """Five rows of scores at a time, or seven."""
    monkeypatch.setattr("videoattn.kernels.reference.SCORE_CHUNK", 5 * 2 * 3 * 53)
    monkeypatch.setattr("videoattn.kernels.sdpa.LSE_CHUNK", 7 * 2 * 3 * 53)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [None, [53, 1], [17, 0]])
def test_matches_fp32(kernel, scale, lengths, small_chunks):
    q, k, v = inputs()
    kv_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    if lengths is not None:
        for b, n in enumerate(lengths):
            k[b, n:], v[b, n:] = torch.nan, torch.inf
    options = {"scale": scale, "kv_lengths": kv_lengths, "kernel": kernel}
    out, lse = videoattn.attention(q, k, v, return_lse=True, **options)
    ref, ref_lse = reference(q, k, v, scale, kv_lengths)
    torch.testing.assert_close(out, ref.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, ref_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out, videoattn.attention(q, k, v, **options))


@pytest.mark.parametrize("form", ["boolean", "additive", "a row an entry"])
def test_a_dense_mask_means_the_same_to_both(form, small_chunks):
    q, k, v = inputs()
    mask = torch.rand(2, 1, 1 if form == "a row an entry" else 37, 53) > 0.5
    if form == "additive":
        mask = torch.where(mask, torch.randn(2, 1, 37, 53), -torch.inf)
    results = [attend(q, k, v, mask=mask, return_lse=True, kernel=kernel) for kernel in ("sdpa", "reference")]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(dtype):
    q, k, v = inputs(dtype=dtype)
    want = reference(q, k, v)[0].to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = videoattn.attention(q, k, v, kernel="reference")
    # Where fp32 sums of another order fall on either side of a rounding boundary.
    assert (out != want).float().mean() < 1e-3
    torch.testing.assert_close(out, want, atol=0, rtol=torch.finfo(dtype).eps)


def test_the_reference_says_what_it_does_not_take(monkeypatch):
    q, k, v = inputs(dtype=torch.float64)
    with pytest.raises(KernelUnavailable, match="float64 inputs are more precise"):
        videoattn.attention(q, k, v, kernel="reference")
    call = AttentionCall(1, 1, 1, 1, 64, torch.float32, "cuda", (9, 0))
    assert choose(call, "reference").kernel == "reference"
    choose.cache_clear()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(KernelUnavailable, match="TF32 is on: set"):
            choose(call, "reference")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_strided_views_of_a_fused_tensor():
    qkv = torch.randn(2, 40, 3, 4, 64)
    q, k, v = qkv.unbind(2)
    torch.testing.assert_close(videoattn.attention(q, k, v), reference(q, k, v)[0], atol=1e-5, rtol=1e-5)


def test_compiles_fullgraph():
    q, k, v = inputs()
    lengths = torch.tensor([5, 9], dtype=torch.int32)

    def f(q, k, v, lengths):
        out, lse = videoattn.attention(q * 2, k, v, kv_lengths=lengths, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, k, v, lengths), f(q, k, v, lengths), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("lengths", [None, [53, 17]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype, lengths, backend):
    """Autocast is for what has no dtype of its own; LSEs of bf16 scores would spoil merged results."""
    q, k, v = inputs(dtype=dtype)
    kv_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)

    def call(q, k, v):
        return videoattn.attention(q, k, v, kv_lengths=kv_lengths, return_lse=True)

    want = call(q, k, v)
    torch.compiler.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = call if backend is None else torch.compile(call, fullgraph=True, backend=backend)
        out, lse = run(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    ref_lse = reference(q, k, v, kv_lengths=kv_lengths)[1]
    torch.testing.assert_close(lse, ref_lse, atol=1e-4, rtol=1e-5)


def test_op_registration_is_sound():
    q, k, v = inputs()
    args = (q, k, v, 0.125, None, None, True, "sdpa", "video_self")
    torch.library.opcheck(
        torch.ops.videoattn.attention.default, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_are_the_twin_of_any_kernel(kernel, dtype):
    q, k, v = inputs(dtype=dtype)
    lengths = torch.tensor([17, 0], dtype=torch.int32)
    logits = torch.randn(2, 37, 5, dtype=dtype)[..., 1:4]
    options = {"kv_lengths": lengths, "kernel": kernel, "return_lse": True}
    out, lse = attend(q, k, v, **options)
    gated, same_lse = attend(q, k, v, gate=logits, **options)
    assert torch.equal(gated, gate_twin(out.flatten(2), logits).view(out.shape))
    assert torch.equal(same_lse, lse)
    assert (gated[1] == 0).all()


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "gate",
    [torch.zeros(2, 40, 3), torch.zeros(40, 3, dtype=torch.bfloat16), torch.zeros(2, 40, 1).bfloat16()],
)
def test_gates_of_another_shape_or_dtype_are_refused(kernel, gate):
    q = torch.randn(2, 40, 3, 64).bfloat16()
    with pytest.raises(ValueError, match=r"gate must be \(2, 40, 3\), torch.bfloat16 on cpu, not "):
        attend(q, q, q, kernel=kernel, gate=gate)


def test_gated_calls_compile_and_have_sound_fakes():
    q, k, v = inputs()
    logits = torch.randn(2, 37, 3)
    args = (q, k, v, 0.125, None, None, True, "sdpa", "video_self", logits)
    torch.library.opcheck(
        torch.ops.videoattn.attention.default, args, test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(
        lambda q, logits: attend(q, k, v, gate=2 * logits)[0] + 1, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, logits), attend(q, k, v, gate=2 * logits)[0] + 1)


def test_gates_go_to_a_kernel_that_knows_them(monkeypatch):
    q, k, v = inputs()
    logits = torch.randn(2, 37, 3)
    plain = attend(q, k, v)[0]
    given = []

    def run(q, k, v, *, gate=None, **options):
        given.append(gate)
        out, lse = flawless(q, k, v, **options)
        return out if gate is None else 3 * out, lse

    flawless = sdpa.run
    monkeypatch.setattr(sdpa, "run", run)
    monkeypatch.setattr(sdpa, "GATES", True, raising=False)
    assert torch.equal(attend(q, k, v, gate=logits)[0], 3 * plain)
    assert given == [logits]
    with videoattn.record_timing():
        assert torch.equal(attend(q, k, v, gate=logits)[0], 3 * plain)
    # Beside arms that know none, gates are a pass of their own, and all outputs are of one attention.
    with videoattn.record_timing(compare="reference") as recording:
        gated = attend(q, k, v, gate=logits)[0]
    assert torch.equal(gated, gate_twin(plain.flatten(2), logits).view(plain.shape))
    assert given[2:] == [None]
    (row,) = recording.rows
    assert row.arms["reference"].max_abs_diff < 1e-5


def test_only_plain_gates_skip_the_dispatcher():
    q, k, v = inputs()
    logits = torch.randn(2, 37, 3)
    assert _plain(q, k, v, logits)
    negated = torch.complex(logits, -logits).conj().imag
    for gate in (logits.clone().requires_grad_(), logits.as_subclass(Seen), negated):
        assert not _plain(q, k, v, gate)
    torch.testing.assert_close(attend(q, k, v, gate=negated), attend(q, k, v, gate=logits))


def test_requires_grad_is_refused():
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        videoattn.attention(q, k, v)
    with torch.no_grad():
        videoattn.attention(q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v, {}), "batch, seq, heads, head_dim"),
        (lambda q, k, v: (q, k, v[:, :-1], {}), "one shape"),
        (lambda q, k, v: (q[:, :, :2], k, v, {}), "grouped-query"),
        (lambda q, k, v: (q.half(), k, v, {}), "one dtype"),
        (lambda q, k, v: (q[:, :0], k, v, {}), "empty"),
        (lambda q, k, v: (q, k, v, {"kv_lengths": torch.tensor([1, 2])}), "int32"),
        (lambda q, k, v: (q, k, v, {"kernel": "flash9"}), "choose from auto, blackwell"),
    ],
)
def test_bad_arguments_name_the_fault(change, message):
    q, k, v, options = change(*inputs())
    with pytest.raises(ValueError, match=message):
        videoattn.attention(q, k, v, **options)


@pytest.mark.parametrize("kernel", ["blackwell", "hopper", "flash4", "flash3"])
def test_a_named_kernel_never_falls_back(kernel):
    with pytest.raises(KernelUnavailable, match=f"'{kernel}' cannot serve"):
        videoattn.attention(*inputs(), kernel=kernel)


class Seen(torch.Tensor):
    pass


class Ops(TorchDispatchMode):
    """Notes the ops a block calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes the functions a block calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


OP = "videoattn.attention.default"


def test_an_eager_call_skips_the_dispatcher_and_gives_the_same_bits():
    q, k, v = inputs()
    out, lse = videoattn.attention(q, k, v, return_lse=True)
    by_op = torch.ops.videoattn.attention(q, k, v, 1 / math.sqrt(64), None, None, True, "auto", "")
    assert torch.equal(out, by_op[0])
    assert torch.equal(lse, by_op[1])
    assert torch.ops.videoattn.attention(q, k, v, 0.1, None, None, False, "auto", "")[1].numel() == 0


@pytest.mark.parametrize("mode", [Ops, Functions])
def test_modes_see_the_op(mode):
    with mode() as seen:
        videoattn.attention(*inputs())
    assert OP in seen.names


class Watched(torch.Tensor):
    """Notes the functions it is given to."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("place", range(3))
def test_a_subclass_sees_the_op(place):
    arguments = inputs()
    arguments[place] = arguments[place].as_subclass(Watched)
    Watched.names.clear()
    videoattn.attention(*arguments)
    assert OP in Watched.names


def test_the_profiler_sees_the_op():
    q, k, v = inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        videoattn.attention(q, k, v)
    assert "videoattn::attention" in {event.name for event in profile.events()}


def test_fake_and_meta_tensors_get_shapes_only():
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in inputs())
        out, lse = videoattn.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (2, 3, 37))
    # Outside the mode the tensors themselves still say so.
    assert isinstance(videoattn.attention(q, k, v), FakeTensor)
    meta = [t.to("meta") for t in inputs()]
    with videoattn.record_timing() as recording:
        assert videoattn.attention(*meta).is_meta
    assert recording.rows == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_op():
    q, k, v = inputs()
    traced: Any = torch.jit.trace(lambda q, k, v: videoattn.attention(q, k, v), (q, k, v), check_trace=False)
    assert "videoattn::attention" in str(traced.graph)
    torch.testing.assert_close(traced(k, k, v), videoattn.attention(k, k, v))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_runs_each_entry_on_its_own():
    q, k, v = (torch.stack([t, t * 2, -t]) for t in inputs())
    together = torch.vmap(lambda q, k, v: videoattn.attention(q, k, v))(q, k, v)
    for i in range(3):
        torch.testing.assert_close(together[i], videoattn.attention(q[i], k[i], v[i]))


def test_kernels_meet_no_lazily_negated_tensors(monkeypatch):
    """Those that read memory by address would miss the sign."""
    seen = []
    run = sdpa.run

    def watched(q, k, v, **options):
        seen.extend(t.is_neg() for t in (q, k, v))
        return run(q, k, v, **options)

    monkeypatch.setattr(sdpa, "run", watched)
    pairs = torch.randn(2, 40, 3, 64, dtype=torch.complex64)
    plain, negated = pairs.real.contiguous(), pairs.conj().imag
    assert negated.is_neg()
    for place in range(3):
        arguments = [negated if i == place else plain for i in range(3)]
        want = reference(*(t.resolve_neg() for t in arguments))[0]
        torch.testing.assert_close(videoattn.attention(*arguments), want, atol=1e-5, rtol=1e-5)
    assert seen == [False] * 9


@pytest.mark.parametrize("place", range(3))
def test_training_through_the_unchecked_call_warns(place):
    arguments = inputs()
    arguments[place].requires_grad_()
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        attend(*arguments)[0].sum().backward()


def test_export_holds_the_op():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return videoattn.attention(q, k, v)

    q, k, v = inputs()
    for strict in (False, True):
        program = torch.export.export(Model(), (q, k, v), strict=strict)
        assert OP in {str(node.target) for node in program.graph.nodes}
        torch.testing.assert_close(program.module()(q, k, v), videoattn.attention(q, k, v))


def test_shapes_seen_before_are_bound_again_after_a_kernel_changed(monkeypatch):
    q, k, v = inputs()
    bound = choose.bind(q, k, None, None, False, "auto", "video_self")
    assert choose.bind(k, k, None, None, False, "auto", "video_self") is not bound
    assert choose.bind(q + 1, k + 1, None, None, False, "auto", "video_self") is bound
    assert (bound.call.kind, bound.call.q_len, bound.call.mask) == ("video_self", 37, "none")
    lengths = torch.ones(2, dtype=torch.int32)
    assert choose.bind(q, k, lengths, None, False, "auto", "video_self").call.mask == "kv_lengths"
    assert choose.bind(q, k, None, lengths, False, "auto", "video_self").call.mask == "dense"
    monkeypatch.setattr(flash3, "supports", lambda call: None)
    with pytest.raises(KernelUnavailable):
        videoattn.attention(q, k, v, kernel="flash4")
    choose.cache_clear()
    try:
        assert choose.bind(q, k, None, None, False, "flash3", "").kernel is flash3
    finally:
        choose.cache_clear()


@pytest.mark.parametrize("count", [1, 3])
def test_lengths_of_another_batch_reach_no_kernel(monkeypatch, count):
    """Through the doors that check no arguments, also after the same call with lengths that fit."""
    q, k, v = inputs()
    fits, lengths = (torch.ones(n, dtype=torch.int32) for n in (2, count))
    attend(q, k, v, kv_lengths=fits)
    monkeypatch.setattr(sdpa, "run", None)
    match = rf"kv_lengths must be of shape \(2,\).*not \({count},\)"
    with pytest.raises(ValueError, match=match):
        attend(q, k, v, kv_lengths=lengths)
    with pytest.raises(ValueError, match=match):
        torch.ops.videoattn.attention(q, k, v, 1.0, lengths, None, False, "auto", "")


def test_a_refusal_names_the_kind_of_call_that_met_it():
    call = AttentionCall(1, 4, 64, 64, 64, torch.float32, "cpu")
    for kind in ("video_self", "audio_text"):
        with pytest.raises(KernelUnavailable, match=f"cannot serve {kind} with"):
            choose(replace(call, kind=kind), "hopper")
