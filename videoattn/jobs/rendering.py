"""Render jobs in the store: how a RenderJob becomes a row, is rendered, and is found again in a clip."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videoattn.jobs.context import Context, PermanentError
from videoattn.jobs.model import Job, NewJob, Result, job_hash
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.metadata import rooted

if TYPE_CHECKING:
    from videoattn.render.checks import Prepared
    from videoattn.render.run import Renderer, RenderResult

OFFLOAD_LEVELS = ("none", "model", "group")
# Each job brings up to two prompts, and the renderer keeps 64.
LOOKAHEAD = 30


def new_job(
    prepared: Prepared,
    *,
    name: str | None = None,
    origin: Mapping[str, Any] | None = None,
    timing: bool = False,
    compare: tuple[str, ...] = (),
    allow_offload: bool = False,
    max_attempts: int = 1,
) -> NewJob:
    """The row for a checked job.

    `timing` logs its attention calls, with `compare` as shadow arms. `allow_offload` lets it go on with the
    next offload level when the GPU's memory runs out. None of these has a part in the hash.
    """
    payload = {
        "job": prepared.job.model_dump(mode="json"),
        "timing": timing or bool(compare),
        "compare": list(compare),
        "allow_offload": allow_offload,
    }
    hashed = content_hash(payload["job"], prepared.image_sha256)
    return NewJob(payload, hashed, name, origin, max_attempts)


def content_hash(job: Mapping[str, Any], image_sha256: str | None) -> str:
    """What names the work of a resolved job: its settings, with the image's content in place of its path.

    Other paths count as whole ones, as the clip will carry them.
    """
    return job_hash({**rooted(job), "image": image_sha256})


def identify(path: Path) -> NewJob | None:
    """The job that a clip says it was rendered from; None if it says nothing."""
    from videoattn.render.metadata import read

    try:
        description = read(path)
        job = RenderJob.parse(description["job"]).model_dump(mode="json")
    except (RenderError, UsageError):
        return None
    # A clip names the dtype it was rendered in; the one that `auto` chooses there was hardly asked for.
    usual = "fp32" if description.get("device") == "cpu" else "bf16"
    if job["dtype"] == usual:
        job["dtype"] = "auto"
    payload = {"job": job, "timing": False, "compare": [], "allow_offload": False}
    return NewJob(payload, content_hash(job, description.get("image_sha256")))


def render_job(job: Job, context: Context) -> Result:
    """A worker's render function: clip, poster, timing log where asked, and what is known about them."""
    renderer = context.models.get("renderer", lambda: _Renderer(context))
    return renderer.render(job, context)


class _Renderer:
    """A `Renderer` that outlives the job, and the hashes of the jobs whose prompts it has encoded."""

    def __init__(self, context: Context) -> None:
        from videoattn.render import models
        from videoattn.render.run import Renderer

        models.quiet()
        self._warnings: list[str] = []
        self._renderer: Renderer = Renderer(
            device=context.device,
            local_files_only=bool(context.options.get("local_files_only")),
            warn=self._warn,
        )
        self._encoded: set[str] = set()
        # The offload level to begin with for a model and size, where a lower one did not fit.
        self._fitting: dict[tuple[Any, ...], str] = {}

    def render(self, job: Job, context: Context) -> Result:
        self._warnings.clear()
        settings = RenderJob.parse(job.payload["job"])
        notes: list[str] = []
        memory = (settings.model, settings.width, settings.height, settings.num_frames)
        if job.payload["allow_offload"] and memory in self._fitting:
            settings = settings.model_copy(update={"offload": self._fitting[memory]})
            notes.append(
                f"rendered with offload {settings.offload}, since a job like it ran out of GPU memory"
            )
        while True:
            try:
                result = self._attempt(job, settings, context)
                return _result(result, [*notes, *self._warnings], context)
            except UsageError as error:
                raise PermanentError(str(error)) from error
            except RenderError as error:
                _raise_if_full(error, context.work)
                allowed = job.payload["allow_offload"] and _out_of_memory(error)
                following = _next_offload(settings) if allowed else None
                if following is None:
                    raise
                notes.append(
                    f"out of GPU memory with offload {settings.offload}, so offload {following} was used"
                )
                print(f"job {job.id}: {notes[-1]}", file=sys.stderr)
                settings = settings.model_copy(update={"offload": following})
                self._fitting[memory] = following
                self._renderer.close()
                self._encoded.clear()

    def _attempt(self, job: Job, settings: RenderJob, context: Context) -> RenderResult:
        listener = _Listener(context)
        prepared = self._renderer.check(settings)
        prepared_in = 0.0
        if job.hash not in self._encoded:
            started = time.monotonic()
            ahead = [job, *context.upcoming]
            same = [prepared, *self._check_others(context.upcoming)]
            self._renderer.prepare(same, listener)
            self._encoded = {each.hash for each in ahead}
            prepared_in = time.monotonic() - started
        timing = context.work / "timing.jsonl" if job.payload["timing"] else None
        result = self._renderer.render(
            prepared,
            output=context.work / "clip.mp4",
            poster=context.work / "poster.png",
            timing=timing,
            compare=tuple(job.payload["compare"]),
            progress=listener,
        )
        return replace(result, load_seconds=result.load_seconds + prepared_in)

    def _check_others(self, jobs: Any) -> list[Any]:
        """The jobs that can be rendered; one that can't will say so in its own turn."""
        checked = []
        noted = len(self._warnings)
        for job in jobs:
            try:
                checked.append(self._renderer.check(RenderJob.parse(job.payload["job"])))
            except (UsageError, RenderError):
                continue
        del self._warnings[noted:]
        return checked

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)


class _Listener:
    """Passes a render's phases and steps on to the worker, which may answer by stopping the job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._phase, self._total = "", 0

    def phase(self, name: str, total: int | None) -> None:
        self._phase, self._total = name, total or 0
        self._context.progress(name, 0, self._total)

    def step(self, done: int) -> None:
        self._context.progress(self._phase, done, self._total)


def _result(result: RenderResult, warnings: list[str], context: Context) -> Result:
    names = {"clip": "clip.mp4", "poster": "poster.png", "timing": "timing.jsonl"}
    report = {
        "job": result.job.model_dump(mode="json"),
        "receipt": None if result.receipt is None else result.receipt.to_dict(),
        "stage_seconds": result.stage_seconds,
        "total_seconds": result.total_seconds,
        "load_seconds": result.load_seconds,
        "layers": result.layers,
        "timing": None if result.report is None else result.report.to_dict(),
        "device": result.metadata.get("device"),
        "warnings": warnings,
    }
    files = {role: name for role, name in names.items() if (context.work / name).exists()}
    return Result(files, report)


def _raise_if_full(error: RenderError, work: Path) -> None:
    """Raise a full disk as what it is: no fault of the job, which is to wait for room."""
    if "disk is full" in str(error) or shutil.disk_usage(work).free == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work)) from error


def _out_of_memory(error: RenderError) -> bool:
    import torch

    return isinstance(error.__context__, torch.OutOfMemoryError)


def _next_offload(job: RenderJob) -> str | None:
    following = OFFLOAD_LEVELS.index(job.offload) + 1
    return OFFLOAD_LEVELS[following] if following < len(OFFLOAD_LEVELS) else None
