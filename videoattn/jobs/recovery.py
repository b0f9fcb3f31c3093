"""What opening a store repairs: attempts cut short, files and rows that do not match."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from videoattn.jobs import outputs
from videoattn.jobs.model import JobState, NewJob, Token, canonical, job_hash

if TYPE_CHECKING:
    from videoattn.jobs.store import Store

CLIP_SUFFIXES = frozenset({".mp4"})


@dataclass(slots=True)
class Recovered:
    """Job ids by what happened to them at opening, and the clips that belong to no job."""

    interrupted: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(
            (self.interrupted, self.completed, self.cancelled, self.missing, self.adopted, self.unclaimed)
        )


def recover(store: Store, identify: Callable[[Path], NewJob | None] | None) -> Recovered:
    """Bring rows and files into agreement after any kind of death of the previous owner.

    A running job whose attempt is complete is published; any other is interrupted, or cancelled if that had
    been asked for. A finished job whose clip is gone fails with that reason. A clip without a finished job
    is adopted if `identify` can tell which job it shows, and listed as unclaimed if not; it is never removed.
    """
    found = Recovered()
    store._empty_trash()
    _end_running(store, found)
    work = store.state_folder / "work"
    for leftover in work.iterdir():
        outputs.discard(leftover)
    _match_files(store, found, identify)
    return found


def _end_running(store: Store, found: Recovered) -> None:
    rows = store._db_rows(
        "SELECT id, name, attempt, fence, cancel_requested FROM jobs WHERE state = 'running'"
    )
    for row in rows:
        token = Token(row["id"], row["attempt"], row["fence"], store.owner)
        work = store._work(token.fence)
        manifest = outputs.read_manifest(work)
        with store._write() as db:
            if row["cancel_requested"]:
                store._end(db, token, JobState.CANCELLED, None)
                found.cancelled.append(token.job)
            elif manifest is not None and outputs.is_published(work, manifest, store.folder, row["name"]):
                store._publish(db, token, work, manifest)
                found.completed.append(token.job)
            else:
                reason = "the process that ran it stopped before it was finished"
                store._end(db, token, JobState.INTERRUPTED, reason)
                found.interrupted.append(token.job)


def _match_files(store: Store, found: Recovered, identify: Callable[[Path], NewJob | None] | None) -> None:
    on_disk = {entry.name for entry in os.scandir(store.folder) if entry.is_file()}
    claimed: set[str] = set()
    for row in store._db_rows("SELECT id, state, files FROM jobs WHERE files != '{}'"):
        files = json.loads(row["files"])
        claimed.update(files.values())
        if row["state"] != JobState.DONE:
            continue
        # Without its poster a clip is still a clip; without the clip there is nothing to show.
        essential = files.get("clip") or next(iter(files.values()), None)
        if essential is not None and essential not in on_disk:
            with store._write() as db:
                db.execute(
                    "UPDATE jobs SET state = 'failed', failures = 0, error = ?, files = '{}' WHERE id = ?",
                    (f"its file {essential} is missing from the folder", row["id"]),
                )
            claimed.difference_update(files.values())
            found.missing.append(row["id"])
    loose = sorted(name for name in on_disk - claimed if Path(name).suffix in CLIP_SUFFIXES)
    for name in loose:
        found_job = identify(store.folder / name) if identify is not None else None
        job = None if found_job is None else _adopt(store, name, found_job)
        if job is None:
            found.unclaimed.append(name)
        else:
            found.adopted.append(job)


def _adopt(store: Store, name: str, found: NewJob) -> int | None:
    """Make a clip the result of its job, or of a new one; None if another job has its name."""
    hashed, stem = found.hash or job_hash(found.payload), Path(name).stem
    files = canonical({"clip": name})
    owner = store.by_name(stem)
    finished = (store.folder / name).stat().st_mtime
    with store._write() as db:
        if owner is None:
            outputs.check_name(stem)
            cursor = db.execute(
                "INSERT INTO jobs (name, state, hash, payload, position, max_attempts, created, finished, "
                "files) VALUES (?, 'done', ?, ?, 0, 1, ?, ?, ?)",
                (stem, hashed, canonical(found.payload), time.time(), finished, files),
            )
            return cursor.lastrowid
        if owner.state is JobState.DONE or owner.hash != hashed:
            return None
        db.execute(
            "UPDATE jobs SET state = 'done', error = NULL, finished = ?, files = ? WHERE id = ?",
            (finished, files, owner.id),
        )
        return owner.id
