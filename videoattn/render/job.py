"""RenderJob: everything that determines a clip, one model for command line, batch row, web form and mp4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from videoattn.render.errors import UsageError

Recipe = Literal["one-stage", "distilled"]
Dtype = Literal["auto", "bf16", "fp16", "fp32", "fp8"]
Offload = Literal["none", "model", "group"]

MAX_SEED = 2**63 - 1


def parse_frame_rate(value: Any) -> Fraction:
    """A frame rate from a number or text: `24`, `23.976`, `24000/1001`.

    A decimal within 0.001 of an NTSC rate (n·1000/1001 for whole n) becomes that exact rate.
    """
    text = str(value).strip()
    try:
        # Before a Fraction is made: of an exponent of nine digits that takes hours.
        inside = "/" in text or 1 <= float(text) <= 240
        rate = (value if isinstance(value, Fraction) else Fraction(text)) if inside else Fraction(0)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"'{text[:60]}' is no frame rate: give a number or a fraction such as 24000/1001"
        ) from None
    if not 1 <= rate <= 240:
        raise ValueError(f"a frame rate lies between 1 and 240 a second, not at {text[:60]}")
    if rate.denominator > 1 and rate.denominator != 1001:
        ntsc = Fraction(math.ceil(rate) * 1000, 1001)
        if abs(ntsc - rate) < Fraction(1, 1000):
            return ntsc
    if rate.denominator > 100_000:
        raise ValueError(
            f"'{text[:60]}' has too many digits for a frame rate: give a fraction such as 24000/1001"
        )
    return rate


def _texts(value: Any) -> Iterator[str]:
    """All text in a setting, in lists and mappings too."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            waiting += part
        else:
            yield str(part)


def _frame_rate_out(rate: Fraction | None) -> int | str | None:
    if rate is None:
        return None
    return rate.numerator if rate.denominator == 1 else f"{rate.numerator}/{rate.denominator}"


FrameRate = Annotated[
    Fraction,
    BeforeValidator(parse_frame_rate),
    PlainSerializer(_frame_rate_out),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
]


class Lora(NamedTuple):
    """One LoRA: a safetensors file, folder or hub id, and the weight of its adapter."""

    source: str
    scale: float


class RenderJob(BaseModel):
    """Everything that determines a clip.

    Fields carry diffusers' argument names; None means the model's own default, made explicit when the job
    is rendered and stored explicitly in the clip. Lengths are pixels and frames.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(default="", description="What the clip shows.")
    negative_prompt: str = Field(default="", description="What the clip must not show; used by guided runs.")
    model: str = Field(
        default="demo", description="demo, a local folder, a hub id, or a single-file safetensors checkpoint."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    components: str | None = Field(
        default=None,
        description="For a single-file checkpoint: folder or hub id holding the parts that it lacks.",
    )
    recipe: Recipe = Field(
        default="one-stage",
        description="distilled: half size, latent upsample, full size, for distilled LTX-2.x.",
    )
    upsampler: str | None = Field(
        default=None,
        description="Latent upsampler of the distilled recipe, if it is not the model's latent_upsampler.",
    )
    width: int | None = Field(default=None, ge=1, lt=2**31, description="Width in pixels.")
    height: int | None = Field(default=None, ge=1, lt=2**31, description="Height in pixels.")
    num_frames: int | None = Field(default=None, ge=1, lt=2**31, description="Number of frames.")
    frame_rate: FrameRate | None = Field(default=None, description="Frames a second: 24, 23.976, 24000/1001.")
    num_inference_steps: int | None = Field(default=None, ge=1, le=1000, description="Denoising steps.")
    guidance_scale: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Classifier-free guidance; 1 is off and turns the other guidance off too.",
    )
    audio_guidance_scale: float | None = Field(
        default=None, ge=0, le=100, description="The same for sound (LTX-2.x)."
    )
    stg_scale: float | None = Field(
        default=None, ge=0, le=100, description="Spatio-temporal guidance; 0 is off."
    )
    audio_stg_scale: float | None = Field(default=None, ge=0, le=100, description="The same for sound.")
    modality_scale: float | None = Field(
        default=None, ge=0, le=100, description="Modality isolation; 1 is off."
    )
    audio_modality_scale: float | None = Field(default=None, ge=0, le=100, description="The same for sound.")
    guidance_rescale: float | None = Field(
        default=None, ge=0, le=1, description="Rescale of guided predictions; 0 is off."
    )
    audio_guidance_rescale: float | None = Field(default=None, ge=0, le=1, description="The same for sound.")
    spatio_temporal_guidance_blocks: tuple[int, ...] | None = Field(
        default=None, description="Transformer blocks that spatio-temporal guidance perturbs."
    )
    decode_timestep: float | None = Field(
        default=None, ge=0, le=1, description="Timestep at which a timestep-conditioned VAE decodes."
    )
    decode_noise_scale: float | None = Field(
        default=None, ge=0, le=1, description="Noise mixed in before that decode."
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of all noise.")
    image: str | None = Field(default=None, description="First frame of an image-to-video clip.")
    lora: tuple[str, ...] = Field(
        default=(), description="LoRA as SOURCE or SOURCE:SCALE; give it again for more."
    )
    dtype: Dtype = Field(
        default="auto",
        description="auto is bf16 on a GPU, fp32 on a CPU; fp8 stores the transformer in e4m3.",
    )
    offload: Offload = Field(
        default="none", description="Keep weights off the GPU: whole models, or groups of layers."
    )
    compile: bool = Field(default=False, description="Compile the transformer's repeated blocks.")
    fast: bool = Field(
        default=False, description="Turn on what measured best on a GPU like this one, and say what that is."
    )
    vae_tiling: bool | None = Field(
        default=None, description="Decode in tiles; on by default when weights are offloaded."
    )
    attention: str = Field(
        default="auto", description="A kernel for all calls, or KIND=KERNEL pairs, comma-separated."
    )
    crf: int = Field(default=16, ge=0, le=51, description="h264 quality: lower is better and larger.")

    @field_validator("lora", "spatio_temporal_guidance_blocks", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, Iterable):
            return [
                piece for part in value for piece in (cls._split(part) if isinstance(part, str) else [part])
            ]
        return value

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            parse_lora(entry)
        return value

    @field_validator("attention", mode="before")
    @classmethod
    def _check_attention(cls, value: Any) -> Any:
        if isinstance(value, dict):
            value = ",".join(f"{kind}={kernel}" for kind, kernel in value.items())
        if isinstance(value, str):
            parse_attention(value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any, info: ValidationInfo) -> Any:
        what = "a prompt" if info.field_name in ("prompt", "negative_prompt") else "a setting"
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{what} is UTF-8 text, and this one has bytes that are not") from None
        return value

    @field_validator("prompt", "negative_prompt")
    @classmethod
    def _strip(cls, value: str) -> str:
        if "\x00" in value:
            raise ValueError("a prompt cannot contain a NUL character")
        return value.strip()

    @property
    def loras(self) -> list[Lora]:
        """The LoRA entries, parsed."""
        return [parse_lora(entry) for entry in self.lora]

    @property
    def kernels(self) -> str | dict[str, str]:
        """`attention` in the form that `videoattn.install` takes."""
        return parse_attention(self.attention)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> RenderJob:
        """A job from plain values; UsageError says in one line what does not fit."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UsageError(explain(error)) from None


def parse_lora(entry: str) -> Lora:
    """Split `SOURCE[:SCALE]`; a colon that no number follows belongs to the source."""
    head, colon, tail = entry.rpartition(":")
    if colon and head:
        try:
            scale = float(tail)
        except ValueError:
            pass
        else:
            if not math.isfinite(scale):
                raise ValueError(f"'{entry}': the scale of a LoRA is a finite number")
            return Lora(head, scale)
    return Lora(entry, 1.0)


def parse_attention(text: str) -> str | dict[str, str]:
    """A kernel's name, or a mapping from `KIND=KERNEL,…`; ValueError names what is known."""
    from videoattn.kernels import NAMES

    def known(kernel: str) -> str:
        if kernel != "auto" and kernel not in NAMES:
            raise ValueError(f"unknown attention kernel '{kernel}': choose from auto, {', '.join(NAMES)}")
        return kernel

    text = text.strip()
    if "=" not in text:
        return known(text)
    from videoattn.dispatch import KINDS

    chosen: dict[str, str] = {}
    for pair in text.split(","):
        kind, _, kernel = (part.strip() for part in pair.partition("="))
        if kind not in KINDS:
            raise ValueError(f"unknown kind of attention call '{kind}': choose from {', '.join(KINDS)}")
        chosen[kind] = known(kernel)
    return chosen


def explain(error: ValidationError) -> str:
    """A pydantic error in one line, fields by their option names, values as given."""
    lines = []
    for item in error.errors():
        option = "--" + str(item["loc"][0]).replace("_", "-") if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            lines.append(f"{option} is no setting of a render")
            continue
        if item["type"] == "value_error":
            lines.append(f"{option}: {message}")
            continue
        lines.append(f"{option} {item['input']}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
