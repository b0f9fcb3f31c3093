"""The page's parts without a server: likeness, uploads, choices, bounds."""

from fractions import Fraction

import gradio as gr
import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image

from tests.pipelines import ltx2_pipeline
from videoattn.jobs import JobState, NewJob, Store
from videoattn.render.clip import Clip, write_mp4
from videoattn.render.errors import UsageError
from videoattn.web import actions as actions_module
from videoattn.web import likeness, queue, text
from videoattn.web.actions import Actions
from videoattn.web.choices import Models
from videoattn.web.generate import Form


def write(path, frames):
    write_mp4(path, Clip(frames, Fraction(24)), place=path, crf=0, metadata={})
    return path


@pytest.fixture
def noise():
    generator = np.random.default_rng(0)
    small = generator.integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    return small.repeat(8, axis=1).repeat(8, axis=2)


def test_likeness_of_a_clip_with_itself(tmp_path, noise):
    a = write(tmp_path / "a.mp4", noise)
    found = likeness.measure(a, a)
    assert found.psnr is None
    assert found.ssim == pytest.approx(1)
    assert (found.compared, found.frames) == (48, 60)


def test_likeness_names_the_worst_frame(tmp_path, noise):
    other = noise.copy()
    other[59] = 255 - other[59]
    found = likeness.measure(write(tmp_path / "a.mp4", noise), write(tmp_path / "b.mp4", other))
    assert found.worst_frame == 59
    assert found.worst_psnr < found.psnr
    assert found.ssim < 1


@pytest.mark.slow
def test_psnr_is_that_of_the_mean_squared_error_of_all_frames(tmp_path, noise):
    other = noise.copy()
    other[:30] //= 2
    paths = write(tmp_path / "a.mp4", noise[20:40]), write(tmp_path / "b.mp4", other[20:40])
    a, b = (np.stack([np.asarray(frame, float) for frame in imageio.imiter(path)]) for path in paths)
    expected = 10 * np.log10(255**2 / np.mean((a - b) ** 2))
    assert likeness.measure(*paths).psnr == pytest.approx(expected, abs=0.01)


def test_clips_of_other_lengths_have_no_likeness(tmp_path, noise):
    with pytest.raises(UsageError, match="60 frames of 64x64, B 59"):
        likeness.measure(write(tmp_path / "a.mp4", noise), write(tmp_path / "b.mp4", noise[:59]))


def test_presets_are_legal_and_folders_are_offered(tmp_path):
    ltx2_pipeline().save_pretrained(tmp_path / "models" / "tiny")
    models = Models((tmp_path / "models",), local_files_only=True)
    assert ("tiny", str(tmp_path / "models" / "tiny")) in models.offered()
    presets = models.presets(str(tmp_path / "models" / "tiny"))
    grid = models.info(str(tmp_path / "models" / "tiny")).grid
    for _, size in presets.sizes:
        for _, frames in presets.lengths:
            grid.check(*map(int, size.split("x")), frames)
    assert presets.recipes == ("one-stage", "distilled")
    assert "stg_scale" in presets.knobs


def test_a_link_does_not_lead_out_of_the_model_folders(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "models" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="choose demo"):
        Models((tmp_path / "models",)).info(str(tmp_path / "models" / "link"))


@pytest.fixture
def actions(tmp_path):
    with Store(tmp_path / "clips") as store:
        yield Actions(store, [], Models())


def test_the_queue_has_an_end(actions, monkeypatch):
    monkeypatch.setattr(actions_module, "MAX_PENDING", 3)
    actions.submit({"prompt": "a red star"}, clips=2)
    with pytest.raises(UsageError, match="the queue is full"):
        actions.submit({"prompt": "a red star"}, clips=2)
    assert actions.store.counts()[JobState.PENDING] == 2


def test_prompts_are_text_on_the_page(actions):
    actions.submit({"prompt": "<img src=x onerror=alert(1)> a star"})
    shown = queue.show(actions, {})["pending"]
    assert "<img" not in shown
    assert "&lt;img" in shown


def test_pages_beyond_the_end_show_the_last_one(actions):
    actions.store.add([NewJob(actions_payload(actions, seed)) for seed in range(120)])
    assert "Page 3 of 3" in queue.show(actions, {"page": 99})["pending"]


def actions_payload(actions, seed):
    prepared, _ = actions.prepare({"prompt": "a red star", "seed": seed})
    from videoattn.jobs.rendering import new_job

    return new_job(prepared).payload


def test_moves(actions):
    ids = [actions.submit({"prompt": "a red star", "seed": seed}).ids[0] for seed in range(4)]
    order = lambda: [job.id for job in actions.store.queue()]  # noqa: E731
    actions.move(ids[3], "first")
    assert order() == [ids[3], *ids[:3]]
    actions.move(ids[0], "up")
    assert order() == [ids[0], ids[3], ids[1], ids[2]]
    actions.move(ids[3], "down")
    assert order() == [ids[0], ids[1], ids[3], ids[2]]
    actions.move(ids[0], "up")
    assert order() == [ids[0], ids[1], ids[3], ids[2]]
    actions.move(ids[2], "before", ids[0])
    assert order() == [ids[2], ids[0], ids[1], ids[3]]
    actions.move(ids[2], "after", ids[3])
    assert order() == [ids[0], ids[1], ids[3], ids[2]]
    with pytest.raises(UsageError):
        actions.move(ids[2], "sideways")


def test_settings_forget_an_image_that_is_gone(actions, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    kept = actions.images.keep(tmp_path / "a.png")
    (job,) = actions.submit({"prompt": "a red star", "image": kept.name}).ids
    assert actions.settings(job)["image"] == str(kept)
    kept.unlink()
    assert actions.settings(job)["image"] is None


def test_a_comparison_is_two_jobs_that_differ_in_the_kernel_alone(actions):
    a, b = (
        actions.store.get(each) for each in actions.compare({"prompt": "a red star"}, ("sdpa", "auto")).ids
    )
    assert {**a.payload["job"], "attention": ""} == {**b.payload["job"], "attention": ""}
    assert (a.payload["job"]["attention"], b.payload["job"]["attention"]) == ("sdpa", "auto")
    assert a.payload["timing"]
    assert a.origin["comparison"] == b.origin["comparison"]
    with pytest.raises(UsageError, match="two different kernels"):
        actions.compare({"prompt": "a red star"}, ("sdpa", "sdpa"))


def test_messages_speak_the_language_of_the_form():
    said = text.sentence("--num-inference-steps 0: too small, see --num-inference-steps")
    assert said == "Num inference steps 0: too small, see num inference steps."


def test_what_a_clip_carries_goes_along_only_where_it_has_a_use(actions, tmp_path):
    """The form has no fields for it, so that nobody could take it out."""
    with gr.Blocks():
        form = Form(actions)
    carried = {"upsampler": "someone/upsampler", "components": "/nowhere", "revision": "v2"}
    values = {each: getattr(each, "value", None) for each in form.inputs}

    def kept(model, recipe):
        changed = {form.model: model, form.recipe: recipe, form.carried: carried}
        settings, _, _ = form.settings(*{**values, **changed}.values())
        return {name for name in carried if settings.get(name)}

    assert kept(str(tmp_path), "one-stage") == set()
    assert kept(str(tmp_path), "distilled") == {"upsampler"}
    assert kept("someone/ltx", "distilled") == {"upsampler", "revision"}
    assert kept("ltx.safetensors", "one-stage") == {"components"}
