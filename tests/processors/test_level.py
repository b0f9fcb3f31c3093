"""Levels of an install: what each refuses, what it says, and that uninstalling leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models.transformers import transformer_ltx, transformer_ltx2

import videoattn
from tests.pipelines import ltx2_inputs, ltx2_pipeline, ltx2_transformer, ltx_inputs, ltx_transformer
from tests.processors.calls import CountingBackend
from videoattn.processors import blocks, fused


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def classes(model):
    return {type(block) for block in model.transformer_blocks}


@pytest.mark.parametrize(
    ("build", "stock"),
    [
        (ltx_transformer, transformer_ltx.LTXVideoTransformerBlock),
        (ltx2_transformer, transformer_ltx2.LTX2VideoTransformerBlock),
    ],
)
def test_uninstall_restores_every_block(build, stock):
    model = build()
    before = [dict(vars(block)) for block in model.transformer_blocks]
    with videoattn.install(model, level="block"):
        assert classes(model) == {blocks.FUSED_CLASSES[stock]}
    assert classes(model) == {stock}
    assert [dict(vars(block)) for block in model.transformer_blocks] == before


def test_installs_stack_with_their_levels():
    model = ltx2_transformer()
    stock, ours = list(blocks.FUSED_CLASSES.items())[1]
    below = videoattn.install(model, level="block")
    above = videoattn.install(model)
    assert classes(model) == {stock}
    assert model.transformer_blocks[0].attn1.processor.fusion is None
    above.uninstall()
    assert classes(model) == {ours}
    assert model.transformer_blocks[0].attn1.processor.fusion is not None
    below.uninstall()
    assert classes(model) == {stock}


def test_a_copy_of_an_installed_model_goes_back_to_stock():
    model = ltx_transformer(layers=1)
    videoattn.install(model, level="block")
    twin = copy.deepcopy(model)
    videoattn.install(twin).uninstall()
    assert torch.equal(twin(**ltx_inputs())[0], model(**ltx_inputs())[0])


def test_a_pipelines_connectors_are_served_too():
    pipe = ltx2_pipeline(layers=1)
    handle = videoattn.install(pipe, level="block")
    attention = pipe.connectors.video_connector.transformer_blocks[0].attn1
    assert attention.processor.fusion is pipe.transformer.transformer_blocks[0].attn1.processor.fusion
    assert "level block" in repr(handle)


def test_what_the_receipt_says():
    model = ltx2_transformer(layers=1)
    plain = videoattn.install(model)
    assert plain.around == ""
    assert "level" not in str(plain.receipt)
    handle = videoattn.install(model, level="attention", under_compile="torch")
    assert str(handle.receipt).endswith(
        "level attention: QK norm with rotary embedding, head gates, by torch, on cpu; "
        "under torch.compile by torch"
    )
    assert set(handle.receipt.to_dict()) == set(handle.layers)


def test_block_offloading_after_the_install_goes_through_it():
    model, stock = ltx2_transformer(), ltx2_transformer()
    handle = videoattn.install(model, level="block")
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    inputs = ltx2_inputs()
    expected = stock(**inputs)
    for _ in range(2):
        # The second time the hooks still hold the fused forward, of blocks that are stock's again.
        for a, b in zip(model(**inputs), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        handle.uninstall()


def test_refusals(monkeypatch):
    model = ltx2_transformer(layers=1)
    with pytest.raises(ValueError, match="unknown level 'all': choose from call, attention, block"):
        videoattn.install(model, level="all")
    with pytest.raises(ValueError, match="under_compile is 'triton' or 'torch'"):
        videoattn.install(model, level="block", under_compile="cuda")
    leaves = ltx2_transformer(layers=1)
    apply_group_offloading(
        leaves,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )
    with pytest.raises(RuntimeError, match="use level='call', or offload whole blocks"):
        videoattn.install(leaves, level="attention")
    mixed = ltx2_transformer(layers=1).bfloat16()
    block = mixed.transformer_blocks[0]
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    with pytest.raises(ValueError, match="modulation tables are torch"):
        videoattn.install(mixed, level="block")

    class Other(type(model.transformer_blocks[0])):
        pass

    model.transformer_blocks[0].__class__ = Other
    with pytest.raises(ValueError, match=r"does not know .*Other: use level='attention'"):
        videoattn.install(model, level="block")
    assert not any("videoattn" in name for name in vars(model))


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(fused, "has_triton", lambda: False)
    from videoattn.processors import levels

    monkeypatch.setattr(levels, "execution_device", lambda model: torch.device("cuda"))
    with pytest.raises(RuntimeError, match="pip install triton"):
        videoattn.install(ltx_transformer(layers=1), level="attention")


def test_compiled_blocks_share_a_graph():
    torch.compiler.reset()
    model, stock = ltx2_transformer(), ltx2_transformer()
    backend = CountingBackend()
    handle = videoattn.install(model, level="block")
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    inputs = ltx2_inputs()
    for a, b in zip(model(**inputs), stock(**inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert backend.graphs == 1
    handle.uninstall()
    videoattn.install(model, level="block")
    model(**inputs)
    assert backend.graphs == 1
    torch.compiler.reset()


@pytest.mark.parametrize("order", ["compile_first", "install_first"])
def test_blocks_inside_torch_compiles_wrappers(order):
    torch.compiler.reset()
    model, expected = ltx_transformer(), ltx_transformer()(**ltx_inputs())[0]

    def compile_each():
        for index, block in enumerate(model.transformer_blocks):
            model.transformer_blocks[index] = torch.compile(block, backend=CountingBackend(), fullgraph=True)

    if order == "compile_first":
        compile_each()
    handle = videoattn.install(model, level="block")
    if order == "install_first":
        compile_each()
    stock = transformer_ltx.LTXVideoTransformerBlock
    assert {type(block._orig_mod) for block in model.transformer_blocks} == {blocks.FUSED_CLASSES[stock]}
    torch.testing.assert_close(model(**ltx_inputs())[0], expected, atol=1e-5, rtol=1e-5)
    with videoattn.install(model):
        torch.testing.assert_close(model(**ltx_inputs())[0], expected, atol=1e-5, rtol=1e-5)
    handle.uninstall()
    assert {type(block._orig_mod) for block in model.transformer_blocks} == {stock}
    assert not any("videoattn" in name for module in model.modules() for name in vars(module))
    torch.testing.assert_close(model(**ltx_inputs())[0], expected, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()
