"""A job with everything the model decides filled in, and how much work its guidance costs."""

from __future__ import annotations

from typing import Any

from videoattn.render.errors import UsageError
from videoattn.render.job import RenderJob
from videoattn.render.sources import ModelInfo

KNOBS = (
    "guidance_scale",
    "audio_guidance_scale",
    "stg_scale",
    "audio_stg_scale",
    "modality_scale",
    "audio_modality_scale",
    "guidance_rescale",
    "audio_guidance_rescale",
)
OFF: dict[str, float] = dict(zip(KNOBS, (1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0), strict=True))
# The model authors' settings, as diffusers 0.42 carries them; LTX-2.0 was released with plain guidance.
GUIDED: dict[str, dict[str, float]] = {
    "0.9": {**OFF, "guidance_scale": 3.0},
    "2.0": {**OFF, "guidance_scale": 4.0, "audio_guidance_scale": 4.0},
    "2.3": dict(zip(KNOBS, (3.0, 7.0, 1.0, 1.0, 3.0, 3.0, 0.7, 0.7), strict=True)),
}
GUIDED["2.5"] = GUIDED["2.3"]
STG_BLOCK = 28
SIZES: dict[str, dict[str, Any]] = {
    "ltx": {"width": 704, "height": 512, "num_frames": 161, "frame_rate": 25, "num_inference_steps": 50},
    "ltx2": {"width": 768, "height": 512, "num_frames": 121, "frame_rate": 24, "num_inference_steps": 30},
}
# Lightricks' distilled two-stage schedule for LTX-2.x, without the final 0.
SIGMAS_HALF = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
SIGMAS_FULL = (0.909375, 0.725, 0.421875)
# The authors' values for VAEs that denoise while they decode.
DECODE_TIMESTEP, DECODE_NOISE_SCALE = 0.05, 0.025


def resolve(job: RenderJob, info: ModelInfo, *, defaults: dict[str, Any] | None = None) -> RenderJob:
    """The job with every field explicit but `dtype`, which the device decides.

    `defaults` are a model's own values and come before the family's. Raises UsageError for sizes that the
    model cannot make and for settings that it does not have.
    """
    _refuse_foreign(job, info)
    values: dict[str, Any] = dict(SIZES[info.family])
    values |= {"decode_timestep": 0.0, "decode_noise_scale": 0.0}
    if info.timestep_conditioned:
        values |= {"decode_timestep": DECODE_TIMESTEP, "decode_noise_scale": DECODE_NOISE_SCALE}
    values |= {name: value for name, value in (defaults or {}).items() if name in RenderJob.model_fields}
    values |= {"vae_tiling": job.offload != "none"}
    asked = {name: value for name, value in job.model_dump().items() if value is not None}
    given = {
        name: value for name, value in asked.items() if name in job.model_fields_set or name not in values
    }
    merged = values | given
    merged |= _guidance(job, info, merged)
    if job.recipe == "distilled":
        merged["num_inference_steps"] = len(SIGMAS_HALF) + len(SIGMAS_FULL)
    complete = RenderJob.parse(merged)
    if not complete.prompt:
        raise UsageError("there is no prompt: say what the clip shows")
    assert complete.width is not None
    assert complete.height is not None
    assert complete.num_frames is not None
    grid = info.grid.halved_first() if complete.recipe == "distilled" else info.grid
    grid.check(complete.width, complete.height, complete.num_frames)
    return complete


def _refuse_foreign(job: RenderJob, info: ModelInfo) -> None:
    if info.family == "ltx":
        if job.recipe == "distilled":
            raise UsageError(
                f"the distilled recipe is for LTX-2.x, this is {info.name}: use --recipe one-stage"
            )
        for name in (*KNOBS[1:6], "audio_guidance_rescale", "spatio_temporal_guidance_blocks"):
            if getattr(job, name) not in (None, OFF.get(name)):
                raise UsageError(f"--{name.replace('_', '-')} is a setting of LTX-2.x, this is {info.name}")
    if info.generation == "2.0" and ((job.stg_scale or 0) > 0 or (job.audio_stg_scale or 0) > 0):
        raise UsageError(
            "--stg-scale: this transformer has no perturbed attention (LTX-2.3 has), leave it out"
        )
    if job.recipe == "distilled" and job.num_inference_steps not in (
        None,
        len(SIGMAS_HALF) + len(SIGMAS_FULL),
    ):
        raise UsageError(
            "the distilled recipe has its own steps (8 at half size, 3 at full size): leave "
            "--num-inference-steps out"
        )
    blocks = job.spatio_temporal_guidance_blocks or ()
    if any(not 0 <= block < info.layers for block in blocks):
        raise UsageError(
            f"--spatio-temporal-guidance-blocks {list(blocks)}: the model has blocks 0 to {info.layers - 1}"
        )


def _guidance(job: RenderJob, info: ModelInfo, merged: dict[str, Any]) -> dict[str, Any]:
    """All eight knobs and the perturbed blocks, explicit.

    An asked `guidance_scale` of at most 1, and the distilled recipe, turn off whatever was not asked for.
    """
    base = merged.get("guidance_scale")
    off = job.recipe == "distilled" or (base is not None and base <= 1)
    knobs = {name: merged.get(name) for name in KNOBS}
    knobs = {
        name: (OFF if off else GUIDED[info.generation])[name] if value is None else value
        for name, value in knobs.items()
    }
    perturbs = knobs["stg_scale"] > 0 or knobs["audio_stg_scale"] > 0
    blocks = job.spatio_temporal_guidance_blocks if perturbs else None
    if perturbs and not blocks:
        blocks = (min(STG_BLOCK, info.layers - 1),)
    return {**knobs, "spatio_temporal_guidance_blocks": blocks}


def is_guided(job: RenderJob) -> bool:
    """Whether a resolved job needs the negative prompt."""
    return (job.guidance_scale or 1) > 1 or (job.audio_guidance_scale or 1) > 1


def perturbs(job: RenderJob) -> bool:
    """Whether a resolved job runs spatio-temporal guidance, which cannot compile as one graph."""
    return (job.stg_scale or 0) > 0 or (job.audio_stg_scale or 0) > 0


def isolates(job: RenderJob) -> bool:
    """Whether a resolved job runs modality isolation guidance."""
    return (job.modality_scale or 1) > 1 or (job.audio_modality_scale or 1) > 1


def forwards_per_step(job: RenderJob) -> int:
    """Transformer forwards in one step; the guided one has twice the batch."""
    return 1 + perturbs(job) + isolates(job)


def work(job: RenderJob) -> str:
    """One phrase on what a step costs."""
    parts = [
        name
        for name, on in (("guidance", is_guided(job)), ("STG", perturbs(job)), ("isolation", isolates(job)))
        if on
    ]
    samples = 1 + is_guided(job) + perturbs(job) + isolates(job)
    with_what = f" ({', '.join(parts)})" if parts else ""
    return f"{job.num_inference_steps} steps of {samples} sample{'s' if samples > 1 else ''}{with_what}"
