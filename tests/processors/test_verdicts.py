"""A verdict on a mask ends with its forward: what meets a mask outside of one honours it whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import videoattn
from tests.pipelines import ltx2_connectors, ltx2_pipeline, ltx_inputs, ltx_transformer
from tests.processors.calls import CountingBackend, recording


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def forms(model):
    return {kind: mask.form for kind, mask in model._videoattn_installs.text_masks.items()}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.fixture
def padded():
    """A prompt with padding, and what stock diffusers makes of it."""
    return ltx_inputs([5]), ltx_transformer()(**ltx_inputs([5]))[0]


def block_arguments(model):
    """A block's arguments, with a mask that hides all but five keys."""
    generator = torch.Generator().manual_seed(3)
    hidden_states, text = (torch.randn(1, length, 128, generator=generator) for length in (24, 32))
    bias = torch.zeros(1, 1, 32)
    bias[:, :, 5:] = -10000.0
    temb = torch.randn(1, 1, 768, generator=generator)
    return hidden_states, text, temb, model.rope(hidden_states, 2, 3, 4), bias


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_called_by_itself(padded, compiled):
    model = ltx_transformer()
    videoattn.install(model)
    forward = torch.compile(model.forward, backend="eager") if compiled else model.forward
    model(**ltx_inputs())
    close(forward(**padded[0])[0], padded[1])
    torch.compiler.reset()


def test_a_block_called_by_itself():
    model = ltx_transformer()
    block, arguments = model.transformer_blocks[0], block_arguments(model)
    stock = block(*arguments)
    videoattn.install(model)
    model(**ltx_inputs())
    close(block(*arguments), stock)


def test_processors_put_back_after_uninstall(padded):
    model = ltx_transformer()
    handle = videoattn.install(model)
    ours = dict(model.attn_processors)
    model(**ltx_inputs())
    handle.uninstall()
    model.set_attn_processor(ours)
    close(model(**padded[0])[0], padded[1])


def test_uninstalled_during_a_forward(padded):
    model = ltx_transformer()
    handle = videoattn.install(model)
    ours = dict(model.attn_processors)
    hook = model.proj_in.register_forward_pre_hook(lambda *_: handle.uninstall())
    model(**ltx_inputs())
    hook.remove()
    model.set_attn_processor(ours)
    close(model(**padded[0])[0], padded[1])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_forward_leaves_no_verdict(padded, error):
    """Also where its traceback, and so its frames, are kept, as an interactive session does."""
    model = ltx_transformer()
    videoattn.install(model)
    kept = []

    def fail(*_):
        raise error

    for module in (model.transformer_blocks[1], model):
        for prepend in (False, True):
            hook = module.register_forward_pre_hook(fail, prepend=prepend)
            with pytest.raises(error) as raised:
                model(**ltx_inputs())
            kept.append(raised)
            hook.remove()
            close(model.forward(**padded[0])[0], padded[1])
    assert forms(model) == {"video_text": "dense"}
    with recording() as calls:
        close(model(**padded[0])[0], padded[1])
    assert calls.forms["video_text", "kv_lengths"] == 2


def test_interrupted_forwards_of_compiled_blocks(padded):
    """Traced code takes what it finds, which the next forward's hooks have put right."""
    torch.compiler.reset()
    model = ltx_transformer()
    videoattn.install(model)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")

    def interrupt(*_):
        raise KeyboardInterrupt

    for _ in range(3):
        hook = model.proj_out.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**ltx_inputs())
        hook.remove()
    for _ in range(2):
        close(model(**padded[0])[0], padded[1])
        assert forms(model) == {"video_text": "dense"}
        close(model.forward(**padded[0])[0], padded[1])
    torch.compiler.reset()


def test_an_interrupted_connector():
    """Its first block, called by itself, looks at no mask."""
    pipe, stock = ltx2_pipeline(registers=False), ltx2_connectors(registers=False).video_connector
    ours = pipe.connectors.video_connector
    videoattn.install(pipe)
    x = torch.randn(1, 32, 256, generator=torch.Generator().manual_seed(1))
    everything, holes = torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 32)
    holes[..., 3:9] = -10000.0
    hook = ours.transformer_blocks[1].register_forward_pre_hook(lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        ours(x, everything)
    hook.remove()
    rotary_emb = ours.rope(1, 32, device=x.device)
    for index, mask in ((0, everything), (1, holes), (0, holes)):
        a, b = (each.transformer_blocks[index](x, mask, rotary_emb) for each in (ours, stock))
        close(a, b)


@pytest.mark.parametrize("inner_fails", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_forward_inside_a_forward(padded, inner_fails):
    """The outer one goes on with its own verdict: a kernel that takes no dense mask can still serve it."""
    model = ltx_transformer()
    videoattn.install(model)
    depth = []

    def nest(*_):
        if depth:
            if inner_fails:
                raise inner_fails
            return
        depth.append(1)
        try:
            model(**ltx_inputs())
        except (ZeroDivisionError, KeyboardInterrupt):
            assert inner_fails

    model.transformer_blocks[0].register_forward_pre_hook(nest)
    with recording() as calls:
        close(model(**padded[0])[0], padded[1])
    assert calls.forms["video_text", "kv_lengths"] == 2
    assert forms(model) == {"video_text": "dense"}


def test_a_copy_made_during_a_forward(padded):
    model = ltx_transformer()
    videoattn.install(model)
    copies = []

    def take(*_):
        hook.remove()
        copies.append(copy.deepcopy(model))

    hook = model.transformer_blocks[1].register_forward_pre_hook(take)
    model(**ltx_inputs())
    copies[0](**ltx_inputs())
    close(copies[0].forward(**padded[0])[0], padded[1])


def test_connectors():
    """Where a connector ends, not where its first block does."""
    stock = ltx2_connectors(registers=False)
    pipe = ltx2_pipeline(registers=False)
    connectors = pipe.connectors
    handle = videoattn.install(pipe)
    assert handle.layers["video_connector"] == 2
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (model.video_connector for model in (connectors, stock))
    x = torch.randn(1, 32, 256, generator=generator)
    everything, holes = torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 32)
    holes[..., 3:9] = -10000.0
    with recording() as calls:
        close(ours(x, everything)[0], theirs(x, everything)[0])
    assert calls.forms == {("video_connector", "none"): 2}
    assert forms(connectors) == dict.fromkeys(("video_connector", "audio_connector"), "dense")
    rotary_emb = ours.rope(1, 32, device=x.device)
    for index in (0, 1, 0):
        for mask in (everything, holes):
            a, b = (each.transformer_blocks[index](x, mask, rotary_emb) for each in (ours, theirs))
            close(a, b)


def test_compiled_blocks_called_outside_of_a_forward():
    torch.compiler.reset()
    model, stock = ltx_transformer(), ltx_transformer()
    backend = CountingBackend()
    videoattn.install(model)
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    model(**ltx_inputs())
    arguments = block_arguments(model)
    close(model.transformer_blocks[0](*arguments), stock.transformer_blocks[0](*arguments))
    close(model(**ltx_inputs([5]))[0], stock(**ltx_inputs([5]))[0])
    model(**ltx_inputs())
    assert backend.graphs == 3  # one for each form: none, dense, kv_lengths
    torch.compiler.reset()


class _Positional(torch.nn.Module):
    """torch.export takes positional tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, hidden_states, encoder_hidden_states, timestep, encoder_attention_mask):
        return self.model(
            hidden_states,
            encoder_hidden_states,
            timestep,
            encoder_attention_mask,
            num_frames=3,
            height=3,
            width=4,
            return_dict=False,
        )[0]


def tensors():
    inputs = ltx_inputs([9])
    names = "hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask"
    return [inputs[name] for name in names]


@pytest.mark.parametrize("level", ["call", "block"])
@pytest.mark.parametrize("mask_is_fake", [True, False])
def test_fake_tensors(level, mask_is_fake):
    model = ltx_transformer()
    videoattn.install(model, level=level)
    met = []
    model.transformer_blocks[0].register_forward_pre_hook(lambda *_: met.append(forms(model)["video_text"]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        *others, mask = tensors()
        fakes = [mode.from_tensor(tensor) for tensor in others]
        out = _Positional(model)(*fakes, mode.from_tensor(mask) if mask_is_fake else mask)
    assert out.shape == (1, 36, 16)
    assert met == ["dense"]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model = _Positional(ltx_transformer())
    stock = model(*tensors())
    videoattn.install(model.model)
    program = torch.export.export(model, tuple(tensors()), strict=strict)
    close(program.module()(*tensors()), stock)
    close(model(*tensors()), stock)
