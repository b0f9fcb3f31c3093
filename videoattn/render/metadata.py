"""What a clip says about itself: settings, seed, versions and receipt as JSON in the mp4."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob, parse_lora
from videoattn.render.places import expanded, require_file
from videoattn.typed_json import fit, parse
from videoattn.version import __version__

PACKAGES = ("torch", "diffusers", "transformers", "av")
SCHEMA = 1
# Settings that may name a file or folder; a model may also be the one in this package.
PLACES = ("model", "components", "upsampler", "image")
DEMO = "demo"


@dataclass(slots=True)
class _Choice:
    kernel: str


@dataclass(slots=True)
class _Description:
    """What has to be right in a description for those who read it; the job has a check of its own."""

    videoattn: int
    job: dict[str, Any]
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    receipt: dict[str, _Choice] | None = None
    image_sha256: str | None = None
    context_parallel: str | None = None
    fast: str | None = None


def versions() -> dict[str, str]:
    """Installed versions of the packages that shape a clip."""
    found = {"videoattn": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def describe(job: RenderJob, *, device: str, receipt: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Everything recorded with a clip; the same for every run of one job on one machine."""
    return {
        "videoattn": SCHEMA,
        "job": rooted(job.model_dump(mode="json")),
        **{name: value for name, value in more.items() if value is not None},
        "device": device,
        "versions": versions(),
        "receipt": receipt,
    }


def rooted(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job's fields with whole paths, so that its clip can be rendered again from another folder."""

    def whole(text: Any) -> Any:
        if not text or text == DEMO:
            return text
        path = expanded(text)
        return os.path.abspath(path) if os.path.exists(path) else text

    loras = [(entry, parse_lora(entry).source) for entry in job["lora"]]
    return {
        **job,
        **{name: whole(job[name]) for name in PLACES},
        "lora": [f"{whole(source)}{entry[len(source) :]}" for entry, source in loras],
    }


def tags(description: dict[str, Any]) -> dict[str, str]:
    """The mp4 tags that carry a description."""
    return {
        "title": description["job"]["prompt"][:200],
        "comment": json.dumps(description, ensure_ascii=False, separators=(",", ":")),
    }


def read(path: Path) -> dict[str, Any]:
    """The description inside a clip.

    Raises UsageError if there is no such file or it can't be looked at, RenderError if it is no video or was
    not made here.
    """
    import av
    import av.error

    require_file(path, f"no such clip: {path}")
    try:
        # Clips of other programs may have tags in any encoding.
        with av.open(str(path), metadata_errors="replace") as container:
            comment = container.metadata.get("comment", "")
    except (av.error.FFmpegError, OSError) as error:
        raise RenderError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        description = parse(comment)
    except ValueError as error:
        if '"videoattn":' in comment:
            raise RenderError(f"the settings in {path} are damaged: {error}") from None
        description = None
    if not isinstance(description, dict) or "job" not in description or "videoattn" not in description:
        raise RenderError(f"{path} carries no settings: it was not rendered by videoattn")
    schema = description["videoattn"]
    if isinstance(schema, int) and schema > SCHEMA:
        raise RenderError(f"{path} was rendered by a newer videoattn: update this one to read it")
    try:
        fit(_Description, description)
    except ValueError as error:
        raise RenderError(f"the settings in {path} are damaged: {error}") from None
    return description


def read_job(path: Path) -> RenderJob:
    """The job that a clip was rendered from, as `read` finds it."""
    settings = read(path)["job"]
    try:
        return RenderJob.parse(settings)
    except UsageError as error:
        raise RenderError(f"the settings in {path} do not fit this version: {error}") from None
