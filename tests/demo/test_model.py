"""The shipped pipeline renders what its prompt asks for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from videoattn import demo
from videoattn.demo.checker import compare, look
from videoattn.demo.draw import draw, make_tracks
from videoattn.demo.scenes import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, Scenes


def scene_of(colour: str, shape: str, size: str, motion: str, background: str) -> Scenes:
    values = (COLOURS.index(colour), SHAPES.index(shape), SIZES.index(size), MOTIONS.index(motion))
    pairs = (np.full((1, 2), value) for value in values)
    return Scenes(*pairs, np.array([[True, False]]), np.array([BACKGROUNDS.index(background)]))


def render(pipe: Any, seed: int, **overrides: Any) -> torch.Tensor:
    settings = {**demo.DEFAULTS, **overrides}
    pipe.set_progress_bar_config(disable=True)
    return pipe(generator=torch.Generator().manual_seed(seed), output_type="pt", **settings).frames[0]


def test_the_folder_is_small_and_safe() -> None:
    files = [path for path in demo.weights_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_importing_the_package_loads_no_model_library() -> None:
    code = "import sys, videoattn.demo as d; d.unknown_words('x'); print('diffusers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_weights_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("videoattn.demo.model.WEIGHTS", tmp_path / "weights")
    with pytest.raises(FileNotFoundError, match="weights are missing"):
        demo.load_pipeline()


def test_heads_suit_the_gpu_kernels() -> None:
    pipe: Any = demo.load_pipeline(torch.float16)
    assert pipe.transformer.config.attention_head_dim == 64
    assert pipe.transformer.dtype == torch.float16
    assert (pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio) == (16, 4)


def test_the_default_prompt_is_drawn() -> None:
    clip = render(demo.load_pipeline(), seed=0)
    assert clip.shape == (33, 3, 128, 128)
    verdict = compare(look(clip, 1), scene_of("yellow", "star", "large", "right", "blue"), 0)
    assert all(verdict.values()), verdict


@pytest.mark.slow
def test_two_shapes_keep_their_attributes() -> None:
    prompt = "a red circle bouncing and a yellow square moving right on a blue background"
    seen = look(render(demo.load_pipeline(), seed=1, prompt=prompt), 2)
    found = {(s.colour, s.shape, s.motion) for s in seen.shapes}
    assert found == {("red", "circle", "bouncing"), ("yellow", "square", "right")}


@pytest.mark.slow
def test_a_given_first_frame_is_kept_and_goes_on() -> None:
    scenes = scene_of("red", "square", "medium", "right", "black")
    drawn = draw(scenes, make_tracks(np.random.default_rng(0), scenes))[0, :, 0]
    frame = ((drawn + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    prompt = "a red square moving right on a black background"
    pipe = demo.load_pipeline(image=True)
    clip = render(pipe, 0, image=Image.fromarray(frame), prompt=prompt, num_inference_steps=8)
    error = (clip[0] - (drawn + 1) / 2).pow(2).mean()
    assert -10 * torch.log10(error) > 28
    assert all(compare(look(clip, 1), scenes, 0).values())
