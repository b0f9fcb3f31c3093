"""The worker's render function with a tiny LTX-Video model: files, hash, progress, cancellation, memory."""

import json

import pytest
import torch

from tests.render.fixtures import ltx_folder  # noqa: F401
from videoattn.jobs import Context, Job, JobCancelled, JobState, PermanentError
from videoattn.jobs.context import LoadedModels
from videoattn.jobs.rendering import content_hash, identify, new_job, render_job
from videoattn.render import models
from videoattn.render.checks import check
from videoattn.render.job import RenderJob
from videoattn.render.run import Renderer


@pytest.fixture
def settings(ltx_folder):  # noqa: F811
    return {
        "prompt": "a red ball",
        "model": str(ltx_folder),
        "width": 64,
        "height": 64,
        "num_frames": 9,
        "num_inference_steps": 2,
    }


def stored(new, number=1, **payload):
    return Job(
        id=number,
        name="shot",
        state=JobState.RUNNING,
        hash=new.hash,
        payload=json.loads(json.dumps({**new.payload, **payload})),
        origin=None,
        position=0,
        attempt=1,
        failures=0,
        max_attempts=1,
        cancel_requested=False,
        created=0.0,
        started=0.0,
        finished=None,
        worker="cpu",
        error=None,
    )


class Setup:
    def __init__(self, folder):
        self.folder = folder
        self.reports = []
        self.models = LoadedModels()
        self.cancel_at = None

    def context(self, upcoming=()):
        work = self.folder / str(len(list(self.folder.iterdir())))
        work.mkdir()
        return Context(
            work=work,
            device="cpu",
            attempt=1,
            options={},
            upcoming=upcoming,
            models=self.models,
            is_cancelled=lambda: self.cancel_at is not None and len(self.reports) >= self.cancel_at,
            report=self.reports.append,
        )


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)


def test_a_render_writes_clip_poster_log_and_report(setup, settings):
    new = new_job(check(RenderJob(**settings, seed=4)), timing=True)
    context = setup.context()
    result = render_job(stored(new), context)
    assert {role: (context.work / name).is_file() for role, name in result.files.items()} == {
        "clip": True,
        "poster": True,
        "timing": True,
    }
    report = json.loads(json.dumps(result.report, allow_nan=False))
    assert report["job"]["seed"] == 4
    assert report["receipt"]["video_self"]["kernel"] == "sdpa"
    assert report["timing"]["total"]["calls"] == 2 * 2 * 2
    assert set(report["stage_seconds"]) >= {"denoise", "decode", "encode"}
    phases = list(dict.fromkeys(each.phase for each in setup.reports))
    assert phases == ["load_model", "encode_prompt", "denoise", "decode", "encode"]


def test_a_clip_is_identified_as_the_job_it_was_rendered_for(setup, settings):
    new = new_job(check(RenderJob(**settings, seed=4)))
    context = setup.context()
    render_job(stored(new), context)
    found = identify(context.work / "clip.mp4")
    assert found.hash == new.hash
    assert found.payload["job"] == new.payload["job"]
    (context.work / "other.mp4").write_bytes(b"no clip")
    assert identify(context.work / "other.mp4") is None


def test_the_hash_is_of_what_determines_the_clip(settings):
    job = check(RenderJob(**settings, seed=4)).job.model_dump(mode="json")
    same = {**job, "image": "elsewhere.png"}
    assert content_hash(job, None) == content_hash(same, None)
    assert content_hash(job, None) != content_hash(job, "0" * 64)
    assert content_hash(job, None) != content_hash({**job, "seed": 5}, None)


def test_prompts_of_upcoming_jobs_are_encoded_with_the_first(setup, settings):
    jobs = [
        stored(new_job(check(RenderJob(**{**settings, "prompt": prompt}))), number)
        for number, prompt in enumerate(["one", "two", "three"])
    ]
    render_job(jobs[0], setup.context(jobs[1:]))
    encoded = [each for each in setup.reports if each.phase == "encode_prompt"]
    # Guided by default: three prompts and the empty negative one.
    assert (encoded[-1].step, encoded[-1].of) == (4, 4)
    setup.reports.clear()
    for job in jobs[1:]:
        render_job(job, setup.context())
    assert "load_model" not in {each.phase for each in setup.reports}
    assert "encode_prompt" not in {each.phase for each in setup.reports}


def test_an_upcoming_job_that_cannot_work_does_not_disturb(setup, settings):
    good = stored(new_job(check(RenderJob(**settings))))
    bad = stored(
        new_job(check(RenderJob(**settings))), 2, job={**good.payload["job"], "model": "gone forever"}
    )
    render_job(good, setup.context([bad]))
    with pytest.raises(PermanentError, match="unknown model 'gone forever'"):
        render_job(bad, setup.context())


def test_cancellation_stops_within_a_step_and_the_renderer_goes_on(setup, settings):
    new = new_job(check(RenderJob(**{**settings, "num_inference_steps": 50})))
    context = setup.context()
    render_job(stored(new_job(check(RenderJob(**settings)))), setup.context())
    setup.reports.clear()
    setup.cancel_at = 3
    with pytest.raises(JobCancelled):
        render_job(stored(new), context)
    assert len(setup.reports) == 3
    assert list(context.work.iterdir()) == []
    setup.cancel_at = None
    render_job(stored(new_job(check(RenderJob(**settings)))), setup.context())


@pytest.mark.parametrize("allowed", [False, True])
def test_out_of_memory_goes_down_the_offload_levels_only_if_allowed(setup, settings, allowed, monkeypatch):
    """The allocator's error is raised by hand where a GPU would raise it: this machine has no GPU to fill."""
    denoise, load = Renderer._run, models.load
    tried = []

    def run(self, ready, prepared, clock):
        tried.append(prepared.job.offload)
        if prepared.job.offload == "none":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return denoise(self, ready, prepared, clock)

    def load_on_the_cpu(source, info, job, *values, **options):
        return load(source, info, job.model_copy(update={"offload": "none"}), *values, **options)

    monkeypatch.setattr(Renderer, "_run", run)
    # Offload hooks need a GPU; what is tested here is who decides, and what is recorded.
    monkeypatch.setattr(models, "load", load_on_the_cpu)
    new = new_job(check(RenderJob(**settings)), allow_offload=allowed)
    if not allowed:
        with pytest.raises(RuntimeError, match="out of GPU memory"):
            render_job(stored(new), setup.context())
        assert tried == ["none"]
        return
    result = render_job(stored(new), setup.context())
    assert tried == ["none", "model"]
    assert result.report["job"]["offload"] == "model"
    assert "so offload model was used" in result.report["warnings"][0]
    result = render_job(stored(new), setup.context())
    assert tried == ["none", "model", "model"]
    assert "rendered with offload model" in result.report["warnings"][0]
