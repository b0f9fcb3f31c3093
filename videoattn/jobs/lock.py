"""One owner process per store: a lock that the kernel releases when its owner dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

from videoattn.jobs.errors import StoreBusy


class OwnerLock:
    """An exclusive `flock` on a file that names its owner.

    The descriptor is not inherited by child processes, so a worker that outlives its server cannot hold the
    store. Raises `StoreBusy` naming the owner when another open lock exists, in this process or in any other.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _describe(os.pread(self._fd, 4096, 0))
            os.close(self._fd)
            raise StoreBusy(
                f"{what} is in use by {owner}; wait for it, stop it, or choose another folder"
            ) from None
        except BaseException:
            os.close(self._fd)
            raise
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": Path(sys.argv[0] or "python").name,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        # The file is never replaced or removed: a lock on an unlinked file excludes nobody.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Give the lock up; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _describe(content: bytes) -> str:
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']} ({owner['command']}, since {owner['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
