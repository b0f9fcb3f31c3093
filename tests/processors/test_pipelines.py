"""Whole pipelines with `install()` against stock: bits, masks, guidance, dtypes, offloading."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.hooks import apply_group_offloading

import videoattn
from tests.pipelines import (
    GUIDANCE_ON,
    LTX2_VERSIONS,
    TEXT_LENGTH,
    call_ltx,
    call_ltx2,
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx_inputs,
    ltx_pipeline,
    ltx_transformer,
)
from tests.processors.calls import recording

STEPS = 2
LAYERS = 2
FULL_PROMPT = "a" * 40  # one token a letter: fills the tokenizer's maximal length, nothing is padded


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_ltx_padding_becomes_key_lengths():
    reference = call_ltx(ltx_pipeline())
    pipe = ltx_pipeline()
    videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx(pipe)
    assert calls.forms == {
        ("video_self", "none"): STEPS * LAYERS,
        ("video_text", "kv_lengths"): STEPS * LAYERS,
    }
    assert {call.batch for call in calls.calls} == {2}
    close([result], [reference])


def test_ltx_without_padding_drops_the_mask():
    reference = call_ltx(ltx_pipeline(), prompt=FULL_PROMPT, guidance_scale=1.0)
    pipe = ltx_pipeline()
    videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx(pipe, prompt=FULL_PROMPT, guidance_scale=1.0)
    assert calls.forms["video_text", "none"] == STEPS * LAYERS
    close([result], [reference])


def test_ltx_padding_matters():
    """The comparison above could not fail if the mask changed nothing."""
    transformer = ltx_transformer()
    with torch.no_grad():
        padded = transformer(**ltx_inputs([5]))[0]
        whole = transformer(**ltx_inputs())[0]
    assert (padded - whole).abs().max() > 1e-3


@pytest.mark.parametrize("version", LTX2_VERSIONS)
def test_ltx2_unguided(version):
    reference = call_ltx2(ltx2_pipeline(version))
    pipe = ltx2_pipeline(version)
    videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx2(pipe)
    assert calls.forms == {
        **{
            (kind, "none"): STEPS * LAYERS
            for kind in (
                "video_self",
                "video_text",
                "audio_self",
                "audio_text",
                "audio_to_video",
                "video_to_audio",
            )
        },
        ("video_connector", "none"): 2,
        ("audio_connector", "none"): 2,
    }
    close(result, reference)


@pytest.mark.parametrize("version", LTX2_VERSIONS)
def test_ltx2_guided(version):
    """Guidance, spatio-temporal guidance, modality isolation: three forwards a step, of batch 2, 1 and 1."""
    reference = call_ltx2(ltx2_pipeline(version), **GUIDANCE_ON)
    pipe = ltx2_pipeline(version)
    videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx2(pipe, **GUIDANCE_ON)
    forwards = 3 * STEPS
    # A perturbed block takes the values in place of self-attention; LTX-2.0 has no perturbed attention.
    skipped = 0 if version == "2.0" else STEPS
    assert calls.kinds["video_self"] == calls.kinds["audio_self"] == forwards * LAYERS - skipped
    assert calls.forms["video_text", "none"] == calls.forms["audio_text", "none"] == forwards * LAYERS
    assert calls.kinds["audio_to_video"] == calls.kinds["video_to_audio"] == 2 * STEPS * LAYERS
    assert {call.batch for call in calls.calls if call.kind == "video_self"} == {1, 2}
    close(result, reference)


def test_ltx2_masks_are_read_once_per_prompt(monkeypatch):
    from videoattn.processors import masks

    read = []
    classify_all = masks.classify_all
    monkeypatch.setattr(masks, "classify_all", lambda seen: read.extend(seen) or classify_all(seen))
    pipe = ltx2_pipeline("2.3")
    videoattn.install(pipe)
    call_ltx2(pipe, num_inference_steps=4, **GUIDANCE_ON)
    # One look for each connector, one for the transformer, whose text kinds share a tensor.
    assert len(read) == 3


def test_connectors_without_registers_keep_their_mask():
    """Left padding that no register replaces is a real mask; the transformer still gets all ones."""
    reference = call_ltx2(ltx2_pipeline("2.3", registers=False))
    pipe = ltx2_pipeline("2.3", registers=False)
    videoattn.install(pipe)
    with recording() as calls:
        result = call_ltx2(pipe)
    assert calls.forms["video_connector", "dense"] == calls.forms["audio_connector", "dense"] == 2
    assert calls.forms["video_text", "none"] == STEPS * LAYERS
    close(result, reference)


@pytest.mark.parametrize("version", ["ltx", *LTX2_VERSIONS])
def test_bit_for_bit_without_a_mask(version):
    stock, inputs = model_and_inputs(version)
    inputs["encoder_attention_mask"] = None
    if version != "ltx":
        inputs["audio_encoder_attention_mask"] = None
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with torch.no_grad():
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("version", ["ltx", *LTX2_VERSIONS])
def test_bit_for_bit_with_a_dense_mask(version):
    stock, inputs = model_and_inputs(version, batch=2)
    mask = torch.ones(2, TEXT_LENGTH, dtype=torch.int64)
    mask[0, 3:7] = 0
    inputs["encoder_attention_mask"] = mask
    if version != "ltx":
        inputs["audio_encoder_attention_mask"] = mask
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with torch.no_grad(), recording() as calls:
        result = ours(**inputs)
        reference = stock(**inputs)
    assert calls.forms["video_text", "dense"] == LAYERS
    for a, b in zip(result, reference, strict=True):
        assert torch.equal(a, b)


def test_in_context_self_attention_mask_stays_whole():
    stock = ltx2_transformer("2.3")
    inputs = ltx2_inputs()
    mask = torch.ones(1, 36, 36)
    mask[:, :20, 20:] = 0.3
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with torch.no_grad(), recording() as calls:
        result = ours(**inputs, video_self_attention_mask=mask)
        reference = stock(**inputs, video_self_attention_mask=mask)
    assert calls.forms["video_self", "dense"] == LAYERS
    assert calls.forms["audio_self", "none"] == calls.forms["video_text", "none"] == LAYERS
    close(result, reference)


@pytest.mark.parametrize("blocks", [[0], [0, 1]])
@pytest.mark.parametrize("perturbation_mask", [None, torch.tensor([0.0, 1.0])])
def test_spatio_temporal_guidance_of_part_of_a_batch(blocks, perturbation_mask):
    stock = ltx2_transformer("2.3")
    inputs = ltx2_inputs(batch=2)
    inputs |= {"encoder_attention_mask": None, "audio_encoder_attention_mask": None}
    inputs |= {"spatio_temporal_guidance_blocks": blocks, "perturbation_mask": perturbation_mask}
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with torch.no_grad():
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3"])
def test_bf16(version):
    stock, inputs = model_and_inputs(version, dtype=torch.bfloat16)
    stock.to(torch.bfloat16)
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    inputs["encoder_attention_mask"] = None
    if version != "ltx":
        inputs["audio_encoder_attention_mask"] = None
    with torch.no_grad():
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            assert a.dtype == torch.bfloat16
            assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[32], [9]])
def test_bf16_masks(lengths):
    """diffusers' bias is -9984 in bf16; it is recognised all the same."""
    transformer = ltx_transformer().to(torch.bfloat16)
    videoattn.install(transformer)
    with torch.no_grad(), recording() as calls:
        transformer(**ltx_inputs(lengths, dtype=torch.bfloat16))
    assert calls.forms["video_text", "none" if lengths == [32] else "kv_lengths"] == LAYERS


@pytest.mark.parametrize("lengths", [[5], [32]])
def test_a_mask_of_another_batch_is_refused(lengths):
    """As in diffusers, and before its one key length is read for every entry."""
    inputs = ltx_inputs([5, 5], batch=2)
    inputs["encoder_attention_mask"] = ltx_inputs(lengths)["encoder_attention_mask"]
    transformer = ltx_transformer()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="shape"):
            transformer(**inputs)
        videoattn.install(transformer)
        with pytest.raises(ValueError, match="mask has 1 entries for a batch of 2: repeat it"):
            transformer(**inputs)


@pytest.mark.parametrize("version", ["ltx", "2.3"])
def test_autocast(version):
    stock, inputs = model_and_inputs(version)
    ours = copy.deepcopy(stock)
    videoattn.install(ours)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("version", ["ltx", "2.3"])
@pytest.mark.parametrize("order", ["install_first", "offload_first"])
@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload(version, order, offload_type):
    stock, inputs = model_and_inputs(version)
    ours = copy.deepcopy(stock)

    def offload(model):
        settings = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
        apply_group_offloading(
            model, onload_device=torch.device("cpu"), offload_type=offload_type, **settings
        )

    offload(stock)
    if order == "install_first":
        handle = videoattn.install(ours)
        offload(ours)
    else:
        offload(ours)
        handle = videoattn.install(ours)
    with torch.no_grad(), recording() as calls:
        close(ours(**inputs), stock(**inputs))
    assert calls.forms["video_text", "none"] == LAYERS
    assert handle.receipt.choices["video_self"].kernel == "sdpa"


@pytest.mark.parametrize("version", ["ltx", "2.3"])
@pytest.mark.parametrize("order", ["install_first", "cast_first"])
def test_fp8_layerwise_casting(version, order):
    stock, inputs = model_and_inputs(version, dtype=torch.bfloat16)
    stock.to(torch.bfloat16)
    ours = copy.deepcopy(stock)

    def cast(model):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)

    cast(stock)
    if order == "install_first":
        handle = videoattn.install(ours)
        cast(ours)
    else:
        cast(ours)
        handle = videoattn.install(ours)
    with torch.no_grad(), recording() as calls:
        for a, b in zip(ours(**inputs), stock(**inputs), strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)
    assert {call.dtype for call in calls.calls} == {torch.bfloat16}
    assert handle.calls["video_self"].dtype == torch.bfloat16


def model_and_inputs(version, *, dtype=torch.float32, batch=1):
    if version == "ltx":
        return ltx_transformer(), ltx_inputs(dtype=dtype, batch=batch)
    return ltx2_transformer(version), ltx2_inputs(version=version, dtype=dtype, batch=batch)
