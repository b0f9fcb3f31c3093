"""What decides the processors' shape: one graph per mask form, in every compile mode, with timing on."""

from __future__ import annotations

import pytest
import torch

import videoattn
from tests.pipelines import (
    GUIDANCE_ON,
    call_ltx,
    call_ltx2,
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx_inputs,
    ltx_pipeline,
    ltx_transformer,
)
from tests.processors.calls import CountingBackend, recording

LAYERS = 12
TEXT = ("video_text", "audio_text")
# Whole models take long to trace.
MODES = [
    "repeated_blocks",
    pytest.param("in_place", marks=pytest.mark.slow),
    pytest.param("wrapped", marks=pytest.mark.slow),
]


def compiled(transformer, mode: str, backend):
    """The transformer in one of the ways in which diffusers users compile it."""
    if mode == "repeated_blocks":
        transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    elif mode == "in_place":
        transformer.compile(fullgraph=True, backend=backend)
    elif mode == "wrapped":
        return torch.compile(transformer, fullgraph=True, backend=backend)
    return transformer


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("mode", "layers"),
    [
        ("eager", LAYERS),
        ("repeated_blocks", LAYERS),
        pytest.param("in_place", 2, marks=pytest.mark.slow),
        pytest.param("wrapped", 2, marks=pytest.mark.slow),
        pytest.param("wrapped", LAYERS, marks=pytest.mark.slow),
    ],
)
def test_one_graph_per_mask_form(mode, layers):
    stock = ltx2_transformer("2.3", layers=layers)
    transformer = ltx2_transformer("2.3", layers=layers)
    videoattn.install(transformer)
    backend = CountingBackend()
    model = compiled(transformer, mode, backend)
    prompts = [None, [9], None, [21], [3]]
    expected_graphs = [1, 2, 2, 2, 2]
    with torch.no_grad():
        for lengths, graphs in zip(prompts, expected_graphs, strict=True):
            inputs = ltx2_inputs(lengths)
            reference = stock(**inputs)
            with recording() as calls:
                result = model(**inputs)
                model(**inputs)
            form = "none" if lengths is None else "kv_lengths"
            assert sum(calls.kinds.values()) == 2 * 6 * layers
            for kind in TEXT:
                assert calls.forms[kind, form] == 2 * layers
            assert backend.graphs == (0 if mode == "eager" else graphs)
            for ours, theirs in zip(result, reference, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_no_known_form_gets_its_own_graph(mode):
    stock = ltx2_transformer("2.3", layers=2)
    transformer = ltx2_transformer("2.3", layers=2)
    videoattn.install(transformer)
    backend = CountingBackend()
    model = compiled(transformer, mode, backend)
    with torch.no_grad():
        model(**ltx2_inputs())
        holes = ltx2_inputs()
        mask = torch.ones_like(holes["encoder_attention_mask"])
        mask[:, 5:11] = 0
        holes["encoder_attention_mask"] = holes["audio_encoder_attention_mask"] = mask
        with recording() as calls:
            result = model(**holes)
        reference = stock(**holes)
    assert calls.forms["video_text", "dense"] == calls.forms["audio_text", "dense"] == 2
    assert backend.graphs == 2
    for ours, theirs in zip(result, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["install_first", "compile_first"])
def test_pipeline(mode, order):
    stock = ltx2_pipeline("2.3", layers=2)
    reference = call_ltx2(stock)
    pipe = ltx2_pipeline("2.3", layers=2)
    backend = CountingBackend()
    if order == "install_first":
        videoattn.install(pipe)
        pipe.transformer = compiled(pipe.transformer, mode, backend)
    else:
        pipe.transformer = compiled(pipe.transformer, mode, backend)
        videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx2(pipe)
    assert calls.forms["video_text", "none"] == calls.forms["audio_text", "none"] == 2 * 2
    assert backend.graphs == 1
    for ours, theirs in zip(result, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_ltx_pipeline_guided(mode):
    reference = call_ltx(ltx_pipeline(layers=2))
    pipe = ltx_pipeline(layers=2)
    videoattn.install(pipe)
    backend = CountingBackend()
    pipe.transformer = compiled(pipe.transformer, mode, backend)
    with recording() as calls:
        result = call_ltx(pipe)
    assert calls.forms == {("video_self", "none"): 4, ("video_text", "kv_lengths"): 4}
    assert backend.graphs == 1
    torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_install_on_a_model_compiled_and_run_before(mode):
    transformer = ltx_transformer()
    backend = CountingBackend()
    model = compiled(transformer, mode, backend)
    prompts = [ltx_inputs(), ltx_inputs([9])]
    with torch.no_grad():
        stock = [model(**inputs)[0] for inputs in prompts]
        graphs = backend.graphs
        for _ in range(2):
            handle = videoattn.install(model)
            with recording() as calls:
                ours = [model(**inputs)[0] for inputs in prompts]
            assert calls.forms["video_text", "none"] == calls.forms["video_text", "kv_lengths"] == 2
            torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
            handle.uninstall()
            assert torch.equal(model(**prompts[1])[0], stock[1])
            assert backend.graphs == graphs + 2


@pytest.mark.slow
def test_inlined_into_a_larger_graph_keeps_masks_whole():
    """A caller's own compiled function leaves no moment outside the graph, so no mask may be dropped."""
    stock = ltx2_transformer("2.3", layers=2)
    transformer = ltx2_transformer("2.3", layers=2)
    videoattn.install(transformer)
    with torch.no_grad():
        transformer(**ltx2_inputs())  # an all-ones mask, known outside the graph
        inputs = ltx2_inputs([9])
        reference = stock(**inputs)
        step = torch.compile(
            lambda values: transformer(**values)[0] * 2, fullgraph=True, backend=CountingBackend()
        )
        with recording() as calls:
            result = step(inputs)
    assert calls.forms["video_text", "dense"] == 2
    torch.testing.assert_close(result, reference[0] * 2, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_guided_with_graph_breaks():
    """Stock spatio-temporal guidance branches on a tensor, so guided runs compile without fullgraph."""
    reference = call_ltx2(ltx2_pipeline("2.3"), **GUIDANCE_ON)
    pipe = ltx2_pipeline("2.3")
    videoattn.install(pipe)
    pipe.transformer.compile_repeated_blocks(backend=CountingBackend())
    for ours, theirs in zip(call_ltx2(pipe, **GUIDANCE_ON), reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_through_aot_autograd():
    """As inductor sees the op: functionalised, shapes from its fake kernel."""
    stock = ltx2_transformer("2.3", layers=3)
    transformer = ltx2_transformer("2.3", layers=3)
    videoattn.install(transformer)
    transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for lengths in (None, [9]):
            inputs = ltx2_inputs(lengths)
            for ours, theirs in zip(transformer(**inputs), stock(**inputs), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
