"""How long an install lasts and what it keeps alive: without its handle, in copies, pickles and threads."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

import videoattn
from tests.pipelines import (
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx_inputs,
    ltx_pipeline,
    ltx_transformer,
)
from tests.processors.calls import recording
from videoattn.processors import stack
from videoattn.processors.base import Processor

LEVELS = ["call", "attention", "block"]


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def no_collector():
    """Objects in a cycle stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def processors(*models):
    return [m.processor for model in models for m in model.modules() if hasattr(m, "get_processor")]


def is_stock(*models):
    """Nothing of ours is on the models."""
    modules = [module for model in models for module in model.modules()]
    return not any(
        "videoattn" in type(value).__module__ or "videoattn" in name
        for module in modules
        for name, value in [("", module), *vars(module).items()]
    ) and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_uninstall_without_the_handle():
    pipe = ltx2_pipeline()
    before = processors(pipe.transformer, pipe.connectors)
    handles = [videoattn.install(pipe, level=level) for level in LEVELS]
    videoattn.uninstall(pipe)
    assert all(a is b for a, b in zip(processors(pipe.transformer, pipe.connectors), before, strict=True))
    assert is_stock(pipe.transformer, pipe.connectors)
    for handle in handles:
        assert not handle.installed
        assert "no longer on" in repr(handle)
        with pytest.raises(RuntimeError, match="was undone"), handle:
            pass
    again = videoattn.install(pipe)
    for handle in handles:
        handle.uninstall()
    assert again.installed
    videoattn.uninstall(pipe)
    videoattn.uninstall(pipe)


def test_uninstall_of_a_part():
    pipe = ltx2_pipeline()
    handle = videoattn.install(pipe)
    videoattn.uninstall(pipe.transformer)
    assert is_stock(pipe.transformer)
    assert all(isinstance(each, Processor) for each in processors(pipe.connectors))
    assert handle.installed
    handle.uninstall()
    assert is_stock(pipe.connectors)


def test_uninstall_of_a_copy_of_an_installed_pipeline():
    pipe = ltx2_pipeline()
    with videoattn.install(pipe, level="block"):
        twin = copy.deepcopy(pipe)
    videoattn.uninstall(twin)
    assert is_stock(twin.transformer, twin.connectors)


def test_uninstall_of_a_compiled_model():
    model = ltx_transformer()
    videoattn.install(model)
    videoattn.uninstall(torch.compile(model))
    assert is_stock(model)


def test_uninstall_of_something_else():
    with pytest.raises(TypeError, match=r"videoattn installs on LTXVideoTransformer3DModel .*, not Linear"):
        videoattn.uninstall(torch.nn.Linear(2, 2))


def test_an_uninstall_that_failed_can_be_tried_again():
    model = ltx_transformer()
    handle = videoattn.install(model, level="block")
    module = model.transformer_blocks[1].attn2

    def fail(_):
        raise ZeroDivisionError

    module.set_processor = fail
    with pytest.raises(ZeroDivisionError):
        handle.uninstall()
    assert not handle.installed
    del module.set_processor
    handle.uninstall()
    assert is_stock(model)


def test_stock_processors_set_since_then_are_replaced_by_the_next_install():
    model = ltx_transformer()
    first = videoattn.install(model)
    theirs = {path: LTXVideoAttnProcessor() for path in model.attn_processors}
    model.set_attn_processor(dict(theirs))
    second = videoattn.install(model, kernels="sdpa")
    with recording() as calls:
        model(**ltx_inputs())
    assert len(calls.calls) == 4
    second.uninstall()
    first.uninstall()
    assert all(model.attn_processors[path] is each for path, each in theirs.items())
    assert is_stock(model)


def test_a_block_put_in_since_then_is_served_by_the_next_install():
    model, other = ltx_transformer(), ltx_transformer(seed=7)
    first = videoattn.install(model)
    model.transformer_blocks[1] = other.transformer_blocks[0]
    second = videoattn.install(model)
    with recording() as calls:
        model(**ltx_inputs())
    assert len(calls.calls) == 4
    second.uninstall()
    first.uninstall()
    assert is_stock(model)


def unnamed(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("where", ["transformer's forward", "connector's forward", "processor", "streams"])
def test_an_install_that_fails_leaves_everything_as_it_was(where, installed, level, monkeypatch):
    """The transformer is served first, so that its part of the install has to be undone."""
    pipe = ltx2_pipeline()
    models = pipe.transformer, pipe.connectors
    stock = processors(*models)
    forwards = {
        "transformer's forward": (pipe.transformer, "LTX2VideoTransformer3DModel", "encoder_attention_mask"),
        "connector's forward": (
            pipe.connectors.audio_connector.transformer_blocks[0],
            "LTX2TransformerBlock1d",
            "attention_mask",
        ),
    }
    if installed:
        handle = videoattn.install(pipe if where == "processor" else pipe.transformer, "sdpa")
    before = processors(*models)
    with monkeypatch.context() as patch:
        if where in forwards:
            module, name, parameter = forwards[where]
            patch.setitem(vars(module), "forward", unnamed(module.forward))
            error = pytest.raises(
                ValueError, match=f"^the forward of {name} has no parameter {parameter}: restore"
            )
        else:

            def fail(*_):
                raise ZeroDivisionError

            if where == "streams":
                patch.setattr(stack.Streams, "adopt", fail)
            else:
                attn = pipe.connectors.audio_connector.transformer_blocks[1].attn1
                patch.setitem(vars(attn), "set_processor", fail)
            error = pytest.raises(ZeroDivisionError)
        if installed and where in ("transformer's forward", "streams"):
            # What is looked up at the first install only.
            videoattn.install(pipe, level=level).uninstall()
        else:
            with error:
                videoattn.install(pipe, level=level)
        assert processors(*models) == before
        assert all("forward" not in vars(m) or m is forwards.get(where, [None])[0] for m in models)
    if installed:
        assert handle.installed
        handle.uninstall()
    assert all(a is b for a, b in zip(processors(*models), stock, strict=True))
    assert is_stock(*models)
    with videoattn.install(pipe, level=level):
        assert all(isinstance(each, Processor) for each in processors(*models))
    assert is_stock(*models)


def test_connectors_without_blocks():
    pipe = ltx2_pipeline()
    pipe.connectors.audio_connector.transformer_blocks = torch.nn.ModuleList()
    with videoattn.install(pipe) as handle:
        assert "audio_connector" not in handle.layers
    assert is_stock(pipe.transformer, pipe.connectors)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("build", "inputs"), [(ltx_transformer, ltx_inputs), (ltx2_transformer, ltx2_inputs)]
)
@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_copies_of_an_installed_model(build, inputs, level, how):
    model = build()
    expected = model(**inputs([5]))
    handle = videoattn.install(model, level=level)
    model(**inputs())
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    handle.uninstall()
    del model
    with recording() as calls:
        close(twin(**inputs([5])), expected)
    assert calls.forms["video_text", "kv_lengths"] == 2
    # The stand-in is the copy's: it finds the copy's own install.
    with pytest.raises(RuntimeError, match="start the ranks by torchrun"):
        twin.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    videoattn.uninstall(twin)
    assert is_stock(twin)
    close(twin(**inputs([5])), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("build", [ltx_transformer, ltx2_transformer])
def test_copies_of_a_part_take_no_model_along(build, level):
    model = build(layers=4)
    block = model.transformer_blocks[0]
    stock = len(pickle.dumps(block)), len(pickle.dumps(model.attn_processors))
    videoattn.install(model, level=level)
    assert len(pickle.dumps(block)) < stock[0] + 10_000
    assert len(pickle.dumps(model.attn_processors)) < stock[1] + 10_000
    for part in (block, block.attn1.processor, model.attn_processors):
        memo = {}
        copy.deepcopy(part, memo)
        assert id(model) not in memo
        assert id(model.proj_in.weight) not in memo


def test_pickled_connectors():
    pipe = ltx2_pipeline()
    videoattn.install(pipe)
    twin = pickle.loads(pickle.dumps(pipe.connectors))
    assert all(isinstance(each, Processor) for each in processors(twin))


@pytest.mark.parametrize("level", LEVELS)
def test_an_undone_handle_lets_go_of_the_model(level, no_collector):
    model = ltx_transformer()
    handle = videoattn.install(model, level=level)
    model(**ltx_inputs())
    told = handle.layers, handle.calls, handle.around, str(handle.receipt)
    handle.uninstall()
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert (handle.layers, handle.calls, handle.around, str(handle.receipt)) == told


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("build", [ltx_pipeline, ltx2_pipeline])
def test_an_installed_model_dies_without_the_collector(build, level, no_collector):
    """As a stock one does: a pipeline that is dropped frees its GPU memory at once."""
    pipe = build()
    alive = weakref.ref(pipe.transformer)
    del pipe
    assert alive() is None
    pipe = build()
    alive = [weakref.ref(pipe.transformer), weakref.ref(getattr(pipe, "connectors", pipe))]
    videoattn.install(pipe, level=level)
    del pipe
    assert [each() for each in alive] == [None, None]


def test_install_while_another_thread_uninstalls(monkeypatch):
    """The other waits until the new install is complete, and takes away its own only."""
    model = ltx_transformer()
    old = videoattn.install(model)
    uninstalling = threading.Thread(target=old.uninstall)
    real = stack.Layer

    def slow(*given):
        uninstalling.start()
        uninstalling.join(0.2)
        return real(*given)

    monkeypatch.setattr("videoattn.processors.install.Layer", slow)
    new = videoattn.install(model)
    uninstalling.join()
    assert new.installed
    assert not old.installed
    with recording() as calls:
        model(**ltx_inputs())
    assert len(calls.calls) == 4
    new.uninstall()
    assert is_stock(model)
