"""Reading a job store: safe beside its owner, from any thread and any process."""

from __future__ import annotations

import json
import queue
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from videoattn.jobs import schema
from videoattn.jobs.errors import StoreError, UnknownJob
from videoattn.jobs.model import ENDED, Attempt, Job, JobState, states

STATE_FOLDER = ".videoattn"
DATABASE = "jobs.sqlite3"
_COLUMNS = (
    "id, name, state, hash, payload, origin, position, attempt, failures, max_attempts, cancel_requested, "
    "created, started, finished, worker, error, files"
)


class StoreReader:
    """The queries of a job store in `folder`.

    Every method is one consistent snapshot. Lists leave the reports out; `report()` fetches one.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.state_folder = self.folder / STATE_FOLDER
        self.database = self.state_folder / DATABASE
        if not self.database.is_file():
            raise StoreError(f"{self.folder} holds no job store")
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._closed = False

    def get(self, job: int) -> Job:
        """One job; raises `UnknownJob`."""
        with self._read() as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job,)).fetchone()
        if row is None:
            raise UnknownJob(f"there is no job {job}")
        return _job(row)

    def report(self, job: int) -> dict[str, Any] | None:
        """What the render function reported (receipt, timings); None if the job has not finished."""
        with self._read() as db:
            row = db.execute("SELECT report FROM jobs WHERE id = ?", (job,)).fetchone()
        if row is None:
            raise UnknownJob(f"there is no job {job}")
        return None if row["report"] is None else json.loads(row["report"])

    def attempts(self, job: int) -> list[Attempt]:
        """Every try of a job, the first one first."""
        with self._read() as db:
            rows = db.execute(
                "SELECT attempt, fence, worker, started, finished, outcome, error "
                "FROM attempts WHERE job = ? ORDER BY attempt",
                (job,),
            ).fetchall()
        return [Attempt(**row) for row in rows]

    def counts(self) -> dict[JobState, int]:
        """The number of jobs in each state, zeros included."""
        with self._read() as db:
            rows = db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        return dict.fromkeys(JobState, 0) | {JobState(state): number for state, number in rows}

    def has_pending(self) -> bool:
        """Whether any job waits to be taken."""
        with self._read() as db:
            return db.execute("SELECT 1 FROM jobs WHERE state = 'pending' LIMIT 1").fetchone() is not None

    def open_ids(self) -> set[int]:
        """The ids of all pending and running jobs."""
        with self._read() as db:
            rows = db.execute("SELECT id FROM jobs WHERE state IN ('pending', 'running')").fetchall()
        return {row["id"] for row in rows}

    def queue(self, *, limit: int = 50, offset: int = 0) -> list[Job]:
        """The running jobs, then the pending ones in the order they will be taken."""
        select = f"SELECT {_COLUMNS} FROM jobs WHERE state = ? ORDER BY position, id LIMIT ? OFFSET ?"
        with self._read() as db:
            db.execute("BEGIN")
            try:
                (running,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'running'").fetchone()
                rows = db.execute(select, (JobState.RUNNING, limit, offset)).fetchall()
                if len(rows) < limit:
                    pending = (JobState.PENDING, limit - len(rows), max(0, offset - running))
                    rows += db.execute(select, pending).fetchall()
            finally:
                db.execute("COMMIT")
        return [_job(row) for row in rows]

    def ended(
        self,
        which: JobState | Iterable[JobState] = ENDED,
        *,
        limit: int = 50,
        before: Job | None = None,
        offset: int = 0,
    ) -> list[Job]:
        """Jobs that have ended in the given states, the latest first.

        `before` continues after the last job of an earlier page, unmoved by jobs that end meanwhile; `offset`
        jumps to a page by number.
        """
        wanted = states(which)
        where, values = _among(wanted)
        where += " AND finished IS NOT NULL"
        if before is not None:
            where += " AND (finished, id) < (?, ?)"
            values += (before.finished, before.id)
        return self._list(f"{where} ORDER BY finished DESC, id DESC", values, limit, offset)

    def by_hash(self, hash: str) -> list[Job]:
        """The jobs with a hash, the oldest first."""
        return self._list("hash = ? ORDER BY id", (hash,), -1, 0)

    def by_name(self, name: str) -> Job | None:
        """The job that owns an output name."""
        found = self._list("name = ?", (name,), 1, 0)
        return found[0] if found else None

    def all(self, which: JobState | Iterable[JobState] = tuple(JobState)) -> Iterator[Job]:
        """Every job in the given states by id, read in blocks."""
        where, values = _among(states(which))
        last = 0
        while block := self._list(f"{where} AND id > ? ORDER BY id", (*values, last), 500, 0):
            yield from block
            last = block[-1].id

    def path(self, job: Job, role: str = "clip") -> Path | None:
        """Where a job's file is; None if it has none in this role."""
        name = job.files.get(role)
        return None if name is None else self.folder / name

    def close(self) -> None:
        """Close the connections; the object can't be used any more."""
        self._closed = True
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _list(self, where: str, values: tuple[Any, ...], limit: int, offset: int) -> list[Job]:
        with self._read() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE {where} LIMIT ? OFFSET ?", (*values, limit, offset)
            ).fetchall()
        return [_job(row) for row in rows]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        """A connection for one query: SQLite lets readers of a write-ahead log run beside the writer."""
        if self._closed:
            raise StoreError(f"the job store in {self.folder} is closed")
        try:
            db = self._idle.get_nowait()
        except queue.Empty:
            db = schema.connect(self.database, write=False)
        try:
            yield db
        finally:
            if self._closed:
                db.close()
            else:
                self._idle.put(db)


def _among(wanted: tuple[JobState, ...]) -> tuple[str, tuple[Any, ...]]:
    # One state is written as an equation: then one range of an index already has the order asked for.
    if len(wanted) == 1:
        return "state = ?", (wanted[0],)
    # Several are kept out of the choice of an index, or SQLite would read and sort them all for one page.
    return f"+state IN ({', '.join('?' * len(wanted))})", tuple(wanted)


def _job(row: sqlite3.Row) -> Job:
    values = dict(row)
    values["state"] = JobState(values["state"])
    values["payload"] = json.loads(values["payload"])
    values["origin"] = None if values["origin"] is None else json.loads(values["origin"])
    values["files"] = json.loads(values["files"])
    values["cancel_requested"] = bool(values["cancel_requested"])
    return Job(**values)
