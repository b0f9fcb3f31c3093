"""Fused kernels, levels, compiled regions and CUDA graphs on a GPU.

The accuracy and the rounding rule are those of `tests/processors/interpreted.py`, here at a real clip's
widths and lengths.
"""

from __future__ import annotations

import copy
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from torch.profiler import ProfilerActivity, profile

import videoattn
from tests.pipelines import (
    call_ltx2,
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx_inputs,
    ltx_transformer,
)
from videoattn.attention import attend
from videoattn.processors import fused, levels, projections
from videoattn.processors.fused import Fusion, Modulation, Residual
from videoattn.processors.projections import project
from videoattn.processors.regions import compile_blocks, compiled_graphs, cuda_graphs
from videoattn.processors.sites import sites
from videoattn.timing import record_timing

DEVICE = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]
# A ragged length, one in which programs take several rows, and audio's.
LENGTHS = [259, 5525, 12288]


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def fusion():
    made = Fusion()
    assert made.engine(DEVICE) == "triton"
    return made


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def strided(batch, length, channels, dtype):
    whole = torch.full((batch, length, 2 * channels), float("nan"), device=DEVICE, dtype=dtype)
    whole[:, :, channels:] = draw(batch, length, channels, dtype=dtype)
    return whole[:, :, channels:]


def assert_accurate(ours, stock, reference):
    for a, b, ref in zip(ours, stock, reference, strict=True):
        assert a.dtype == b.dtype
        error, allowed = ((x.float() - ref.float()).abs().max().item() for x in (a, b))
        assert 0 < allowed < ref.abs().max() / 20
        assert error <= 2 * allowed


def assert_rounds_as(stock, ours):
    """Equal but for one element in a hundred: sums in another order and other exponentials than torch's put
    some on the other side of a rounding."""
    for a, b in zip(ours, stock, strict=True):
        unit = torch.finfo(b.dtype).eps * b.abs().max().float()
        assert (a.float() - b.float()).abs().max() <= 2 * unit
        assert (a != b).float().mean() < 0.01


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (32, 64)])
@pytest.mark.parametrize("rope", ["none", "split", "interleaved"])
@pytest.mark.parametrize("together", [False, True])
def test_query_and_key(fusion, dtype, length, heads, head_dim, rope, together):
    channels = heads * head_dim
    norms = [torch.nn.RMSNorm(channels, eps=1e-6, device=DEVICE, dtype=dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    attn = SimpleNamespace(norm_q=norms[0], norm_k=norms[1])
    batch, lengths = 2, (length, length if together else 1024)
    turns = []
    for each in lengths:
        if rope == "split":
            turn = draw(batch, each, heads, head_dim // 2).swapaxes(1, 2)
        else:
            turn = draw(1, each, channels)
        turns.append(None if rope == "none" else (turn.cos(), turn.sin()))
    if together:
        turns[1] = turns[0]
    inputs = [strided(batch, each, channels, dtype) for each in lengths]

    def twin(values, weights):
        return [
            fused.norm_rotate_twin(x, w, 1e-6, turn)
            for x, w, turn in zip(values, weights, turns, strict=True)
        ]

    weights = [norm.weight for norm in norms]
    ours = fusion.query_and_key(attn, *inputs, *(turns[:1] if together else turns))
    reference = twin([x.float() for x in inputs], [w.float() for w in weights])
    assert_accurate(ours, twin(inputs, weights), reference)
    assert_rounds_as(twin(inputs, weights), ours)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gate(fusion, dtype, length, head_dim):
    x, logits = strided(2, length, 32 * head_dim, dtype), strided(2, length, 32, dtype)
    reference = fused.gate_twin(x.float(), logits.float())
    ours, stock = [fusion.gate(x, logits)], [fused.gate_twin(x, logits)]
    assert_accurate(ours, stock, [reference])
    assert_rounds_as(stock, ours)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_len", [200, 1500])
def test_gates_in_attention_are_the_gates_own_pass(fusion, dtype, head_dim, kv_len):
    """By the kernels that gate in their store, and by those that are gated behind."""
    q, k, v = (draw(2, n, 8 * head_dim, dtype=dtype).unflatten(2, (8, -1)) for n in (700, kv_len, kv_len))
    logits = strided(2, 700, 8, dtype)
    own = {(9, 0): ["hopper"], (10, 0): ["blackwell"], (10, 3): ["blackwell"]}
    for kernel in [*own.get(torch.cuda.get_device_capability(), []), "sdpa"]:
        plain, _ = attend(q, k, v, kernel=kernel)
        gated, _ = attend(q, k, v, kernel=kernel, gate=logits)
        assert_rounds_as([fusion.gate(plain.flatten(2), logits)], [gated.flatten(2)])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("channels", [2048, 4096])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("modulations", [1, 2])
def test_residual_norm(fusion, dtype, length, channels, per_row, modulations):
    def values(kind):
        generator = torch.Generator(DEVICE).manual_seed(1)

        def normal(*shape):
            return torch.randn(shape, device=DEVICE, generator=generator).to(dtype).to(kind)

        table, temb = normal(5, channels) / 4, normal(2, length if per_row else 1, 5 * channels)
        each = [fused.parameter(table, temb, index) for index in range(5)]
        pairs = tuple(Modulation(*each[2 * i : 2 * i + 2]) for i in range(modulations))
        norm = RMSNorm(channels, eps=1e-6, elementwise_affine=False)
        return normal(2, length, channels), normal(2, length, channels), each[4], norm, pairs

    given, wide = values(dtype), values(torch.float32)
    ours, stock = fusion.residual_norm(*given), fused.residual_norm_twin(*given)
    assert_accurate(ours, stock, fused.residual_norm_twin(*wide))
    assert_rounds_as(stock, ours)
    assert torch.equal(ours[0], stock[0]), "the sum of a residual is no matter of order"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lengths", [(5525, 126), (12288, 251), (126, 12288)])
@pytest.mark.parametrize("per_row", [False, True])
def test_residual_norms_of_two(fusion, dtype, lengths, per_row):
    """LTX-2.3's video and audio streams in one launch."""

    def values(kind):
        generator = torch.Generator(DEVICE).manual_seed(1)

        def normal(*shape):
            return torch.randn(shape, device=DEVICE, generator=generator).to(dtype).to(kind)

        streams = []
        for length, channels, rows in zip(
            lengths, (4096, 2048), (lengths[0] if per_row else 1, 1), strict=True
        ):
            table, temb = normal(5, channels) / 4, normal(2, rows, 5 * channels)
            each = [fused.parameter(table, temb, index) for index in range(5)]
            pairs = (Modulation(*each[:2]), Modulation(*each[2:4]))
            norm = RMSNorm(channels, eps=1e-6, elementwise_affine=False)
            x, branch = normal(2, length, channels), normal(2, length, channels)
            streams.append(Residual(x, branch, each[4], norm, pairs))
        return streams

    given, wide = values(dtype), values(torch.float32)
    for ours, narrow, reference in zip(fusion.residual_norms(*given), given, wide, strict=True):
        assert_accurate(ours, fused.residual_norm_twin(*narrow), fused.residual_norm_twin(*reference))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_gelu(fusion, dtype, bias):
    linear = torch.nn.Linear(4096, 16384, bias=bias, device=DEVICE, dtype=dtype)
    x = draw(1, 5525, 4096, dtype=dtype)
    wide = copy.deepcopy(linear).float()
    reference = F.gelu(wide(x.float()), approximate="tanh")
    stock = F.gelu(linear(x), approximate="tanh")
    assert_accurate([fusion.linear_gelu(x, linear)], [stock], [reference])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [259, 3072, 5525])
@pytest.mark.parametrize("source", [None, 4096, 2048])
def test_projections_in_one_product(dtype, length, source):
    """LTX-2.3's video attentions: with itself, with text, and with sound, which is half as wide."""
    attn = LTX2Attention(
        4096,
        heads=32,
        kv_heads=32,
        dim_head=128 if source is None or source == 4096 else 64,
        cross_attention_dim=source,
        apply_gated_attention=True,
    ).to(DEVICE, dtype)
    x = draw(1, length, 4096, dtype=dtype)
    y = x if source is None else draw(1, 1024, source, dtype=dtype)
    stock = project(attn, x, y, together=True)
    wide = copy.deepcopy(attn).float()
    reference = project(wide, x.float(), x.float() if y is x else y.float(), together=False)
    assert projections.lay_side_by_side(attn)
    products = [
        name for name in kernels_of(lambda: project(attn, x, y, together=True)) if "Memset" not in name
    ]
    apart = [name for name in kernels_of(lambda: project(attn, x, y, together=False)) if "Memset" not in name]
    assert len(products) < len(apart)
    ours = project(attn, x, y, together=True)
    assert_accurate(ours, stock, reference)
    assert_rounds_as(stock, ours)


@pytest.fixture
def joined(monkeypatch):
    """How many layers each joined product took."""
    taken, product = [], projections._product

    def counted(layers, x):
        parts = product(layers, x)
        if parts is not None:
            taken.append(len(parts))
        return parts

    monkeypatch.setattr(projections, "_product", counted)
    return taken


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
@pytest.mark.parametrize("level", ["attention", "block"])
def test_an_install_joins_projections(version, level, joined):
    """Eight heads: their logits are as wide as what TMA asks for, as are those of the released models."""
    model, inputs = model_and_inputs(version, heads=8)
    expected = copy.deepcopy(model)(**inputs)
    graphs = cuda_graphs(model)
    for _ in range(3):
        model(**inputs)
    assert not joined
    gc.collect()
    values = [p.clone() for p in model.parameters()]
    held = torch.cuda.memory_allocated()
    handle = videoattn.install(model, level=level)
    assert handle.around.endswith("; projections of one tensor in one product, except in compiled code")
    attentions = [site.module for site in sites(model)]
    assert all(map(projections.are_side_by_side, attentions))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
    # Blocks of 512 bytes: a bias alone may fill one in part.
    assert torch.cuda.memory_allocated() <= held + 512 * 8 * len(attentions)
    before = graphs.replays
    for _ in range(3):
        for a, b in zip(model(**inputs), expected, strict=True):
            torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)
    assert graphs.replays > before, "captured anew, where the weights now lie"
    # Self-attention in one; the others, and what they attend to, in two.
    gated = version in ("2.3", "2.5")
    assert set(joined) == ({4, 2} if gated else {3, 2})
    graphs.release()
    held = torch.cuda.memory_allocated()
    handle.uninstall()
    assert not any(map(projections.are_side_by_side, attentions))
    assert torch.cuda.memory_allocated() <= held + 512 * 8 * len(attentions)
    assert all(torch.equal(a, b) for a, b in zip(model(**inputs), expected, strict=True))


def test_an_install_short_of_memory_joins_what_it_can(monkeypatch):
    model, inputs = model_and_inputs("2.3")
    expected = copy.deepcopy(model)(**inputs)
    laid = []

    def lay(attn):
        if len(laid) == 2:
            raise torch.OutOfMemoryError
        laid.append(projections.lay_side_by_side(attn))

    monkeypatch.setattr(levels, "lay_side_by_side", lay)
    handle = videoattn.install(model, level="block")
    assert f"in one product in 2 of {len(sites(model))} attentions" in handle.around
    for a, b in zip(model(**inputs), expected, strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_models_offloaded_whole_keep_a_product_each():
    pipe = ltx2_pipeline().to(DEVICE)
    expected = call_ltx2(pipe)
    handle = videoattn.install(pipe, level="block")
    assert "one product" in handle.around
    pipe.enable_model_cpu_offload()
    for ours, theirs in zip(call_ltx2(pipe), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=1e-3, rtol=1e-3)
    assert "one product" not in handle.around


def test_compiled_blocks_stay_where_they_are():
    model, _ = model_and_inputs("2.3", heads=8)
    compile_blocks(model)
    before = [p.data_ptr() for p in model.parameters()]
    handle = videoattn.install(model, level="block")
    assert [p.data_ptr() for p in model.parameters()] == before
    assert "one product" not in handle.around


def model_and_inputs(version, dtype=torch.bfloat16, batch=1, heads=2):
    if version == "ltx":
        model, inputs = ltx_transformer(), ltx_inputs(dtype=dtype, batch=batch)
    else:
        model = ltx2_transformer(version, heads=heads)
        inputs = ltx2_inputs(version=version, heads=heads, dtype=dtype, batch=batch)
        coords = model.rope.prepare_video_coords(batch, 3, 3, 4, torch.device("cpu"), fps=24.0)
        inputs["video_coords"] = coords
    if version == "2.5":
        inputs["video_keyframes_mask"] = None
    on_device = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return model.to(DEVICE, dtype), on_device


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
@pytest.mark.parametrize("level", ["attention", "block"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (2, 2), (2, 8)])
def test_a_transformer(version, level, batch, heads):
    stock, inputs = model_and_inputs(version, batch=batch, heads=heads)
    wide = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    reference = copy.deepcopy(stock).float()(**wide)
    ours = copy.deepcopy(stock)
    handle = videoattn.install(ours, level=level)
    assert "fused by Triton" in str(handle.receipt)
    assert_accurate(ours(**inputs), stock(**inputs), reference)
    handle.uninstall()
    assert all(torch.equal(a, b) for a, b in zip(ours(**inputs), stock(**inputs), strict=True))


def kernels_of(run):
    """Names of the kernels that ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    return [event.name for event in recorded.events() if event.device_type == kind]


def test_a_block_launches_half_as_much_or_less():
    stock, inputs = model_and_inputs("2.3")
    ours = copy.deepcopy(stock)
    videoattn.install(ours, level="block")
    for model in (stock, ours):
        model(**inputs)
    counts = [len(kernels_of(lambda model=model: model(**inputs))) for model in (stock, ours)]
    assert counts[1] <= 0.5 * counts[0], counts


@pytest.mark.parametrize("version", ["ltx", "2.3"])
@pytest.mark.parametrize("under_compile", ["triton", "torch"])
def test_compiled(version, under_compile):
    stock, inputs = model_and_inputs(version)
    ours = copy.deepcopy(stock)
    videoattn.install(ours, level="block", under_compile=under_compile)
    compile_blocks(ours)
    before = compiled_graphs()
    ours(**inputs)
    assert compiled_graphs() == before + 1
    names = kernels_of(lambda: ours(**inputs))
    assert any("_norm_rotate_kernel" in name for name in names) == (under_compile == "triton")
    for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3"])
@pytest.mark.parametrize("arm", ["stock", "block", "compiled"])
def test_graphs_replay_the_same_numbers(version, arm):
    model, inputs = model_and_inputs(version, heads=8)
    if arm != "stock":
        videoattn.install(model, level="block")
    if arm == "compiled":
        compile_blocks(model)
    model(**inputs)
    calls = []
    for seed in range(3):
        torch.manual_seed(seed)
        calls.append({**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])})
    expected = [model(**call) for call in calls]
    before = compiled_graphs()
    graphs = cuda_graphs(model)
    model(**calls[0])
    results = [model(**call) for call in calls]
    assert (graphs.captured, graphs.replays) == (1, 3)
    assert compiled_graphs() == before
    for ours, theirs in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_audio_beside_video_gives_the_same_numbers(version):
    model, inputs = model_and_inputs(version, heads=8)
    videoattn.install(model, level="block")
    calls = [{**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])} for _ in range(3)]
    expected = [model(**call) for call in calls]
    graphs = cuda_graphs(model, overlap=True)
    for _ in range(20):
        for call, theirs in zip(calls, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(model(**call), theirs, strict=True))
    assert graphs.captured == 1
    graphs.release()
    compile_blocks(model)
    with pytest.raises(RuntimeError, match="not compiled"):
        cuda_graphs(model, overlap=True)


def test_a_model_on_another_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, inputs = model_and_inputs("2.3")
    videoattn.install(model, level="block")
    expected = model(**inputs)
    model.to("cuda:1")
    there = {
        name: value.to("cuda:1") if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    assert torch.cuda.current_device() == 0
    graphs = cuda_graphs(model, overlap=True)
    for _ in range(4):
        for ours, theirs in zip(model(**there), expected, strict=True):
            assert torch.equal(ours.to(DEVICE), theirs)
    assert (graphs.captured, graphs.replays) == (1, 3)


def test_two_sizes_share_a_pool_and_keep_their_numbers():
    model, small = model_and_inputs("2.3")
    large = model_and_inputs("2.3", batch=2)[1]
    videoattn.install(model, level="block")
    expected = [model(**inputs) for inputs in (small, large)]
    graphs = cuda_graphs(model)
    for _ in range(4):
        for inputs, theirs in zip((small, large), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(model(**inputs), theirs, strict=True))
    assert graphs.captured == 2


def test_a_replay_does_not_wait_for_the_device():
    model, inputs = model_and_inputs("2.3")
    videoattn.install(model, level="block")
    cuda_graphs(model)
    for _ in range(3):
        model(**inputs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [w for w in caught if "synchroniz" in str(w.message)]


def test_released_graphs_give_their_memory_back():
    model, inputs = model_and_inputs("2.3")
    model(**inputs)
    # Graphs of earlier tests are garbage in cycles.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = cuda_graphs(model)
    for _ in range(3):
        model(**inputs)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    assert graphs.captured == 1, graphs.plain
    assert held > before
    graphs.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


def test_weights_that_moved_are_captured_anew():
    model, inputs = model_and_inputs("2.3")
    expected = model(**inputs)
    graphs = cuda_graphs(model)
    for _ in range(3):
        model(**inputs)
    model.to("cpu")
    parking = draw(1 << 24)  # takes the place that the weights left
    model.to(DEVICE)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(model(**inputs), expected, strict=True))
    assert graphs.captured == 1
    del parking


def test_the_log_times_replays_whole():
    model, inputs = model_and_inputs("2.3")
    handle = videoattn.install(model, level="block")
    cuda_graphs(model)
    with record_timing() as recording:
        recording.enter(clip="a", stage="denoise", layers=handle.layers, around=handle.around)
        for step in range(5):
            recording.step = step
            model(**inputs)
    assert len(recording.rows) == 12
    assert [f.replayed_calls for f in recording.log.forwards] == [12] * 4
    assert all(f.milliseconds > 0 for f in recording.log.forwards)


def test_offloading_is_refused():
    pipe = ltx2_pipeline()
    pipe.enable_model_cpu_offload()
    with pytest.raises(RuntimeError, match=r"NVIDIA GPU|moves or changes"):
        cuda_graphs(pipe)


def test_a_pipeline_keeps_its_result():
    stock = ltx2_pipeline().to(DEVICE)
    expected = call_ltx2(stock, num_inference_steps=6)
    pipe = ltx2_pipeline().to(DEVICE)
    videoattn.install(pipe, level="block")
    graphs = cuda_graphs(pipe)
    for ours, theirs in zip(call_ltx2(pipe, num_inference_steps=6), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=1e-3, rtol=1e-3)
    assert graphs.replays == 5
