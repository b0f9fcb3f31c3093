"""Output files: written beside their places, renamed when everything is there, gone when anything fails."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from videoattn.render.errors import RenderError, UsageError

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StagedFiles:
    """A set of output files that appear together, or not at all.

    Used as a context manager: leaving it without `commit()` removes whatever was written, and the folders
    that were made for it.
    """

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path]] = []
        self._made: list[Path] = []

    def stage(self, place: Path) -> Path:
        """The path to write instead of `place`: beside it, created empty, so that a bad place shows at once.

        Raises UsageError if nothing can be written there.
        """
        try:
            if place.is_dir():
                raise UsageError(f"cannot write {place}: it is a folder, name a file in it")
            self._make_parents(place.parent)
            temporary = place.parent / f".{place.name}.{secrets.token_hex(4)}.part"
            with open(temporary, "xb"):
                pass
        except OSError as error:
            self.discard()
            if error.errno in NO_SPACE:
                raise disk_full(place) from None
            raise UsageError(f"cannot write {place}: {_reason(error)}") from None
        self._staged.append((temporary, place))
        return temporary

    def _make_parents(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir()
            self._made.append(each)

    def commit(self) -> None:
        """Rename every staged file to its place."""
        try:
            for temporary, _ in self._staged:
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            while self._staged:
                temporary, place = self._staged[0]
                os.replace(temporary, place)
                self._staged.pop(0)
        except OSError as error:
            raise write_failed(error, self._staged[0][1]) from None
        self._made.clear()

    def discard(self) -> None:
        """Remove what was staged and the folders made for it."""
        for temporary, _ in self._staged:
            temporary.unlink(missing_ok=True)
        self._staged.clear()
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                break
        self._made.clear()

    def __enter__(self) -> StagedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


class Leftovers:
    """What a process that was killed leaves of its staged files; made before it starts."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places
        self._before = set(self._parts())
        self._missing = [folder for place in places for folder in place.parents if not folder.exists()]

    def _parts(self) -> list[Path]:
        # Not by a pattern: a name may hold characters that mean something in one.
        return [
            part
            for place in self._places
            if place.parent.is_dir()
            for part in place.parent.iterdir()
            if part.name.startswith(f".{place.name}.") and part.name.endswith(".part")
        ]

    def remove(self) -> None:
        """Remove what has come since, and the folders that were made for it."""
        for part in self._parts():
            if part not in self._before:
                part.unlink(missing_ok=True)
        for folder in self._missing:
            with suppress(OSError):
                folder.rmdir()


def write_failed(error: OSError, place: Path) -> RenderError:
    """The error for a failed write: disk full, or the system's reason."""
    if error.errno in NO_SPACE:
        return disk_full(place)
    return RenderError(f"cannot write {place}: {_reason(error)}")


def disk_full(place: Path) -> RenderError:
    """The error for a full disk under `place`."""
    return RenderError(f"cannot write {place}: the disk is full, nothing was kept")


def require_space(place: Path, needed: int) -> None:
    """Raise RenderError before the work starts if fewer than `needed` bytes are free under `place`."""
    folder = place.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RenderError(
            f"cannot write {place}: the disk is full ({free // 1024} KiB free, the clip needs about "
            f"{needed // 1024 + 1} KiB)"
        )


def unused_name(prompt: str, seed: int, suffix: str = ".mp4") -> Path:
    """A file name made from prompt and seed that does not exist yet in the current folder."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48].rstrip("-") or "clip"
    stem = f"{words}-seed{seed}"
    place, count = Path(stem + suffix), 1
    while place.exists():
        count += 1
        place = Path(f"{stem}-{count}{suffix}")
    return place


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
