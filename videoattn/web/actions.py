"""What visitors can do to the queue and the clips: one method an action, over the store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videoattn.jobs import Job, JobState, NewJob, Store, Worker
from videoattn.jobs.errors import StoreError
from videoattn.jobs.rendering import new_job
from videoattn.kernels import NAMES
from videoattn.render.checks import Prepared, check
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import MAX_SEED, RenderJob
from videoattn.web.choices import Models
from videoattn.web.limits import MAX_CLIP_PIXELS, MAX_CLIPS_AT_ONCE, MAX_PENDING, MAX_PROMPT
from videoattn.web.uploads import Images

REFUSALS = (UsageError, RenderError, StoreError)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The jobs that a form became, and what looks odd about them."""

    ids: list[int]
    warnings: list[str]


class Actions:
    """Everything the page and its API do; thread-safe.

    Methods raise UsageError, RenderError or StoreError, each one line for the visitor.
    """

    def __init__(self, store: Store, workers: list[Worker], models: Models) -> None:
        self.store = store
        self.workers = workers
        self.models = models
        self.images = Images(store.state_folder / "images")
        self._adding = threading.Lock()

    @property
    def device(self) -> str:
        """The device of the first worker."""
        return self.workers[0].name if self.workers else "cpu"

    def prepare(self, settings: Mapping[str, Any]) -> tuple[Prepared, list[str]]:
        """Check settings against bounds, models and kernels; returns the job explicit, and warnings.

        `image` must be one of our stored images, by name or path.
        """
        for field in ("prompt", "negative_prompt"):
            if len(str(settings.get(field) or "")) > MAX_PROMPT:
                raise UsageError(
                    f"the {field.replace('_', ' ')} is longer than {MAX_PROMPT} characters: shorten it"
                )
        job = RenderJob.parse({name: value for name, value in settings.items() if value is not None})
        if not job.prompt:
            raise UsageError("there is no prompt: say what the clip shows")
        if job.image is not None:
            kept = self.images.find(job.image)
            if kept is None:
                raise UsageError("the start image is not on this server: upload it again")
            job = job.model_copy(update={"image": str(kept)})
        self.models.require(job)
        warnings: list[str] = []
        prepared = check(job, local_files_only=self.models.local_files_only, warn=warnings.append)
        resolved = prepared.job
        assert resolved.width is not None
        assert resolved.height is not None
        assert resolved.num_frames is not None
        if resolved.width * resolved.height * resolved.num_frames > MAX_CLIP_PIXELS:
            raise UsageError("the clip is too large for this server: choose a smaller size or fewer frames")
        return prepared, warnings

    def submit(
        self,
        settings: Mapping[str, Any],
        *,
        clips: int = 1,
        timing: bool = False,
        compare: tuple[str, ...] = (),
        origin: Mapping[str, Any] | None = None,
    ) -> Submitted:
        """Queue one job, or several with consecutive seeds."""
        if not 1 <= clips <= MAX_CLIPS_AT_ONCE:
            raise UsageError(f"the number of clips lies between 1 and {MAX_CLIPS_AT_ONCE}")
        prepared, warnings = self.prepare(settings)
        self._require_kernels(prepared, compare)
        first = prepared.job.seed
        if first + clips - 1 > MAX_SEED:
            raise UsageError(f"the seed is too large for {clips} clips: the last one would pass {MAX_SEED}")
        jobs = [
            new_job(
                _with_seed(prepared, first + number),
                timing=timing,
                compare=compare,
                allow_offload=self.device != "cpu",
                origin={"from": "page", **(origin or {})},
            )
            for number in range(clips)
        ]
        return Submitted(self._add(jobs), warnings)

    def compare(self, settings: Mapping[str, Any], kernels: tuple[str, str]) -> Submitted:
        """Queue the same job once for each of two kernels, both timed, as one comparison."""
        if kernels[0] == kernels[1]:
            raise UsageError("choose two different kernels: a kernel compared with itself shows nothing")
        group = secrets.token_hex(6)
        jobs: list[NewJob] = []
        warnings: list[str] = []
        for arm, kernel in enumerate(kernels):
            prepared, said = self.prepare({**settings, "attention": kernel})
            self._require_kernels(prepared, ())
            warnings += [text for text in said if text not in warnings]
            jobs.append(
                new_job(prepared, timing=True, origin={"from": "page", "comparison": group, "arm": arm})
            )
        return Submitted(self._add(jobs), warnings)

    def measure_again(self, job: int, arms: tuple[str, ...]) -> Submitted:
        """Queue a finished job once more with every attention call timed, and `arms` run beside it."""
        return self.submit(self.settings(job), timing=True, compare=arms)

    def settings(self, job: int) -> dict[str, Any]:
        """The settings of a job, for a form; a start image that is gone is left out."""
        values = dict(self.store.get(job).payload["job"])
        if self.images.find(values.get("image")) is None:
            values["image"] = None
        return values

    def cancel(self, job: int) -> JobState:
        """Cancel a pending or running job."""
        return self.store.cancel(job)

    def move(self, job: int, where: str, other: int | None = None) -> None:
        """Move a pending job `first`, `up`, `down`, `last`, or `before` or `after` another one."""
        if where == "first":
            self.store.move_first(job)
        elif where == "last":
            self.store.move(job)
        elif where == "before" and other is not None:
            self.store.move(job, before=other)
        elif where == "after" and other is not None:
            self.store.move(job, after=other)
        elif where in ("up", "down"):
            self._step(job, where)
        else:
            raise UsageError(f"cannot move a job '{where}': use first, up, down, last, before or after")

    def _step(self, job: int, where: str) -> None:
        running = self.store.counts()[JobState.RUNNING]
        pending = [each.id for each in self.store.queue(limit=running + MAX_PENDING)]
        states = {each: number for number, each in enumerate(pending)}
        if job not in states:
            return
        place = states[job] + (-1 if where == "up" else 1)
        if 0 <= place < len(pending) and self.store.get(pending[place]).state is JobState.PENDING:
            if where == "up":
                self.store.move(job, before=pending[place])
            else:
                self.store.move(job, after=pending[place])

    def delete(self, job: int) -> None:
        """Remove a job that has ended, with its files."""
        self.store.delete(job)

    def status(self, job: int) -> dict[str, Any]:
        """A job's state, progress and links, JSON-able."""
        found = self.store.get(job)
        progress = self.store.progress(job)
        return {
            "job": found.id,
            "state": str(found.state),
            "phase": progress.phase if progress else None,
            "step": progress.step if progress else None,
            "of": progress.of if progress else None,
            "remaining_seconds": progress.remaining if progress else None,
            "error": found.error,
            "files": {role: media_url(found, role) for role in found.files},
        }

    def file(self, job: int, role: str = "clip") -> Path:
        """A finished job's file; UsageError if it has none of that role."""
        found = self.store.get(job)
        path = self.store.path(found, role)
        if path is None or not path.is_file():
            raise UsageError(f"job {job} has no {role}: it is {found.state}")
        return path

    def _require_kernels(self, prepared: Prepared, compare: tuple[str, ...]) -> None:
        for arm in compare:
            if arm not in NAMES:
                raise UsageError(f"unknown attention kernel '{arm}': choose from {', '.join(NAMES)}")
        if prepared.job.attention == "auto" and not compare:
            return
        from videoattn.render.devices import pick_device, require_kernels

        require_kernels(prepared, pick_device(self.device), compare)

    def _add(self, jobs: list[NewJob]) -> list[int]:
        with self._adding:
            if self.store.counts()[JobState.PENDING] + len(jobs) > MAX_PENDING:
                raise UsageError(
                    f"the queue is full ({MAX_PENDING} jobs): wait until some are done, or cancel some"
                )
            return self.store.add(jobs)


def media_url(job: Job, role: str) -> str:
    """Where the page's server hands out a job's file; changes when the job is rendered again."""
    return f"media/{job.id}/{role}?v={job.attempt}"


def _with_seed(prepared: Prepared, seed: int) -> Prepared:
    from dataclasses import replace

    return replace(prepared, job=prepared.job.model_copy(update={"seed": seed}))
