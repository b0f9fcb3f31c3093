"""Whole forwards replayed: which are, what a replay depends on, what the log says; `Rerun` is the GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from peft import IA3Config, LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

import videoattn
from tests.pipelines import (
    call_ltx2,
    ltx2_inputs,
    ltx2_pipeline,
    ltx2_transformer,
    ltx_inputs,
    ltx_transformer,
)
from videoattn.dispatch import choose
from videoattn.processors import regions
from videoattn.timing import record_timing, recorder
from videoattn.timing.report import summarise


class Rerun:
    """What a CUDA graph does, by running the function again on the buffers it was recorded with."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, run):
        self._run, self._outputs = run, run()
        return self._outputs

    def replay(self):
        self.replays += 1
        # A GPU replays without running any Python.
        with recorder.unrecorded():
            outputs = self._run()
        for old, new in zip(self._outputs, outputs, strict=True):
            old.copy_(new)


class Frozen:
    """What a CUDA graph does with Python: none of it runs again. For inputs that stay the same."""

    def record(self, run):
        self._outputs = run()
        self._recorded = [output.clone() for output in self._outputs]
        return self._outputs

    def replay(self):
        for output, recorded in zip(self._outputs, self._recorded, strict=True):
            output.copy_(recorded)


def graphs_of(model, max_tokens=None, capture=Rerun):
    return regions.ForwardGraphs(model, max_tokens, lambda device: capture)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def ltx2_call(seed=0, lengths=None, **more):
    inputs = ltx2_inputs(lengths, seed=seed)
    model = ltx2_transformer(layers=1)
    coords = model.rope.prepare_video_coords(1, 3, 3, 4, torch.device("cpu"), fps=24.0)
    return {**inputs, "video_coords": coords, **more}


def test_replays_follow_their_inputs():
    model = ltx2_transformer(layers=1)
    calls = [ltx2_call(seed) for seed in range(4)]
    expected = [model(**call) for call in calls]
    graphs = graphs_of(model)
    results = [model(**call) for call in calls]
    # Kept until here: an output that a later replay overwrites would differ.
    assert all(equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert (graphs.captured, graphs.replays) == (1, 3)
    assert graphs.plain == {"the first forward of its kind": 1}
    graphs.release()
    assert "forward" not in vars(model)
    assert equal(model(**calls[0]), expected[0])


def test_a_graph_for_each_shape_and_mask_form():
    model = ltx_transformer(layers=1)
    videoattn.install(model)
    graphs = graphs_of(model)
    stock = ltx_transformer(layers=1)
    for lengths, captured in (
        (None, 0), (None, 1), ([9], 1), ([9], 2), ([20], 2), (None, 2), ([9, 20], 2), ([9, 20], 3),
    ):  # fmt: skip
        call = ltx_inputs(lengths, batch=2 if lengths and len(lengths) == 2 else 1)
        torch.testing.assert_close(model(**call)[0], stock(**call)[0], atol=1e-5, rtol=1e-5)
        assert graphs.captured == captured


def test_install_and_uninstall_do_not_replay_each_others_graphs():
    model = ltx2_transformer(layers=1)
    graphs = graphs_of(model)
    call = ltx2_call()
    for _ in range(2):
        model(**call)
    handle = videoattn.install(model)
    for _ in range(3):
        model(**call)
    assert graphs.captured == 2
    handle.uninstall()
    model(**call)
    assert graphs.captured == 2
    assert graphs.replays == 4


def test_equal_installs_share_graphs_and_do_not_outlive_themselves():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model, capture=Frozen)
    gone = []
    for _ in range(3):
        with videoattn.install(model, level="block"):
            gone.append(weakref.ref(vars(model)["_videoattn_installs"].layers[0]))
            for _ in range(2):
                model(**call)
    gc.collect()
    assert [layer() for layer in gone] == [None] * 3
    assert (graphs.captured, graphs.replays) == (1, 5)


def test_installs_that_differ_do_not_share_graphs():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model)
    installs = (
        {},
        {"kernels": "sdpa"},
        {"kernels": {"video_text": "reference"}},
        {"kernels": {"video_self": "reference"}},
        {"level": "attention"},
        {"level": "attention", "under_compile": "torch"},
        {"level": "block"},
    )
    for number, how in enumerate(installs):
        with videoattn.install(model, **how):
            for _ in range(2):
                model(**call)
        assert graphs.captured == number + 1


def test_a_strangers_processor_hides_no_change_of_the_blocks():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    graphs = graphs_of(model)
    handle = videoattn.install(model, level="block")
    model.set_attn_processor(LTXVideoAttnProcessor())
    for _ in range(2):
        model(**call)
    handle.uninstall()
    model(**call)
    assert (graphs.captured, graphs.replays) == (1, 1)


def test_what_auto_chose_is_captured_anew_when_it_may_choose_otherwise():
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    videoattn.install(model)
    graphs = graphs_of(model)
    for captured in (0, 1, 1):
        model(**call)
        assert graphs.captured == captured
    choose.cache_clear()
    for captured in (0, 1):
        model(**call)
        assert graphs.captured == captured


def test_a_forward_of_the_users_own_that_names_no_parameters():
    model, calls = ltx_transformer(layers=1), [ltx_inputs(seed=seed) for seed in range(4)]
    expected = [model(**call) for call in calls]
    own, seen = model.forward, []

    def passes_on(*args, **kwargs):
        seen.append(kwargs.get("return_dict"))
        return own(*args, **kwargs)

    model.forward = passes_on
    graphs = graphs_of(model)
    for call, theirs in zip(calls, expected, strict=True):
        positional = {name: call[name] for name in ("hidden_states", "encoder_hidden_states")}
        named = {name: value for name, value in call.items() if name not in positional}
        assert equal(model(*positional.values(), **named), theirs)
    assert graphs.replays == 3
    assert seen
    graphs.release()
    assert model.forward is passes_on


def test_what_a_forward_of_the_users_own_names_decides_nothing():
    """By whatever names it takes them, arguments that no graph may hold are seen, and strangers run plain."""
    model = ltx2_transformer(layers=1)
    given = model.forward

    def first_only(hidden_states, *args, **rest):
        return given(hidden_states, *args, **rest)

    def tagged(*args, tag=None, **rest):
        return given(*args, **rest)

    guided = {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": torch.ones(1)}
    for own in (first_only, tagged):
        model.forward = own
        graphs = graphs_of(model)
        call = ltx2_call()
        unplaced = {name: value for name, value in call.items() if name != "video_coords"}
        for refused in ({**call, **guided}, unplaced):
            for _ in range(3):
                assert equal(model(**refused), given(**refused))
        assert (graphs.captured, graphs.plain.total()) == (0, 6)
        for _ in range(3):
            assert equal(model(**call), given(**call))
        assert (graphs.captured, graphs.replays) == (1, 2)
        graphs.release()
    model.forward = tagged
    graphs = graphs_of(model)
    for _ in range(3):
        assert equal(model(**call, tag=1), given(**call))
    assert graphs.plain == {"arguments that diffusers' forward does not take": 3}
    with pytest.raises(TypeError, match="frobnicate"):
        model(**call, frobnicate=1)
    graphs.release()
    del model.forward


def test_what_no_graph_may_hold_runs_plain():
    model = ltx2_transformer()
    graphs = graphs_of(model, max_tokens=40)
    stg = {"spatio_temporal_guidance_blocks": [1]}
    for more in (stg, {"video_coords": None}):
        for _ in range(2):
            model(**ltx2_call(**more))
    big = ltx2_inputs(batch=2)
    model(**{**big, "video_coords": torch.cat([ltx2_call()["video_coords"]] * 2)})
    with torch.enable_grad():
        model(**ltx2_call())
    assert graphs.captured == 0
    assert graphs.plain == {
        "spatio-temporal guidance branches on a tensor": 2,
        "no video_coords were given": 2,
        "more than 40 tokens": 1,
        "gradients are on": 1,
    }


def test_weights_that_moved_and_adapters_that_changed_are_captured_anew():
    model = ltx2_transformer(layers=1)
    graphs = graphs_of(model)
    call = ltx2_call()
    before = [model(**call) for _ in range(3)][-1]
    model.proj_out.weight.data = 2 * model.proj_out.weight.data
    model(**call)
    assert graphs.captured == 0
    changed = [model(**call) for _ in range(2)][-1]
    assert not equal(changed, before)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    expected = graphs._forward(**call)
    for _ in range(3):
        assert equal(model(**call), expected)
    assert graphs.captured == 1
    model.set_adapters(["default"], [0.5])
    expected = graphs._forward(**call)
    for _ in range(3):
        assert equal(model(**call), expected)


def lora(model, name):
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)


def ia3(model, name):
    targets = {"target_modules": ["to_k", "to_v"], "feedforward_modules": []}
    model.add_adapter(IA3Config(**targets, init_ia3_weights=False), name)


def whole_module(model, name):
    if not isinstance(model.proj_out, ModulesToSaveWrapper):
        model.proj_out = ModulesToSaveWrapper(model.proj_out, name)
    model.proj_out.update(name)
    torch.nn.init.normal_(model.proj_out.modules_to_save[name].weight)


def peft_layers(model):
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]


def disable(model):
    for layer in peft_layers(model):
        layer.enable_adapters(False)
    return lambda: [layer.enable_adapters(True) for layer in peft_layers(model)]


def disable_lora(model):
    model.disable_lora()
    return model.enable_lora


def switch(model):
    for layer in peft_layers(model):
        layer.set_adapter("b")
    return lambda: [layer.set_adapter("a") for layer in peft_layers(model)]


def scale(model):
    for layer in peft_layers(model):
        layer.scale_layer(0.5)
    return lambda: [layer.unscale_layer(0.5) for layer in peft_layers(model)]


def merge(model):
    for layer in peft_layers(model):
        layer.merge()
    return lambda: [layer.unmerge() for layer in peft_layers(model)]


@pytest.mark.parametrize(
    ("adapter", "change"),
    [
        (lora, disable_lora),
        *((adapter, change) for adapter in (lora, ia3, whole_module) for change in (disable, switch)),
        (lora, scale),
        (lora, merge),
        (ia3, merge),
    ],
)
def test_adapters_that_act_otherwise_are_captured_anew(adapter, change):
    model, call = ltx_transformer(layers=1), ltx_inputs((20,))
    torch.manual_seed(0)
    for name in "ab":
        adapter(model, name)
    for layer in peft_layers(model):
        layer.set_adapter("a")
    graphs = graphs_of(model, capture=Frozen)
    before = [model(**call) for _ in range(3)][-1]
    undo = change(model)
    # Merged weights stay at their addresses and give the same outputs but for roundings.
    assert not equal(graphs._forward(**call), before)
    for step in (lambda: None, undo):
        step()
        expected = graphs._forward(**call)
        for _ in range(3):
            assert equal(model(**call), expected)
        assert graphs.captured == 1


def test_the_log_times_replays_whole_and_says_so(tmp_path):
    model = ltx2_transformer()
    handle = videoattn.install(model, level="attention")
    graphs = graphs_of(model)
    call = ltx2_call()
    with record_timing(tmp_path / "log.jsonl") as recording:
        recording.enter(clip="a", stage="denoise", layers=handle.layers, around=handle.around)
        for step in range(4):
            recording.step = step
            model(**call)
    log = videoattn.timing.load(tmp_path / "log.jsonl")
    assert graphs.replays == 3
    assert len(log.rows) == 12
    assert [(f.step, f.replayed_calls) for f in log.forwards] == [(1, 12), (2, 12), (3, 12)]
    report = str(summarise(log))
    assert "3 forwards replayed a CUDA graph: their 36 attention calls" in " ".join(report.split())
    assert "Around the calls: level attention: QK norm with rotary embedding" in " ".join(report.split())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("level", ["call", "block"])
def test_the_log_counts_the_calls_that_a_forward_makes(level, compiled):
    torch.compiler.reset()
    model = ltx2_transformer()
    videoattn.install(model, level=level)
    if compiled:
        model.compile_repeated_blocks(backend="eager", fullgraph=True, dynamic=False)
    graphs = graphs_of(model)
    for more, calls in (({}, 12), ({"isolate_modalities": True}, 8), ({}, 12)):
        with record_timing() as recording:
            for _ in range(3):
                model(**ltx2_call(**more))
        plain = 3 - len(recording.log.forwards)
        assert len(recording.rows) == calls * plain
        assert [forward.replayed_calls for forward in recording.log.forwards] == [calls] * (3 - plain)
    assert (graphs.captured, graphs.replays) == (2, 7)
    torch.compiler.reset()


def test_shadow_arms_keep_forwards_plain():
    model = ltx2_transformer(layers=1)
    videoattn.install(model)
    graphs = graphs_of(model)
    with record_timing(compare="sdpa") as recording:
        for _ in range(3):
            model(**ltx2_call())
    assert len(recording.rows) == 18
    assert graphs.plain == {"shadow arms run beside single calls": 3}


def test_a_pipeline_keeps_its_result():
    stock = call_ltx2(ltx2_pipeline(layers=1), num_inference_steps=4)
    pipe = ltx2_pipeline(layers=1)
    graphs = graphs_of(pipe.transformer)
    videoattn.install(pipe, level="block")
    for ours, theirs in zip(call_ltx2(pipe, num_inference_steps=4), stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert graphs.replays == 3


def test_refusals():
    model = ltx2_transformer(layers=1)
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        regions.cuda_graphs(model)
    graphs_of(model)
    with pytest.raises(RuntimeError, match="already"):
        regions.cuda_graphs(model)
    with pytest.raises(TypeError, match="install"):
        regions.cuda_graphs(torch.nn.Linear(1, 1))
    cast = ltx2_transformer(layers=1)
    cast.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    graphs = graphs_of(cast)
    expected = graphs._forward(**ltx2_call())
    for _ in range(3):
        assert equal(cast(**ltx2_call()), expected)
    assert graphs.plain == {"a hook is on a module": 3}


def test_compiled_blocks_make_one_graph_a_size():
    torch.compiler.reset()
    from tests.processors.calls import CountingBackend

    model = ltx_transformer()
    videoattn.install(model, level="block")
    backend = CountingBackend()
    compile_repeated_blocks = model.compile_repeated_blocks
    seen = {}

    def compile_with(**options):
        seen.update(options)
        compile_repeated_blocks(**options, backend=backend)

    model.compile_repeated_blocks = compile_with
    regions.compile_blocks(model)
    assert seen == {"fullgraph": True, "dynamic": False}
    small, large = ltx_inputs(), ltx_inputs(batch=2)
    for _ in range(2):
        model(**small)
        model(**large)
    assert backend.graphs == 2
    torch.compiler.reset()


def test_a_capture_is_made_on_the_models_device(monkeypatch):
    """Whatever device is current, by torch's own `graph` class over a CUDA that only notes devices."""
    current, seen = [0], []

    class Stream:
        def __init__(self, device=None, priority=0):
            self.device = torch.device("cuda", current[0] if device is None else torch.device(device).index)

    class Graph:
        def capture_begin(self, *pool, **options):
            seen.append(("begin", current[0]))

        def capture_end(self):
            seen.append(("end", current[0]))

    @contextmanager
    def on(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: on(torch.device(device).index))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: on(stream.device.index))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Stream("cuda:0"))
    for device in ("cuda:1", "cuda:0"):
        new = regions.cuda_captures(torch.device(device))
        new().record(lambda: seen.append(("run", current[0])))
    assert seen == [(what, index) for index in (1, 0) for what in ("begin", "run", "end")]
