"""The Generate tab: a form that becomes jobs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from videoattn.batch.estimate import estimate as estimate_jobs
from videoattn.batch.plan import Planned
from videoattn.batch.problems import Place
from videoattn.batch.view import duration
from videoattn.kernels import NAMES
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.settings import KNOBS as ALL_KNOBS
from videoattn.render.sources import unused
from videoattn.web import text, uploads
from videoattn.web.actions import Actions
from videoattn.web.choices import Presets
from videoattn.web.limits import MAX_CLIPS_AT_ONCE, MAX_PROMPT

KNOBS = ALL_KNOBS[1:]
# Settings beyond the form's own fields that a clip may bring along; they are kept beside the form.
CARRIED = ("revision", "components", "upsampler", "spatio_temporal_guidance_blocks", "decode_timestep")
OWN_SIZE = "own"


class Form:
    """The form's components, and how they become settings and settings become them."""

    latest: gr.HTML

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        offered = actions.models.offered()
        first = offered[0][1] if offered else ""
        self.start: Presets | None = actions.models.presets(first) if first else None
        defaults = self.start.defaults if self.start else {}
        self.prompt = gr.Textbox(
            label="Prompt",
            lines=4,
            max_length=MAX_PROMPT,
            placeholder=defaults.get("prompt") or "What the clip shows",
            autofocus=True,
            elem_id="prompt",
        )
        self.negative = gr.Textbox(
            label="Negative prompt",
            lines=1,
            max_length=MAX_PROMPT,
            placeholder="What it must not show (used with guidance above 1)",
            elem_id="negative-prompt",
        )
        self.model = gr.Dropdown(
            offered,
            value=first or None,
            label="Model",
            info="A hub id such as Lightricks/LTX-2 can be typed in",
            allow_custom_value=True,
            elem_id="model",
        )
        with gr.Row():
            self.size = _dropdown(_sizes(self.start), "Size", "size")
            self.length = _dropdown(_lengths(self.start), "Length", "length")
        with gr.Row():
            self.steps = gr.Slider(
                1,
                100,
                value=defaults.get("num_inference_steps", 30),
                step=1,
                label="Steps",
                elem_id="steps",
                min_width=200,
            )
            self.guidance = gr.Slider(
                1,
                15,
                value=defaults.get("guidance_scale", 3.0),
                step=0.1,
                label="Guidance",
                elem_id="guidance",
                min_width=200,
            )
        with gr.Row(elem_classes="va-seed"):
            # Text, since a browser's numbers end at 2^53 and seeds at 2^63.
            self.seed = gr.Textbox(
                value=str(secrets.randbelow(2**32)), label="Seed", max_lines=1, scale=3, elem_id="seed"
            )
            self.dice = gr.Button("Dice", scale=1, min_width=80, elem_id="dice")
            self.again = gr.Button("Same again", scale=1, min_width=110, elem_id="same-again")
        self.fresh = gr.Checkbox(True, label="New seed after each submit", elem_id="fresh-seed")
        self.image = gr.Image(
            label="Start image (optional)",
            type="filepath",
            sources=["upload", "clipboard"],
            height=180,
            elem_id="start-image",
        )
        with gr.Accordion("Advanced", open=False, elem_id="advanced"):
            self.attention = gr.Dropdown(
                ["auto", *NAMES],
                value="auto",
                label="Attention kernel",
                info="auto takes the fastest that has been verified; pairs such as video_self=sdpa work too",
                allow_custom_value=True,
                elem_id="attention",
            )
            self.timing = gr.Checkbox(False, label="Time every attention call", elem_id="time-calls")
            self.clips = gr.Slider(
                1, MAX_CLIPS_AT_ONCE, value=1, step=1, label="Clips, with consecutive seeds", elem_id="clips"
            )
            with gr.Row():
                self.width = _blank("Own width", "the preset", "own-width")
                self.height = _blank("Own height", "the preset", "own-height")
                self.frames = _blank("Own frames", "the preset", "own-frames")
            self.rate = gr.Textbox(
                value=str(defaults.get("frame_rate", 24)), label="Frames a second", elem_id="frame-rate"
            )
            self.recipe = gr.Radio(
                list(self.start.recipes if self.start else ("one-stage", "distilled")),
                value="one-stage",
                label="Recipe",
                elem_id="recipe",
            )
            self.knobs = [
                _blank(
                    name.replace("_", " ").capitalize(),
                    "the model's own",
                    name.replace("_", "-"),
                    visible=self.start is None or name in self.start.knobs,
                )
                for name in KNOBS
            ]
            self.lora = gr.Textbox("", label="LoRA", placeholder="SOURCE:SCALE, several with commas")
            with gr.Row():
                self.dtype = gr.Dropdown(["auto", "bf16", "fp16", "fp32", "fp8"], value="auto", label="Dtype")
                self.offload = gr.Dropdown(["none", "model", "group"], value="none", label="Offload")
            with gr.Row():
                self.compile = gr.Checkbox(False, label="Compile the transformer")
                self.tiling = gr.Checkbox(False, label="Decode in tiles")
            self.crf = gr.Slider(0, 51, value=16, step=1, label="CRF of the mp4 (lower is better)")
        self.carried = gr.State({})
        self.clip = gr.File(
            label="Load the settings of a clip: drop its mp4 here",
            file_types=[".mp4"],
            type="filepath",
            height=110,
            elem_id="drop-clip",
        )

    @property
    def inputs(self) -> list[Any]:
        """The components that make up a job."""
        return [
            self.prompt, self.negative, self.model, self.size, self.length, self.steps, self.guidance,
            self.seed, self.image, self.attention, self.timing, self.clips, self.width, self.height,
            self.frames, self.rate, self.recipe, *self.knobs, self.lora, self.dtype, self.offload,
            self.compile, self.tiling, self.crf, self.carried,
        ]  # fmt: skip

    def settings(self, *values: Any, with_image: bool = True) -> tuple[dict[str, Any], int, bool]:
        """A job's settings, how many clips, and whether to time them, from the values of `inputs`."""
        given = dict(zip(self.inputs, values, strict=True))
        width, height = _parse_size(given[self.size])
        frames = given[self.length] if given[self.length] != OWN_SIZE else None
        settings = {
            "prompt": given[self.prompt] or "",
            "negative_prompt": given[self.negative] or "",
            "model": (given[self.model] or "").strip(),
            "width": _typed(given[self.width]) or width,
            "height": _typed(given[self.height]) or height,
            "num_frames": _typed(given[self.frames]) or frames,
            "frame_rate": (given[self.rate] or "").strip() or None,
            "num_inference_steps": given[self.steps],
            "guidance_scale": given[self.guidance],
            "seed": _parse_seed(given[self.seed]),
            "attention": (given[self.attention] or "auto").strip(),
            "recipe": given[self.recipe] or "one-stage",
            **dict(zip(KNOBS, (_typed(given[knob]) for knob in self.knobs), strict=True)),
            "lora": given[self.lora] or (),
            "dtype": given[self.dtype],
            "offload": given[self.offload],
            "compile": given[self.compile],
            "vae_tiling": True if given[self.tiling] else None,
            "crf": given[self.crf],
            **(given[self.carried] or {}),
        }
        if given[self.carried]:
            for name in unused(settings["model"], settings["recipe"]):
                settings.pop(name, None)
        if settings["recipe"] == "distilled":
            # The recipe has steps of its own.
            settings["num_inference_steps"] = None
        if given[self.image] and with_image:
            settings["image"] = str(self.actions.images.keep(Path(given[self.image])))
        return settings, int(given[self.clips]), bool(given[self.timing])

    def fill(self, settings: Mapping[str, Any]) -> dict[Any, Any]:
        """Updates that put a job's settings into the form."""
        image = self.actions.images.find(settings.get("image"))
        updates = self.choices(settings["model"])
        presets = self.actions.models.presets(settings["model"])
        size = f"{settings.get('width')}x{settings.get('height')}"
        listed = size in [value for _, value in presets.sizes]
        frames = settings.get("num_frames")
        known = frames in [value for _, value in presets.lengths]
        return updates | {
            self.prompt: settings.get("prompt") or "",
            self.negative: settings.get("negative_prompt") or "",
            self.model: settings["model"],
            self.size: _update(_sizes(presets), size if listed else None),
            self.length: _update(_lengths(presets), frames if known else None),
            self.width: "" if listed else _words(settings.get("width")),
            self.height: "" if listed else _words(settings.get("height")),
            self.frames: "" if known else _words(frames),
            self.steps: settings.get("num_inference_steps") or presets.defaults["num_inference_steps"],
            self.guidance: _first(settings.get("guidance_scale"), presets.defaults["guidance_scale"]),
            self.seed: str(settings.get("seed", 0)),
            self.fresh: False,
            self.image: str(image) if image else None,
            self.attention: settings.get("attention") or "auto",
            self.rate: str(settings.get("frame_rate") or presets.defaults["frame_rate"]),
            self.recipe: gr.update(
                choices=list(presets.recipes), value=settings.get("recipe") or "one-stage"
            ),
            **{
                knob: gr.update(value=_words(settings.get(name)), visible=name in presets.knobs)
                for name, knob in zip(KNOBS, self.knobs, strict=True)
            },
            self.lora: ", ".join(settings.get("lora") or ()),
            self.dtype: settings.get("dtype") or "auto",
            self.offload: settings.get("offload") or "none",
            self.compile: bool(settings.get("compile")),
            self.tiling: bool(settings.get("vae_tiling")),
            self.crf: settings.get("crf", 16),
            self.carried: {name: settings[name] for name in CARRIED if settings.get(name)},
        }

    def choices(self, model: str) -> dict[Any, Any]:
        """Updates for a newly chosen model: its sizes and lengths, and its own settings."""
        presets = self.actions.models.presets(model)
        defaults = presets.defaults
        return {
            self.prompt: gr.update(placeholder=defaults.get("prompt") or "What the clip shows"),
            self.size: _update(_sizes(presets)),
            self.length: _update(_lengths(presets)),
            self.steps: defaults["num_inference_steps"],
            self.guidance: defaults["guidance_scale"],
            self.rate: str(defaults["frame_rate"]),
            self.recipe: gr.update(choices=list(presets.recipes), value="one-stage"),
            self.width: "",
            self.height: "",
            self.frames: "",
            **{
                knob: gr.update(value="", visible=name in presets.knobs)
                for name, knob in zip(KNOBS, self.knobs, strict=True)
            },
            self.carried: {},
        }

    @property
    def outputs(self) -> list[Any]:
        """Every component that `fill` or `choices` may update."""
        left_out = (self.timing, self.clips)
        return [*(each for each in self.inputs if each not in left_out), self.fresh]


def estimate(form: Form, *values: Any) -> str:
    """One line on how long the job will take and what it needs, or what is wrong with it."""
    try:
        settings, clips, _ = form.settings(*values, with_image=False)
        settings["prompt"] = settings["prompt"] or "-"
        prepared, warnings = form.actions.prepare(settings)
        planned = Planned(prepared, "page", "", Place("page"))
        (found,) = estimate_jobs([planned], form.actions.store.folder, form.actions.device)
    except (RenderError, UsageError) as error:
        return text.sentence(error)
    each = "" if clips == 1 else f" each, {duration(clips * (found.seconds or 0))} in all"
    parts = []
    if found.seconds is None:
        parts.append("No estimate of the time")
    else:
        basis = "from earlier clips" if found.measured else "predicted"
        parts.append(f"About {duration(max(1.0, found.seconds))}{each} ({basis})")
    if found.memory_bytes is not None:
        memory = "GPU memory" if found.on_gpu else "main memory"
        parts.append(f"{text.amount(found.memory_bytes)} of {memory} (predicted)")
    parts.append(f"{text.amount(found.disk_bytes * clips)} of disk at most")
    return " · ".join(parts) + "".join(f"\n\n⚠️ {text.sentence(each)}" for each in warnings)


def submit(form: Form, *values: Any) -> str:
    """Queue what the form says; returns a line about it."""
    settings, clips, timing = form.settings(*values)
    done = form.actions.submit(settings, clips=clips, timing=timing)
    first = done.ids[0]
    line = f"Job {first} is queued." if clips == 1 else f"Jobs {first} to {done.ids[-1]} are queued."
    return line + "".join(f"\n\n⚠️ {text.sentence(each)}" for each in done.warnings)


def load_clip(form: Form, path: str | None) -> tuple[dict[Any, Any], str]:
    """Updates that fill the form from an uploaded clip, and a line about what is missing."""
    if path is None:
        return {}, ""
    settings = uploads.read_clip(Path(path))
    updates = form.fill(settings)
    if settings.get("image") and form.actions.images.find(settings["image"]) is None:
        return updates, "⚠️ The clip began with an image that is not here: upload it as the start image."
    return updates, ""


Choices = tuple[list[tuple[str, Any]], Any]


def _sizes(presets: Presets | None) -> Choices:
    choices = presets.sizes if presets else [("the model's own", OWN_SIZE)]
    return list(choices), choices[0][1]


def _lengths(presets: Presets | None) -> Choices:
    if presets is None:
        return [("the model's own", OWN_SIZE)], OWN_SIZE
    return list(presets.lengths), presets.defaults["num_frames"]


def _dropdown(choices: Choices, label: str, elem_id: str) -> gr.Dropdown:
    return gr.Dropdown(choices[0], value=choices[1], label=label, elem_id=elem_id, min_width=200)


def _update(choices: Choices, value: Any = None) -> Any:
    return gr.update(choices=choices[0], value=choices[1] if value is None else value)


def _blank(label: str, placeholder: str, elem_id: str, *, visible: bool = True) -> gr.Textbox:
    """A field for a number that may stay empty, which Gradio's own number field turns into 0."""
    return gr.Textbox("", label=label, placeholder=placeholder, max_lines=1, elem_id=elem_id, visible=visible)


def _typed(value: Any) -> str | None:
    return str(value if value is not None else "").strip() or None


def _words(value: Any) -> str:
    return "" if value is None else str(value)


def _parse_size(value: Any) -> tuple[int | None, int | None]:
    width, cross, height = str(value or "").partition("x")
    return (int(width), int(height)) if cross and width.isdecimal() and height.isdecimal() else (None, None)


def _parse_seed(value: Any) -> int:
    words = str(value if value is not None else "").strip()
    if not words.isdecimal():
        raise UsageError(f"the seed '{words[:40]}' is no whole number: throw the dice or type digits")
    return int(words)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
