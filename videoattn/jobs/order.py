"""The order of the queue: integer positions with room between them, so that a move writes one row."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

# Room for twenty moves into the same place before the queue is numbered anew.
GAP = 1 << 20


def front(db: sqlite3.Connection) -> int:
    """A position before every pending job."""
    first = db.execute("SELECT min(position) FROM jobs WHERE state = 'pending'").fetchone()[0]
    return GAP if first is None else first - GAP


def back(db: sqlite3.Connection) -> int:
    """A position behind every pending job."""
    last = db.execute("SELECT max(position) FROM jobs WHERE state = 'pending'").fetchone()[0]
    return GAP if last is None else last + GAP


def assign(db: sqlite3.Connection, job: int, position: int) -> None:
    """Give a job a position."""
    db.execute("UPDATE jobs SET position = ? WHERE id = ?", (position, job))


def place(db: sqlite3.Connection, job: int, other: int | None, *, before: bool) -> None:
    """Put a pending job directly before or after another one, or behind all of them."""
    if other is None:
        return assign(db, job, back(db))
    position = _beside(db, job, other, before=before)
    if position is None:
        _renumber(db)
        position = _beside(db, job, other, before=before)
        assert position is not None
    assign(db, job, position)


def permute(db: sqlite3.Connection, jobs: Iterable[int]) -> None:
    """Put pending jobs into the given order, in the positions they hold together."""
    rows = db.execute("SELECT id, position FROM jobs WHERE state = 'pending'")
    places = {row["id"]: row["position"] for row in rows}
    wanted = [job for job in dict.fromkeys(jobs) if job in places]
    for job, position in zip(wanted, sorted(places[job] for job in wanted), strict=True):
        assign(db, job, position)


def _beside(db: sqlite3.Connection, job: int, other: int, *, before: bool) -> int | None:
    """A free position beside another job; None when the room there is used up."""
    here = db.execute("SELECT position FROM jobs WHERE id = ?", (other,)).fetchone()[0]
    # A job that was queued again in its old place may share a position with another one.
    shared = "SELECT 1 FROM jobs WHERE state = 'pending' AND position = ? AND id NOT IN (?, ?)"
    if db.execute(shared, (here, job, other)).fetchone():
        return None
    select, compare = ("max", "<") if before else ("min", ">")
    neighbour = db.execute(
        f"SELECT {select}(position) FROM jobs WHERE state = 'pending' AND id != ? AND position {compare} ?",
        (job, here),
    ).fetchone()[0]
    if neighbour is None:
        return here - GAP if before else here + GAP
    middle = (here + neighbour) // 2
    return None if middle in (here, neighbour) else middle


def _renumber(db: sqlite3.Connection) -> None:
    rows = db.execute("SELECT id FROM jobs WHERE state = 'pending' ORDER BY position, id").fetchall()
    for number, row in enumerate(rows, start=1):
        assign(db, row["id"], number * GAP)
