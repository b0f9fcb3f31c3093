"""The page's actions as API endpoints, for Gradio's client and for plain HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from videoattn.web import text
from videoattn.web.actions import REFUSALS, Actions


def build(actions: Actions) -> None:
    """Add `submit`, `status`, `queue`, `cancel`, `image` and `download` to the page being built."""

    def submit(settings: dict, clips: int = 1, timing: bool = False) -> list:
        """Queue a job; settings are those of a render (prompt, seed, width, …). Returns the job numbers."""
        if not isinstance(settings, dict) or not isinstance(clips, int):
            raise _refusal("settings must be an object, and clips a whole number")
        try:
            return actions.submit(settings, clips=clips, timing=bool(timing), origin={"from": "api"}).ids
        except REFUSALS as error:
            raise _refusal(error) from None

    def status(job: int) -> dict:
        """State, progress, error and files of a job."""
        try:
            return actions.status(_number(job))
        except REFUSALS as error:
            raise _refusal(error) from None

    def cancel(job: int) -> str:
        """Cancel a waiting or running job; returns its state, running until the denoise step has ended."""
        try:
            return str(actions.cancel(_number(job)))
        except REFUSALS as error:
            raise _refusal(error) from None

    def jobs(limit: int = 50, offset: int = 0) -> list:
        """The running and waiting jobs, in order."""
        listed = actions.store.queue(limit=min(200, max(1, _number(limit))), offset=max(0, _number(offset)))
        return [{"job": job.id, "state": str(job.state), "settings": job.payload["job"]} for job in listed]

    for endpoint in (submit, status, cancel, jobs):
        gr.api(endpoint, api_name="queue" if endpoint is jobs else endpoint.__name__)

    def image(path: str | None) -> str:
        try:
            if path is None:
                raise _refusal("no image was given")
            return actions.images.keep(Path(path)).name
        except REFUSALS as error:
            raise _refusal(error) from None

    def download(job: float | None, role: str) -> str:
        try:
            return str(actions.file(_number(job), role or "clip").resolve())
        except REFUSALS as error:
            raise _refusal(error) from None

    # Endpoints with files need components, which check where an uploaded path leads.
    with gr.Row(visible=False):
        upload = gr.File(type="filepath", label="image")
        name = gr.Textbox(label="name")
        job, role = gr.Number(label="job", precision=0), gr.Textbox("clip", label="role")
        file = gr.File(label="file")
        gr.Button().click(image, upload, name, api_name="image", api_description=IMAGE)
        gr.Button().click(download, [job, role], file, api_name="download", api_description=DOWNLOAD)


IMAGE = "Store a start image; returns the name to give as the setting `image`."
DOWNLOAD = "A finished job's file: role clip, poster or timing."


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise _refusal("a job is named by its number")
    return int(value)


def _refusal(error: BaseException | str) -> gr.Error:
    return gr.Error(text.sentence(error), print_exception=False)
