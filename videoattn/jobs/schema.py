"""The store's tables and how its connections are opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from videoattn.jobs.errors import StoreError

VERSION = 1

# A page of the queue or of the gallery reads one index range; counting per state reads `jobs_by_state` alone.
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('owner', 0), ('fence', 0);

CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL
        CHECK (state IN ('pending', 'running', 'done', 'failed', 'cancelled', 'interrupted')),
    hash TEXT NOT NULL,
    payload TEXT NOT NULL,
    origin TEXT,
    position INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    started REAL,
    finished REAL,
    worker TEXT,
    error TEXT,
    files TEXT NOT NULL DEFAULT '{}',
    report TEXT
);
CREATE INDEX jobs_by_state ON jobs (state, position, id);
CREATE INDEX jobs_by_end ON jobs (finished DESC, id DESC) WHERE finished IS NOT NULL;
CREATE INDEX jobs_by_state_end ON jobs (state, finished DESC, id DESC);
CREATE INDEX jobs_by_hash ON jobs (hash);

CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    fence INTEGER NOT NULL UNIQUE,
    worker TEXT NOT NULL,
    started REAL NOT NULL,
    finished REAL,
    outcome TEXT,
    error TEXT,
    PRIMARY KEY (job, attempt)
) WITHOUT ROWID;

CREATE TABLE trash (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open a connection in autocommit mode; transactions are begun explicitly.

    A writing connection creates the tables when the file is new. Raises `StoreError` for a file that is no
    job store, has another format, or lies on a file system without write-ahead logging.
    """
    # Readers open the file for writing too: SQLite needs that for the WAL index. query_only keeps them out.
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"
    try:
        db = sqlite3.connect(uri, uri=True, timeout=10, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot open the job store {path}: {error}") from error
    try:
        db.row_factory = sqlite3.Row
        mode = db.execute("PRAGMA journal_mode = WAL" if write else "PRAGMA journal_mode").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"the job store {path} needs a local disk: no write-ahead logging here ({mode})")
        # FULL: a finished job must outlive a power cut, and a job costs two commits in all.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        # KiB: the default of 2000 a connection fills over hundreds of jobs, and the system caches the file.
        db.execute("PRAGMA cache_size = -256")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and write:
            db.executescript(f"BEGIN IMMEDIATE;{TABLES}PRAGMA user_version = {VERSION};COMMIT;")
        elif version != VERSION:
            raise StoreError(
                f"the job store {path} has format {version}; this version reads format {VERSION}"
            )
        if not write:
            db.execute("PRAGMA query_only = ON")
    except sqlite3.DatabaseError as error:
        db.close()
        if error.sqlite_errorname == "SQLITE_NOTADB":
            raise StoreError(f"{path} is not a job store") from error
        raise
    except BaseException:
        db.close()
        raise
    return db
