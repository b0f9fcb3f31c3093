"""A queue of render jobs that survives anything: SQLite store, fenced attempts, one worker per device."""

from videoattn.jobs.context import Context, JobCancelled, PermanentError
from videoattn.jobs.errors import (
    BadFolder,
    OwnershipLost,
    RetryLimit,
    StaleToken,
    StoreBusy,
    StoreError,
    StoreFull,
    UnknownJob,
    WrongState,
)
from videoattn.jobs.model import Attempt, Job, JobState, NewJob, Progress, Result, Token, job_hash
from videoattn.jobs.reader import StoreReader
from videoattn.jobs.store import Store
from videoattn.jobs.worker import Worker, WorkerStatus

__all__ = [
    "Attempt",
    "BadFolder",
    "Context",
    "Job",
    "JobCancelled",
    "JobState",
    "NewJob",
    "OwnershipLost",
    "PermanentError",
    "Progress",
    "Result",
    "RetryLimit",
    "StaleToken",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreReader",
    "Token",
    "UnknownJob",
    "Worker",
    "WorkerStatus",
    "WrongState",
    "job_hash",
]
