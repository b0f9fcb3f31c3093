"""The Compare tab: one prompt, one seed, two kernels, side by side."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import gradio as gr

from videoattn.jobs import Job, JobState
from videoattn.kernels import NAMES
from videoattn.web import gallery, likeness, text, timing
from videoattn.web.actions import REFUSALS, Actions, media_url
from videoattn.web.events import Events
from videoattn.web.limits import MAX_PROMPT
from videoattn.web.panel import panel, render

OFFERED = 60


def build(actions: Actions, events: Events) -> gr.HTML:
    """The tab; returns the panel that shows a pair, whose query names the jobs `a` and `b`."""
    offered = actions.models.offered()
    with gr.Accordion("New comparison", open=True, elem_id="new-comparison"):
        with gr.Row():
            prompt = gr.Textbox(
                label="Prompt", lines=2, max_length=MAX_PROMPT, scale=3, elem_id="compare-prompt"
            )
            model = gr.Dropdown(
                offered,
                value=offered[0][1] if offered else None,
                label="Model",
                allow_custom_value=True,
                scale=1,
                min_width=200,
                elem_id="compare-model",
            )
            seed = gr.Textbox("0", label="Seed", max_lines=1, scale=1, min_width=160, elem_id="compare-seed")
        with gr.Row():
            left = gr.Dropdown(["auto", *NAMES], value="sdpa", label="Kernel A", elem_id="kernel-a")
            # On a CPU `auto` is sdpa too.
            other = "reference" if actions.device == "cpu" else "auto"
            right = gr.Dropdown(["auto", *NAMES], value=other, label="Kernel B", elem_id="kernel-b")
            start = gr.Button("Compare", variant="primary", min_width=120, elem_id="start-comparison")
    shower = _Shower(actions)
    pair = panel("compare", shower.show, act=shower.act, seconds=1.0)

    def do_compare(prompt: str, model: str, seed: str, left: str, right: str) -> str:
        settings = {"prompt": prompt, "model": model, "seed": int(seed) if seed.isdecimal() else seed}
        a, b = actions.compare(settings, (left, right)).ids
        return json.dumps({"a": a, "b": b})

    events.on(
        [start.click, prompt.submit],
        do_compare,
        inputs=[prompt, model, seed, left, right],
        outputs=pair,
    )
    return pair


def choose(query: str, side: str, job: int) -> str:
    """The panel's query with one side replaced."""
    return json.dumps({**json.loads(query or "{}"), side: job})


class _Shower:
    """Renders a pair; likeness is computed once a pair, beside the requests."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self._lock = threading.Lock()
        self._found: dict[tuple[int, int, int, int], likeness.Likeness | str | None] = {}

    def show(self, query: Mapping[str, Any]) -> dict[str, str]:
        store = self.actions.store
        done = store.ended(JobState.DONE, limit=OFFERED)
        a, b = self._pair(query, done)
        listed = [*{job.id: job for job in (*(each for each in (a, b) if each), *done)}.values()]
        parts = {"pick": render("compare_pick.html", jobs=listed, a=a, b=b)}
        parts |= {"wait": "", "stage": "", "numbers": "", "receipts": ""}
        if a is None or b is None:
            return parts
        waiting = [job for job in (a, b) if job.state is not JobState.DONE]
        if waiting:
            parts["wait"] = render(
                "compare_wait.html", jobs=[(job, store.progress(job.id)) for job in waiting], State=JobState
            )
            return parts
        sides = [self._side(name, job) for name, job in (("A", a), ("B", b))]
        left, right = a.payload["job"], b.payload["job"]
        alike = all(left[name] == right[name] for name in ("prompt", "seed", "model"))
        same = sides[0]["kernels"] == sides[1]["kernels"]
        parts["stage"] = render("compare_stage.html", sides=sides, alike=alike, same=same)
        parts["numbers"] = render(
            "compare_numbers.html", likeness=self._likeness(a, b), sides=sides, charts=_charts(sides)
        )
        parts["receipts"] = render("compare_receipts.html", sides=sides)
        return parts

    def act(self, request: Mapping[str, Any]) -> str | None:
        if request["act"] != "cancel":
            raise KeyError(request["act"])
        self.actions.cancel(int(request["job"]))
        return f"Job {int(request['job'])} cancelled."

    def _pair(self, query: Mapping[str, Any], done: list[Job]) -> tuple[Job | None, Job | None]:
        """The jobs asked for; with neither, the latest comparison."""
        wanted = [int(query.get(side) or 0) for side in ("a", "b")]
        if not any(wanted):
            arms: dict[str, dict[int, Job]] = {}
            for job in done:
                origin = job.origin or {}
                if "comparison" in origin:
                    found = arms.setdefault(origin["comparison"], {})
                    found[origin["arm"]] = job
                    if len(found) == 2:
                        return found[0], found[1]
            return None, None
        jobs = [self.actions.store.get(each) if each else None for each in wanted]
        return jobs[0], jobs[1]

    def _side(self, name: str, job: Job) -> dict[str, Any]:
        report = self.actions.store.report(job.id) or {}
        return {
            "name": name,
            "job": job,
            "clip": media_url(job, "clip"),
            "report": report,
            "settings": report.get("job") or job.payload["job"],
            "receipt": gallery.grouped(report.get("receipt")),
            "kernels": ", ".join(
                dict.fromkeys(each["kernel"] for each in (report.get("receipt") or {}).values())
            ),
        }

    def _likeness(self, a: Job, b: Job) -> likeness.Likeness | str | None:
        """PSNR and SSIM, a reason why there is none, or None while they are computed."""
        key = (a.id, a.attempt, b.id, b.attempt)
        with self._lock:
            if key in self._found:
                return self._found[key]
            if len(self._found) > 256:
                self._found.clear()
            self._found[key] = None
        paths = [self.actions.store.path(job) for job in (a, b)]
        threading.Thread(target=self._compute, args=(key, *paths), daemon=True).start()
        return None

    def _compute(self, key: tuple[int, int, int, int], a: Any, b: Any) -> None:
        try:
            found: likeness.Likeness | str = likeness.measure(a, b)
        except REFUSALS as error:
            found = text.sentence(error)
        with self._lock:
            self._found[key] = found


def _charts(sides: list[dict[str, Any]]) -> list[tuple[str, str, list[tuple[str, float, float]]]]:
    """Title, unit and bars: seconds by stage and attention milliseconds by kind, A beside B."""
    stages, kinds = [], []
    for side in sides:
        report = side["report"]
        stages.append(dict(timing.stage_seconds(report)))
        lines = (report.get("timing") or {}).get("lines") or []
        totals: dict[str, float] = {}
        for line in lines:
            totals[line["kind"]] = totals.get(line["kind"], 0.0) + line["total_ms"]
        kinds.append(totals)
    charts = []
    for title, unit, values in (("Seconds by stage", "s", stages), ("Attention by kind", "ms", kinds)):
        names = list(dict.fromkeys(name for each in values for name in each))
        rows = [
            (f"{name} {side['name']}", each[name])
            for name in names
            for side, each in zip(sides, values, strict=True)
            if name in each
        ]
        charts.append((title, unit, timing.bars(rows)))
    return charts
