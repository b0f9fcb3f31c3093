"""Recipes against the same pipelines called by hand."""

import shutil

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2LatentUpsamplePipeline
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.render.fixtures import SIZE
from videoattn.render import models, recipes
from videoattn.render.checks import check
from videoattn.render.errors import NonFinite, RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.prompts import PromptCache
from videoattn.render.settings import KNOBS, OFF, SIGMAS_FULL, SIGMAS_HALF, forwards_per_step, is_guided

CPU = torch.device("cpu")
TWO_STAGE = {"width": 128, "height": 128, "num_frames": 9}


class Log:
    """What a recipe reported."""

    def __init__(self):
        self.events = []

    @property
    def watch(self):
        return recipes.Watch(
            lambda name, total: self.events.append((name, total)), lambda done: self.events.append(done)
        )


def checked(folder, **values):
    return check(RenderJob.parse({"prompt": "a red ball", "model": str(folder), "dtype": "fp32", **values}))


def run(folder, log=None, **values):
    """Render by the recipe; returns what was made, the loaded model and the batch sizes of its forwards."""
    prepared = checked(folder, **values)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    models.place(loaded)
    return (*render(loaded, prepared, log), loaded, prepared.job)


def render(loaded, prepared, log=None):
    job = prepared.job
    prompts = PromptCache(loaded, lambda text: None)
    prompts.encode(prompts.needed([job]))
    inputs = recipes.Inputs(
        job,
        prompts.get(job.prompt),
        prompts.get(job.negative_prompt) if is_guided(job) else None,
        prepared.image,
    )
    batches = []
    hook = loaded.pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    try:
        return recipes.run(loaded, inputs, (log or Log()).watch), batches
    finally:
        hook.remove()


def test_ltx_equals_the_pipeline_called_by_hand(ltx_folder):
    log = Log()
    values = {"num_inference_steps": 3, "negative_prompt": "blue", "seed": 4}
    made, batches, loaded, _ = run(ltx_folder, log, **values, **SIZE)
    frames = loaded.pipe(
        prompt="a red ball",
        negative_prompt="blue",
        num_inference_steps=3,
        guidance_scale=3.0,
        frame_rate=25,
        generator=torch.Generator().manual_seed(4),
        output_type="pt",
        **SIZE,
    ).frames[0]
    assert torch.equal(made.frames, frames)
    assert made.audio is None
    assert batches == [2, 2, 2]
    assert log.events == [("denoise", 3), 1, 2, 3, ("decode", None)]


@pytest.mark.parametrize("folder", ["ltx2_folder", "ltx20_folder", "ltx25_folder"])
@pytest.mark.parametrize("guided", [False, True])
def test_ltx2_equals_the_pipeline_called_by_hand(folder, guided, request):
    path = request.getfixturevalue(folder)
    values = {} if guided else {"guidance_scale": 1.0}
    made, batches, loaded, job = run(path, num_inference_steps=2, frame_rate="24000/1001", **values, **SIZE)
    output = loaded.pipe(
        prompt="a red ball",
        num_inference_steps=2,
        frame_rate=24000 / 1001,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        use_cross_timestep=folder != "ltx20_folder",
        spatio_temporal_guidance_blocks=list(job.spatio_temporal_guidance_blocks or []) or None,
        **{name: getattr(job, name) for name in KNOBS},
        **SIZE,
    )
    assert torch.equal(made.frames, output.frames[0])
    assert torch.equal(made.audio, output.audio[0])
    assert made.sample_rate == 16000
    assert len(batches) == 2 * forwards_per_step(job)
    assert batches.count(2) == (2 if guided else 0)


def test_distilled_equals_the_two_stages_composed_by_hand(ltx2_folder):
    log = Log()
    made, batches, loaded, _ = run(ltx2_folder, log, recipe="distilled", seed=3, **TWO_STAGE)
    pipe = loaded.pipe
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        pipe.scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )
    generator = torch.Generator().manual_seed(3)
    common = {"prompt": "a red ball", "num_frames": 9, "frame_rate": 24.0, "generator": generator, **OFF}
    latents, audio_latents = pipe(
        width=64, height=64, sigmas=list(SIGMAS_HALF), output_type="latent", return_dict=False, **common
    )
    upsample = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=loaded.upsampler)
    latents = upsample(latents=latents, output_type="latent", return_dict=False)[0]
    assert latents.shape[-2:] == (4, 4)
    frames, audio = pipe(
        width=128,
        height=128,
        sigmas=list(SIGMAS_FULL),
        latents=latents,
        audio_latents=audio_latents,
        noise_scale=SIGMAS_FULL[0],
        output_type="pt",
        return_dict=False,
        **common,
    )
    assert made.frames.shape == (9, 3, 128, 128)
    assert torch.equal(made.frames, frames[0])
    assert torch.equal(made.audio, audio[0])
    # Unguided: 8 + 3 forwards of one sample, where the library's own defaults run 24 + 9.
    assert batches == [1] * 11
    assert [event for event in log.events if isinstance(event, tuple)] == [
        ("denoise_half", 8),
        ("upsample", 1),
        ("denoise_full", 3),
        ("decode", None),
    ]


@pytest.mark.slow
def test_a_scheduler_that_shifts_does_not_bend_the_distilled_sigmas(ltx2_folder):
    prepared = checked(ltx2_folder, recipe="distilled", **TWO_STAGE)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    loaded.pipe.scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift_terminal=0.1, base_shift=0.95, max_shift=2.05, shift=3.0
    )
    made, batches = render(loaded, prepared)
    assert len(batches) == 11
    loaded.pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    assert torch.equal(made.frames, render(loaded, prepared)[0].frames)
    loaded.pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    with pytest.raises(RenderError, match="the scheduler changed the distilled sigmas"):
        render(loaded, prepared)


def test_sound_guidance_can_be_off_while_the_pictures_is_on(ltx2_folder):
    values = {"guidance_scale": 1.0, "num_inference_steps": 2, **SIZE}
    both, *_ = run(ltx2_folder, stg_scale=1.0, audio_stg_scale=1.0, **values)
    picture, batches, *_ = run(ltx2_folder, stg_scale=1.0, **values)
    assert batches == [1, 1, 1, 1]
    # diffusers reads a plain 0 as "like the picture" and would make the two equal.
    assert not torch.equal(both.audio, picture.audio)


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("ltx_folder", {"num_inference_steps": 2, **SIZE}),
        ("ltx2_folder", {"num_inference_steps": 2, "guidance_scale": 1.0, **SIZE}),
        ("ltx2_folder", {"recipe": "distilled", **TWO_STAGE}),
    ],
)
def test_an_image_decides_the_clip(folder, values, request, tmp_path):
    path = request.getfixturevalue(folder)
    made = {}
    for name, colour in (("red", (255, 0, 0)), ("grey", (90, 90, 90))):
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{name}.png")
        made[name] = run(path, image=str(tmp_path / f"{name}.png"), **values)[0].frames
    assert made["red"].shape == (values["num_frames"], 3, values["height"], values["width"])
    assert not torch.allclose(made["red"][0], made["grey"][0], atol=1e-3)


@pytest.mark.slow
def test_the_distilled_recipe_needs_an_upsampler(ltx_folder, ltx2_folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for part in ltx2_folder.iterdir():
        if part.name != "latent_upsampler":
            (bare / part.name).symlink_to(part)
    with pytest.raises(UsageError, match="name one by --upsampler"):
        run(bare, recipe="distilled", **TWO_STAGE)
    made, *_ = run(bare, recipe="distilled", upsampler=str(ltx2_folder / "latent_upsampler"), **TWO_STAGE)
    usual, *_ = run(ltx2_folder, recipe="distilled", **TWO_STAGE)
    assert torch.equal(made.frames, usual.frames)


@pytest.mark.slow
def test_a_revision_holds_for_the_upsampler_too(ltx2_folder, tmp_path, monkeypatch):
    """Two revisions in a hub cache, which differ in nothing but the upsampler."""
    hub = tmp_path / "models--someone--ltx"
    (hub / "refs").mkdir(parents=True)
    weights = "latent_upsampler/diffusion_pytorch_model.safetensors"
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (hub / "refs" / name).write_text(commit)
        shutil.copytree(ltx2_folder, hub / "snapshots" / commit)
    ours = load_file(ltx2_folder / weights)
    theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    save_file(theirs, hub / "snapshots" / ("a" * 40) / weights, metadata={"format": "pt"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def upsampler(**values):
        prepared = checked("someone/ltx", recipe="distilled", **TWO_STAGE, **values)
        loaded = models.load(prepared.source, prepared.info, prepared.job, CPU, local_files_only=True)
        return loaded.upsampler.state_dict()

    for values, expected in (({}, theirs), ({"revision": "v2"}, ours)):
        found = upsampler(**values)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def poison(module, at_call=1, value=float("nan")):
    """Make a module return a non-finite element from its n-th call on."""
    calls = {"count": 0}

    def hook(_module, _inputs, output):
        calls["count"] += 1
        if calls["count"] < at_call:
            return output
        first = output[0] if isinstance(output, tuple) else output
        first = first.clone()
        first.view(-1)[-1] = value
        return (first, *output[1:]) if isinstance(output, tuple) else first

    return module.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("part", "at_call", "value", "message"),
    [
        ("transformer", 2, np.nan, "NaN in stage denoise_half, step 2 of 8"),
        ("transformer", 9, np.inf, "in stage denoise_full, step 1 of 3"),
        ("vae.decoder", 1, np.inf, "Inf in stage decode \\(vae\\)"),
        ("vocoder", 1, np.nan, "NaN in stage decode \\(vocoder\\)"),
        ("upsampler", 1, np.nan, "NaN in stage upsample"),
    ],
)
def test_nan_and_inf_are_named_by_stage(ltx2_folder, part, at_call, value, message):
    prepared = checked(ltx2_folder, recipe="distilled", **TWO_STAGE)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    owner, _, inner = part.partition(".")
    module = loaded.upsampler if owner == "upsampler" else getattr(loaded.pipe, owner)
    module = getattr(module, inner) if inner else module
    poison(module, at_call, value)
    with pytest.raises(NonFinite, match=message):
        render(loaded, prepared)


def test_nan_in_the_text_encoder_is_named(ltx_folder):
    prepared = checked(ltx_folder, num_inference_steps=1, **SIZE)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    loaded.pipe.text_encoder.encoder.final_layer_norm.weight.data[0] = float("nan")
    with pytest.raises(NonFinite, match="NaN in stage encode_prompt"):
        render(loaded, prepared)


def test_two_prompts_encoded_together_equal_each_alone(ltx2_folder):
    prepared = checked(ltx2_folder, **SIZE)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    together, alone = PromptCache(loaded, print), PromptCache(loaded, print)
    together.encode(["a red ball", "blue", ""])
    alone.encode(["blue"])
    assert torch.equal(together.get("blue").embeds, alone.get("blue").embeds)
    assert together.needed([prepared.job]) == []


def test_a_prompt_longer_than_the_model_reads_is_announced(ltx_folder):
    said = []
    prepared = checked(ltx_folder, prompt="a red ball " * 80, **SIZE)
    loaded = models.load(prepared.source, prepared.info, prepared.job, CPU)
    PromptCache(loaded, said.append).encode([prepared.job.prompt])
    assert said == ["the prompt has 241 tokens, the model reads the first 128"]
