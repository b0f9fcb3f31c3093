"""`install()` on a GPU: stock's results, masks without synchronisation, CUDA graphs, offloading."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from diffusers.hooks import apply_group_offloading

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

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def on_device(inputs):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def model_and_inputs(version, lengths=None, dtype=BF16):
    if version == "ltx":
        model, inputs = ltx_transformer(), ltx_inputs(lengths, dtype=dtype)
    else:
        model = ltx2_transformer(version)
        inputs = ltx2_inputs(lengths, version=version, dtype=dtype)
    return model.to(DEVICE, dtype), on_device(inputs)


def without_masks(inputs):
    return {k: None if k.endswith("encoder_attention_mask") else v for k, v in inputs.items()}


def close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def inference():
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
def test_bit_for_bit_without_a_mask(version):
    stock, inputs = model_and_inputs(version)
    ours = copy.deepcopy(stock)
    videoattn.install(ours, kernels="sdpa")
    inputs = without_masks(inputs)
    for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
@pytest.mark.parametrize("lengths", [None, [9]])
def test_masks(version, lengths):
    stock, inputs = model_and_inputs(version, lengths, dtype=torch.float32)
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with recording() as calls:
        close(ours(**inputs), stock(**inputs), 1e-4)
    assert calls.forms["video_text", "none" if lengths is None else "kv_lengths"] == 2


def synchronisations(run):
    """How often `run` made the host wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("version", ["ltx", "2.3"])
@pytest.mark.parametrize("lengths", [None, [9]])
def test_one_synchronisation_per_prompt(version, lengths):
    stock, inputs = model_and_inputs(version, lengths)
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    for model in (stock, ours):
        model(**without_masks(inputs))
    before = synchronisations(lambda: stock(**inputs))
    assert synchronisations(lambda: ours(**inputs)) == before + 1
    assert synchronisations(lambda: ours(**inputs)) == before


@pytest.mark.parametrize("mode", ["repeated_blocks", "in_place", "wrapped"])
def test_graphs_per_mask_form(mode):
    transformer, _ = model_and_inputs("2.3")
    videoattn.install(transformer)
    backend = CountingBackend()
    model = transformer
    if mode == "repeated_blocks":
        transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    elif mode == "in_place":
        transformer.compile(fullgraph=True, backend=backend)
    else:
        model = torch.compile(transformer, fullgraph=True, backend=backend)
    for lengths, graphs in ((None, 1), ([9], 2), (None, 2), ([21], 2)):
        inputs = on_device(ltx2_inputs(lengths, dtype=BF16))
        with recording() as calls:
            model(**inputs)
        assert calls.forms["video_text", "none" if lengths is None else "kv_lengths"] == 2
        assert backend.graphs == graphs


def test_cuda_graphs_follow_the_prompt():
    """Captured graphs hold a mask's form, not its lengths; another form gets its own."""
    stock, _ = model_and_inputs("ltx", dtype=torch.float32)
    transformer = copy.deepcopy(stock)
    videoattn.install(transformer)
    model = torch.compile(transformer, fullgraph=True, mode="reduce-overhead")
    for lengths in ([32], [9], [32], [20], [20], [3], [32]):
        inputs = on_device(ltx_inputs(lengths))
        torch.compiler.cudagraph_mark_step_begin()
        close(model(**inputs), stock(**inputs), 1e-3)


def test_group_offload_is_seen_through():
    stock, inputs = model_and_inputs("2.3")
    ours = copy.deepcopy(stock).to("cpu")
    apply_group_offloading(
        ours, onload_device=DEVICE, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
    handle = videoattn.install(ours)
    assert handle.calls["video_self"].device == "cuda"
    close(ours(**inputs), stock(**inputs), 2e-2)


@pytest.mark.parametrize("offload", [False, True])
def test_pipelines(offload):
    for build, call, settings in (
        (ltx_pipeline, call_ltx, {}),
        (ltx2_pipeline, call_ltx2, {}),
        (ltx2_pipeline, call_ltx2, GUIDANCE_ON),
    ):
        results = []
        for installed in (False, True):
            pipe = build()
            if offload:
                pipe.enable_model_cpu_offload()
            else:
                pipe.to(DEVICE)
            if installed:
                handle = videoattn.install(pipe)
                assert {choice.device for choice in handle.calls.values()} == {"cuda"}
            result = call(pipe, **settings)
            results.append(result if isinstance(result, tuple) else (result,))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=1e-3, rtol=1e-3)
