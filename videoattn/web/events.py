"""The page's own events: each is one request that carries its answer."""

from __future__ import annotations

import json
import secrets
import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import gradio as gr

from videoattn.web import text
from videoattn.web.actions import REFUSALS


class Events:
    """Joins the page's components to what they do.

    Not through Gradio's queue: that answers a browser's events over one stream, which the server closes as
    soon as none is pending. An event that is posted after that, and before the browser has read of it, is
    carried out but never answered (Gradio 6.31). The page's events are short; what takes long waits in the
    store's queue.
    """

    def __init__(self) -> None:
        # Gradio shows an error of an event outside its queue nowhere; one that a component raises, it does.
        self._trouble = gr.HTML(
            "{}",
            html_template="",
            js_on_load="watch('value', () => trigger('error', JSON.parse(props.value).text));",
            visible="hidden",
        )

    def on(
        self,
        triggers: Any,
        run: Callable[..., Any],
        *,
        inputs: Any = None,
        outputs: Any,
        **options: Any,
    ) -> None:
        """Have a trigger, or a list of them, call `run`; what it raises is told in a toast."""
        listed = outputs if isinstance(outputs, Sequence) else [outputs]

        @wraps(run)
        def answer(*values: Any) -> dict[Any, Any]:
            try:
                found = run(*values)
            except Exception as error:
                if not isinstance(error, REFUSALS):
                    traceback.print_exc()
                # The token has the same words told again.
                told = {"text": text.sentence(error), "token": secrets.token_hex(4)}
                return {self._trouble: json.dumps(told)}
            if not isinstance(found, dict):
                found = dict(zip(listed, found if len(listed) > 1 else [found], strict=True))
            return {self._trouble: gr.skip(), **found}

        # `gr.on` does not take the events that an HTML component defines.
        listen = partial(gr.on, triggers) if isinstance(triggers, list) else triggers
        listen(
            answer,
            inputs=inputs,
            outputs=[*listed, self._trouble],
            queue=False,
            api_visibility="private",
            show_progress="hidden",
            **options,
        )
