"""The command as a user types it."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tests.cli.command import TINY, complaint, environment, run, run_forked, start
from videoattn import cli
from videoattn.render import metadata
from videoattn.render.checks import check
from videoattn.render.clip import Clip, write_mp4
from videoattn.render.job import RenderJob


@pytest.fixture(scope="module")
def clip(tmp_path_factory, ltx2_folder):
    """A clip with sound made by the command, with everything else it can write."""
    folder = tmp_path_factory.mktemp("clip")
    arguments = [
        "--model",
        ltx2_folder,
        *TINY,
        "--frame-rate",
        "23.976",
        "--seed",
        "11",
        "--guidance-scale",
        "1",
    ]
    outputs = [
        "-o",
        "new/clip.mp4",
        "--poster",
        "new/p.png",
        "--preview",
        "new/p.gif",
        "--timing",
        "new/t.jsonl",
    ]
    result = run("render", "a red ball", *arguments, *outputs, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "new" / "clip.mp4", result


def test_it_writes_the_clip_and_what_was_asked(clip):
    path, result = clip
    assert result.stdout.split() == ["new/p.png", "new/p.gif", "new/t.jsonl", "new/clip.mp4"]
    assert sorted(os.listdir(path.parent)) == ["clip.mp4", "p.gif", "p.png", "t.jsonl"]
    with av.open(str(path)) as container:
        assert len(container.streams.audio) == 1
        video = container.streams.video[0]
        assert (video.width, video.height, video.frames) == (128, 96, 17)
        assert str(video.average_rate) == "24000/1001"


def test_it_says_what_it_does(clip):
    _, result = clip
    assert "LTX-2.3, one-stage: 128x96, 17 frames, 2 steps of 1 sample, seed 11" in result.stderr
    for phase in ("load model", "encode prompt", "denoise", "decode", "write clip"):
        assert f"{phase}: " in result.stderr
    assert "video_self" in result.stderr
    assert "sdpa" in result.stderr
    assert "s without loading" in result.stderr


def test_show_prints_the_settings(clip):
    path, _ = clip
    result = run("show", path, cwd=path.parent)
    assert result.returncode == 0
    for piece in ("a red ball", "24000/1001", "11", "sdpa"):
        assert piece in result.stdout
    everything = json.loads(run("show", "--json", path, cwd=path.parent).stdout)
    assert everything["job"]["seed"] == 11
    assert everything["job"]["guidance_scale"] == 1.0
    assert everything["receipt"]["video_self"]["kernel"] == "sdpa"
    assert set(everything["versions"]) >= {"videoattn", "torch", "diffusers"}


@pytest.mark.slow
def test_a_clip_renders_itself_again(clip):
    path, _ = clip
    result = run_forked("render", "--from", path, "-o", "again.mp4", cwd=path.parent.parent)
    assert result.returncode == 0, result.stderr
    assert (path.parent.parent / "again.mp4").read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_from_takes_what_is_given_over_what_was(clip):
    path, _ = clip
    result = run_forked(
        "render", "blue", "--from", path, "--seed", "12", "-o", "other.mp4", cwd=path.parent.parent
    )
    assert result.returncode == 0, result.stderr
    job = json.loads(run_forked("show", "--json", "other.mp4", cwd=path.parent.parent).stdout)["job"]
    before = json.loads(run_forked("show", "--json", path, cwd=path.parent).stdout)["job"]
    assert job == before | {"prompt": "blue", "seed": 12}


@pytest.mark.slow
def test_without_a_name_the_clip_is_named_by_prompt_and_seed(ltx_folder, tmp_path):
    (tmp_path / "a-red-ball-seed0.mp4").write_text("taken")
    result = run_forked(
        "render", "A red, ball!", "--model", ltx_folder, *TINY, "--compare", "sdpa", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "a-red-ball-seed0-2.mp4"
    assert (tmp_path / "a-red-ball-seed0.mp4").read_text() == "taken"
    # Shadow arms change the clock, so a run with them quotes no seconds for the clip.
    assert "s without loading" not in result.stderr
    assert "Shadow arms" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_render_leaves_nothing(ltx_folder, tmp_path, number, code):
    arguments = ["--model", ltx_folder, *TINY[:-1], "1000", "-o", "new/clip.mp4", "--timing", "new/t.jsonl"]
    process = start("render", "a red ball", *arguments, cwd=tmp_path)
    said = ""
    while "encode prompt" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    time.sleep(0.5)
    assert list(tmp_path.rglob(".clip.mp4.*.part"))
    assert not list(tmp_path.rglob("*.mp4"))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    result = subprocess.CompletedProcess(arguments, process.returncode, out, err)
    assert process.returncode == code
    assert "nothing unfinished is left" in complaint(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_at_any_moment_of_the_start_is_one_line(tmp_path):
    """Imports take the first seconds; only the interpreter's own first moments answer in its way."""
    started = time.monotonic()
    assert run("doctor", cwd=tmp_path).returncode == 0
    whole = time.monotonic() - started
    for share in (0.1, 0.2, 0.4, 0.6):
        process = start("doctor", cwd=tmp_path)
        while "/site-packages/" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.001)
        time.sleep(share * whole)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert err.splitlines() in (["videoattn: interrupted, nothing unfinished is left"], []), err


@pytest.mark.parametrize("pressed", [True, False])
def test_an_import_that_an_interrupt_broke_is_no_traceback(pressed, tmp_path):
    """numpy's parts can't be imported twice, which whoever catches the first failure gets told."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        f"    {pressed} and os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "except BaseException:\n"
        "    pass\n"
        "raise ImportError('cannot load module more than once per process')\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "videoattn", "doctor"],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"},
        capture_output=True,
        text=True,
    )
    if pressed:
        assert result.stderr == "videoattn: interrupted, nothing unfinished is left\n"
        assert result.returncode == 130
    else:
        assert "ImportError: cannot load module" in result.stderr
        assert result.returncode == 1


@pytest.mark.slow
def test_a_killed_render_leaves_nothing_that_looks_finished(ltx_folder, tmp_path):
    process = start("render", "x", "--model", ltx_folder, *TINY[:-1], "1000", "-o", "clip.mp4", cwd=tmp_path)
    while "encode prompt" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize("arguments", [["--help"], ["render", "--help"], ["--version"]])
def test_help_answers_without_torch(arguments, tmp_path):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "videoattn", *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert not loaded(result.stderr) & {"torch", "diffusers", "transformers", "av"}
    assert "videoattn" in result.stdout or "0." in result.stdout


def test_show_and_refusals_answer_without_torch(clip, tmp_path):
    path, _ = clip
    for arguments in (["show", path], ["render", "x", "--from", path, "--width", "100"]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "videoattn", *map(str, arguments)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert not loaded(result.stderr) & {"torch", "diffusers", "transformers"}


def test_another_image_than_the_clips_own_is_announced(ltx_folder, tmp_path):
    Image.new("RGB", (64, 48), "red").save(tmp_path / "first.png")
    job = RenderJob(prompt="x", model=str(ltx_folder), width=128, height=96, num_frames=17, image="first.png")
    digest = hashlib.sha256((tmp_path / "first.png").read_bytes()).hexdigest()
    # A folder in the output's place ends the command before anything is loaded.
    (tmp_path / "out.mp4").mkdir()
    for name, sha256 in (("same", digest), ("other", "0" * 64)):
        tags = metadata.tags(metadata.describe(job, device="cpu", receipt=None, image_sha256=sha256))
        clip = Clip(np.zeros((17, 96, 128, 3), np.uint8), Fraction(24))
        write_mp4(tmp_path / f"{name}.mp4", clip, place=tmp_path / f"{name}.mp4", crf=16, metadata=tags)
    said = {
        name: run_forked("render", "--from", f"{name}.mp4", "-o", "out.mp4", cwd=tmp_path).stderr
        for name in ("same", "other")
    }
    assert "is not the one that other.mp4 was rendered from" in said["other"]
    assert "is not the one" not in said["same"]


MADE = {"width": 128, "height": 128, "num_frames": 9, "prompt": "a red ball", "seed": 4}


@pytest.mark.parametrize(
    ("first", "given", "fresh"),
    [
        ({}, {"guidance_scale": 1}, {"guidance_scale": 1}),
        ({"stg_scale": 2}, {"guidance_scale": 0.5}, {"guidance_scale": 0.5}),
        (
            {"spatio_temporal_guidance_blocks": [0]},
            {"guidance_scale": 1, "audio_stg_scale": 2},
            {"guidance_scale": 1, "audio_stg_scale": 2},
        ),
        ({"num_inference_steps": 2}, {"recipe": "distilled"}, {"recipe": "distilled"}),
        ({"recipe": "distilled"}, {"recipe": "one-stage"}, {}),
        (
            {"recipe": "distilled", "upsampler": "someone/upsampler"},
            {"recipe": "one-stage", "num_inference_steps": 3},
            {"num_inference_steps": 3},
        ),
        # What earlier versions let pass has no use.
        ({"revision": "main", "components": "/some/folder", "upsampler": "a/b"}, {"seed": 5}, {"seed": 5}),
        # And what decides nothing else leaves the clip's settings alone.
        (
            {"num_inference_steps": 2, "stg_scale": 2},
            {"recipe": "one-stage", "seed": 5},
            {"num_inference_steps": 2, "stg_scale": 2, "seed": 5},
        ),
        ({"recipe": "distilled"}, {"recipe": "distilled"}, {"recipe": "distilled"}),
        (
            {"stg_scale": 2, "guidance_scale": 4},
            {"guidance_scale": 2},
            {"stg_scale": 2, "guidance_scale": 2},
        ),
    ],
)
def test_guidance_turned_off_and_another_recipe_mean_what_they_mean_without_a_clip(
    first, given, fresh, ltx2_folder, tmp_path
):
    model = {"model": str(ltx2_folder)}
    idle = {name: first.pop(name) for name in ("revision", "components", "upsampler") if name in first}
    made = check(RenderJob.parse({**MADE, **model, **first})).job.model_copy(update=idle)
    frames = Clip(np.zeros((9, 128, 128, 3), np.uint8), Fraction(24))
    path = tmp_path / "clip.mp4"
    write_mp4(
        path,
        frames,
        place=path,
        crf=16,
        metadata=metadata.tags(metadata.describe(made, device="cpu", receipt=None)),
    )
    again = cli._job(None, RenderJob.parse(given), path)
    assert check(again).job == check(RenderJob.parse({**MADE, **model, **fresh})).job


def loaded(importtime: str) -> set[str]:
    lines = [line for line in importtime.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}


def test_every_field_of_a_job_is_an_option(tmp_path):
    from videoattn.render.job import RenderJob

    text = run("render", "--help", cwd=tmp_path).stdout
    for name in RenderJob.model_fields:
        assert "--" + name.replace("_", "-") in text


def test_doctor_names_what_a_render_needs(tmp_path):
    result = run("doctor", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for piece in ("torch", "diffusers", "kernel sdpa", "kernel blackwell", "libx264", "aac", "disk, here"):
        assert piece in result.stdout
