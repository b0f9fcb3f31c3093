"""Files that come from a visitor: looked at by content, kept under names of our own."""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from videoattn.render.errors import RenderError, UsageError
from videoattn.web.limits import MAX_IMAGE_PIXELS

_NAME = re.compile(r"[0-9a-f]{32}\.png")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")


class Images:
    """Start images, each stored once as PNG under the hash of its pixels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, upload: Path) -> Path:
        """Decode an upload and store it; UsageError unless it is an image of bearable size."""
        image = decode_image(upload)
        # Written anew: what a decoder ignored in the upload goes no further.
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        content = buffer.getvalue()
        place = self.folder / f"{hashlib.sha256(content).hexdigest()[:32]}.png"
        if not place.exists():
            partial = place.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(content)
            os.replace(partial, place)
        return place

    def find(self, place: str | None) -> Path | None:
        """The stored image that a name or path means; None if it is none of ours, or gone."""
        if not place:
            return None
        found = self.folder / Path(place).name
        ours = place in (found.name, str(found)) and _NAME.fullmatch(found.name) is not None
        return found if ours and found.is_file() else None


def decode_image(path: Path) -> Image.Image:
    """An RGB image; UsageError unless Pillow decodes the file as one of `FORMATS` within the pixel bound."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_IMAGE_PIXELS:
                    raise UsageError(
                        f"the start image has {width}x{height} pixels: give one of at most "
                        f"{MAX_IMAGE_PIXELS // 1_000_000} million pixels"
                    )
                image.load()
                return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            "the start image is no picture that can be read: give a PNG, JPEG or WebP file"
        ) from None


def read_clip(path: Path) -> dict[str, Any]:
    """The settings inside an uploaded clip; UsageError, without the server's path, when it carries none."""
    from videoattn.render.metadata import read_job

    try:
        return read_job(path).model_dump(mode="json")
    except (RenderError, UsageError):
        raise UsageError(
            "this file carries no settings: drop an mp4 that videoattn has rendered and no other program "
            "has re-encoded"
        ) from None
