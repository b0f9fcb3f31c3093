"""The Gallery tab: every finished clip with its settings and receipt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from videoattn.jobs import Job, JobState
from videoattn.web.actions import Actions, media_url
from videoattn.web.panel import panel, render

PAGE = 24


def build(actions: Actions) -> gr.HTML:
    """The tab's panel; it raises `reuse`, `again`, `left`, `right` and `timing` with a job's number."""
    return panel(
        "gallery",
        lambda query: show(actions, query),
        act=lambda request: act(actions, request),
        look=lambda request: look(actions, int(request["look"])),
        emits=("reuse", "left", "right", "timing"),
        seconds=2.0,
    )


def show(actions: Actions, query: Mapping[str, Any]) -> dict[str, str]:
    """One page of clips, the latest first."""
    total = actions.store.counts()[JobState.DONE]
    pages = max(1, -(-total // PAGE))
    page = min(max(1, int(query.get("page") or 1)), pages)
    jobs = actions.store.ended(JobState.DONE, limit=PAGE, offset=(page - 1) * PAGE)
    clips = [(job, _links(job)) for job in jobs]
    return {"clips": render("gallery.html", clips=clips, page=page, pages=pages, total=total)}


def act(actions: Actions, request: Mapping[str, Any]) -> str | None:
    """Delete a clip."""
    if request["act"] != "delete":
        raise KeyError(request["act"])
    job = int(request["job"])
    actions.delete(job)
    return f"Clip {job} deleted."


def look(actions: Actions, job: int) -> str:
    """The details of a clip, with its player."""
    found = actions.store.get(job)
    report = actions.store.report(job) or {}
    settings = report.get("job") or found.payload["job"]
    return render(
        "clip.html",
        job=found,
        links=_links(found),
        settings=described(settings),
        report=report,
        receipt=grouped(report.get("receipt")),
        size=_size(actions, found),
    )


def described(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings that say something, as names and words."""
    shown = []
    for name, value in settings.items():
        if value in (None, "", [], ()) or name == "image":
            continue
        words = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        shown.append((name.replace("_", " "), words))
    if settings.get("image"):
        shown.append(("start image", "yes"))
    return shown


def grouped(receipt: Mapping[str, Any] | None) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """A receipt as `(kinds, kernel, [(other kernel, reason)])`, kinds with the same story together."""
    stories: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for kind, choice in (receipt or {}).items():
        story = choice["kernel"], tuple(sorted(choice["reasons"].items()))
        stories.setdefault(story, []).append(kind)
    return [(", ".join(kinds), kernel, list(reasons)) for (kernel, reasons), kinds in stories.items()]


def _links(job: Job) -> dict[str, str]:
    return {role: media_url(job, role) for role in job.files}


def _size(actions: Actions, job: Job) -> int | None:
    path = actions.store.path(job)
    return path.stat().st_size if path is not None and path.is_file() else None
