"""The capstone script on a tiny model."""

import importlib.util
import json
import subprocess
import sys

import av
import pytest

from tests.cli.command import ROOT, environment
from videoattn.timing.log import TimingLog

SCRIPT = ROOT / "scripts" / "generate_clips.py"
SMALL = ["--width", "128", "--height", "128", "--num-frames", "9"]


def generate(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_it_renders_prompts_and_checks_the_calls(ltx2_folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("# two clips\na red ball\n\nblue square\n")
    result = generate(
        "prompts.txt", "--model", ltx2_folder, *SMALL, "--compare", "sdpa", "--output", "clips", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    clips = tmp_path / "clips"
    with av.open(str(clips / "clip-02.mp4")) as container:
        assert container.streams.video[0].frames == 9
        job = json.loads(container.metadata["comment"])["job"]
    assert (job["prompt"], job["seed"], job["recipe"]) == ("blue square", 1, "distilled")
    summary = json.loads((clips / "summary.json").read_text())
    # Two layers: 11 forwards of 12 calls, and the connectors twice.
    assert [clip["calls"] for clip in summary["clips"]] == [140, 140]
    assert summary["unexpected_calls"] == []
    assert all(clip["seconds"] > 0 for clip in summary["clips"])
    table = (clips / "table.txt").read_text()
    assert "generate_clips.py prompts.txt" in table
    assert "video_self" in table
    assert "280 attention calls, number and shapes as the model's config implies" in result.stdout


def test_bad_usage(tmp_path, ltx2_folder):
    result = generate("none.txt", "--model", ltx2_folder, cwd=tmp_path)
    assert result.returncode == 2
    assert "generate_clips: no such prompts file: none.txt" in result.stderr
    result = generate("--modle", "x", cwd=tmp_path)
    assert result.returncode == 2
    assert "--modle" in result.stderr


def test_unexpected_calls_end_with_a_failure(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("generate_clips", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_clips"] = module
    spec.loader.exec_module(module)
    log = TimingLog("CPU", "0", "2")
    clips = [{"clip": "clip-01.mp4", "calls": 3}]
    assert module._conclude(module.Tally(whole=log, clips=clips), tmp_path) == 0
    tally = module.Tally(
        whole=log, clips=clips, wrong=["clip-01.mp4: denoise video_self: 3 calls, expected 4"]
    )
    assert module._conclude(tally, tmp_path) == 1
    assert "differ from what the model's config implies" in capsys.readouterr().out
