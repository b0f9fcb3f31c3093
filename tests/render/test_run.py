"""Renders from a job to files on disk, in one process."""

import json
from collections import Counter
from contextlib import contextmanager

import av
import pytest
import torch

from tests.render.fixtures import SIZE
from videoattn.render import devices, metadata
from videoattn.render.errors import RenderError
from videoattn.render.files import StagedFiles
from videoattn.render.job import RenderJob
from videoattn.render.run import Renderer, render

TWO_STAGE = {"width": 128, "height": 128, "num_frames": 9}


class Stop(Exception):
    """Raised by a listener."""


class Log:
    """A listener that remembers, and raises where it is told to."""

    def __init__(self, stop_at=None):
        self.phases, self.steps, self.stop_at = [], Counter(), stop_at

    def phase(self, name, total):
        self.phases.append((name, total))
        if self.stop_at == name:
            raise Stop(name)

    def step(self, done):
        self.steps[self.phases[-1][0]] = done
        if self.stop_at == (self.phases[-1][0], done):
            raise Stop


def job(folder, **values):
    return RenderJob.parse(
        {"prompt": "a red ball", "model": str(folder), "num_inference_steps": 2, **SIZE, **values}
    )


def distilled(folder, **values):
    return RenderJob.parse(
        {"prompt": "x", "model": str(folder), "recipe": "distilled", **TWO_STAGE, **values}
    )


def test_a_render_reports_its_phases_and_steps(ltx2_folder, tmp_path):
    log = Log()
    result = render(distilled(ltx2_folder), output=tmp_path / "clip.mp4", progress=log)
    assert log.phases == [
        ("load_model", None),
        ("encode_prompt", 1),
        ("denoise_half", 8),
        ("upsample", 1),
        ("denoise_full", 3),
        ("decode", None),
        ("encode", 9),
    ]
    assert log.steps == {"encode_prompt": 1, "denoise_half": 8, "upsample": 1, "denoise_full": 3, "encode": 9}
    assert list(result.stage_seconds) == [name for name, _ in log.phases[1:]]
    assert result.total_seconds == pytest.approx(sum(result.stage_seconds.values()))
    assert result.load_seconds > 0
    with av.open(str(result.path)) as container:
        assert container.streams.video[0].frames == 9
        assert container.streams.audio[0].rate == 16000


def test_the_file_says_how_to_make_it_again(ltx2_folder, tmp_path):
    result = render(job(ltx2_folder, seed=5, frame_rate="24000/1001"), output=tmp_path / "a.mp4")
    found = metadata.read(tmp_path / "a.mp4")
    assert found == json.loads(json.dumps(result.metadata))
    assert found["job"]["dtype"] == "fp32"
    assert found["job"]["frame_rate"] == "24000/1001"
    assert found["device"] == "cpu"
    assert set(found["receipt"]) == {
        "video_self",
        "video_text",
        "audio_self",
        "audio_text",
        "audio_to_video",
        "video_to_audio",
        "video_connector",
        "audio_connector",
    }
    render(metadata.read_job(tmp_path / "a.mp4"), output=tmp_path / "b.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_the_seed_and_the_prompt_matter(ltx_folder, tmp_path):
    renderer = Renderer()
    for name, values in {"a": {}, "b": {"seed": 1}, "c": {"prompt": "blue"}, "d": {}}.items():
        renderer.render(job(ltx_folder, **values), output=tmp_path / f"{name}.mp4")
    data = {name: (tmp_path / f"{name}.mp4").read_bytes() for name in "abcd"}
    assert data["a"] == data["d"]
    assert len(set(data.values())) == 3


def test_one_model_serves_many_jobs_and_prompts_come_first(ltx_folder, tmp_path):
    renderer, log = Renderer(), Log()
    prepared = [renderer.check(job(ltx_folder, prompt=text)) for text in ("red", "blue", "red")]
    renderer.prepare(prepared, log)
    assert log.phases == [("load_model", None), ("encode_prompt", 3)]
    for index, each in enumerate(prepared):
        renderer.render(each, output=tmp_path / f"{index}.mp4", progress=log)
    assert [name for name, _ in log.phases[2:]] == ["denoise", "decode", "encode"] * 3


def test_closing_gives_the_model_back_its_processors(ltx_folder, tmp_path):
    renderer = Renderer()
    renderer.prepare([renderer.check(job(ltx_folder))])
    transformer = renderer._ready.loaded.pipe.transformer
    assert all("videoattn" in type(p).__module__ for p in transformer.attn_processors.values())
    renderer.close()
    assert all("diffusers" in type(p).__module__ for p in transformer.attn_processors.values())


STOPS = ["load_model", "encode_prompt", "denoise", ("denoise", 1), "decode", "encode", ("encode", 16)]


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_listener_stops_a_render_that_leaves_nothing(ltx_folder, tmp_path, stop):
    outputs = {
        "output": "new/deep/clip.mp4",
        "poster": "new/p.png",
        "preview": "new/p.gif",
        "timing": "t.jsonl",
    }
    places = {name: tmp_path / place for name, place in outputs.items()}
    with pytest.raises(Stop):
        render(job(ltx_folder), progress=Log(stop), **places)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_render_keeps_the_clip_that_was_there(ltx_folder, tmp_path):
    (tmp_path / "clip.mp4").write_text("earlier")
    with pytest.raises(Stop):
        render(job(ltx_folder), output=tmp_path / "clip.mp4", progress=Log("encode"))
    assert (tmp_path / "clip.mp4").read_text() == "earlier"
    render(job(ltx_folder), output=tmp_path / "clip.mp4")
    assert metadata.read(tmp_path / "clip.mp4")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_after_a_stop_the_renderer_works_on(ltx_folder, tmp_path):
    renderer = Renderer()
    with pytest.raises(Stop):
        renderer.render(job(ltx_folder), output=tmp_path / "a.mp4", progress=Log(("denoise", 1)))
    renderer.render(job(ltx_folder), output=tmp_path / "a.mp4")
    render(job(ltx_folder), output=tmp_path / "b.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_timing_has_a_row_for_every_call(ltx2_folder, tmp_path):
    result = render(distilled(ltx2_folder), output=tmp_path / "clip.mp4", timing=tmp_path / "t.jsonl")
    layers = 2
    kinds = ("video_self", "video_text", "audio_self", "audio_text", "audio_to_video", "video_to_audio")
    counted = Counter((row.stage, row.kind) for row in result.log.rows)
    for stage, steps in (("denoise_half", 8), ("denoise_full", 3)):
        for kind in kinds:
            assert counted.pop((stage, kind)) == layers * steps
        for kind in ("video_connector", "audio_connector"):
            assert counted.pop((stage, kind)) == result.layers[kind]
    assert not counted
    assert {row.clip for row in result.log.rows} == {"clip.mp4"}
    half = [row for row in result.log.rows if (row.stage, row.kind) == ("denoise_half", "video_self")]
    assert [(row.step, row.layer) for row in half] == [
        (step, layer) for step in range(8) for layer in range(2)
    ]
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(lines) > len(result.log.rows)
    assert result.total_seconds is not None


def test_shadow_arms_take_away_the_seconds(ltx_folder, tmp_path):
    result = render(job(ltx_folder), output=tmp_path / "clip.mp4", compare=("sdpa",))
    assert result.stage_seconds is None
    assert result.total_seconds is None
    assert result.report.compare == ("sdpa",)
    render(job(ltx_folder), output=tmp_path / "plain.mp4")
    assert (tmp_path / "plain.mp4").read_bytes() == (tmp_path / "clip.mp4").read_bytes()


def test_a_kernel_that_cannot_run_is_refused_before_loading(ltx_folder, tmp_path):
    log = Log()
    with pytest.raises(RenderError, match="'flash4' cannot serve video_self"):
        render(job(ltx_folder, attention="flash4"), output=tmp_path / "x.mp4", device="cpu", progress=log)
    assert log.phases == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["ltx_folder", "ltx2_folder"])
def test_compiled_blocks_give_the_same_clip(folder, request, tmp_path):
    path = request.getfixturevalue(folder)
    values = {"guidance_scale": 1.0} if folder == "ltx2_folder" else {}
    frames = {}
    for compiled in (False, True):
        torch.compiler.reset()
        render(job(path, compile=compiled, crf=0, **values), output=tmp_path / f"{compiled}.mp4")
        with av.open(str(tmp_path / f"{compiled}.mp4")) as container:
            frames[compiled] = [
                frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)
            ]
    assert max(abs(a - b).max() for a, b in zip(*frames.values(), strict=True)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"dtype": "fp8"}, {"offload": "group"}], ids=str)
def test_what_moves_or_casts_weights_goes_with_compiled_blocks(ltx_folder, values, tmp_path):
    clips = []
    for more in ({}, values, {**values, "compile": True}):
        torch.compiler.reset()
        result = render(job(ltx_folder, crf=0, **more), output=tmp_path / "clip.mp4")
        with av.open(str(result.path)) as container:
            clips.append([frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode()])
    fp32, plain, compiled = clips

    def most(ours, theirs):
        return max(abs(a - b).max() for a, b in zip(ours, theirs, strict=True))

    # A compiler rounds elsewhere, which costs no more than the dtype itself.
    assert most(compiled, plain) <= max(3, most(plain, fp32))


def test_everything_runs_with_the_device_current(ltx_folder, tmp_path, monkeypatch):
    """As CUDA's streams and events need it, on machines of several GPUs."""
    inside, at = [], []

    @contextmanager
    def current(device):
        inside.append(device)
        yield
        inside.pop()

    class Where(Log):
        def phase(self, name, total):
            super().phase(name, total)
            at.append((name, list(inside)))

    monkeypatch.setattr("videoattn.render.run.current", current)
    renderer = Renderer(device="cpu")
    prepared = renderer.check(job(ltx_folder))
    renderer.prepare([prepared], Where())
    renderer.render(prepared, output=tmp_path / "clip.mp4", progress=Where())
    assert {name for name, _ in at} >= {"load_model", "encode_prompt", "denoise", "decode"}
    assert all(where == [torch.device("cpu")] for _, where in at)
    assert devices.current(torch.device("cuda:1")).idx == 1


def test_staged_files_appear_together(tmp_path):
    with StagedFiles() as files:
        for name in ("a/x.txt", "b.txt"):
            files.stage(tmp_path / name).write_text(name)
        assert not (tmp_path / "b.txt").exists()
        files.commit()
    assert (tmp_path / "a" / "x.txt").read_text() == "a/x.txt"
    assert (tmp_path / "b.txt").read_text() == "b.txt"
    assert not list(tmp_path.rglob("*.part"))


def test_a_file_limit_mid_write_is_a_full_disk(ltx_folder, tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 1024, hard))
    try:
        with pytest.raises(RenderError, match=r"cannot write .*clip\.mp4: the disk is full"):
            render(job(ltx_folder, crf=0), output=tmp_path / "clip.mp4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
