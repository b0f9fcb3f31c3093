"""What `make demo` runs: the command's default model and prompt, judged by what the mp4 shows."""

from __future__ import annotations

import json
from collections import Counter

import av
import numpy as np
import pytest
import torch

from tests.cli.command import run
from videoattn import demo
from videoattn.demo.checker import look

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    result = run("render", "--output", "clips/demo.mp4", "--timing", "clips/demo.timing.jsonl", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_the_asked_shape_moves_as_asked_in_the_mp4(made):
    folder, _ = made
    with av.open(str(folder / "clips" / "demo.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    clip = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
    assert clip.shape == (33, 3, 128, 128)
    seen = look(clip, 1)
    assert seen.background == "blue"
    assert [(each.colour, each.shape, each.size, each.motion) for each in seen.shapes] == [
        ("yellow", "star", "large", "right")
    ]


def test_it_prints_receipt_timing_table_and_paths(made):
    folder, result = made
    assert sorted(result.stdout.split()) == ["clips/demo.mp4", "clips/demo.timing.jsonl"]
    assert "video_self  sdpa" in result.stderr
    for column in ("video_self", "video_text", "denoise", "calls", "share"):
        assert column in result.stderr, result.stderr
    rows = map(json.loads, (folder / "clips" / "demo.timing.jsonl").read_text().splitlines())
    calls = Counter(row["kind"] for row in rows if "kind" in row)
    layers = json.loads((demo.weights_path() / "transformer" / "config.json").read_text())["num_layers"]
    of_each_kind = layers * demo.DEFAULTS["num_inference_steps"]
    assert calls == {"video_self": of_each_kind, "video_text": of_each_kind}


def test_words_it_does_not_know_are_named_with_those_it_knows(tmp_path):
    result = run("render", "a mauve circle", "--num-inference-steps", "1", "-o", "clip.mp4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "'mauve'" in result.stderr
    assert "circling" in result.stderr
