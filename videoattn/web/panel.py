"""A panel: a part of the page that the server renders from the store and the browser keeps fresh."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import gradio as gr
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from videoattn.batch.view import duration
from videoattn.web import text
from videoattn.web.actions import REFUSALS

Show = Callable[[Mapping[str, Any]], dict[str, str]]
Act = Callable[[Mapping[str, Any]], str | None]
Look = Callable[[Mapping[str, Any]], str]


def panel(
    name: str,
    show: Show,
    *,
    act: Act | None = None,
    look: Look | None = None,
    emits: tuple[str, ...] = (),
    seconds: float = 1.0,
    query: Mapping[str, Any] | None = None,
) -> gr.HTML:
    """A panel of parts.

    `show(query)` returns HTML by part and is asked again every `seconds` while the panel is visible.
    `act(request)` serves buttons with `data-act` and returns a line for the user, `look(request)` fills the
    dialog for `data-look`; `emits` are events that buttons with `data-emit` raise on the returned component.
    `query` is its first value, which an event may replace.
    """

    def panel_show(request: dict[str, Any]) -> dict[str, str]:
        try:
            return show(request)
        except (*REFUSALS, ValueError, TypeError) as error:
            return {"trouble": str(Markup('<p class="va-note">{}</p>').format(text.sentence(error)))}

    def panel_act(request: dict[str, Any]) -> dict[str, str]:
        try:
            return {"message": (act(request) if act else None) or ""}
        except REFUSALS as error:
            return {"error": text.sentence(error)}
        except (KeyError, ValueError, TypeError):
            return {"error": "This request does not fit the page: reload it and try again."}

    def panel_look(request: dict[str, Any]) -> dict[str, str]:
        try:
            return {"html": look(request) if look else ""}
        except REFUSALS as error:
            return {"html": str(Markup("<p>{}</p>").format(text.sentence(error)))}

    names = ", ".join(f"'{each}'" for each in emits)
    script = (
        "videoattn.panel(element, {server: {show: (q) => server.panel_show(q), act: (q) => "
        "server.panel_act(q), look: (q) => server.panel_look(q)}, emit: (name, data) => "
        f"[{names}].includes(name) && trigger(name, data), every: {round(seconds * 1000)}, "
        "query: () => JSON.parse(props.value || '{}'), watch});"
    )
    return gr.HTML(
        json.dumps(dict(query or {})),
        html_template=render("panel.html", name=name),
        js_on_load=script,
        server_functions=[panel_show, panel_act, panel_look],
        elem_id=f"va-{name}",
        elem_classes="va",
    )


def render(template: str, **values: Any) -> str:
    """One of the page's templates; every value is escaped."""
    return _templates().get_template(template).render(**values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("videoattn.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "phase": text.phase, "ago": text.ago, "bytes": text.amount}
    return environment


@cache
def asset(name: str) -> str:
    """The text of a file among the page's assets."""
    return (resources.files("videoattn.web") / "assets" / name).read_text(encoding="utf-8")
