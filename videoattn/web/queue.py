"""The Queue tab: what runs, what waits, what did not end well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from videoattn.jobs import JobState
from videoattn.jobs.model import RETRYABLE
from videoattn.web.actions import Actions
from videoattn.web.panel import panel, render

PAGE = 50


def build(actions: Actions) -> gr.HTML:
    """The tab's panel."""
    return panel(
        "queue", lambda query: show(actions, query), act=lambda request: act(actions, request), seconds=0.8
    )


def show(actions: Actions, query: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the tab for one page of the queue."""
    store = actions.store
    counts = store.counts()
    running = counts[JobState.RUNNING]
    pages = max(1, -(-counts[JobState.PENDING] // PAGE))
    page = min(max(1, int(query.get("page") or 1)), pages)
    listed = store.queue(limit=running) if running else []
    pending = store.queue(limit=PAGE, offset=running + (page - 1) * PAGE)
    pending = [job for job in pending if job.state is JobState.PENDING]
    stopped = sum(counts[state] for state in RETRYABLE)
    ended = store.ended(tuple(RETRYABLE), limit=PAGE) if stopped else []
    workers = [(worker.name, worker.status) for worker in actions.workers]
    return {
        "head": render("queue_head.html", counts=counts, State=JobState, workers=workers, stopped=stopped),
        "running": render(
            "queue_running.html", jobs=[(job, store.progress(job.id)) for job in listed if job not in pending]
        ),
        "pending": render(
            "queue_pending.html", jobs=pending, page=page, pages=pages, first=(page - 1) * PAGE + 1
        ),
        "ended": render("queue_ended.html", jobs=ended, stopped=stopped),
    }


def act(actions: Actions, request: Mapping[str, Any]) -> str | None:
    """Do what a button of the tab asks for; returns a line about it."""
    store, what = actions.store, request["act"]
    if what == "cancel-pending":
        return f"{store.cancel_pending()} jobs cancelled."
    if what == "retry-all":
        return f"{store.retry_all(tuple(RETRYABLE))} jobs queued again."
    if what == "clear":
        return f"{store.clear(tuple(RETRYABLE))} jobs removed from the list."
    if what in ("pause", "resume"):
        for worker in actions.workers:
            worker.pause() if what == "pause" else worker.resume()
        return "No further job is started until you resume." if what == "pause" else "The queue goes on."
    job = int(request["job"])
    if what == "cancel":
        state = actions.cancel(job)
        return f"Job {job} cancelled." if state is JobState.CANCELLED else f"Job {job} stops after this step."
    if what == "retry":
        store.retry(job)
        return f"Job {job} queued again."
    if what == "remove":
        actions.delete(job)
        return f"Job {job} removed."
    if what == "move":
        other = request.get("other")
        actions.move(job, str(request["where"]), None if other is None else int(other))
        return None
    raise KeyError(what)
