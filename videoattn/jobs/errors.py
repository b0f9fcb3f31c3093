"""What can go wrong with a job store, one class per thing a caller would handle differently."""

from __future__ import annotations

import errno
import sqlite3


class StoreError(RuntimeError):
    """A job store operation was refused; the message is one line for the user."""


class StoreBusy(StoreError):
    """Another living process owns the store."""


class BadFolder(StoreError):
    """The folder cannot hold a job store: it is no folder, cannot be made, or must not be written."""


class OwnershipLost(StoreError):
    """A later process took the store over; nothing this process does may be written any more."""


class StaleToken(StoreError):
    """The attempt that the token was given to has ended or was taken away."""


class UnknownJob(StoreError):
    """No job has this id."""


class WrongState(StoreError):
    """The job's state does not allow what was asked."""


class RetryLimit(StoreError):
    """The job was tried as often as the store allows."""


class StoreFull(StoreError):
    """The disk (or a quota, or a file size limit) has no room for the store or an output."""


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SQLITE_FULL = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    }
)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception says that the disk, the quota or the file size limit is exhausted."""
    if isinstance(error, StoreFull):
        return True
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in _SQLITE_FULL
    # PyAV raises errors with an errno that are no OSError.
    return getattr(error, "errno", None) in DISK_FULL
