"""Looking at the files and folders that a user names, without a traceback for any of them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

from videoattn.render.errors import UsageError


def expanded(text: str | Path) -> Path:
    """The path with its `~` replaced; one whose user does not exist stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def kind_of(path: Path) -> Literal["file", "folder"] | None:
    """What a path names, None if there is nothing.

    Raises UsageError for a path that the system won't look at (no permission, too long a name, a loop of
    links), and for a device or a pipe.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISREG(mode):
        return "file"
    raise UsageError(f"cannot read {path}: it is neither a file nor a folder")


def require_file(path: Path, missing: str) -> None:
    """Raise UsageError unless there is a file: `missing` if there is nothing, else why it can't be read."""
    found = kind_of(path)
    if found is None:
        raise UsageError(missing)
    if found == "folder":
        raise UsageError(f"cannot read {path}: it is a folder")


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error for a path that can't be looked at or opened, with the system's reason."""
    return UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}")
