"""Projections of one tensor in one product: the same numbers, from weights that anybody may still change."""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from torch.utils._python_dispatch import TorchDispatchMode

import videoattn
from tests.pipelines import ltx2_inputs, ltx2_pipeline, ltx2_transformer, ltx_inputs, ltx_transformer
from tests.processors.calls import CountingBackend
from videoattn.processors import projections
from videoattn.processors.projections import are_side_by_side, lay_side_by_side, project
from videoattn.processors.sites import parts, sites

ROWS = 40


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket._qualified_op_name in ("aten::addmm", "aten::mm", "aten::bmm")
        return func(*args, **(kwargs or {}))


@contextmanager
def products(expected):
    with Products() as seen:
        yield
    assert seen.count == expected


def attention(heads=8, source=64, gated=True, bias=True, dtype=torch.float32):
    """An LTX-2 attention of 64 channels, over a source of as many, or of others."""
    made = LTX2Attention(
        64,
        heads=heads,
        kv_heads=heads,
        dim_head=8,
        bias=bias,
        cross_attention_dim=source,
        apply_gated_attention=gated,
    )
    return made.to(dtype).eval()


def tensors(source=64, dtype=torch.float32):
    return torch.randn(2, ROWS // 2, 64, dtype=dtype), torch.randn(2, 7, source, dtype=dtype)


def linears(attn):
    return [x for x in (attn.to_gate_logits, attn.to_q, attn.to_k, attn.to_v) if x is not None]


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_in_one_product_and_in_two(dtype, gated, bias):
    attn, (x, _) = attention(gated=gated, bias=bias, dtype=dtype), tensors(dtype=dtype)
    before = copy.deepcopy(attn)
    apart = 3 + gated
    with products(apart):
        expected = project(attn, x, x, together=True)
    assert lay_side_by_side(attn)
    assert are_side_by_side(attn)
    assert_same(list(attn.parameters()), list(before.parameters()))
    # Gates always have a bias: where the others have none they stay by themselves.
    lone_gates = gated and not bias
    for limit, count in ((ROWS, 3 if lone_gates else 1), (ROWS - 1, 2 + lone_gates)):
        with products(count):
            assert_same(project(attn, x, x, together=True, rows_of_one=limit), expected)
    with products(apart):
        assert_same(project(attn, x, x, together=False), expected)


@pytest.mark.parametrize("source", [64, 32])
def test_cross_attention_in_two_products(source):
    attn, (x, y) = attention(source=source), tensors(source)
    expected = project(attn, x, y, together=True)
    assert lay_side_by_side(attn)
    with products(2):
        assert_same(project(attn, x, y, together=True), expected)


def test_gates_too_narrow_for_tma_stay_apart():
    """Two logits of four bytes in front of a row would leave its values where no copy by TMA may start."""
    attn, (x, _) = attention(heads=2), tensors()
    expected = project(attn, x, x, together=True)
    assert lay_side_by_side(attn)
    assert are_side_by_side(attn)
    with products(3):
        found = project(attn, x, x, together=True)
    assert_same(found, expected)
    assert all(part.stride(1) * 4 % projections.ALIGNMENT == 0 for part in found[:3])


def test_ltx_videos_attention_has_no_gates():
    attn = LTXAttention(query_dim=64, heads=4, kv_heads=4, dim_head=16, cross_attention_dim=64)
    x, y = tensors()
    expected = project(attn, x, y, together=True)
    assert lay_side_by_side(attn)
    with products(2):
        assert_same(project(attn, x, y, together=True), expected)
    with products(1):
        project(attn, x, x, together=True)


def test_layers_that_are_not_plain_are_not_moved():
    """Each layer alone, in each of the ways in which one can differ from the rest."""

    def mixed(layer):
        layer.to(torch.bfloat16)

    def hooked(layer):
        layer.register_forward_hook(lambda *_: None)

    def elsewhere(layer):
        layer.to("meta")

    def subclassed(layer):
        layer.__class__ = type("Other", (torch.nn.Linear,), {})

    def mixed_bias(layer):
        layer.bias.data = layer.bias.data.to(torch.bfloat16)

    def bias_elsewhere(layer):
        layer.bias = torch.nn.Parameter(layer.bias.to("meta"))

    def bias_of_inference(layer):
        with torch.inference_mode():
            layer.bias = torch.nn.Parameter(layer.bias.clone())

    for change in (mixed, hooked, elsewhere, subclassed, mixed_bias, bias_elsewhere, bias_of_inference):
        for index in range(4):
            attn = attention()
            change(linears(attn)[index])
            before = [p.data_ptr() for p in attn.parameters()]
            assert not lay_side_by_side(attn)
            assert not are_side_by_side(attn)
            assert [p.data_ptr() for p in attn.parameters()] == before


def test_a_layer_with_a_forward_of_its_own_runs_it():
    """What is put on a layer after its weights were moved, each layer alone."""

    def doubled(module, args, out):
        return 2 * out

    def hook(attn, name):
        getattr(attn, name).register_forward_hook(doubled)

    def pre_hook(attn, name):
        getattr(attn, name).register_forward_pre_hook(lambda module, args: (2 * args[0],))

    def forward(attn, name):
        layer = getattr(attn, name)
        own = layer.forward
        layer.forward = lambda x: 2 * own(x)

    def wrapped(attn, name):
        setattr(attn, name, torch.nn.Sequential(getattr(attn, name), torch.nn.Tanh()))

    def replaced(attn, name):
        layer = getattr(attn, name)
        layer.weight = torch.nn.Parameter(2 * layer.weight)

    def moved(attn, name):
        layer = getattr(attn, name)
        layer.weight.data = 2 * layer.weight.data

    names = ("to_gate_logits", "to_q", "to_k", "to_v")
    for change in (hook, pre_hook, forward, wrapped, replaced, moved):
        for name in names:
            attn, (x, y) = attention(), tensors()
            plain = project(attn, x, y, together=True)
            lay_side_by_side(attn)
            change(attn, name)
            for source in (x, y):
                expected = project(attn, x, source, together=False)
                assert_same(project(attn, x, source, together=True), expected)
            changed = {"to_gate_logits": "gate"}.get(
                name, {"to_q": "query", "to_k": "key", "to_v": "value"}.get(name)
            )
            assert not torch.allclose(getattr(expected, changed), getattr(plain, changed)), (change, name)


def test_weights_changed_where_they_lie_stay_together():
    attn, other, (x, _) = attention(), attention(), tensors()
    lay_side_by_side(attn)
    attn.load_state_dict(other.state_dict())
    attn.to_k.weight.data += 1.0
    other.to_k.weight.data += 1.0
    with products(1):
        found = project(attn, x, x, together=True)
    assert_same(found, project(other, x, x, together=False))


def test_neighbours_in_memory_that_are_no_neighbours_in_a_storage():
    """Two allocations may touch: a matrix over both would end behind the first one's storage."""
    attn, (x, y) = attention(gated=False), tensors()
    both = np.zeros((128, 64), np.float32)
    attn.to_k.weight.data = torch.from_numpy(both[:64])
    attn.to_v.weight.data = torch.from_numpy(both[64:])
    assert attn.to_k.weight.data_ptr() + attn.to_k.weight.nbytes == attn.to_v.weight.data_ptr()
    assert not are_side_by_side(attn)
    with products(3):
        project(attn, x, y, together=True)


def test_training_autocast_and_tensors_of_other_kinds_take_each_layer():
    attn, (x, _) = attention(), tensors()
    lay_side_by_side(attn)
    with torch.enable_grad():
        with products(4):
            query = project(attn, x, x, together=True).query
        query.sum().backward()
    assert attn.to_q.weight.grad is not None
    assert attn.to_k.weight.grad is None
    with torch.autocast("cpu", torch.bfloat16), products(4):
        assert project(attn, x, x, together=True).query.dtype == torch.bfloat16
    mine = x.as_subclass(type("Mine", (torch.Tensor,), {}))
    with products(4):
        project(attn, mine, mine, together=True)
    attn.requires_grad_(False)
    with torch.enable_grad(), products(1):
        project(attn, x, x, together=True)


def test_weights_of_inference_mode_are_not_moved():
    with torch.inference_mode():
        attn = attention()
    before = attn.to_q.weight.data_ptr()
    assert not lay_side_by_side(attn)
    assert attn.to_q.weight.data_ptr() == before
    outside = attention()
    with torch.inference_mode():
        assert lay_side_by_side(outside)
        project(outside, *tensors(), together=True)
    assert not outside.to_q.weight.is_inference()


def test_laying_twice_moves_nothing():
    attn = attention()
    lay_side_by_side(attn)
    before = [p.data_ptr() for p in attn.parameters()]
    assert lay_side_by_side(attn)
    assert [p.data_ptr() for p in attn.parameters()] == before


def storages(*modules):
    """Bytes that the modules keep."""
    held = {}
    for module in modules:
        for parameter in module.parameters():
            storage = parameter.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def one_buffer(attn):
    flat = torch.cat([p.flatten() for p in attn.parameters()])
    sizes = [p.numel() for p in attn.parameters()]
    for parameter, place in zip(attn.parameters(), flat.split(sizes), strict=True):
        parameter.data = place.view(parameter.shape)


def tied(attn):
    attn.to_v.weight = attn.to_k.weight


@pytest.mark.parametrize("shared", [one_buffer, tied])
def test_weights_that_something_else_keeps_are_not_moved(shared):
    attn, (x, _) = attention(source=32), tensors()
    y = torch.randn(2, 7, 32)
    shared(attn)
    expected, held = project(attn, x, y, together=False), storages(attn)
    lay_side_by_side(attn)
    once = storages(attn)
    lay_side_by_side(attn)
    assert storages(attn) == once
    assert not are_side_by_side(attn)
    if shared is one_buffer:
        assert once == held
    assert_same(project(attn, x, y, together=True), expected)


@pytest.mark.parametrize("name", ["to_gate_logits", "to_q", "to_k", "to_v"])
def test_taken_apart(name):
    """Weights laid side by side, one of them replaced, laid again: nothing is kept that nobody uses."""
    attn, (x, _) = attention(), tensors()
    held = storages(attn)
    expected = project(attn, x, x, together=False)
    for replaced in (False, True):
        assert lay_side_by_side(attn)
        if replaced:
            getattr(attn, name).weight.data = getattr(attn, name).weight.data.clone()
            assert storages(attn) > held
            assert lay_side_by_side(attn)
            assert storages(attn) == held
            getattr(attn, name).weight.data = getattr(attn, name).weight.data.clone()
        assert projections.take_apart(attn)
        assert not are_side_by_side(attn)
        assert storages(attn) == held
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in attn.parameters())
        with products(4):
            assert_same(project(attn, x, x, together=True), expected)
        assert not projections.take_apart(attn)


def test_taken_apart_again_once_there_is_memory(monkeypatch):
    model = ltx2_transformer()
    handle = videoattn.install(model, level="block")
    lay(model)
    held, left = storages(model), [5]
    clone = torch.Tensor.clone

    def short(tensor, **options):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError
        return clone(tensor, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", short)
        handle.uninstall()
    assert not handle.installed
    assert any(are_side_by_side(site.module) for site in sites(model))
    videoattn.install(model, level="attention").uninstall()
    assert not any(are_side_by_side(site.module) for site in sites(model))
    assert storages(model) == held


def test_weights_that_lay_side_by_side_by_themselves_stay_so():
    attn = attention(gated=False)
    whole = torch.randn(128, 64)
    attn.to_k.weight.data, attn.to_v.weight.data = whole.split(64)
    before = attn.to_v.weight.data_ptr()
    assert not projections.take_apart(attn)
    assert attn.to_v.weight.data_ptr() == before


def test_weights_that_are_no_parameters():
    """FSDP's flat parameters leave views of them as plain attributes."""
    attn, (x, _) = attention(), tensors()
    expected = project(attn, x, x, together=True)
    lay_side_by_side(attn)
    for layer in linears(attn):
        values = [(name, getattr(layer, name).detach()) for name in ("weight", "bias")]
        for name, value in values:
            delattr(layer, name)
            layer.register_buffer(name, value)
    with products(4):
        assert_same(project(attn, x, x, together=True), expected)


def test_hooks_on_every_module_and_another_forward_of_every_linear_layer(monkeypatch):
    attn, (x, _) = attention(), tensors()
    lay_side_by_side(attn)
    seen = []
    for register in (
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_forward_pre_hook,
    ):
        hook = register(lambda module, *_: seen.append(module))
        project(attn, x, x, together=True)
        hook.remove()
        assert seen == linears(attn)
        seen.clear()
    plain = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: 2 * plain(self, x))
    assert_same(project(attn, x, x, together=True), project(attn, x, x, together=False))


def test_biases_that_are_trained():
    attn, (x, _) = attention(), tensors()
    lay_side_by_side(attn)
    for layer in linears(attn):
        layer.weight.requires_grad_(False)
    with torch.enable_grad():
        for layer in linears(attn):
            layer.bias.requires_grad_(True)
            assert any(part.requires_grad for part in project(attn, x, x, together=True))
            layer.bias.requires_grad_(False)


def test_compiled_for_all_sizes():
    """Where compiled code gets products each, the number of rows decides nothing."""
    attn = attention()
    lay_side_by_side(attn)
    torch.compiler.reset()
    backend = CountingBackend()
    run = torch.compile(
        lambda x: tuple(project(attn, x, x, together=True)), fullgraph=True, dynamic=True, backend=backend
    )
    for rows in (projections.ROWS_OF_ONE - 7, projections.ROWS_OF_ONE, projections.ROWS_OF_ONE + 9):
        x = torch.randn(1, rows, 64)
        assert_same(run(x), project(attn, x, x, together=False))
    assert backend.graphs == 1
    torch.compiler.reset()


def test_gradients_and_optimisers_keep_the_parameters():
    attn, (x, _) = attention(), tensors()
    held = list(attn.parameters())
    lay_side_by_side(attn)
    assert all(a is b for a, b in zip(held, attn.parameters(), strict=True))
    optimizer = torch.optim.SGD(held, lr=0.1)
    with torch.enable_grad():
        sum(part.sum() for part in project(attn, x, x, together=True)).backward()
    optimizer.step()
    with products(1):
        found = project(attn, x, x, together=True)
    assert_same(found, project(attn, x, x, together=False))


def transformer(version):
    if version == "ltx":
        return ltx_transformer(), ltx_inputs()
    return ltx2_transformer(version), ltx2_inputs(version=version)


def lay(model):
    assert all(lay_side_by_side(site.module) for part in parts(model) for site in sites(part))


@pytest.mark.parametrize("level", ["attention", "block"])
@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
def test_a_transformer(version, level):
    (model, inputs), (stock, _) = transformer(version), transformer(version)
    expected = stock(**inputs)
    videoattn.install(model, level=level)
    with Products() as apart:
        model(**inputs)
    lay(model)
    with Products() as joined:
        found = model(**inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    attentions = len(sites(model))
    assert apart.count - joined.count >= attentions
    with videoattn.install(model), Products() as call:
        model(**inputs)
    assert call.count == apart.count, "level 'call' is the attention call and nothing else"


def test_spatio_temporal_guidance():
    model, stock = ltx2_transformer(), ltx2_transformer()
    videoattn.install(model, level="block")
    lay(model)
    for mask in (torch.zeros(1), torch.ones(1)):
        inputs = ltx2_inputs() | {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": mask}
        for a, b in zip(model(**inputs), stock(**inputs), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compiled_blocks_know_nothing_of_it():
    torch.compiler.reset()
    model, stock, inputs = ltx2_transformer(), ltx2_transformer(), ltx2_inputs()
    videoattn.install(model, level="block")
    lay(model)
    backend = CountingBackend()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    for a, b in zip(model(**inputs), stock(**inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert backend.graphs == 1
    torch.compiler.reset()


def test_saved_and_loaded_again(tmp_path):
    model = ltx2_transformer()
    expected = copy.deepcopy(model.state_dict())
    lay(model)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    loaded = LTX2VideoTransformer3DModel.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    sizes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert sizes < 1.1 * sum(p.nbytes for p in model.parameters()), "each weight once"


def test_saved_by_others_once_uninstalled(tmp_path):
    """Savers that tell tensors by their storages: they would drop or refuse views of one."""
    from accelerate import Accelerator
    from safetensors.torch import load_file, save_model

    model = ltx2_transformer()
    expected = copy.deepcopy(model.state_dict())
    handles = [videoattn.install(model, level=level) for level in ("block", "attention", "call")]
    lay(model)
    for handle in handles[:2]:
        assert are_side_by_side(model.transformer_blocks[0].attn1)
        handle.uninstall()
    assert not are_side_by_side(model.transformer_blocks[0].attn1)
    handles[2].uninstall()
    save_model(model, str(tmp_path / "model.safetensors"))
    Accelerator().save_model(model, str(tmp_path / "accelerate"))
    for path in (tmp_path / "model.safetensors", tmp_path / "accelerate" / "model.safetensors"):
        loaded = load_file(path)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_uninstall_by_target_takes_projections_apart():
    pipe = ltx2_pipeline()
    videoattn.install(pipe, level="block")
    lay(pipe)
    held = storages(pipe.transformer, pipe.connectors)
    videoattn.uninstall(pipe)
    every = [site.module for part in parts(pipe) for site in sites(part)]
    assert not any(map(are_side_by_side, every))
    assert storages(pipe.transformer, pipe.connectors) == held


def test_copied_and_cast_models():
    model, inputs = ltx2_transformer(), ltx2_inputs()
    expected = model(**inputs)
    lay(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.transformer_blocks[0].attn1.to_q.weight.zero_()
    for a, b in zip(twin(**inputs), expected, strict=True):
        assert torch.equal(a, b)
    videoattn.install(twin, level="attention")
    half = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    plain = ltx2_transformer().bfloat16()
    for a, b in zip(twin.bfloat16()(**half), plain(**half), strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


def test_lora_beside_merged_and_taken_away():
    from peft import LoraConfig

    model, inputs = ltx2_transformer(), ltx2_inputs()
    videoattn.install(model, level="block")
    lay(model)
    plain = model(**inputs)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    assert not are_side_by_side(model.transformer_blocks[0].attn1)
    beside = model(**inputs)
    assert not torch.allclose(beside[0], plain[0], atol=1e-3)
    model.fuse_lora()
    merged = model(**inputs)
    torch.testing.assert_close(merged[0], beside[0], atol=1e-4, rtol=1e-4)
    model.unfuse_lora()
    model.unload_lora()
    assert are_side_by_side(model.transformer_blocks[0].attn1)
    torch.testing.assert_close(model(**inputs)[0], plain[0], atol=1e-4, rtol=1e-4)


def test_an_install_moves_weights_on_a_gpu_alone():
    model = ltx2_transformer()
    before = [p.data_ptr() for p in model.parameters()]
    handle = videoattn.install(model, level="block")
    assert [p.data_ptr() for p in model.parameters()] == before
    assert "one product" not in handle.around


def test_what_the_receipt_says():
    pipe = ltx2_pipeline()
    handle = videoattn.install(pipe, level="attention")
    assert "one product" not in str(handle.receipt)
    every = [site.module for part in parts(pipe) for site in sites(part)]
    lay_side_by_side(every[0])
    assert f"projections of one tensor in one product in 1 of {len(every)} attentions" in handle.around
    lay(pipe)
    assert handle.around.endswith("on cpu; projections of one tensor in one product, except in compiled code")
    every[-1].to_k.register_forward_hook(lambda *_: None)
    assert f"{len(every) - 1} of {len(every)} attentions" in handle.around


@pytest.mark.slow
def test_the_benchmark(capsys):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    import bench_projections

    assert bench_projections.main(["--config", "tiny", "--tokens", "8"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(dict.fromkeys(site.kind for site in sites(ltx2_transformer())))
    for kind, _, each, two, one, differ in rows:
        assert min(float(each), float(two)) > 0
        assert (one == "–") == (not kind.endswith("_self"))
        assert float(differ) < 0.1


def test_products_of_a_block():
    """As docs/speed.md counts them, with as many heads as TMA wants."""
    given = ltx2_inputs(heads=8)
    model = ltx2_transformer(layers=1, heads=8)
    videoattn.install(model, level="block")
    block = model.transformer_blocks[0]
    seen = []
    block.register_forward_pre_hook(lambda *_: seen.append(Products().__enter__()))
    block.register_forward_hook(lambda *_: seen[-1].__exit__(None, None, None))
    expected = model(**given)
    lay(model)
    for a, b in zip(model(**given), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    # Those of the attention calls are in both.
    assert seen[0].count - seen[1].count == 34 - 20
