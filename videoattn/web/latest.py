"""Beside the form: what is rendering now, and the clip that was finished last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from videoattn.jobs import JobState
from videoattn.web import queue
from videoattn.web.actions import Actions, media_url
from videoattn.web.panel import panel, render


def build(actions: Actions) -> gr.HTML:
    """The panel; it raises `reuse` with a job's number."""
    return panel(
        "latest",
        lambda query: show(actions, query),
        act=lambda request: queue.act(actions, request),
        emits=("reuse",),
        seconds=0.7,
    )


def show(actions: Actions, query: Mapping[str, Any]) -> dict[str, str]:
    """Progress of the running jobs, the last clip, and the last failure if it is later than that."""
    store = actions.store
    counts = store.counts()
    running = store.queue(limit=counts[JobState.RUNNING]) if counts[JobState.RUNNING] else []
    done = store.ended(JobState.DONE, limit=1)
    last = store.ended((JobState.DONE, JobState.FAILED, JobState.INTERRUPTED), limit=1)
    trouble = last[0] if last and last[0].state is not JobState.DONE else None
    return {
        "now": render(
            "latest_now.html",
            jobs=[(job, store.progress(job.id)) for job in running if job.state is JobState.RUNNING],
            waiting=counts[JobState.PENDING],
            trouble=trouble,
        ),
        "clip": render(
            "latest_clip.html",
            job=done[0] if done else None,
            links={role: media_url(done[0], role) for role in done[0].files} if done else {},
        ),
    }
