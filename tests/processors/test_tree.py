"""What is changed in a model after a capture: no replay hides it. `Frozen` is the GPU."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FirstBlockCacheConfig
from diffusers.guiders import SkipLayerGuidance
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_group_offloading, apply_layer_skip
from diffusers.hooks import ModelHook as DiffusersHook
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from peft import LoraConfig
from torch.nn.modules.module import register_module_forward_hook

import videoattn
from tests.pipelines import ltx_inputs, ltx_transformer
from tests.processors.test_regions import Frozen, equal, graphs_of
from videoattn.processors.regions import ForwardGraphs, cuda_graphs


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def doubled(*arguments):
    return 2 * arguments[-1]


def doubled_input(module, arguments):
    return (2 * arguments[0], *arguments[1:])


def hook(model):
    return model.proj_out.register_forward_hook(doubled).remove


def pre_hook(model):
    return model.proj_out.register_forward_pre_hook(doubled_input).remove


def hook_on_every_module(model):
    kind = type(model.proj_out)
    return register_module_forward_hook(
        lambda module, arguments, output: 2 * output if type(module) is kind else None
    ).remove


def accelerate_hook(model):
    class Doubled(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    add_hook_to_module(model.proj_out, Doubled())
    return lambda: remove_hook_from_module(model.proj_out)


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "installed"])
@pytest.mark.parametrize("put", [hook, pre_hook, hook_on_every_module, accelerate_hook])
def test_a_hook_keeps_forwards_plain_for_as_long_as_it_is_there(put, installed):
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    if installed:
        videoattn.install(model)
    graphs = graphs_of(model, capture=Frozen)
    before = [model(**call) for _ in range(3)][-1]
    assert graphs.replays == 2
    remove = put(model)
    expected = graphs._forward(**call)
    assert not equal(expected, before)
    for _ in range(2):
        assert equal(model(**call), expected)
    assert graphs.replays == 2
    assert graphs.plain["a hook is on a module"] == 2
    remove()
    for _ in range(3):
        assert equal(model(**call), before)
    assert graphs.replays > 2


def accelerate_hook_on_the_model(model):
    add_hook_to_module(model, ModelHook())
    return lambda: remove_hook_from_module(model)


def diffusers_hook_on_the_model(model):
    HookRegistry.check_if_exists_or_initialize(model).register_hook(DiffusersHook(), "none")
    return lambda: model._diffusers_hook.remove_hook("none")


def stranger_around_the_model(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)

    def remove():
        model.forward = forward

    return remove


@pytest.mark.parametrize("forwards", [0, 3])
@pytest.mark.parametrize(
    "put", [accelerate_hook_on_the_model, diffusers_hook_on_the_model, stranger_around_the_model]
)
def test_a_release_below_a_hook_is_one(put, forwards):
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    before = model(**call)
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(forwards):
        model(**call)
    replays, plain = graphs.replays, dict(graphs.plain)
    remove = put(model)
    graphs.release()
    own_parameter(model)
    expected = graphs._forward(**call)
    assert not equal(expected, before)
    for undo in (lambda: None, remove):
        undo()
        for _ in range(3):
            assert equal(model(**call), expected)
    assert (graphs.captured, graphs.replays, graphs.plain) == (0, replays, plain)
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):  # and not that there are graphs already
        cuda_graphs(model)
    again = graphs_of(model, capture=Frozen)
    for _ in range(3):
        assert equal(model(**call), expected)
    assert again.replays == 2
    again.release()
    assert equal(model(**call), expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_release_gives_back_the_forward_that_was_there(wrapped):
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    forward, expected = model.forward, (2 * model(**call)[0],)

    @functools.wraps(forward)
    def mine(*args, **kwargs):
        return (2 * forward(*args, **kwargs)[0],)

    model.forward = mine
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(3):
        assert equal(model(**call), expected)
    assert graphs.replays == 2
    if wrapped:
        stranger_around_the_model(model)
    for _ in range(2):
        graphs.release()
        assert equal(model(**call), expected)
        assert wrapped or vars(model)["forward"] is mine


def test_a_cache_keeps_forwards_plain():
    model, call = ltx_transformer(layers=3), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    before = [model(**call) for _ in range(3)][-1]
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with model.cache_context("cond"):
        for _ in range(2):
            model(**call)
    assert graphs.plain["a hook is on a module"] == 2
    model.disable_cache()
    # The registries that a cache leaves behind are no hooks.
    assert graphs.replays == 2
    for _ in range(3):
        assert equal(model(**call), before)
    assert graphs.replays == 4


def test_skip_layer_guidance_skips_layers_and_graphs_the_rest():
    model, call = ltx_transformer(layers=3), ltx_inputs((20,))
    videoattn.install(model)
    guider = SkipLayerGuidance(
        skip_layer_config=LayerSkipConfig(indices=[1], fqn="transformer_blocks"),
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    )

    def step():
        guider.set_state(step=1, num_inference_steps=4, timestep=torch.tensor(500.0))
        outputs = []
        for _ in range(guider.num_conditions):
            guider.prepare_models(model)
            outputs.append(model(**call)[0])
            guider.cleanup_models(model)
        return outputs

    expected = step()
    assert len({output.sum().item() for output in expected}) == 2
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(4):
        assert equal(step(), expected)
    assert graphs.captured == 1
    assert graphs.plain["a hook is on a module"] == 4
    assert graphs.replays > 4


class Doubling(LTXVideoAttnProcessor):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


def own_processors(model):
    model.set_attn_processor({name: Doubling() for name in model.attn_processors})


def own_processor_of_one(model):
    model.transformer_blocks[0].attn2.set_processor(Doubling())


def own_forward(model):
    forward = model.proj_out.forward
    model.proj_out.forward = lambda x: 2 * forward(x)


def own_module(model):
    model.proj_out = torch.nn.Linear(model.proj_out.in_features, model.proj_out.out_features)


def own_parameter(model):
    model.proj_out.weight = torch.nn.Parameter(2 * model.proj_out.weight)


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "installed"])
@pytest.mark.parametrize(
    "change", [own_processors, own_processor_of_one, own_forward, own_module, own_parameter]
)
def test_what_a_model_runs_otherwise_is_captured_anew(change, installed):
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    if installed:
        videoattn.install(model)
    graphs = graphs_of(model, capture=Frozen)
    before = [model(**call) for _ in range(3)][-1]
    for again in (False, True):
        change(model)
        expected = graphs._forward(**call)
        assert again or not equal(expected, before)
        for _ in range(3):
            assert equal(model(**call), expected)
        assert graphs.captured == 1


def layer_skip(model):
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks"))
    return lambda: HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[1]).remove_hook(
        "layer_skip_hook"
    )


def layerwise_casting(model):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    # Stays: diffusers has no way to remove it.


def group_offloading(model):
    here = torch.device("cpu")
    apply_group_offloading(model, onload_device=here, offload_device=here, offload_type="leaf_level")

    def remove():
        for module in model.modules():
            if hasattr(module, "_diffusers_hook"):
                module._diffusers_hook.remove_hook("group_offloading")

    return remove


def another_module(model):
    attention = model.transformer_blocks[0].attn1
    attention.to_q = torch.nn.Linear(attention.to_q.in_features, attention.to_q.out_features)


def moved_weights(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def adapter(model):
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))


@pytest.mark.parametrize("forwards", [0, 1, 3])
@pytest.mark.parametrize("change", [another_module, own_parameter, moved_weights, adapter])
@pytest.mark.parametrize(
    "put",
    [
        hook,
        accelerate_hook,
        accelerate_hook_on_the_model,
        diffusers_hook_on_the_model,
        layer_skip,
        layerwise_casting,
        group_offloading,
    ],
)
def test_a_hook_keeps_forwards_plain_whatever_changes_beside_it(put, change, forwards):
    model, call = ltx_transformer(layers=2), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(forwards):
        model(**call)
    replays = graphs.replays
    remove = put(model)
    for step in (lambda: None, lambda: change(model)):
        step()
        expected = graphs._forward(**call)
        for _ in range(2):
            assert equal(model(**call), expected)
    assert graphs.replays == replays
    assert graphs.plain["a hook is on a module"] == 4
    if remove is None:
        return
    remove()
    expected = graphs._forward(**call)
    for _ in range(3):
        assert equal(model(**call), expected)
    assert (graphs.captured, graphs.replays) == (1, replays + 2)


@pytest.mark.parametrize("forwards", [0, 1, 3])
def test_a_cache_keeps_forwards_plain_from_the_first_on(forwards):
    model, call = ltx_transformer(layers=3), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(forwards):
        model(**call)
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    for _ in range(2):
        with model.cache_context("cond"):
            model(**call)
        moved_weights(model)
    assert graphs.plain["a hook is on a module"] == 2


def frozen(device):
    return Frozen


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("forwards", [0, 1, 3])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("installed", [False, True], ids=["stock", "installed"])
@pytest.mark.parametrize(
    "change",
    [
        hook,
        pre_hook,
        accelerate_hook,
        layer_skip,
        own_forward,
        own_module,
        own_parameter,
        own_processors,
        adapter,
    ],
)
def test_a_copy_has_graphs_of_its_own(change, installed, copied, forwards):
    model, call = ltx_transformer(layers=2), ltx_inputs((20,))
    if installed:
        videoattn.install(model)
    graphs = ForwardGraphs(model, None, frozen)
    for _ in range(forwards):
        model(**call)
    before, counts = graphs._forward(**call), (graphs.captured, graphs.replays, dict(graphs.plain))
    other = copied(model)
    assert (other.forward.captured, other.forward.replays, other.forward.plain) == (0, 0, {})
    for _ in range(3):
        assert equal(other(**call), before)
    assert (other.forward.captured, other.forward.replays) == (1, 2)
    change(other)
    expected = other.forward._forward(**call)
    assert not equal(expected, before)
    for _ in range(3):
        assert equal(other(**call), expected)
    assert (graphs.captured, graphs.replays, graphs.plain) == counts
    for _ in range(3):
        assert equal(model(**call), before)
    graphs.release()
    other.forward.release()
    assert "forward" not in vars(model) | vars(other)
    assert equal(model(**call), before)
    assert equal(other(**call), expected)


class Uncopied:
    """As a CUDA stream: nothing that holds it can be copied."""

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle 'Stream' object")


class UncopiedLane(Uncopied):
    def run(self, main, beside):
        return main(), beside()


class UncopiedCaptures(Uncopied):
    def __call__(self):
        return Frozen()


def test_nothing_of_a_device_is_copied():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    devices = []

    def captures(device):
        devices.append(("captures", device))
        return UncopiedCaptures()

    def lanes(device):
        devices.append(("lane", device))
        return UncopiedLane()

    graphs = ForwardGraphs(model, None, captures, lanes)
    expected = [model(**call) for _ in range(3)][-1]
    assert devices == [("lane", torch.device("cpu")), ("captures", torch.device("cpu"))]
    other = copy.deepcopy(model)
    for _ in range(3):
        assert equal(other(**call), expected)
    assert (graphs.captured, other.forward.captured) == (1, 1)
    assert devices == 2 * devices[:2]
    # As it is when the model has moved to another device.
    moved_weights(model)
    for _ in range(3):
        assert equal(model(**call), expected)
    assert devices == 3 * devices[:2]


def test_new_processors_of_diffusers_own_are_no_change():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(2):
        model(**call)
    model.set_attn_processor({name: LTXVideoAttnProcessor() for name in model.attn_processors})
    model(**call)
    assert (graphs.captured, graphs.replays) == (1, 2)


def test_attention_backends_have_graphs_of_their_own():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(2):
        model(**call)
    with attention_backend("_native_math"):
        for _ in range(2):
            model(**call)
        assert graphs.captured == 2
        for backend in ("_native_math", "native"):
            for attention in model.transformer_blocks[0].attn1, model.transformer_blocks[0].attn2:
                attention.set_attention_backend(backend)
            for _ in range(2):
                model(**call)
    assert graphs.captured == 4


def test_a_backend_that_an_install_refuses_is_refused_in_place_of_a_replay():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    videoattn.install(model)
    graphs = graphs_of(model, capture=Frozen)
    for _ in range(2):
        model(**call)
    with attention_backend("native"):  # the model's setter sets the process's as well
        model.set_attention_backend("_native_math")
        with pytest.raises(RuntimeError, match="'_native_math' was set while videoattn"):
            model(**call)
        model.reset_attention_backend()
    model(**call)
    assert graphs.captured == 1


def test_precisions_have_graphs_of_their_own():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)

    def captured():
        for _ in range(3):
            model(**call)
        return graphs.captured

    # CUDA's, which decide nothing on a CPU; torch.autocast would not set them there.
    matmul = torch.backends.cuda.matmul
    dtype, precision = torch.get_autocast_dtype("cuda"), matmul.fp32_precision
    assert captured() == 1
    try:
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        assert captured() == 1
        torch.set_autocast_enabled("cuda", True)
        assert captured() == 2
        torch.set_autocast_dtype("cuda", torch.float16)
        assert captured() == 3
        torch.set_autocast_enabled("cuda", False)
        assert captured() == 3
        matmul.fp32_precision = "tf32"
        assert captured() == 4
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)
        matmul.fp32_precision = precision
