"""Recipes: one stage, or LTX-2.x's distilled two stages with a latent upsample between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from diffusers.pipelines.ltx.pipeline_ltx_image2video import LTXImageToVideoPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_image2video import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_latent_upsample import LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2.utils import DEFAULT_IMAGE_CRF, LTX2_5_IMAGE_CRF
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from PIL import Image

from videoattn.render.errors import RenderError
from videoattn.render.guard import finite_outputs, require_finite
from videoattn.render.job import RenderJob
from videoattn.render.models import Loaded
from videoattn.render.prompts import Embeddings
from videoattn.render.settings import KNOBS, SIGMAS_FULL, SIGMAS_HALF


class ExplicitFloat(float):
    """A number that is true even when it is 0.

    LTX2Pipeline reads `audio_x = audio_x or x`, so a plain 0 for sound would become the picture's value.
    """

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one clip is made from; embeddings on the device, `negative` None in unguided runs.

    Without `decode` the run ends with the latents, on ranks that take part in a clip another one writes.
    """

    job: RenderJob
    prompt: Embeddings
    negative: Embeddings | None
    image: Image.Image | None
    decode: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """Where a recipe reports: `stage(name, steps)` as a stage begins, `step(done)` after each step."""

    stage: Callable[[str, int | None], None]
    step: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Made:
    """A decoded clip: frames `(frames, 3, height, width)` in [0, 1], audio `(channels, samples)` or None.

    Latents in their place where the inputs said not to decode.
    """

    frames: torch.Tensor
    audio: torch.Tensor | None
    sample_rate: int | None


def run(loaded: Loaded, inputs: Inputs, watch: Watch) -> Made:
    """Render one clip by the job's recipe; raises NonFinite where NaN or Inf appears."""
    generator = torch.Generator("cpu").manual_seed(inputs.job.seed)
    try:
        if loaded.info.family == "ltx":
            return _ltx(loaded, inputs, watch, generator)
        if inputs.job.recipe == "distilled":
            return _distilled(loaded, inputs, watch, generator)
        return _ltx2(loaded, inputs, watch, generator)
    finally:
        if loaded.offload == "model":
            loaded.pipe.maybe_free_model_hooks()


def _ltx(loaded: Loaded, inputs: Inputs, watch: Watch, generator: torch.Generator) -> Made:
    job = inputs.job
    arguments = _common(loaded, inputs, generator)
    arguments |= {
        "num_inference_steps": job.num_inference_steps,
        "guidance_scale": job.guidance_scale,
        "guidance_rescale": job.guidance_rescale,
    }
    cls = LTXPipeline
    if inputs.image is not None:
        cls = LTXImageToVideoPipeline
        arguments["image"] = inputs.image
    pipe = cls(**_components(loaded, cls))
    steps = _Steps("denoise", job.num_inference_steps or 0, watch, decodes=True)
    frames = _call(loaded, pipe, arguments, steps)[0]
    return Made(frames[0], None, None)


def _ltx2(loaded: Loaded, inputs: Inputs, watch: Watch, generator: torch.Generator) -> Made:
    job = inputs.job
    arguments = _common(loaded, inputs, generator) | _knobs(loaded, job)
    arguments["num_inference_steps"] = job.num_inference_steps
    pipe = _ltx2_pipe(loaded, inputs, arguments, loaded.pipe.scheduler)
    steps = _Steps("denoise", job.num_inference_steps or 0, watch, decodes=True)
    return _with_sound(loaded, _call(loaded, pipe, arguments, steps))


def _distilled(loaded: Loaded, inputs: Inputs, watch: Watch, generator: torch.Generator) -> Made:
    job = inputs.job
    assert job.width is not None
    assert job.height is not None
    # A checkpoint's own shifting would silently bend the distilled sigmas.
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        loaded.pipe.scheduler.config, use_dynamic_shifting=False, shift_terminal=None, shift=1.0
    )
    half = _common(loaded, inputs, generator) | _knobs(loaded, job)
    half |= {
        "width": job.width // 2,
        "height": job.height // 2,
        "num_inference_steps": len(SIGMAS_HALF),
        "sigmas": list(SIGMAS_HALF),
        "output_type": "latent",
    }
    pipe = _ltx2_pipe(loaded, inputs, half, scheduler)
    steps = _Steps("denoise_half", len(SIGMAS_HALF), watch, sigmas=SIGMAS_HALF)
    latents, audio_latents = _call(loaded, pipe, half, steps)

    watch.stage("upsample", 1)
    upsample = LTX2LatentUpsamplePipeline(vae=loaded.pipe.vae, latent_upsampler=loaded.upsampler)
    latents = upsample(
        latents=latents,
        width=job.width // 2,
        height=job.height // 2,
        num_frames=job.num_frames or 0,
        latents_normalized=False,
        output_type="latent",
        return_dict=False,
    )[0]
    require_finite(latents, "upsample")
    watch.step(1)

    full = _common(loaded, inputs, generator) | _knobs(loaded, job)
    full |= {
        "latents": latents.to(torch.float32),
        "audio_latents": audio_latents.to(torch.float32),
        "num_inference_steps": len(SIGMAS_FULL),
        "sigmas": list(SIGMAS_FULL),
        "noise_scale": SIGMAS_FULL[0],
    }
    pipe = _ltx2_pipe(loaded, inputs, full, scheduler)
    steps = _Steps("denoise_full", len(SIGMAS_FULL), watch, sigmas=SIGMAS_FULL, decodes=True)
    return _with_sound(loaded, _call(loaded, pipe, full, steps))


def _common(loaded: Loaded, inputs: Inputs, generator: torch.Generator) -> dict[str, Any]:
    job = inputs.job
    assert job.frame_rate is not None
    negative = inputs.negative
    return {
        "prompt_embeds": inputs.prompt.embeds,
        "prompt_attention_mask": inputs.prompt.mask,
        "negative_prompt_embeds": None if negative is None else negative.embeds,
        "negative_prompt_attention_mask": None if negative is None else negative.mask,
        "width": job.width,
        "height": job.height,
        "num_frames": job.num_frames,
        "frame_rate": float(job.frame_rate),
        "decode_timestep": job.decode_timestep,
        "decode_noise_scale": job.decode_noise_scale,
        "generator": generator,
        "output_type": "pt" if inputs.decode else "latent",
        "return_dict": False,
    }


def _knobs(loaded: Loaded, job: RenderJob) -> dict[str, Any]:
    """Every guidance setting, none left to the library's defaults, which changed three times."""
    knobs: dict[str, Any] = {name: ExplicitFloat(getattr(job, name)) for name in KNOBS}
    blocks = job.spatio_temporal_guidance_blocks
    knobs["spatio_temporal_guidance_blocks"] = None if blocks is None else list(blocks)
    knobs["use_cross_timestep"] = loaded.info.generation != "2.0"
    return knobs


def _ltx2_pipe(loaded: Loaded, inputs: Inputs, arguments: dict[str, Any], scheduler: Any) -> Any:
    cls = LTX2Pipeline if inputs.image is None else LTX2ImageToVideoPipeline
    if inputs.image is not None:
        arguments["image"] = inputs.image
        arguments["image_crf"] = LTX2_5_IMAGE_CRF if loaded.info.generation == "2.5" else DEFAULT_IMAGE_CRF
    return cls(**{**_components(loaded, cls), "scheduler": scheduler})


def _components(loaded: Loaded, cls: Any) -> dict[str, Any]:
    wanted, _ = cls._get_signature_keys(cls)
    parts = {name: part for name, part in loaded.pipe.components.items() if name in wanted}
    if loaded.resident:
        # It waits on the CPU, and must not make the pipeline compute there.
        parts["text_encoder"] = None
    return parts


def _call(loaded: Loaded, pipe: Any, arguments: dict[str, Any], steps: _Steps) -> tuple[Any, ...]:
    pipe.set_progress_bar_config(disable=True)
    steps.begin()
    parts = {"vae": loaded.pipe.vae.decoder}
    if loaded.info.sound:
        parts["vocoder"] = loaded.pipe.vocoder
    with finite_outputs(parts, "decode"):
        return pipe(**arguments, callback_on_step_end=steps)


def _with_sound(loaded: Loaded, output: tuple[Any, ...]) -> Made:
    frames, audio = output
    if not loaded.info.sound:
        return Made(frames[0], None, None)
    return Made(frames[0], audio[0], int(loaded.pipe.vocoder.config.output_sampling_rate))


class _Steps:
    """The callback of one denoising stage: checks the latents, counts, and announces the decode."""

    def __init__(
        self,
        stage: str,
        total: int,
        watch: Watch,
        *,
        sigmas: tuple[float, ...] | None = None,
        decodes: bool = False,
    ) -> None:
        self._stage, self._total, self._watch = stage, total, watch
        self._sigmas, self._decodes = sigmas, decodes

    def begin(self) -> None:
        self._watch.stage(self._stage, self._total)

    def __call__(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if self._sigmas is not None and index == 0:
            used = pipe.scheduler.sigmas[:-1].cpu()
            if not torch.allclose(used, torch.tensor(self._sigmas), atol=1e-6):
                raise RenderError(f"the scheduler changed the distilled sigmas to {used.tolist()}")
        require_finite(tensors["latents"], f"{self._stage}, step {index + 1} of {self._total}")
        self._watch.step(index + 1)
        if self._decodes and index + 1 == self._total:
            self._watch.stage("decode", None)
        return {}
