"""What came out of a batch: one HTML file and one CSV, rebuilt from the store at the end of every run."""

from __future__ import annotations

import base64
import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from PIL import Image

from videoattn.batch.page import TEMPLATE
from videoattn.batch.view import duration
from videoattn.jobs import Job, JobState, StoreReader
from videoattn.jobs.outputs import write_atomic
from videoattn.render.job import RenderJob
from videoattn.version import __version__

HTML, CSV = "report.html", "report.csv"
_THUMBNAIL = (240, 240)


def write(store: StoreReader, ids: Sequence[int]) -> tuple[Path, Path]:
    """Write `report.html` and `report.csv` into the store's folder for these jobs; returns their paths."""
    entries = [_entry(store, store.get(job)) for job in ids]
    page, sheet = store.folder / HTML, store.folder / CSV
    write_atomic(sheet, _csv(entries))
    write_atomic(page, _html(entries))
    return page, sheet


def _entry(store: StoreReader, job: Job) -> dict[str, Any]:
    """Everything about one job that the reports show."""
    report: dict[str, Any] = {}
    if job.state is JobState.DONE:
        report = store.report(job.id) or {}
    settings = report.get("job") or job.payload["job"]
    timing = report.get("timing") or {}
    total = timing.get("total") or {}
    origin = job.origin or {}
    return {
        "name": job.name,
        "state": job.state.value,
        "file": origin.get("file"),
        "row": origin.get("row"),
        "clip": job.files.get("clip") if job.state is JobState.DONE else None,
        "log": job.files.get("timing") if job.state is JobState.DONE else None,
        "attempts": job.tries,
        "error": job.error if job.state is not JobState.DONE else None,
        "warnings": report.get("warnings") or [],
        "settings": settings,
        "stages": report.get("stage_seconds") or {},
        "total_seconds": report.get("total_seconds"),
        "load_seconds": report.get("load_seconds"),
        "device": report.get("device"),
        "kernels": _kernels(report.get("receipt")),
        "attention_share": total.get("share"),
        "share_is_estimate": bool(timing.get("share_is_estimate")),
        "ratios": {arm: line.get("ratio") for arm, line in (total.get("arms") or {}).items()},
        "poster": _thumbnail(store.path(job, "poster")) if job.state is JobState.DONE else None,
    }


def _kernels(receipt: Mapping[str, Any] | None) -> dict[str, str]:
    return {kind: choice["kernel"] for kind, choice in (receipt or {}).items()}


def _thumbnail(poster: Path | None) -> str | None:
    """A small JPEG as a data URI, so that the page is one file; None when the poster is gone."""
    if poster is None or not poster.is_file():
        return None
    with Image.open(poster) as image:
        small = image.convert("RGB")
        small.thumbnail(_THUMBNAIL)
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _csv(entries: Sequence[Mapping[str, Any]]) -> str:
    stages = list(dict.fromkeys(stage for entry in entries for stage in entry["stages"]))
    arms = list(dict.fromkeys(arm for entry in entries for arm in entry["ratios"]))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    fixed = ("name", "state", "clip", "file", "row", "attempts", "error")
    figures = ("total_seconds", "load_seconds", "attention_share")
    writer.writerow(
        [
            *fixed,
            "warnings",
            *figures,
            *(f"seconds_{stage}" for stage in stages),
            *(f"ratio_{arm}" for arm in arms),
            "device",
            "kernels",
            *RenderJob.model_fields,
        ]
    )
    for entry in entries:
        writer.writerow(
            [
                *(entry[name] for name in fixed),
                "; ".join(entry["warnings"]),
                *(entry[name] for name in figures),
                *(entry["stages"].get(stage) for stage in stages),
                *(entry["ratios"].get(arm) for arm in arms),
                entry["device"],
                " ".join(f"{kind}={kernel}" for kind, kernel in entry["kernels"].items()),
                *(_cell(entry["settings"].get(name)) for name in RenderJob.model_fields),
            ]
        )
    return out.getvalue()


def _cell(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _html(entries: Sequence[Mapping[str, Any]]) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = duration
    done = [entry for entry in entries if entry["state"] == JobState.DONE]
    common, varying = _split_settings(entries)
    return environment.from_string(TEMPLATE).render(
        entries=entries,
        done=len(done),
        failed=sum(entry["state"] == JobState.FAILED for entry in entries),
        seconds=sum(entry["total_seconds"] or 0.0 for entry in done),
        common=common,
        varying=varying,
        stages=list(_stage_totals(done)),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _split_settings(entries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Settings that all jobs share and that say something, and the names of those that differ."""
    names = [name for name in RenderJob.model_fields if name not in ("prompt", "seed")]
    values = {name: [_cell(entry["settings"].get(name)) for entry in entries] for name in names}
    common = {
        name: found[0]
        for name, found in values.items()
        if found and all(value == found[0] for value in found) and found[0] not in (None, "", False)
    }
    return common, [name for name, found in values.items() if any(value != found[0] for value in found)]


def _stage_totals(done: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Stage, seconds in it over all clips, and its share of them."""
    totals: dict[str, float] = {}
    for entry in done:
        for stage, seconds in entry["stages"].items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    whole = sum(totals.values())
    for stage, seconds in totals.items():
        yield stage, seconds, seconds / whole if whole else 0.0
