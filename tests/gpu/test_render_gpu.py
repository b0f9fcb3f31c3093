"""Whole renders on a GPU: where weights live, what is compiled or replayed, the log and the command."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from tests.cli.command import run
from tests.render import fixtures
from tests.render.test_ranks import frames_of, psnr, sound_of
from videoattn.dispatch import device_capability
from videoattn.kernels import library
from videoattn.render import fast, metadata
from videoattn.render.job import RenderJob
from videoattn.render.run import render

ltx_folder, ltx2_folder = fixtures.ltx_folder, fixtures.ltx2_folder
FOLDERS = ["ltx_folder", "ltx2_folder"]
# On a CPU bf16 and fp8 weights are 32 dB from fp32 with these models; weights that only move change nothing.
SAME_DB, ROUNDED_DB, FP8_DB = 50.0, 28.0, 24.0

GRAPHS = fast.Setup("measured here", level="block", graph_tokens=1 << 20)
BOTH = fast.Setup("measured here", level="block", graph_tokens=1 << 20, compile=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, request):
    """Clips without any option, by folder fixture and recipe."""
    made: dict[tuple[str, str], Path] = {}

    def of(name: str, recipe: str) -> Path:
        if (name, recipe) not in made:
            path = tmp_path_factory.mktemp("plain") / "clip.mp4"
            made[name, recipe] = rendered(request.getfixturevalue(name), path, recipe=recipe)
        return made[name, recipe]

    return of


def rendered(folder: Path | str, path: Path, **options) -> Path:
    size = {"width": 128, "height": 128, "num_frames": 9}
    steps = {} if options.get("recipe") == "distilled" else {"num_inference_steps": 3}
    job = RenderJob.parse(
        {"prompt": "a red ball", "model": str(folder), "dtype": "bf16", **size, **steps, **options}
    )
    render(job, output=path)
    return path


OPTIONS = [
    ({"offload": "model"}, SAME_DB),
    ({"offload": "group"}, SAME_DB),
    ({"compile": True}, ROUNDED_DB),
    ({"compile": True, "offload": "model"}, ROUNDED_DB),
    ({"compile": True, "offload": "group"}, ROUNDED_DB),
    ({"dtype": "fp8"}, FP8_DB),
    ({"dtype": "fp8", "compile": True}, FP8_DB),
    ({"dtype": "fp8", "offload": "model"}, FP8_DB),
    ({"dtype": "fp8", "offload": "group"}, FP8_DB),
    ({"fast": True}, ROUNDED_DB),
]


@pytest.mark.parametrize(
    ("options", "least"), OPTIONS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_an_option_changes_no_clip(folder, options, least, plain, tmp_path, request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = rendered(request.getfixturevalue(folder), tmp_path / "clip.mp4", recipe="one-stage", **options)
    expected = plain(folder, "one-stage")
    assert psnr(frames_of(made), frames_of(expected)) > least
    assert metadata.read(made)["device"] == torch.cuda.get_device_name()
    if folder == "ltx2_folder":
        assert sound_of(made).shape == sound_of(expected).shape


@pytest.mark.parametrize(
    "options", [{"offload": "model"}, {"offload": "group"}, {"dtype": "fp8"}, {"compile": True}]
)
def test_two_stages(options, plain, ltx2_folder, tmp_path):
    made = rendered(ltx2_folder, tmp_path / "clip.mp4", recipe="distilled", **options)
    least = FP8_DB if "dtype" in options else ROUNDED_DB
    assert psnr(frames_of(made), frames_of(plain("ltx2_folder", "distilled"))) > least


@pytest.mark.parametrize("setup", [GRAPHS, BOTH], ids=["graphs", "graphs and compile"])
@pytest.mark.parametrize("recipe", ["one-stage", "distilled"])
def test_fast_with_everything_a_table_may_turn_on(setup, recipe, plain, ltx2_folder, tmp_path, monkeypatch):
    capability = device_capability(torch.device("cuda", 0))
    assert capability is not None
    monkeypatch.setitem(fast.MEASURED, capability[0], setup)
    made = rendered(ltx2_folder, tmp_path / "clip.mp4", recipe=recipe, fast=True)
    assert psnr(frames_of(made), frames_of(plain("ltx2_folder", recipe))) > ROUNDED_DB
    assert "CUDA graphs" in metadata.read(made)["fast"]


@pytest.mark.parametrize("recipe", ["one-stage", "distilled"])
def test_the_same_clip_twice(recipe, ltx2_folder, plain, tmp_path):
    made = rendered(ltx2_folder, tmp_path / "clip.mp4", recipe=recipe)
    assert made.read_bytes() == plain("ltx2_folder", recipe).read_bytes()


@pytest.mark.parametrize(
    "options", [["--dtype", "fp32"], ["--dtype", "bf16"], ["--dtype", "fp16"], ["--offload", "model"]]
)
def test_the_command_draws_the_demo_clip(options, tmp_path):
    result = run(
        "render", "-o", "clip.mp4", "--timing", "t.jsonl", "--compare", "sdpa", *options, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    calls = [row for row in rows if row.get("kind") == "video_self"]
    assert calls
    assert all(row["milliseconds"] > 0 for row in calls)
    if library.unavailable(0) is None and "fp32" not in options:
        assert {row["kernel"] for row in calls} == {"hopper"}
