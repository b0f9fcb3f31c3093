"""Context parallelism on two GPUs of one host: nccl, our kernels' LSE, compiled blocks, the command."""

from __future__ import annotations

import pytest
import torch

from tests import pipelines
from tests.cli.command import TINY, run
from tests.processors import parallel_gpu_checks as checks
from tests.processors.ranks import Ranks

DEGREES = [(2, 1), (1, 2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Ranks(tmp_path_factory.mktemp("ranks"), count=2, backend="nccl") as started:
        yield started


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("tokens", [6144, 5525])
def test_self_attention(ranks, degrees, tokens):
    for said in ranks.run(checks.self_attention, *degrees, tokens):
        assert said == dict.fromkeys(said, "")
        assert "sdpa" in said


@pytest.mark.parametrize("tokens", [12288, 5525])
def test_keys_in_parts(ranks, tokens):
    one, other = ranks.run(checks.split_keys, tokens)
    assert one == other
    assert {name: text for name, (text, _) in one.items()} == dict.fromkeys(one, "")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
def test_forward(ranks, version, degrees, compiled):
    assert max(ranks.run(checks.forward, version, *degrees, compiled)) < 1e-4


@pytest.mark.parametrize("version", ["ltx", "2.3"])
def test_enabled_before_the_install(ranks, version):
    assert max(ranks.run(checks.adopted, version)) < 1e-4


def test_a_full_width_forward(ranks):
    size = ["--layers", "2", "--width", "768", "--height", "512", "--frames", "49", "--rounds", "2"]
    arms, _ = ranks.run(checks.benchmark, ["--device", "cuda", *size])
    assert arms == [("1 rank", True), ("ulysses:2", True), ("ring:2", True)]


def test_the_command(ranks, tmp_path):
    pipelines.ltx2_pipeline("2.3").save_pretrained(tmp_path / "model")
    for degrees in ("ulysses:2", "ring:2"):
        arguments = ["--model", tmp_path / "model", *TINY, "-o", "clip.mp4", "--context-parallel", degrees]
        result = run("render", "a red ball", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["clip.mp4"]
