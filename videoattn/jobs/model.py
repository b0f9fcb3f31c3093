"""What a job is: its states, its fencing token, its progress, and the hash that names its work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED})
RETRYABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class Token:
    """The right to end one attempt of one job.

    `fence` comes from a counter that only grows over the whole life of a store, `owner` counts the processes
    that have owned it; a write is accepted while both are still the job's and the store's.
    """

    job: int
    attempt: int
    fence: int
    owner: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be added.

    `payload` is JSON-able and determines the output. `hash` defaults to `job_hash(payload)`. `name` is the
    stem of the output files, unique in the store, generated when None. `origin` says where the job came
    from (a job file and row, a form) and has no part in the hash. `max_attempts` bounds failed attempts
    before the job fails.
    """

    payload: Mapping[str, Any]
    hash: str | None = None
    name: str | None = None
    origin: Mapping[str, Any] | None = None
    max_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the store holds it; times in seconds since the epoch, `files` from role to file name."""

    id: int
    name: str
    state: JobState
    hash: str
    payload: dict[str, Any]
    origin: dict[str, Any] | None
    position: int
    attempt: int
    failures: int
    max_attempts: int
    cancel_requested: bool
    created: float
    started: float | None
    finished: float | None
    worker: str | None
    error: str | None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def tries(self) -> int:
        """Attempts at the present work that failed or made its clip.

        `attempt` counts over the row's whole life: earlier payloads and interrupted attempts included.
        """
        return min(self.attempt, self.failures + (self.state is JobState.DONE))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a job; `outcome` is None while it runs."""

    attempt: int
    fence: int
    worker: str
    started: float
    finished: float | None
    outcome: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running job is: `step` of `of` in `phase`, and the seconds it is expected to need yet."""

    phase: str
    step: int = 0
    of: int = 0
    remaining: float | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a render function returns.

    `files` maps a role (`clip`, `poster`, `timing`, …) to a file inside the context's work folder; `report`
    is JSON-able and is kept with the job: receipt, timings, seconds per stage.
    """

    files: Mapping[str, PurePath | str]
    report: Mapping[str, Any] = field(default_factory=dict)


def job_hash(payload: Mapping[str, Any]) -> str:
    """SHA-256 of a payload's canonical JSON, whatever the order of its keys."""
    return hashlib.sha256(canonical(payload).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; raises ValueError on NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def states(values: JobState | Iterable[JobState]) -> tuple[JobState, ...]:
    """One state or several, as a tuple."""
    return (values,) if isinstance(values, JobState) else tuple(values)
