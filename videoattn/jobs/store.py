"""The job store's owner: the one process that adds, orders, hands out and ends jobs."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from videoattn.jobs import order, outputs, recovery, schema
from videoattn.jobs.errors import (
    BadFolder,
    OwnershipLost,
    RetryLimit,
    StaleToken,
    StoreError,
    StoreFull,
    WrongState,
    is_disk_full,
)
from videoattn.jobs.live import LiveState
from videoattn.jobs.lock import OwnerLock
from videoattn.jobs.model import (
    ENDED,
    RETRYABLE,
    Job,
    JobState,
    NewJob,
    Progress,
    Token,
    canonical,
    job_hash,
    states,
)
from videoattn.jobs.reader import DATABASE, STATE_FOLDER, StoreReader


class Store(StoreReader, LiveState):
    """A job store, opened as its owner; creates `folder` when it is missing.

    Published files lie in `folder`, everything else in `folder/.videoattn`. `identify(path)` tells
    which job a clip shows (None if it is not one of ours); with it, clips that no row claims become jobs
    again. `attempt_limit` bounds how often one job may be started at all. `recovered` says what
    opening had to repair. Raises `StoreBusy` while another process owns the store, and `BadFolder` when
    there can be none. Every write raises `OwnershipLost` once a later owner exists, and `StoreFull` when the
    disk is full; neither leaves anything half-written. Thread-safe.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        identify: Callable[[Path], NewJob | None] | None = None,
        attempt_limit: int = 20,
    ) -> None:
        state_folder = Path(folder) / STATE_FOLDER
        self.attempt_limit = attempt_limit
        self._mutex = threading.RLock()
        LiveState.__init__(self)
        try:
            (state_folder / "work").mkdir(parents=True, exist_ok=True)
            self._lock = OwnerLock(state_folder / "owner.lock", what=str(folder))
        except OSError as error:
            if is_disk_full(error):
                raise _cannot_open(folder, error) from error
            raise BadFolder(f"cannot write {folder}: {_reason(error).lower()}") from error
        try:
            self._db = schema.connect(state_folder / DATABASE, write=True)
            try:
                StoreReader.__init__(self, folder)
                self.owner = self._take_ownership()
                self.recovered = recovery.recover(self, identify)
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            self._lock.release()
            raise _cannot_open(folder, error) from error
        except BaseException:
            self._lock.release()
            raise

    # Adding, ordering, removing

    def add(self, jobs: NewJob | Iterable[NewJob]) -> list[int]:
        """Append jobs to the queue, all or none; returns their ids.

        Raises `StoreError` when a name is illegal or taken.
        """
        batch = [jobs] if isinstance(jobs, NewJob) else list(jobs)
        now = time.time()
        with self._write() as db:
            first = 1 + (_scalar(db, "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'") or 0)
            position = order.back(db)
            rows = []
            for number, job in enumerate(batch):
                hashed = job.hash or job_hash(job.payload)
                name = outputs.check_name(job.name or f"{first + number:06d}-{hashed[:8]}")
                origin = None if job.origin is None else canonical(job.origin)
                rows.append(
                    (
                        first + number,
                        name,
                        hashed,
                        canonical(job.payload),
                        origin,
                        position + order.GAP * number,
                        job.max_attempts,
                        now,
                    )
                )
            for row in rows:
                try:
                    db.execute(
                        "INSERT INTO jobs (id, name, state, hash, payload, origin, position, max_attempts, "
                        "created) VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?)",
                        row,
                    )
                except sqlite3.IntegrityError as error:
                    raise StoreError(f"the output name {row[1]!r} is taken by another job") from error
        return [row[0] for row in rows]

    def move(self, job: int, *, before: int | None = None, after: int | None = None) -> None:
        """Move a pending job directly before or after another one; with neither given, to the end.

        Raises `WrongState` unless both are pending.
        """
        if before is not None and after is not None:
            raise ValueError("give before or after, not both")
        other = before if before is not None else after
        with self._write() as db:
            for one in {job, other} - {None}:
                state = self._state(db, one)
                if state is not JobState.PENDING:
                    raise WrongState(f"job {one} is {state}; only pending jobs have a place in the queue")
            if other != job:
                order.place(db, job, other, before=before is not None)

    def move_first(self, job: int) -> None:
        """Make a pending job the next one to be taken."""
        with self._write() as db:
            state = self._state(db, job)
            if state is not JobState.PENDING:
                raise WrongState(f"job {job} is {state}; only pending jobs have a place in the queue")
            order.assign(db, job, order.front(db))

    def reorder(self, jobs: Sequence[int]) -> None:
        """Put pending jobs into the given order, in the places they hold together now.

        Jobs of the list that have left the queue meanwhile are passed over; jobs outside it do not move.
        """
        with self._write() as db:
            order.permute(db, jobs)

    def cancel(self, job: int) -> JobState:
        """Cancel a pending job at once, or ask a running one to stop; returns the state it has now.

        A running job ends as cancelled even if it finishes meanwhile, and after a crash too. Raises
        `WrongState` for a job that has ended.
        """
        with self._write() as db:
            state = self._state(db, job)
            if state is JobState.PENDING:
                self._end_pending(db, "id = ?", (job,))
                return JobState.CANCELLED
            if state is not JobState.RUNNING:
                raise WrongState(f"job {job} has ended ({state}) and cannot be cancelled")
            db.execute("UPDATE jobs SET cancel_requested = 1 WHERE id = ?", (job,))
        self._tell_cancelled(job)
        return JobState.RUNNING

    def cancel_pending(self, jobs: Collection[int] | None = None) -> int:
        """Cancel everything that has not started, or what of `jobs` has not; returns how many that were."""
        with self._write() as db:
            if jobs is None:
                return self._end_pending(db, "TRUE", ())
            return sum(self._end_pending(db, "id = ?", (job,)) for job in jobs)

    def retry(self, job: int, *, first: bool = False) -> None:
        """Queue a job again that failed, was cancelled or was interrupted, at the end or in front.

        Allows one more failure than there were. Raises `WrongState` for other states and `RetryLimit` after
        `attempt_limit` attempts.
        """
        with self._write() as db:
            state = self._state(db, job)
            if state not in RETRYABLE:
                raise WrongState(
                    f"job {job} is {state}; only failed, cancelled or interrupted jobs can be retried"
                )
            attempt = _scalar(db, "SELECT attempt FROM jobs WHERE id = ?", (job,))
            if attempt >= self.attempt_limit:
                raise RetryLimit(f"job {job} was tried {attempt} times, the limit of this store")
            self._requeue(db, job, order.front(db) if first else order.back(db))

    def retry_all(
        self, which: JobState | Iterable[JobState] = JobState.INTERRUPTED, jobs: Collection[int] | None = None
    ) -> int:
        """Queue every job in the given states, or those of `jobs`, again where it was; returns how many.

        Jobs past `attempt_limit` stay as they are.
        """
        wanted = states(which)
        if not RETRYABLE.issuperset(wanted):
            raise WrongState("only failed, cancelled or interrupted jobs can be retried")
        with self._write() as db:
            marks = ", ".join("?" * len(wanted))
            rows = db.execute(
                f"SELECT id, position FROM jobs WHERE state IN ({marks}) AND attempt < ?",
                (*wanted, self.attempt_limit),
            ).fetchall()
            chosen = None if jobs is None else set(jobs)
            rows = [row for row in rows if chosen is None or row["id"] in chosen]
            for row in rows:
                self._requeue(db, row["id"], row["position"])
        return len(rows)

    def allow(self, jobs: Iterable[int], attempts: int) -> None:
        """Let each of these jobs fail `attempts` times from now on, whatever has failed before."""
        with self._write() as db:
            db.executemany(
                "UPDATE jobs SET max_attempts = failures + ? WHERE id = ?", [(attempts, job) for job in jobs]
            )

    def replace(self, job: int, new: NewJob) -> None:
        """Give an unstarted or ended job another payload and queue it at the end, its name kept.

        Its files stay in place until the new result is published over them. Raises `WrongState` while it
        runs.
        """
        with self._write() as db:
            state = self._state(db, job)
            if state is JobState.RUNNING:
                raise WrongState(f"job {job} is running and cannot be changed")
            origin = None if new.origin is None else canonical(new.origin)
            db.execute(
                "UPDATE jobs SET payload = ?, hash = ?, origin = ?, failures = 0, max_attempts = ?, "
                "report = NULL WHERE id = ?",
                (canonical(new.payload), new.hash or job_hash(new.payload), origin, new.max_attempts, job),
            )
            self._requeue(db, job, order.back(db))

    def delete(self, jobs: int | Iterable[int]) -> int:
        """Remove jobs with their files; returns how many. Raises `WrongState` if one has not ended."""
        wanted = [jobs] if isinstance(jobs, int) else list(jobs)
        with self._write() as db:
            for job in wanted:
                state = self._state(db, job)
                if state not in ENDED:
                    raise WrongState(f"job {job} is {state}; cancel it before deleting it")
            self._delete(db, wanted)
        self._empty_trash()
        return len(wanted)

    def clear(self, which: JobState | Iterable[JobState]) -> int:
        """Remove every job in the given ended states with its files; returns how many."""
        wanted = states(which)
        if not ENDED.issuperset(wanted):
            raise WrongState("only jobs that have ended can be cleared")
        with self._write() as db:
            ids = [
                row["id"]
                for row in db.execute(
                    f"SELECT id FROM jobs WHERE state IN ({', '.join('?' * len(wanted))})", wanted
                )
            ]
            self._delete(db, ids)
        self._empty_trash()
        return len(ids)

    # Handing out and ending attempts

    def claim(self, worker: str) -> tuple[Job, Token] | None:
        """Start the next pending job on behalf of a worker; None when nothing is pending."""
        with self._write() as db:
            row = db.execute(
                "SELECT id, attempt FROM jobs WHERE state = 'pending' ORDER BY position, id LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            fence = _scalar(db, "UPDATE meta SET value = value + 1 WHERE key = 'fence' RETURNING value")
            token = Token(row["id"], row["attempt"] + 1, fence, self.owner)
            now = time.time()
            db.execute(
                "UPDATE jobs SET state = 'running', attempt = ?, fence = ?, started = ?, finished = NULL, "
                "worker = ?, error = NULL, cancel_requested = 0 WHERE id = ?",
                (token.attempt, fence, now, worker, token.job),
            )
            db.execute(
                "INSERT INTO attempts (job, attempt, fence, worker, started) VALUES (?, ?, ?, ?, ?)",
                (token.job, token.attempt, fence, worker, now),
            )
        self.set_progress(token, Progress("starting", at=now))
        return self.get(token.job), token

    def work_folder(self, token: Token) -> Path:
        """Where the attempt writes; made empty here, removed when the attempt ends."""
        work = self.work(token)
        outputs.discard(work)
        try:
            work.mkdir()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return work

    def work(self, token: Token) -> Path:
        """The path of that folder."""
        return self._work(token.fence)

    def finish(self, token: Token) -> Job:
        """End an attempt whose work folder is complete: publish its files and record its result.

        Raises `StaleToken` when the attempt has lost its job, in which case nothing is published.
        """
        work = self._work(token.fence)
        manifest = outputs.read_manifest(work)
        if manifest is None:
            raise StoreError(f"job {token.job} is not finished: {work} holds no {outputs.MANIFEST}")
        with self._write() as db:
            if self._held(db, token)["cancel_requested"]:
                self._end(db, token, JobState.CANCELLED, None)
            else:
                self._publish(db, token, work, manifest)
        self._after_attempt(token)
        self._empty_trash()
        return self.get(token.job)

    def fail(self, token: Token, error: str, *, retry: bool = True) -> Job:
        """End an attempt as failed; with `retry`, the job is queued again while it has attempts left."""
        with self._write() as db:
            row = self._held(db, token)
            failures = row["failures"] + 1
            db.execute("UPDATE jobs SET failures = ? WHERE id = ?", (failures, token.job))
            if row["cancel_requested"]:
                self._end(db, token, JobState.CANCELLED, None)
            else:
                self._end(db, token, JobState.FAILED, error)
                if retry and failures < row["max_attempts"] and token.attempt < self.attempt_limit:
                    self._requeue(db, token.job, row["position"], keep_error=True)
        self._after_attempt(token)
        return self.get(token.job)

    def cancelled(self, token: Token) -> Job:
        """End an attempt because its cancellation was asked for."""
        with self._write() as db:
            self._held(db, token)
            self._end(db, token, JobState.CANCELLED, None)
        self._after_attempt(token)
        return self.get(token.job)

    def interrupt(self, token: Token, reason: str, *, requeue: bool = False) -> Job:
        """Take an attempt away from its worker without counting it as a failure.

        From here on the token is stale. With `requeue` the job is pending again, in its old place.
        """
        with self._write() as db:
            row = self._held(db, token)
            if row["cancel_requested"]:
                self._end(db, token, JobState.CANCELLED, None)
            else:
                self._end(db, token, JobState.INTERRUPTED, reason)
                if requeue and token.attempt < self.attempt_limit:
                    self._requeue(db, token.job, row["position"], keep_error=True)
        self._after_attempt(token)
        return self.get(token.job)

    def close(self) -> None:
        """Close the store and give up its lock; jobs that still run are interrupted at the next opening."""
        with self._mutex:
            if self._closed:
                return
            super().close()
            self._db.close()
            self._lock.release()
        self._end_waiting()

    # Inside a write transaction

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            if self._closed:
                raise StoreError(f"the job store in {self.folder} is closed")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    if _scalar(self._db, "SELECT value FROM meta WHERE key = 'owner'") != self.owner:
                        raise OwnershipLost(f"another process has taken over {self.folder}")
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    # SQLite has rolled back by itself after some errors (disk full among them).
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except (OSError, sqlite3.Error) as error:
                raise _cannot_write(self.folder, error) from error
        self._notify(write=True)

    def _take_ownership(self) -> int:
        with self._mutex:
            return _scalar(self._db, "UPDATE meta SET value = value + 1 WHERE key = 'owner' RETURNING value")

    def _work(self, fence: int) -> Path:
        return self.state_folder / "work" / str(fence)

    def _state(self, db: sqlite3.Connection, job: int) -> JobState:
        found = _scalar(db, "SELECT state FROM jobs WHERE id = ?", (job,))
        if found is None:
            self.get(job)
        return JobState(found)

    def _end_pending(self, db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> int:
        return db.execute(
            f"UPDATE jobs SET state = 'cancelled', finished = ? WHERE state = 'pending' AND {where}",
            (time.time(), *values),
        ).rowcount

    def _requeue(self, db: sqlite3.Connection, job: int, position: int, *, keep_error: bool = False) -> None:
        error = "error" if keep_error else "NULL"
        allowed = "max_attempts" if keep_error else "max(max_attempts, failures + 1)"
        db.execute(
            f"UPDATE jobs SET state = 'pending', position = ?, finished = NULL, cancel_requested = 0, "
            f"error = {error}, max_attempts = {allowed} WHERE id = ?",
            (position, job),
        )

    def _held(self, db: sqlite3.Connection, token: Token) -> sqlite3.Row:
        row = db.execute(
            "SELECT name, state, fence, position, failures, max_attempts, cancel_requested "
            "FROM jobs WHERE id = ?",
            (token.job,),
        ).fetchone()
        if row is None or row["state"] != JobState.RUNNING or row["fence"] != token.fence:
            raise StaleToken(f"attempt {token.attempt} of job {token.job} no longer holds the job")
        if token.owner != self.owner:
            raise StaleToken(f"attempt {token.attempt} of job {token.job} belongs to an earlier owner")
        return row

    def _publish(self, db: sqlite3.Connection, token: Token, work: Path, manifest: Mapping[str, Any]) -> None:
        name = _scalar(db, "SELECT name FROM jobs WHERE id = ?", (token.job,))
        # Renamed before the commit: a reader that sees `done` finds the files, and recovery can repeat it.
        files = outputs.publish(work, manifest, self.folder, name)
        self._end(db, token, JobState.DONE, None)
        # Files of an earlier result that this one has not overwritten.
        earlier = json.loads(_scalar(db, "SELECT files FROM jobs WHERE id = ?", (token.job,)))
        stale = set(earlier.values()) - set(files.values())
        db.executemany("INSERT OR IGNORE INTO trash VALUES (?)", [(file,) for file in stale])
        db.executemany("DELETE FROM trash WHERE name = ?", [(file,) for file in files.values()])
        db.execute(
            "UPDATE jobs SET files = ?, report = ? WHERE id = ?",
            (canonical(files), canonical(manifest["report"]), token.job),
        )

    def _end(self, db: sqlite3.Connection, token: Token, state: JobState, error: str | None) -> None:
        now = time.time()
        db.execute(
            "UPDATE jobs SET state = ?, finished = ?, error = ?, cancel_requested = 0 WHERE id = ?",
            (state, now, error, token.job),
        )
        db.execute(
            "UPDATE attempts SET finished = ?, outcome = ?, error = ? WHERE fence = ?",
            (now, state, error, token.fence),
        )

    def _after_attempt(self, token: Token) -> None:
        self._drop_progress(token)
        outputs.discard(self._work(token.fence))
        self._notify()

    def _delete(self, db: sqlite3.Connection, jobs: Iterable[int]) -> None:
        for job in jobs:
            files = self.get(job).files.values()
            db.executemany("INSERT OR IGNORE INTO trash VALUES (?)", [(name,) for name in files])
            db.execute("DELETE FROM jobs WHERE id = ?", (job,))

    def _empty_trash(self) -> None:
        names = [row["name"] for row in self._db_rows("SELECT name FROM trash")]
        if names:
            outputs.remove(self.folder, names)
            with self._write() as db:
                db.executemany("DELETE FROM trash WHERE name = ?", [(name,) for name in names])

    def _db_rows(self, select: str) -> list[sqlite3.Row]:
        with self._read() as db:
            return db.execute(select).fetchall()


def _scalar(db: sqlite3.Connection, statement: str, values: tuple[Any, ...] = ()) -> Any:
    row = db.execute(statement, values).fetchone()
    return None if row is None else row[0]


def _cannot_open(folder: Path | str, error: Exception) -> StoreError:
    kind = StoreFull if is_disk_full(error) else StoreError
    return kind(f"cannot open the job store in {folder}: {_reason(error)}")


def _cannot_write(folder: Path, error: Exception) -> StoreError:
    kind = StoreFull if is_disk_full(error) else StoreError
    return kind(f"cannot write to {folder}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
