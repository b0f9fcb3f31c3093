"""The Triton kernels run by Triton's interpreter; `test_fused.py` starts this file in a process of its own,
since TRITON_INTERPRET must be set before Triton is imported.

The accuracy rule: max|fused − ref| ≤ 2 · max|stock − ref|, ref being the stock computation in wider numbers.
The rounding rule: a kernel rounds where its twin does, so the two are equal, bit for bit where no sum's order
can tell them apart.
"""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from diffusers.models.normalization import RMSNorm
from torch.utils._python_dispatch import TorchDispatchMode

import videoattn
from tests.pipelines import ltx2_inputs, ltx2_transformer, ltx_inputs, ltx_transformer
from tests.processors.calls import recording
from videoattn.processors import blocks, fused, fused_kernels
from videoattn.processors.fused import Fusion, Modulation, Parameter, Residual
from videoattn.processors.untouched import plain_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}


_convert_float = interpreter._convert_float


def _rounded(source, source_type, target_type, rounding_mode):
    """The interpreter cuts off what bf16 cannot hold, where a GPU rounds to the nearest: do as a GPU."""
    if (source_type, target_type) != (tl.float32, tl.bfloat16):
        return _convert_float(source, source_type, target_type, rounding_mode)
    return torch.from_numpy(source.copy()).bfloat16().view(torch.uint16).numpy()


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    monkeypatch.setattr(interpreter, "_convert_float", _rounded)


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def fusion():
    made = Fusion()
    assert made.engine(torch.device("cpu")) == "triton"
    return made


def wide_module(module):
    return any(parameter.dtype == torch.float32 for parameter in module.parameters())


def wider(value):
    """The same in the dtype that the reference is computed in."""
    if isinstance(value, torch.Tensor):
        return value.to(WIDER.get(value.dtype, value.dtype))
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to(torch.float64 if wide_module(value) else torch.float32)
    if isinstance(value, dict):
        return {name: wider(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(wider, value))
    if isinstance(value, tuple | list):
        return type(value)(map(wider, value))
    return value


def assert_accurate(ours, stock, reference):
    """The rule, over all results of one function."""
    for a, b, ref in zip(ours, stock, reference, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        error, allowed = ((x.to(ref.dtype) - ref).abs().max() for x in (a, b))
        # Of fp32 results the last bit is a matter of the order of sums.
        floor = 4 * torch.finfo(torch.float32).eps * ref.abs().max() if a.dtype == torch.float32 else 0.0
        assert error <= 2 * allowed + floor, (error, allowed)
        assert ref.abs().max() > 20 * allowed


def assert_rounds_as(stock, ours):
    """Equal but for one element in a hundred, which the order of a norm's sum puts on the other side of a
    rounding: there one unit in the last place of the largest number."""
    for a, b in zip(ours, stock, strict=True):
        unit = torch.finfo(b.dtype).eps * b.abs().max().float()
        assert (a.float() - b.float()).abs().max() <= unit
        assert (a != b).float().mean() < 0.01


def all_equal(ours, stock):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def summable(*shape, dtype):
    """Numbers whose squares add up exactly, in whatever order."""
    return (torch.randint(-16, 17, shape) / 8).to(dtype)


def strided(batch, length, channels, dtype):
    """A slice of a wider tensor, as chunking a joint projection gives it; what lies beside it is poison."""
    whole = torch.full((batch, length + 1, 2 * channels), float("nan"), dtype=dtype)
    whole[:, :length, channels:] = torch.randn(batch, length, channels).to(dtype)
    return whole[:, :length, channels:]


def attention_norms(channels, dtype):
    norms = [torch.nn.RMSNorm(channels, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    return SimpleNamespace(norm_q=norms[0], norm_k=norms[1])


def angles(kind, batch, length, heads, head_dim):
    if kind == "none":
        return None
    if kind == "split":
        turn = torch.randn(batch, length, heads, head_dim // 2).swapaxes(1, 2)
    else:
        turn = torch.randn(1, length, heads * head_dim)
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ["none", "split", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "lengths"), [(2, 64, (3, 3)), (2, 64, (2, 3)), (3, 128, (3, 2))]
)
def test_query_and_key(fusion, dtype, rope, heads, head_dim, lengths):
    norms = attention_norms(heads * head_dim, dtype)
    batch = 2
    rotary = [angles(rope, batch, length, heads, head_dim) for length in lengths]
    own_angles = lengths[0] != lengths[1]
    if not own_angles:
        rotary[1] = rotary[0]
    inputs = [strided(batch, length, heads * head_dim, dtype) for length in lengths]
    ours = fusion.query_and_key(norms, *inputs, *(rotary if own_angles else rotary[:1]))

    def stock(values):
        return [
            fused.norm_rotate_twin(x, norm.weight.to(x.dtype), norm.eps, turn)
            for x, norm, turn in zip(values, (norms.norm_q, norms.norm_k), rotary, strict=True)
        ]

    assert_accurate(ours, stock(inputs), stock(wider(inputs)) if dtype != torch.float32 else stock(inputs))
    if dtype != torch.float32:
        assert_rounds_as(stock(inputs), ours)
    assert all(out.is_contiguous() for out in ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (3, 128)])
def test_gate(fusion, dtype, heads, head_dim):
    x, logits = strided(2, 3, heads * head_dim, dtype), strided(2, 3, heads, dtype)
    ours, stock = [fusion.gate(x, logits)], [fused.gate_twin(x, logits)]
    assert_accurate(ours, stock, [fused.gate_twin(wider(x), wider(logits))])
    if dtype != torch.float32:  # that differs by the last bits of an exponential
        assert all_equal(ours, stock)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ["none", "split", "interleaved"])
def test_query_and_key_round_as_stock(fusion, dtype, rope):
    norms, turn = attention_norms(384, dtype), angles(rope, 2, 5, 3, 128)
    norms.norm_k.eps = None
    inputs = [summable(2, 5, 384, dtype=dtype) for _ in range(2)]
    ours = fusion.query_and_key(norms, *inputs, turn)
    twins = [
        fused.norm_rotate_twin(x, norm.weight, norm.eps, turn)
        for x, norm in zip(inputs, (norms.norm_q, norms.norm_k), strict=True)
    ]
    if (dtype, rope) == (torch.float32, "split"):  # torch may fuse a product with a sum here
        for a, b in zip(ours, twins, strict=True):
            torch.testing.assert_close(a, b, atol=2e-7, rtol=2e-7)
    else:
        assert all_equal(ours, twins)


def parameters(count, batch, rows, channels, dtype):
    table = (torch.randn(count, channels) / 2).to(dtype)
    temb = torch.randn(batch, rows, count * channels).to(dtype)
    return [fused.parameter(table, temb, index) for index in range(count)]


@pytest.mark.parametrize(
    ("branch", "gated", "norm", "modulations", "per_row", "dtype"),
    [
        (False, False, True, 1, False, torch.bfloat16),
        (True, True, True, 1, False, torch.float16),
        (True, True, True, 2, False, torch.bfloat16),
        (True, True, True, 2, True, torch.bfloat16),
        (True, True, True, 2, True, torch.float32),
        (True, False, True, 0, False, torch.bfloat16),
        (True, True, False, 0, True, torch.bfloat16),
        (False, False, False, 1, False, torch.bfloat16),
    ],
)
def test_residual_norm(fusion, dtype, per_row, branch, gated, norm, modulations):
    batch, length, channels = 2, 3, 96
    values = parameters(5, batch, length if per_row else 1, channels, dtype)
    module = RMSNorm(channels, eps=1e-6, elementwise_affine=branch).to(dtype)
    if branch:
        module.weight.uniform_(0.5, 1.5)
    arguments = (
        strided(batch, length, channels, dtype),
        strided(batch, length, channels, dtype) if branch else None,
        values[4] if gated else None,
        module if norm else None,
        tuple(Modulation(*values[2 * index : 2 * index + 2]) for index in range(modulations)),
    )
    ours = fusion.residual_norm(*arguments)
    stock, reference = fused.residual_norm_twin(*arguments), fused.residual_norm_twin(*wider(arguments))
    assert len(ours) == branch + max(int(norm), modulations)
    assert_accurate(ours, stock, reference)
    if dtype != torch.float32:
        assert_rounds_as(stock, ours)
    if not norm:
        assert all_equal(ours, stock)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [False, True])
def test_a_residual_rounds_as_stock(fusion, dtype, per_row):
    """The sum of a gated branch; norms with and without a weight; one and two modulations."""
    shape = 2, 5, 384
    values = parameters(5, 2, 5 if per_row else 1, 384, dtype)
    pairs = Modulation(*values[:2]), Modulation(*values[2:4])
    plain, weighted = (RMSNorm(384, 1e-6, elementwise_affine=affine).to(dtype) for affine in (False, True))
    weighted.weight.uniform_(0.5, 1.5)
    x = summable(*shape, dtype=dtype)
    cases = [
        Residual(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), values[4]),
        Residual(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)),
        Residual(torch.randn(shape).to(dtype), modulations=pairs),
        Residual(x, norm=weighted),
        Residual(x, norm=plain, modulations=pairs[:1]),
        Residual(x, norm=weighted, modulations=pairs),
    ]
    for case in cases:
        assert all_equal(fusion.residual_norm(*case), fused.residual_norm_twin(*case)), case


def test_parameters_of_another_dtype_round_as_stock(fusion):
    """Tables in fp32 beside bf16: what they are added to or multiplied with is fp32 until stored."""
    x, branch = (torch.randn(2, 5, 128).bfloat16() for _ in range(2))
    table, temb = torch.randn(3, 128) / 2, torch.randn(2, 1, 384).bfloat16()
    scale, shift, gate = (fused.parameter(table, temb, index) for index in range(3))
    for case in (Residual(x, branch, gate), Residual(x, modulations=(Modulation(scale, shift),))):
        (stock,) = fused.residual_norm_twin(*case)
        assert stock.dtype == torch.float32
        assert all_equal(fusion.residual_norm(*case), [stock.bfloat16()])


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 4)])
def test_residual_norms_of_two(fusion, lengths):
    """In one launch as in two, bit for bit: other widths, branches, modulations and timesteps by row."""
    dtype = torch.bfloat16
    video, audio = parameters(5, 2, 1, 128, dtype), parameters(5, 2, lengths[1], 64, dtype)
    norms = [RMSNorm(width, eps=1e-6, elementwise_affine=False) for width in (128, 64)]
    x, y = strided(2, lengths[0], 128, dtype), strided(2, lengths[1], 64, dtype)
    pairs = [(Modulation(*each[:2]), Modulation(*each[2:4])) for each in (video, audio)]
    cases = [
        (Residual(x, None, None, norms[0], pairs[0][:1]), Residual(y, None, None, norms[1], pairs[1][:1])),
        (Residual(x, x + 1, video[4], norms[0], pairs[0]), Residual(y, y + 1, audio[4], norms[1], pairs[1])),
        (Residual(x, x + 1, None, norms[0]), Residual(y, y + 1, audio[4])),
        (Residual(y, modulations=pairs[1][:1]), Residual(x, x + 1, video[4], norms[0], pairs[0])),
    ]
    for a, b in cases:
        together = fusion.residual_norms(a, b)
        for ours, one in zip(together, (a, b), strict=True):
            alone = fusion.residual_norm(*one)
            assert len(ours) == len(alone)
            assert all(torch.equal(first, second) for first, second in zip(ours, alone, strict=True))
    assert [len(each) for each in fusion.residual_norms(cases[0][0], Residual(y[:1], y[:1]))] == [1, 1]


def test_several_rows_in_a_program(fusion, monkeypatch):
    """As at full size; 5 rows in programs of 4, so that the last one ends early."""
    norms = attention_norms(128, torch.float32)
    x = torch.randn(2, 5, 128)
    rotary = angles("split", 2, 5, 2, 64)
    values = parameters(3, 2, 1, 128, torch.float32)
    norm = (x, x, values[2], RMSNorm(128, 1e-6, elementwise_affine=False), (Modulation(*values[:2]),))
    y, turn = torch.randn(2, 6, 128), angles("split", 2, 6, 2, 64)
    pairs = ((x, x, rotary), (x, y, rotary, turn), (y, x, turn, rotary), (x, y, None))

    def both():
        return [result for pair in pairs for result in fusion.query_and_key(norms, *pair)]

    one = [*both(), *fusion.residual_norm(*norm)]
    monkeypatch.setattr(fused_kernels, "MANY_ROWS", 0)
    several = [*both(), *fusion.residual_norm(*norm)]
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))
    pair = fusion.residual_norms(Residual(*norm), Residual(y, y, None, norm[3]))
    assert all(torch.equal(a, b) for a, b in zip(pair[0], one[-2:], strict=True))
    assert torch.equal(pair[1][0], 2 * y)


def small(inputs, version="ltx"):
    """The inputs cut to two video tokens, and three of audio and text: the interpreter is slow."""
    cut = {**inputs, "num_frames": 1, "height": 1, "width": 2, "audio_num_frames": 3}
    if version == "ltx":
        del cut["audio_num_frames"]
    for name, count in (("hidden_states", 2), ("audio_hidden_states", 3)):
        if name in cut:
            cut[name] = cut[name][:, :count]
    for name in ("encoder_hidden_states", "audio_encoder_hidden_states"):
        if name in cut:
            cut[name] = cut[name][:, :3]
    for name in ("encoder_attention_mask", "audio_encoder_attention_mask"):
        if name in cut:
            cut[name] = cut[name][:, :3]
    return cut


@pytest.mark.parametrize(("version", "level"), [("ltx", "block"), ("2.0", "attention"), ("2.3", "block")])
def test_a_transformer(version, level):
    """Every kind of attention module in its block, against stock's: gated in 2.3, not in the others."""
    dtype = torch.bfloat16
    if version == "ltx":
        stock, inputs = ltx_transformer(layers=1), small(ltx_inputs(dtype=dtype))
    else:
        stock = ltx2_transformer(version, layers=1)
        inputs = small(ltx2_inputs(version=version, dtype=dtype), version)
    stock = stock.to(dtype)
    reference = copy.deepcopy(stock).float()(**wider(inputs))
    ours = copy.deepcopy(stock)
    handle = videoattn.install(ours, level=level)
    assert "fused by Triton" in str(handle.receipt)
    with recording() as calls:
        results = ours(**inputs)
    assert len(calls.calls) == (2 if version == "ltx" else 6)
    expected = stock(**inputs)
    assert_accurate(results, expected, reference)
    for a, b, ref in zip(results, expected, reference, strict=True):
        assert (a.float() - b.float()).norm() < (b.float() - ref).norm() / 4, "roundings are not stock's"


class Ops(TorchDispatchMode):
    """Counts the ops of a block."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.gated = 0  # attention calls with gates

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        if func is torch.ops.videoattn.attention.default:
            self.gated += len(args) == 10
        return func(*args, **(kwargs or {}))


def test_launches_of_a_block():
    """Video and audio share launches, and so do query and key of every attention."""
    model, inputs = ltx2_transformer("2.3", layers=1), small(ltx2_inputs(), "2.3")
    videoattn.install(model, level="block")
    with Ops() as seen:
        model(**inputs)
    ops = torch.ops.videoattn
    assert seen.counts[ops.residual_norm_pair.default] == 6
    assert seen.counts[ops.norm_rotate.default] == 6
    assert seen.counts[ops.attention.default] == seen.gated == 6
    assert ops.residual_norm.default not in seen.counts
    assert ops.gate.default not in seen.counts


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.0]), torch.zeros(2)], ids=["one of two", "all"])
def test_perturbed_values_are_gated_after_attention(mask):
    """The self-attentions of a guided block; where all is perturbed there is none."""
    stock = ltx2_transformer("2.3", layers=1)
    inputs = small(ltx2_inputs(batch=2), "2.3")
    guided = {"perturbation_mask": mask, "spatio_temporal_guidance_blocks": [0]}
    ours = copy.deepcopy(stock)
    videoattn.install(ours, level="block")
    expected = stock(**inputs, **guided)
    with Ops() as seen:
        results = ours(**inputs, **guided)
    for result, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(result, theirs, atol=1e-5, rtol=1e-5)
    ops = torch.ops.videoattn
    assert seen.gated == 4
    assert seen.counts[ops.gate.default] == 2
    assert seen.counts[ops.attention.default] == (6 if mask.any() else 4)


def test_autocast_keeps_the_gates_where_they_round(fusion):
    """Norms in fp32 make the output fp32, which bf16 gates multiply unrounded."""
    one, half = torch.randn(1, 3, 2), torch.randn(1, 3, 2, dtype=torch.bfloat16)
    assert fusion.gates_in_attention(half, half, half)
    assert not fusion.gates_in_attention(one, half, half)
    assert not fusion.gates_in_attention(half, half, one)
    with pytest.raises(RuntimeError, match="offloading"):
        fusion.gates_in_attention(half, half, half.to("meta"))


@pytest.mark.parametrize("under_compile", ["triton", "torch"])
def test_video_and_audio_in_one_graph(under_compile):
    model, inputs = ltx2_transformer("2.3", layers=1), small(ltx2_inputs(), "2.3")
    expected = model(**inputs)
    videoattn.install(model, level="block", under_compile=under_compile)
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for ours, theirs in zip(model(**inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("under_compile", ["triton", "torch"])
def test_in_one_graph(under_compile):
    run = torch.ops.videoattn.residual_norm.default
    model = ltx_transformer(layers=2 if under_compile == "triton" else 1)
    inputs = small(ltx_inputs())
    expected = model(**inputs)
    videoattn.install(model, level="block", under_compile=under_compile)
    seen = []

    def backend(graph, _):
        seen.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    result = model(**inputs)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert len(seen) == 1, "blocks share one graph"
    assert (str(run) in seen[0]) == (under_compile == "triton")
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(**inputs), expected, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()


def test_angles_that_do_not_fit_are_refused(fusion):
    norms = attention_norms(128, torch.float32)
    x = torch.randn(1, 3, 128)
    with pytest.raises(ValueError, match="rotary angles"):
        fusion.query_and_key(norms, x, x, angles("split", 1, 2, 2, 64), None)
    with pytest.raises(ValueError, match="rotary angles"):
        fusion.query_and_key(norms, x, x, angles("split", 1, 3, 2, 32), None)


def test_tensors_on_two_devices_are_refused(fusion):
    with pytest.raises(RuntimeError, match="use level='call'"):
        fusion.gate(torch.randn(1, 3, 128), torch.empty(1, 3, 2, device="meta"))


def test_adapters_keep_a_forward_of_their_own(fusion):
    ff = ltx_transformer(layers=1).transformer_blocks[0].ff
    x = torch.randn(1, 2, 128)
    assert plain_linear(ff.net[0].proj, x)
    assert not plain_linear(ff.net[0].proj, x.bfloat16())
    ff.net[0].proj = torch.nn.Sequential(ff.net[0].proj)
    torch.testing.assert_close(blocks.feed_forward(fusion, ff, x), ff(x))


def test_a_parameter_is_the_sum_of_both():
    value = Parameter(torch.tensor([1.0, 2.0]), torch.tensor([[[0.5, 0.5]]])).value
    assert torch.equal(value, torch.tensor([[[1.5, 2.5]]]))
