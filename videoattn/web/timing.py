"""The Timing tab: where a clip's attention time went, call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import gradio as gr

from videoattn.jobs import Job, JobState
from videoattn.timing.log import load
from videoattn.web import text
from videoattn.web.actions import Actions, media_url
from videoattn.web.choices import kernel_verdicts
from videoattn.web.panel import panel, render

OFFERED = 60
ARMS = ("flash4", "flash3", "sdpa", "blackwell", "hopper")


def build(actions: Actions) -> gr.HTML:
    """The tab's panel; its query names the job."""
    return panel(
        "timing", lambda query: show(actions, query), act=lambda request: act(actions, request), seconds=2.0
    )


def show(actions: Actions, query: Mapping[str, Any]) -> dict[str, str]:
    """The chosen clip's timing, by default that of the latest timed clip."""
    store = actions.store
    wanted = int(query.get("job") or 0)
    recent = store.ended(JobState.DONE, limit=OFFERED)
    timed = [job for job in recent if "timing" in job.files]
    job = store.get(wanted) if wanted else (timed[0] if timed else None)
    offered = timed if job is None or job in timed else [job, *timed]
    parts = {"pick": render("timing_pick.html", jobs=offered, chosen=job)}
    parts["calls"] = parts["again"] = ""
    if job is None:
        return parts
    if "timing" in job.files:
        parts["calls"] = _calls(actions, job)
    verdicts = kernel_verdicts(actions.device)
    parts["again"] = render(
        "timing_again.html",
        job=job,
        timed="timing" in job.files,
        ready=[name for name in ARMS if verdicts[name] is None],
        missing=[(name, verdicts[name]) for name in ARMS if verdicts[name] is not None],
    )
    return parts


def act(actions: Actions, request: Mapping[str, Any]) -> str | None:
    """Render a clip once more with its calls timed."""
    if request["act"] != "measure":
        raise KeyError(request["act"])
    arms = tuple(arm for arm in str(request.get("arms") or "").split(",") if arm)
    done = actions.measure_again(int(request["job"]), arms)
    return f"Job {done.ids[0]} is queued; its timing appears here when it is done."


def _calls(actions: Actions, job: Job) -> str:
    report = (actions.store.report(job.id) or {}).get("timing")
    path = actions.store.path(job, "timing")
    if report is None or path is None or not path.is_file():
        return ""
    layers, calls = by_layer(path, path.stat().st_mtime_ns)
    return render(
        "timing_calls.html",
        report=report,
        kinds=bars([(f"{line['stage']}: {line['kind']}", line["total_ms"]) for line in report["lines"]]),
        stages=bars(stage_seconds(report)),
        layers=[(name, bars([(f"layer {layer}", ms) for layer, ms in values])) for name, values in layers],
        calls=calls,
        link=media_url(job, "timing"),
    )


def bars(values: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Label, value, and percent of the largest value."""
    largest = max((value for _, value in values), default=0.0)
    return [(label, value, 100 * value / largest if largest else 0.0) for label, value in values]


def stage_seconds(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Wall seconds by stage, in the order of a render; empty when shadow arms ran."""
    order = list(text.PHASES)
    seconds = (report.get("stage_seconds") or {}).items()
    return sorted(seconds, key=lambda each: order.index(each[0]) if each[0] in order else len(order))


@lru_cache(maxsize=16)
def by_layer(path: Path, version: int) -> tuple[list[tuple[str, list[tuple[int, float]]]], int]:
    """Median milliseconds of a call by kind and layer, and the number of calls; `version` is the file's."""
    log = load(path)
    grouped: dict[str, dict[int, list[float]]] = {}
    for row in log.rows:
        if row.layer is not None and row.milliseconds is not None:
            grouped.setdefault(row.kind or "unnamed", {}).setdefault(row.layer, []).append(row.milliseconds)
    layers = [
        (kind, [(layer, median(values)) for layer, values in sorted(each.items())])
        for kind, each in grouped.items()
    ]
    return layers, len(log.rows)
