"""`--fast`: one table decides, every outcome says what it is, and it reaches the clip and its log."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch

from tests.pipelines import ltx2_pipeline
from videoattn.processors.regions import ForwardGraphs
from videoattn.render import fast as module
from videoattn.render import metadata
from videoattn.render.fast import MEASURED, Setup, fast
from videoattn.render.job import RenderJob
from videoattn.render.run import Renderer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = {"width": 128, "height": 96, "num_frames": 17, "num_inference_steps": 2, "guidance_scale": 1.0}


def on(monkeypatch, capability, name="NVIDIA X"):
    monkeypatch.setattr(module, "device_capability", lambda device: capability)
    monkeypatch.setattr(module, "device_name", lambda device: name)


def test_without_it_nothing_is_decided():
    assert fast(RenderJob(), CPU) is None


def test_a_cpu_says_that_nothing_is_known():
    chosen = fast(RenderJob(fast=True), CPU)
    assert not chosen.anything
    assert chosen.says == "--fast: nothing faster is known on cpu, rendering as usual"


@pytest.mark.parametrize(
    ("capability", "job", "says"),
    [
        ((8, 0), {}, "--fast: nothing was measured on NVIDIA X or its family, rendering as usual"),
        ((9, 0), {"offload": "group"}, "--fast: nothing was measured with offloaded or fp8 weights"),
        ((9, 0), {"dtype": "fp8"}, "--fast: nothing was measured with offloaded or fp8 weights"),
        (
            (9, 0),
            {},
            "--fast on NVIDIA X: fused work at level block, CUDA graphs up to 49152 tokens (on one H200",
        ),
    ],
)
def test_what_a_gpu_gets(monkeypatch, capability, job, says):
    on(monkeypatch, capability)
    chosen = fast(RenderJob(fast=True, **job), CUDA)
    assert chosen.says.startswith(says)
    assert chosen.anything == ("fused" in says)


def test_every_entry_names_its_measurement():
    for setup in MEASURED.values():
        assert setup.parts
        assert any(character.isdigit() for character in setup.because)


@pytest.fixture
def folder(tmp_path):
    ltx2_pipeline("2.3", layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_render_says_so_and_makes_the_same_clip(folder, tmp_path):
    pixels = {}
    warnings = []
    for on in (False, True):
        renderer = Renderer(device="cpu", warn=warnings.append)
        job = RenderJob(prompt="a ball", model=str(folder), fast=on, **TINY)
        result = renderer.render(job, output=tmp_path / f"{on}.mp4", timing=tmp_path / f"{on}.jsonl")
        renderer.close()
        with av.open(str(tmp_path / f"{on}.mp4")) as clip:
            pixels[on] = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
        assert result.job.fast is on
    assert np.array_equal(pixels[True], pixels[False])
    assert warnings == ["--fast: nothing faster is known on cpu, rendering as usual"]
    assert metadata.read(tmp_path / "True.mp4")["fast"] == warnings[0]
    assert "fast" not in metadata.read(tmp_path / "False.mp4")


def test_an_entry_is_carried_out(folder, tmp_path, monkeypatch):
    """With a GPU's entry applied here: level and graphs are on in the model, and the log says so."""
    from videoattn.render import run

    setup = Setup("a test", level="block", graph_tokens=40)
    monkeypatch.setattr(run, "fast", lambda job, device, **_: module.Fast(setup, "--fast here"))
    made = []

    def graphs(pipe, *, max_tokens):
        from tests.processors.test_regions import Rerun

        made.append(ForwardGraphs(pipe.transformer, max_tokens, lambda device: Rerun))
        return made[-1]

    monkeypatch.setattr(run, "cuda_graphs", graphs)
    renderer = Renderer(device="cpu")
    job = RenderJob(prompt="a ball", model=str(folder), fast=True, **{**TINY, "num_inference_steps": 3})
    renderer.render(job, output=tmp_path / "clip.mp4", timing=tmp_path / "log.jsonl")
    assert made[0].max_tokens == 40
    assert made[0].replays == 2
    head = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert head["around"].startswith("level block: QK norm with rotary embedding")
    assert head["around"].endswith("; CUDA graphs up to 40 tokens")
    renderer.close()
    assert made[0].captured == 0
