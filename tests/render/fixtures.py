"""Tiny model folders on disk, made once per test process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import pipelines

SIZE = {"width": 128, "height": 96, "num_frames": 17}


@pytest.fixture(scope="session")
def ltx_folder(tmp_path_factory) -> Path:
    """An LTX-Video 0.9.x pipeline."""
    folder = tmp_path_factory.mktemp("models") / "ltx"
    pipelines.ltx_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ltx2_folder(tmp_path_factory) -> Path:
    """An LTX-2.3 pipeline with sound and a latent upsampler."""
    return _ltx2(tmp_path_factory.mktemp("models") / "ltx23", "2.3")


@pytest.fixture(scope="session")
def ltx20_folder(tmp_path_factory) -> Path:
    """An LTX-2.0 pipeline with sound and a latent upsampler."""
    return _ltx2(tmp_path_factory.mktemp("models") / "ltx20", "2.0")


@pytest.fixture(scope="session")
def ltx25_folder(tmp_path_factory) -> Path:
    """A pipeline around an LTX-2.5 transformer."""
    return _ltx2(tmp_path_factory.mktemp("models") / "ltx25", "2.5")


def _ltx2(folder: Path, version: str) -> Path:
    pipe = pipelines.ltx2_pipeline(version)
    pipe.save_pretrained(folder)
    pipelines.ltx2_upsample_pipeline(pipe).latent_upsampler.save_pretrained(folder / "latent_upsampler")
    return folder


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield
