"""Level "block" beside hooks on blocks and on what they are made of: diffusers', accelerate's, PyTorch's."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.guiders import SkipLayerGuidance
from diffusers.hooks import FirstBlockCacheConfig, LayerSkipConfig, MagCacheConfig, apply_layer_skip

import videoattn
from tests.pipelines import ltx2_inputs, ltx2_transformer, ltx_inputs, ltx_transformer
from tests.processors.calls import CountingBackend
from videoattn.processors import blocks

LEVELS = ["call", "block"]


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def fused(monkeypatch):
    """How many linear layers ran with their GELU."""
    seen = []
    real = blocks.Fusion.linear_gelu
    monkeypatch.setattr(blocks.Fusion, "linear_gelu", lambda *given: seen.append(1) or real(*given))
    return seen


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def skip(model, **what):
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **what))


SKIPS = {"feed-forward": {"skip_attention": False, "skip_ff": True}, "block": {}}
CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=10.0),
    "mag": lambda: MagCacheConfig(
        threshold=0.06, max_skip_steps=3, num_inference_steps=4, mag_ratios=[1.0] * 4, retention_ratio=0.0
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", SKIPS)
def test_skipped_layers(level, what):
    stock, model = ltx_transformer(layers=3), ltx_transformer(layers=3)
    plain = stock(**ltx_inputs())
    skip(stock, **SKIPS[what])
    videoattn.install(model, level=level)
    skip(model, **SKIPS[what])
    close(model(**ltx_inputs()), stock(**ltx_inputs()))
    assert (stock(**ltx_inputs())[0] - plain[0]).abs().max() > 1e-3


@pytest.mark.parametrize("what", SKIPS)
def test_skip_layer_guidance(what):
    def passes(model):
        guidance = SkipLayerGuidance(
            skip_layer_config=LayerSkipConfig(indices=[1], fqn="transformer_blocks", **SKIPS[what]),
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        )
        guidance.set_state(step=1, num_inference_steps=4, timestep=torch.tensor(500.0))
        for _ in range(guidance.num_conditions):
            guidance.prepare_models(model)
            yield model(**ltx_inputs())[0]
            guidance.cleanup_models(model)

    model = ltx_transformer(layers=3)
    with videoattn.install(model, level="block"):
        for _ in range(2):
            close(passes(model), passes(ltx_transformer(layers=3)))
    close(passes(model), passes(ltx_transformer(layers=3)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", CACHES)
def test_caches_over_blocks(level, cache, fused):
    def steps(model):
        with model.cache_context("a prompt"):
            return [model(**ltx_inputs(seed=seed))[0] for seed in (0, 1)]

    stock, model = ltx_transformer(layers=3), ltx_transformer(layers=3)
    plain = [stock(**ltx_inputs(seed=seed))[0] for seed in (0, 1)]
    stock.enable_cache(CACHES[cache]())
    expected = steps(stock)
    assert (expected[1] - plain[1]).abs().max() > 1e-3
    handle = videoattn.install(model, level=level)
    model.enable_cache(CACHES[cache]())
    close(steps(model), expected)
    model.disable_cache()
    close([model(**ltx_inputs())[0]], plain[:1])
    handle.uninstall()
    close([model(**ltx_inputs())[0]], plain[:1])
    # diffusers left each block a bound forward, which must not hide the fused one.
    del fused[:]
    videoattn.install(model, level=level)
    close([model(**ltx_inputs())[0]], plain[:1])
    assert len(fused) == (3 if level == "block" else 0)


def test_a_cache_that_stock_does_not_serve_is_refused_alike():
    stock, model = ltx2_transformer(), ltx2_transformer()
    videoattn.install(model, level="block")
    for each in (stock, model):
        with pytest.raises(ValueError, match=r"LTX2VideoTransformerBlock.* not registered"):
            each.enable_cache(CACHES["first block"]())


@pytest.mark.parametrize("wrap", ["cache", "skip"])
def test_wrapped_before_the_install(wrap, fused):
    model = ltx_transformer(layers=3)
    if wrap == "cache":
        model.enable_cache(CACHES["first block"]())
    else:
        skip(model)
    message = r"a cache, layer skipping\): undo that, install\(level='block'\), then do it again"
    with pytest.raises(RuntimeError, match=message):
        videoattn.install(model, level="block")
    if wrap == "cache":
        model.disable_cache()
    else:
        model.transformer_blocks[1]._diffusers_hook.remove_hook("layer_skip_hook")
    assert any("forward" in vars(block) for block in model.transformer_blocks)
    with videoattn.install(model, level="block"):
        close(model(**ltx_inputs()), ltx_transformer(layers=3)(**ltx_inputs()))
        assert len(fused) == 3
    close(model(**ltx_inputs()), ltx_transformer(layers=3)(**ltx_inputs()))


def test_someone_elses_forward_is_no_left_over():
    model = ltx_transformer()
    block = model.transformer_blocks[0]
    block.forward = lambda hidden_states, *_, **__: hidden_states
    with pytest.raises(RuntimeError, match="something wraps the forward"):
        videoattn.install(model, level="block")


@pytest.mark.parametrize(
    ("build", "inputs"), [(ltx_transformer, ltx_inputs), (ltx2_transformer, ltx2_inputs)]
)
@pytest.mark.parametrize("path", ["ff", "ff.net.0", "ff.net.0.proj", "ff.net.2"])
def test_hooks_of_the_feed_forward_run(build, inputs, path, fused):
    """PyTorch's hooks before and after, accelerate's, and a forward of the module's own."""
    model, stock = build(layers=1), build(layers=1)
    plain = stock(**inputs())[0]
    videoattn.install(model, level="block")
    modules = [each.transformer_blocks[0].get_submodule(path) for each in (model, stock)]

    class Halve(ModelHook):
        def post_forward(self, module, output):
            return output / 2

    def before():
        handles = [m.register_forward_pre_hook(lambda _, args: (args[0] / 2,)) for m in modules]
        return lambda: [handle.remove() for handle in handles]

    def after():
        handles = [m.register_forward_hook(lambda _, __, output: output / 2) for m in modules]
        return lambda: [handle.remove() for handle in handles]

    def of_accelerate():
        for module in modules:
            add_hook_to_module(module, Halve())
        return lambda: [remove_hook_from_module(module) for module in modules]

    def own():
        for module in modules:
            module.forward = lambda x, forward=module.forward: forward(x) / 2
        return lambda: [delattr(module, "forward") for module in modules]

    for change in (before, after, own, of_accelerate):
        undo = change()
        expected = stock(**inputs())
        assert (expected[0] - plain).abs().max() > 1e-4
        close(model(**inputs()), expected)
        undo()
    assert len(fused) > 0 or path != "ff.net.2"


def test_compiled_blocks_run_the_feed_forwards_hooks():
    torch.compiler.reset()
    model, stock = ltx_transformer(), ltx_transformer()
    for each in (model, stock):
        # On all blocks: torch does not tell a hooked one from the first it compiled.
        for block in each.transformer_blocks:
            block.ff.register_forward_hook(lambda _, __, output: output / 2)
    videoattn.install(model, level="block")
    backend = CountingBackend()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    close(model(**ltx_inputs()), stock(**ltx_inputs()))
    assert backend.graphs == 1
    torch.compiler.reset()
