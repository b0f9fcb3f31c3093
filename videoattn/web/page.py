"""The page: its tabs, how they act on each other, and the same actions as API endpoints."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import gradio as gr

from videoattn.web import api, compare, gallery, generate, latest, queue, status, timing
from videoattn.web.actions import Actions
from videoattn.web.events import Events
from videoattn.web.panel import asset
from videoattn.web.uploads import decode_image

TABS = ("generate", "queue", "gallery", "compare", "timing", "status")


def build(actions: Actions) -> gr.Blocks:
    """The page over one store."""
    with gr.Blocks(title="videoattn", analytics_enabled=False, fill_width=True) as blocks:
        blocks.queue(default_concurrency_limit=8, max_size=200)
        gr.HTML('<h1 class="va-title">videoattn</h1>', js_on_load=None)
        events = Events()
        with gr.Tabs(selected="generate", elem_id="tabs") as tabs:
            with gr.Tab("Generate", id="generate", render_children=True):
                form = _generate(actions, blocks, events)
            with gr.Tab("Queue", id="queue"):
                queue.build(actions)
            with gr.Tab("Gallery", id="gallery"):
                shelf = gallery.build(actions)
            with gr.Tab("Compare", id="compare"):
                pair = compare.build(actions, events)
            with gr.Tab("Timing", id="timing"):
                clip = timing.build(actions)
            with gr.Tab("Status", id="status"):
                status.build(actions)
        _connect(actions, events, tabs, form, shelf, pair, clip)
        api.build(actions)
    return blocks


def theme() -> gr.themes.Base:
    """Gradio's base look in the system's own fonts, so that nothing is fetched from elsewhere."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    return gr.themes.Default(
        primary_hue="teal", neutral_hue="slate", font=fonts, font_mono=["ui-monospace", "monospace"]
    )


def css() -> str:
    """The page's style."""
    return asset("page.css")


def head() -> str:
    """The page's scripts."""
    scripts = "".join(f"<script>{asset(name)}</script>" for name in ("panel.js", "players.js"))
    return f'<meta name="viewport" content="width=device-width, initial-scale=1">{scripts}'


def _generate(actions: Actions, blocks: gr.Blocks, events: Events) -> generate.Form:
    with gr.Row(elem_classes="va-columns"):
        with gr.Column(scale=3, min_width=320):
            form = generate.Form(actions)
        with gr.Column(scale=2, min_width=320):
            submit = gr.Button("Generate", variant="primary", size="lg", elem_id="submit")
            told = gr.Markdown(elem_id="told")
            expected = gr.Markdown(elem_id="estimate")
            form.latest = latest.build(actions)

    used = gr.State("")

    def do_submit(fresh: bool, *values: Any) -> tuple[str, str, str]:
        line = generate.submit(form, *values)
        seed = str(values[form.inputs.index(form.seed)])
        return line, (str(secrets.randbelow(2**32)) if fresh else seed), seed

    events.on(
        [submit.click, form.prompt.submit],
        do_submit,
        inputs=[form.fresh, *form.inputs],
        outputs=[told, form.seed, used],
    )
    events.on(form.dice.click, lambda: str(secrets.randbelow(2**32)), outputs=form.seed)
    events.on(
        form.again.click,
        lambda used: (used or _last_seed(actions), False),
        inputs=used,
        outputs=[form.seed, form.fresh],
    )
    events.on(form.model.input, form.choices, inputs=form.model, outputs=form.outputs)

    def do_load(path: str | None) -> dict[Any, Any]:
        filled, line = generate.load_clip(form, path)
        return {**filled, told: line}

    events.on(form.clip.upload, do_load, inputs=form.clip, outputs=[*form.outputs, told])
    events.on(form.image.upload, _check_image, inputs=form.image, outputs=form.image)
    weighing = [
        form.model, form.size, form.length, form.steps, form.guidance, form.clips, form.width, form.height,
        form.frames, form.recipe, form.rate, *form.knobs,
    ]  # fmt: skip
    events.on(
        [blocks.load, *(each.change for each in weighing)],
        lambda *values: generate.estimate(form, *values),
        inputs=form.inputs,
        outputs=expected,
        trigger_mode="always_last",
    )
    return form


def _check_image(path: str | None) -> str | None:
    if path is not None:
        decode_image(Path(path))
    return path


def _last_seed(actions: Actions) -> str:
    last = actions.store.ended(limit=1)
    return str(last[0].payload["job"]["seed"]) if last else "0"


def _connect(
    actions: Actions,
    events: Events,
    tabs: gr.Tabs,
    form: generate.Form,
    shelf: gr.HTML,
    pair: gr.HTML,
    clip: gr.HTML,
) -> None:
    """What the buttons of one tab do to another."""

    def reuse(event: gr.EventData) -> dict[Any, Any]:
        return form.fill(actions.settings(int(event.job))) | {tabs: gr.Tabs(selected="generate")}

    def left(chosen: str, event: gr.EventData) -> tuple[Any, str]:
        return gr.Tabs(selected="compare"), compare.choose(chosen, "a", int(event.job))

    def right(chosen: str, event: gr.EventData) -> tuple[Any, str]:
        return gr.Tabs(selected="compare"), compare.choose(chosen, "b", int(event.job))

    def times(event: gr.EventData) -> tuple[Any, str]:
        return gr.Tabs(selected="timing"), json.dumps({"job": int(event.job)})

    for source in (form.latest, shelf):
        events.on(source.reuse, reuse, outputs=[tabs, *form.outputs])
    events.on(shelf.left, left, inputs=pair, outputs=[tabs, pair])
    events.on(shelf.right, right, inputs=pair, outputs=[tabs, pair])
    events.on(shelf.timing, times, outputs=[tabs, clip])
