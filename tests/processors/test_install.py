"""Installing, stacking, uninstalling, refusing: what the handle promises."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel, LTXImageToVideoPipeline
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from peft import LoraConfig

import videoattn
from tests.pipelines import (
    call_ltx,
    call_ltx2,
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx2_upsample_pipeline,
    ltx_inputs,
    ltx_pipeline,
    ltx_transformer,
)
from tests.processors.calls import recording
from videoattn import kernels
from videoattn.dispatch import KernelUnavailable
from videoattn.processors.base import Processor

# What differs from the classes' defaults in the released LTX-2.3.
RELEASED_23 = {
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
}
CONNECTORS_23 = {
    "rope_type": "split",
    "per_modality_projections": True,
    "proj_bias": True,
    **{
        f"{modality}_{name}": value
        for modality, head_dim in (("video", 128), ("audio", 64))
        for name, value in {
            "connector_num_attention_heads": 32,
            "connector_attention_head_dim": head_dim,
            "connector_num_layers": 8,
            "gated_attn": True,
        }.items()
    },
}
LTX2_KINDS = {"video_self", "video_text", "audio_self", "audio_text", "audio_to_video", "video_to_audio"}


def processors(model):
    """Every attention module's processor, by path."""
    return {path: m.processor for path, m in model.named_modules() if hasattr(m, "get_processor")}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(ours[path] is theirs[path] for path in ours)


def traces(model):
    """What an install leaves on a model besides processors."""
    return [
        path
        for path, module in model.named_modules()
        if module._forward_pre_hooks
        or any("videoattn" in name or name == "fuse_qkv_projections" for name in vars(module))
    ]


@pytest.fixture
def twin(monkeypatch):
    """A second kernel that works anywhere: PyTorch's under the name of one that is absent here."""
    monkeypatch.setattr("videoattn.kernels.flash4.supports", lambda call: None)
    monkeypatch.setattr("videoattn.kernels.flash4.run", kernels.get("sdpa").run)
    from videoattn.dispatch import choose

    choose.cache_clear()
    yield "flash4"
    choose.cache_clear()


def test_pipeline_and_back():
    pipe = ltx2_pipeline("2.3")
    before = processors(pipe.transformer), processors(pipe.connectors)
    handle = videoattn.install(pipe)
    assert all(isinstance(p, Processor) for p in processors(pipe.transformer).values())
    assert all(isinstance(p, Processor) for p in processors(pipe.connectors).values())
    handle.uninstall()
    assert same(processors(pipe.transformer), before[0])
    assert same(processors(pipe.connectors), before[1])
    assert traces(pipe.transformer) == traces(pipe.connectors) == []
    handle.uninstall()
    assert same(processors(pipe.transformer), before[0])


def test_kinds_come_from_where_calls_sit():
    pipe = ltx2_pipeline("2.3", layers=3)
    handle = videoattn.install(pipe)
    connectors = {"video_connector": 2, "audio_connector": 2}
    assert handle.layers == {**dict.fromkeys(LTX2_KINDS, 3), **connectors}
    # In this model audio_to_video and audio_self share their head dim; only the place tells them apart.
    block = pipe.transformer.transformer_blocks[1]
    assert block.attn1.processor.kind == "video_self"
    assert block.audio_to_video_attn.processor.kind == "audio_to_video"
    assert block.video_to_audio_attn.processor.kind == "video_to_audio"
    assert len({id(p) for p in processors(pipe.transformer).values()}) == 6


@pytest.mark.parametrize(
    ("build", "inputs"), [(ltx_transformer, ltx_inputs), (ltx2_transformer, ltx2_inputs)]
)
def test_layers_are_the_calls_of_one_forward(build, inputs):
    transformer = build(layers=3)
    handle = videoattn.install(transformer)
    with torch.no_grad(), recording() as calls:
        transformer(**inputs())
    assert calls.kinds == handle.layers


def test_calls_of_a_distilled_clip():
    """LTX-2.3 as released, without weights: eleven forwards, and the connectors once for each stage."""
    with torch.device("meta"):
        transformer = LTX2VideoTransformer3DModel(**RELEASED_23)
        connectors = LTX2TextConnectors(**CONNECTORS_23)
    handle = videoattn.install(SimpleNamespace(transformer=transformer, connectors=connectors))
    layers, calls = handle.layers, handle.calls
    assert 11 * sum(layers[kind] for kind in LTX2_KINDS) == 3168
    assert 11 * sum(layers[kind] for kind in LTX2_KINDS if calls[kind].head_dim == 128) == 1056
    assert 2 * (layers["video_connector"] + layers["audio_connector"]) == 32
    assert {call.heads for call in calls.values()} == {32}


def test_transformer_alone():
    pipe = ltx2_pipeline("2.0")
    handle = videoattn.install(pipe.transformer)
    assert set(handle.layers) == LTX2_KINDS
    assert not any(isinstance(p, Processor) for p in processors(pipe.connectors).values())
    assert videoattn.install(ltx_transformer(layers=5)).layers == {"video_self": 5, "video_text": 5}


def test_context_manager_restores_after_an_error():
    pipe = ltx_pipeline()
    before = processors(pipe.transformer)
    handle = videoattn.install(pipe)
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert not handle.installed
    assert same(processors(pipe.transformer), before)
    with pytest.raises(RuntimeError, match="call install\\(\\) again"), handle:
        pass


def test_one_handle_entered_twice():
    transformer = ltx_transformer()
    handle = videoattn.install(transformer)
    with handle:
        with handle:
            pass
        assert handle.installed
    assert not handle.installed


def test_nested_installs(twin):
    transformer = ltx_transformer()
    before = processors(transformer)
    with torch.no_grad(), videoattn.install(transformer), recording() as calls:
        with videoattn.install(transformer, kernels=twin):
            transformer(**ltx_inputs())
            assert set(calls.kernels) == {twin}
        transformer(**ltx_inputs())
        assert calls.kernels[-1] == "sdpa"
    assert same(processors(transformer), before)
    assert traces(transformer) == []


def test_uninstall_out_of_order(twin):
    transformer = ltx_transformer()
    before = processors(transformer)
    first = videoattn.install(transformer)
    second = videoattn.install(transformer, kernels={"video_self": twin})
    first.uninstall()
    with torch.no_grad(), recording() as calls:
        transformer(**ltx_inputs())
    assert calls.by_kernel == {("video_self", twin): 2, ("video_text", "sdpa"): 2}
    second.uninstall()
    assert same(processors(transformer), before)
    assert traces(transformer) == []


def test_two_pipelines_share_a_transformer(twin):
    one, two = ltx2_pipeline("2.3"), ltx2_pipeline("2.3", seed=7)
    two.transformer = one.transformer
    before = processors(one.transformer), processors(one.connectors), processors(two.connectors)
    first = videoattn.install(one)
    second = videoattn.install(two, kernels={"video_text": twin})
    with recording() as calls:
        call_ltx2(one)
    assert calls.by_kernel["video_text", twin] == 4
    assert calls.forms["video_connector", "none"] == 2
    first.uninstall()
    assert same(processors(one.connectors), before[1])
    with recording() as calls:
        call_ltx2(two)
    assert calls.by_kernel["video_text", twin] == 4
    assert calls.kinds["video_connector"] == 2
    second.uninstall()
    assert same(processors(one.transformer), before[0])
    assert same(processors(two.connectors), before[2])


def test_from_pipe_shares_the_install():
    pipe = ltx_pipeline()
    handle = videoattn.install(pipe)
    other = LTXImageToVideoPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(3))
    with recording() as calls:
        ours = call_ltx(other, image=image)
    assert calls.forms["video_text", "kv_lengths"] == 4
    handle.uninstall()
    torch.testing.assert_close(ours, call_ltx(other, image=image), atol=1e-5, rtol=1e-5)

    pipe = ltx2_pipeline("2.3")
    other = LTX2ImageToVideoPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    with videoattn.install(other), recording() as calls:
        call_ltx2(pipe)
        call_ltx2(other, image=image, image_crf=0)
    assert calls.kinds["video_connector"] == 4
    assert not any(isinstance(p, Processor) for p in processors(pipe.transformer).values())


def test_prompts_of_several_pipelines_do_not_mix():
    """The verdict on a mask belongs to the mask, not to the pipeline that ran last."""
    transformer = ltx_transformer()
    stock = copy.deepcopy(transformer)
    videoattn.install(transformer)
    with torch.no_grad():
        for lengths in ([32], [4], [32], [9], [4]):
            inputs = ltx_inputs(lengths)
            ours, theirs = transformer(**inputs)[0], stock(**inputs)[0]
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_mask_changed_in_place_is_read_again():
    transformer = ltx_transformer()
    stock = copy.deepcopy(transformer)
    videoattn.install(transformer)
    inputs = ltx_inputs()
    with torch.no_grad(), recording() as calls:
        transformer(**inputs)
        inputs["encoder_attention_mask"][:, 7:] = False
        ours, theirs = transformer(**inputs)[0], stock(**inputs)[0]
    assert calls.forms["video_text", "kv_lengths"] == 2
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_inference_mode():
    pipe = ltx_pipeline()
    reference = call_ltx(ltx_pipeline())
    videoattn.install(pipe)
    with torch.inference_mode():
        result = call_ltx(pipe)
    torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["ltx", "ltx2"])
def test_lora_added_afterwards(family):
    model = ltx_transformer() if family == "ltx" else ltx2_transformer("2.3")
    inputs = ltx_inputs() if family == "ltx" else ltx2_inputs()
    handle = videoattn.install(model)
    with torch.no_grad():
        plain = model(**inputs)
        torch.manual_seed(4)
        model.add_adapter(
            LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
        )
        adapted = model(**inputs)
        handle.uninstall()
        stock = model(**inputs)
    assert (plain[0] - adapted[0]).abs().max() > 1e-3
    for ours, theirs in zip(adapted, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_installed_under_an_adapter():
    model = ltx_transformer()
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    before = processors(model)
    with torch.no_grad():
        stock = model(**ltx_inputs())[0]
        with videoattn.install(model) as handle:
            assert handle.layers == {"video_self": 2, "video_text": 2}
            torch.testing.assert_close(model(**ltx_inputs())[0], stock, atol=1e-5, rtol=1e-5)
    assert same(processors(model), before)


def test_copies_stand_alone():
    model = ltx_transformer()
    handle = videoattn.install(model)
    twin = copy.deepcopy(model)
    handle.uninstall()
    with torch.no_grad(), recording() as calls:
        ours = twin(**ltx_inputs([6]))[0]
        torch.testing.assert_close(ours, model(**ltx_inputs([6]))[0], atol=1e-5, rtol=1e-5)
    assert calls.forms["video_text", "kv_lengths"] == 2
    videoattn.install(twin).uninstall()


def test_someone_elses_processor_set_later_is_left_alone():
    model = ltx_transformer()
    handle = videoattn.install(model)
    theirs = type(handle._layers[0][1][0].processor.replaces())()
    model.transformer_blocks[0].attn1.set_processor(theirs)
    handle.uninstall()
    assert model.transformer_blocks[0].attn1.processor is theirs
    assert not any(isinstance(p, Processor) for p in processors(model).values())


def test_receipt():
    handle = videoattn.install(ltx2_pipeline("2.3"), kernels={"video_self": "sdpa"})
    receipt = handle.receipt
    assert set(receipt.choices) == {*LTX2_KINDS, "video_connector", "audio_connector"}
    assert {choice.kernel for choice in receipt.choices.values()} == {"sdpa"}
    assert receipt.choices["video_self"].requested == "sdpa"
    assert receipt.choices["video_text"].requested == "auto"
    assert receipt.choices["video_text"].reasons["flash4"].startswith("it needs an NVIDIA GPU")
    assert "video_self" in str(receipt)
    calls = handle.calls
    assert (calls["video_self"].head_dim, calls["audio_to_video"].head_dim) == (128, 64)
    assert calls["video_text"].mask == "none"
    assert videoattn.install(ltx_transformer()).calls["video_text"].mask == "kv_lengths"


def test_repr():
    handle = videoattn.install(ltx_transformer(), kernels={"video_self": "sdpa"})
    assert repr(handle) == "<videoattn on LTXVideoTransformer3DModel: video_self=sdpa, video_text=auto>"
    handle.uninstall()
    assert repr(handle) == "<videoattn, no longer on LTXVideoTransformer3DModel>"


class Foreign:
    """Someone else's processor."""

    def __call__(self, attn, hidden_states, *args):
        return hidden_states


@pytest.mark.parametrize(
    ("kernels", "error", "message"),
    [
        ("warp", ValueError, "unknown attention kernel 'warp': choose from auto, blackwell"),
        ({"video_self": "warp"}, ValueError, "unknown attention kernel 'warp'"),
        (
            {"video": "sdpa"},
            ValueError,
            "unknown kind of call 'video': this model has video_self, video_text",
        ),
        ({"audio_self": "sdpa"}, ValueError, "unknown kind of call 'audio_self'"),
        (
            "flash4",
            KernelUnavailable,
            "'flash4' cannot serve video_self .*needs an NVIDIA GPU.*before install",
        ),
        ({"video_text": "blackwell"}, KernelUnavailable, "'blackwell' cannot serve video_text"),
    ],
)
def test_bad_kernels_leave_the_model_alone(kernels, error, message):
    transformer = ltx_transformer()
    before = processors(transformer)
    with pytest.raises(error, match=message) as raised:
        videoattn.install(transformer, kernels=kernels)
    assert "\n" not in str(raised.value)
    assert same(processors(transformer), before)
    assert traces(transformer) == []


def test_a_kernel_that_cannot_serve_a_connector_leaves_the_transformer_alone():
    pipe = ltx2_pipeline("2.3")
    before = processors(pipe.transformer)
    with pytest.raises(KernelUnavailable, match="video_connector"):
        videoattn.install(pipe, kernels={"video_connector": "hopper"})
    assert same(processors(pipe.transformer), before)
    assert traces(pipe.transformer) == []


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        (None, "NoneType"),
        (lambda: ltx2_upsample_pipeline(ltx2_pipeline("2.3")), "LTX2LatentUpsamplePipeline"),
    ],
)
def test_other_targets(target, found):
    target = target() if callable(target) and not isinstance(target, torch.nn.Module) else target
    with pytest.raises(TypeError, match=f"LTXVideoTransformer3DModel or LTX2.*not {found}"):
        videoattn.install(target)


def test_foreign_processor_is_named():
    transformer = ltx_transformer()
    transformer.transformer_blocks[1].attn2.set_processor(Foreign())
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn2 .*test_install\.Foreign.*restore"):
        videoattn.install(transformer)
    assert traces(transformer) == []


def test_stock_processor_with_an_unknown_argument(monkeypatch):
    from diffusers.models.transformers import transformer_ltx as stock

    def later(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, window=None):
        raise AssertionError

    monkeypatch.setattr(stock.LTXVideoAttnProcessor, "__call__", later)
    with pytest.raises(ValueError, match="LTXVideoAttnProcessor of this diffusers takes window"):
        videoattn.install(ltx_transformer())


@pytest.mark.parametrize("build", [ltx_transformer, ltx2_transformer])
def test_fusing_is_refused(build):
    transformer = build()
    handle = videoattn.install(transformer)
    with pytest.raises(RuntimeError, match="never read the fused weights"):
        transformer.fuse_qkv_projections()
    handle.uninstall()
    assert "fuse_qkv_projections" not in vars(transformer)


def test_fused_projections_are_refused():
    transformer = ltx_transformer()
    transformer.fuse_qkv_projections()
    with pytest.raises(ValueError, match="never read the fused weights"):
        videoattn.install(transformer)
    transformer.unfuse_qkv_projections()
    videoattn.install(transformer)
    transformer.transformer_blocks[0].attn1.fuse_projections()
    with torch.no_grad(), pytest.raises(RuntimeError, match="never read the fused weights"):
        transformer(**ltx_inputs())


def test_parallelism_behind_the_back_is_refused():
    transformer = ltx2_transformer()
    handle = videoattn.install(transformer)
    for processor in transformer.attn_processors.values():
        processor._parallel_config = object()
    with torch.no_grad(), pytest.raises(RuntimeError, match="behind its back"):
        transformer(**ltx2_inputs())
    handle.uninstall()
    transformer._parallel_config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
    with pytest.raises(RuntimeError, match="serves context parallelism of the transformer"):
        videoattn.install(transformer)
    assert traces(transformer) == []


def test_diffusers_backends(monkeypatch):
    """Set before: left for uninstall. Set after: refused. The process-global backend: never touched."""
    active = _AttentionBackendRegistry.get_active_backend()
    transformer = ltx_transformer()
    block = transformer.transformer_blocks[0]
    block.attn1.set_attention_backend("_native_math")
    handle = videoattn.install(transformer)
    with torch.no_grad():
        result = transformer(**ltx_inputs())[0]
        # As under diffusers' attention_backend(...): nobody asks for it.
        with monkeypatch.context() as patch:
            patch.setattr(_AttentionBackendRegistry, "_active_backend", "no such backend")
            assert torch.equal(transformer(**ltx_inputs())[0], result)
        block.attn1.set_attention_backend("_native_math")
        match = "^diffusers' attention backend '_native_math' was set while .* and set it again$"
        with pytest.raises(RuntimeError, match=match):
            transformer(**ltx_inputs())
    handle.uninstall()
    assert block.attn1.processor._attention_backend == "_native_math"
    assert _AttentionBackendRegistry.get_active_backend() == active


def test_training_is_refused():
    transformer = ltx_transformer()
    videoattn.install(transformer)
    with pytest.raises(RuntimeError, match=r"no backward: run the model under torch\.no_grad"):
        transformer(**ltx_inputs())


@pytest.mark.slow
def test_import_is_light():
    """No later than torch + 0.3 s, and without diffusers: it is imported by the first install()."""
    script = (
        "import sys, time, torch; start = time.perf_counter(); import videoattn; videoattn.attention; "
        "print(time.perf_counter() - start, *(m for m in ('diffusers', 'transformers', 'triton', 'gradio') "
        "if m in sys.modules))"
    )
    seconds = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        fields = out.stdout.split()
        assert fields[1:] == []
        seconds.append(float(fields[0]))
    assert min(seconds) <= 0.3
