"""Everything about a job that can be known before torch is imported and weights are read."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from videoattn.render.errors import UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded, kind_of, require_file, unreadable
from videoattn.render.settings import resolve
from videoattn.render.sources import HUB_ID, ModelInfo, Source, describe, find, unused

CLIP_SUFFIXES = (".mp4", ".m4v", ".mov")
PREVIEW_SUFFIXES = (".gif", ".webp")
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked job, explicit but for its dtype, with the source and abilities of its model."""

    job: RenderJob
    source: Source
    info: ModelInfo
    image: Image.Image | None = None
    image_sha256: str | None = None


def check(
    job: RenderJob, *, local_files_only: bool = False, warn: Callable[[str], None] = lambda text: None
) -> Prepared:
    """Resolve a job against its model's configs.

    Raises UsageError for a model, size, image, LoRA or setting that cannot work; `warn` receives one line for
    what merely looks wrong.
    """
    for name, owner in unused(job.model, job.recipe).items():
        if job.model and getattr(job, name):
            raise UsageError(f"--{name} belongs to {owner}: leave it out")
    source = find(job, local_files_only=local_files_only)
    info = describe(source)
    resolved = resolve(job, info, defaults=_demo_defaults() if job.model == "demo" else None)
    for lora in resolved.loras:
        _require_place("--lora", lora.source, (".safetensors",))
    if resolved.upsampler is not None:
        _require_place("--upsampler", resolved.upsampler, ())
    if job.model == "demo":
        _warn_unknown_words(resolved, warn)
    if "distilled" in job.model.lower() and info.family == "ltx2" and resolved.recipe == "one-stage":
        warn(f"{job.model} looks distilled: --recipe distilled is made for it")
    image, digest = open_image(resolved.image) if resolved.image else (None, None)
    return Prepared(resolved, source, info, image, digest)


def check_places(output: Path, **others: Path | None) -> None:
    """Raise UsageError unless the names of clip, poster, preview and log fit and differ."""
    if output.suffix.lower() not in CLIP_SUFFIXES:
        raise UsageError(f"cannot write {output}: a clip's name ends in {', '.join(CLIP_SUFFIXES)}")
    preview, poster = others.get("preview"), others.get("poster")
    if preview is not None and preview.suffix.lower() not in PREVIEW_SUFFIXES:
        raise UsageError(f"cannot write {preview}: a preview's name ends in {' or '.join(PREVIEW_SUFFIXES)}")
    if poster is not None and poster.suffix.lower() != ".png":
        raise UsageError(f"cannot write {poster}: a poster's name ends in .png")
    places = [os.path.realpath(place) for place in (output, *others.values()) if place is not None]
    if len(set(places)) < len(places):
        raise UsageError("two outputs have the same name: clip, poster, preview and log need one each")


def check_device(name: str) -> None:
    """Raise UsageError for what is no name of a device here; whether there is such a GPU only torch knows."""
    if not _DEVICE.fullmatch(name):
        raise UsageError(f"unknown device '{name}': give cpu, cuda or cuda:N")


def expected_bytes(width: int, height: int, num_frames: int) -> int:
    """A generous guess of an mp4's size, 0.25 bits a pixel: used only to refuse a full disk early."""
    return width * height * num_frames // 32


def open_image(place: str) -> tuple[Image.Image, str]:
    """An RGB image and the SHA-256 of its file; UsageError if it can't be read."""
    path = expanded(place)
    require_file(path, f"no such image: {path}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return image.convert("RGB"), hashlib.sha256(content).hexdigest()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise UsageError(f"{path} is no image that Pillow can read: give a PNG, JPEG or WebP file") from None


def _require_place(option: str, text: str, suffixes: tuple[str, ...]) -> None:
    path = expanded(text)
    try:
        found = kind_of(path)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    if found == "file" and suffixes and path.suffix not in suffixes:
        raise UsageError(f"{option} {text}: weights must be safetensors")
    if found is None and (path.suffix in {*suffixes, ".bin", ".pt"} or not HUB_ID.match(text)):
        raise UsageError(f"{option} {text}: no such file or folder")


def _demo_defaults() -> dict[str, Any]:
    from videoattn import demo

    return dict(demo.DEFAULTS)


def _warn_unknown_words(job: RenderJob, warn: Callable[[str], None]) -> None:
    from videoattn import demo

    for text in (job.prompt, job.negative_prompt):
        unknown = demo.unknown_words(text) if text else []
        if unknown:
            words = ", ".join(f"'{word}'" for word in unknown)
            warn(f"the demo model does not know {words}; it knows {', '.join(demo.known_words())}")
