"""Output files: written in a folder per attempt, put in place by rename, never seen half-written.

A worker writes into `work/<fence>` and ends with `result.json`, itself renamed into place: an attempt is
complete when that file exists. The owner then renames the files it lists into the output folder and removes
the work folder. Each step can be repeated after a crash.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from videoattn.jobs.errors import StoreError
from videoattn.jobs.model import Result, canonical

MANIFEST = "result.json"
# No dots: `name.role.suffix` must never be another job's clip.
_NAME = re.compile(r"\w[\w ()+,=@-]*")
_NAME_BYTES = 180
_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")


def check_name(name: str) -> str:
    """Return `name` if it can be the stem of an output file on any system; raises `StoreError` if not."""
    if not _NAME.fullmatch(name) or name.endswith(" ") or len(name.encode()) > _NAME_BYTES:
        raise StoreError(
            f"{name[:80]!r} cannot name an output: begin with a letter or digit, go on with letters, digits, "
            f"spaces or _-()+,=@, and use at most {_NAME_BYTES} bytes"
        )
    return name


def file_name(name: str, role: str, suffix: str) -> str:
    """The published name of a job's file: the clip is `name.mp4`, everything else `name.role.suffix`."""
    return f"{name}{suffix}" if role == "clip" else f"{name}.{role}{suffix}"


def write_manifest(work: Path, result: Result) -> None:
    """Declare an attempt complete: flush its files to the disk, then rename the manifest into place."""
    files: dict[str, str] = {}
    for role, given in result.files.items():
        path = work / given
        if not _ROLE.fullmatch(role):
            raise ValueError(f"{role!r} is not a role: use lower-case letters, digits and _")
        if path.resolve().parent != work.resolve() or not path.is_file():
            raise ValueError(f"the {role} {given} is not a file in the work folder of the job")
        sync_file(path)
        files[role] = path.name
    text = canonical({"files": files, "report": dict(result.report)})
    write_atomic(work / MANIFEST, text)


def read_manifest(work: Path) -> dict[str, Any] | None:
    """The manifest of a complete attempt; None while it is not complete."""
    try:
        return json.loads((work / MANIFEST).read_text())
    except FileNotFoundError:
        return None


def publish(work: Path, manifest: Mapping[str, Any], folder: Path, name: str) -> dict[str, str]:
    """Rename an attempt's files into `folder`; returns role → published name.

    Files that an earlier call has already moved are left where they are. Raises `StoreError` when a file is
    in neither place.
    """
    published: dict[str, str] = {}
    for role, source in manifest["files"].items():
        target = file_name(name, role, Path(source).suffix)
        try:
            os.replace(work / source, folder / target)
        except FileNotFoundError:
            if not (folder / target).is_file():
                raise StoreError(f"the finished {role} of {name} has disappeared from {work}") from None
        published[role] = target
    sync_folder(folder)
    return published


def is_published(work: Path, manifest: Mapping[str, Any], folder: Path, name: str) -> bool:
    """Whether every file of a complete attempt exists, in its work folder or in place."""
    return all(
        (work / source).is_file() or (folder / file_name(name, role, Path(source).suffix)).is_file()
        for role, source in manifest["files"].items()
    )


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove published files; those that are already gone are fine."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def discard(work: Path) -> None:
    """Remove a work folder and what is in it; a zombie that still writes there cannot make it reappear."""
    shutil.rmtree(work, ignore_errors=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file beside its place, flush it, and rename it into place."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file's contents to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (renames, removals) to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
