import pytest

from videoattn.render.errors import UsageError
from videoattn.render.job import RenderJob
from videoattn.render.settings import KNOBS, OFF, forwards_per_step, is_guided, resolve, work
from videoattn.render.sizes import Grid
from videoattn.render.sources import ModelInfo

LTX = ModelInfo("ltx", "0.9", Grid(32, 8), False, False, 28)
LTX_DECODING = ModelInfo("ltx", "0.9", Grid(32, 8), False, True, 48)
LTX20 = ModelInfo("ltx2", "2.0", Grid(32, 8), True, False, 48)
LTX23 = ModelInfo("ltx2", "2.3", Grid(32, 8), True, False, 48)


def knobs(job: RenderJob) -> dict[str, float]:
    return {name: getattr(job, name) for name in KNOBS}


def test_every_field_that_a_pipeline_takes_is_explicit():
    optional = {"revision", "components", "upsampler", "image", "spatio_temporal_guidance_blocks"}
    for info in (LTX, LTX20, LTX23):
        job = resolve(RenderJob(prompt="x"), info)
        left = {name for name, value in job if value is None and name not in optional}
        assert not left


def test_the_defaults_are_the_authors_settings():
    job = resolve(RenderJob(prompt="x"), LTX23)
    assert list(knobs(job).values()) == [3.0, 7.0, 1.0, 1.0, 3.0, 3.0, 0.7, 0.7]
    assert job.spatio_temporal_guidance_blocks == (28,)
    assert forwards_per_step(job) == 3
    assert work(job) == "30 steps of 4 samples (guidance, STG, isolation)"
    assert forwards_per_step(resolve(RenderJob(prompt="x"), LTX20)) == 1


def test_guidance_1_turns_everything_off():
    job = resolve(RenderJob(prompt="x", guidance_scale=1.0), LTX23)
    assert knobs(job) == OFF
    assert job.spatio_temporal_guidance_blocks is None
    assert not is_guided(job)
    assert work(job) == "30 steps of 1 sample"


def test_what_was_asked_for_stays_on():
    job = resolve(RenderJob(prompt="x", guidance_scale=1.0, stg_scale=0.5, audio_guidance_scale=2.0), LTX23)
    assert knobs(job) == OFF | {"stg_scale": 0.5, "audio_guidance_scale": 2.0}
    assert job.spatio_temporal_guidance_blocks == (28,)
    assert is_guided(job)


def test_the_distilled_recipe_is_unguided_and_has_its_own_steps():
    job = resolve(RenderJob(prompt="x", recipe="distilled"), LTX23)
    assert knobs(job) == OFF
    assert job.num_inference_steps == 11
    with pytest.raises(UsageError, match="its own steps"):
        resolve(RenderJob(prompt="x", recipe="distilled", num_inference_steps=20), LTX23)
    with pytest.raises(UsageError, match="height 544: use 512 or 576"):
        resolve(RenderJob(prompt="x", recipe="distilled", height=544), LTX23)


def test_a_resolved_job_resolves_to_itself():
    for info, job in (
        (LTX, RenderJob(prompt="x")),
        (LTX23, RenderJob(prompt="x")),
        (LTX23, RenderJob(prompt="x", recipe="distilled", seed=5)),
        (LTX23, RenderJob(prompt="x", guidance_scale=1)),
    ):
        resolved = resolve(job, info)
        assert resolve(resolved, info) == resolved
        assert resolve(RenderJob.model_validate_json(resolved.model_dump_json()), info) == resolved


def test_a_models_own_defaults_come_before_the_familys_and_after_what_is_asked():
    defaults = {"prompt": "a ball", "width": 128, "height": 128, "num_frames": 33, "guidance_scale": 2.0}
    job = resolve(RenderJob(), LTX, defaults=defaults)
    assert (job.prompt, job.width, job.num_frames, job.guidance_scale) == ("a ball", 128, 33, 2.0)
    job = resolve(RenderJob(prompt="a star", width=256), LTX, defaults=defaults)
    assert (job.prompt, job.width, job.height) == ("a star", 256, 128)


def test_vaes_that_denoise_get_the_authors_decode_settings():
    assert resolve(RenderJob(prompt="x"), LTX).decode_timestep == 0
    job = resolve(RenderJob(prompt="x"), LTX_DECODING)
    assert (job.decode_timestep, job.decode_noise_scale) == (0.05, 0.025)


def test_tiling_follows_offload_unless_asked():
    assert resolve(RenderJob(prompt="x"), LTX).vae_tiling is False
    assert resolve(RenderJob(prompt="x", offload="group"), LTX).vae_tiling is True
    assert resolve(RenderJob(prompt="x", offload="group", vae_tiling=False), LTX).vae_tiling is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": ""}, "no prompt"),
        ({"recipe": "distilled"}, "the distilled recipe is for LTX-2.x"),
        ({"stg_scale": 1.0}, "--stg-scale is a setting of LTX-2.x"),
        ({"audio_guidance_scale": 3.0}, "--audio-guidance-scale is a setting of LTX-2.x"),
        ({"width": 700}, "width 700: use 672 or 704"),
        ({"num_frames": 160}, "num_frames 160: use 153 or 161"),
        ({"num_frames": 4}, "num_frames 4: use 1 or 9"),
    ],
)
def test_what_ltx_video_cannot_do(values, message):
    with pytest.raises(UsageError, match=message):
        resolve(RenderJob.parse({"prompt": "x", **values}), LTX)


def test_blocks_that_do_not_exist_are_refused():
    with pytest.raises(UsageError, match="blocks 0 to 47"):
        resolve(RenderJob(prompt="x", spatio_temporal_guidance_blocks=(48,)), LTX23)
