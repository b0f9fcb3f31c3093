"""Words and numbers as visitors read them."""

from __future__ import annotations

import time

PHASES = {
    "starting": "Starting",
    "load_model": "Loading the model",
    "encode_prompt": "Reading the prompt",
    "denoise": "Denoising",
    "denoise_half": "Denoising at half size",
    "upsample": "Upsampling",
    "denoise_full": "Denoising at full size",
    "decode": "Decoding",
    "encode": "Writing the file",
}


def phase(name: str) -> str:
    """A stage of a render in words."""
    return PHASES.get(name, name.replace("_", " ").capitalize())


def ago(then: float | None) -> str:
    """A time in seconds since the epoch as its distance from now."""
    if then is None:
        return ""
    seconds = max(0, round(time.time() - then))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def amount(size: float) -> str:
    """Bytes with a unit of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def sentence(error: BaseException | str) -> str:
    """A message as a sentence, options of the command named as the form names them."""
    words = " ".join(str(error).split())
    for word in {each.strip(":;,") for each in words.split() if each.startswith("--")}:
        words = words.replace(word, word.removeprefix("--").replace("-", " "))
    words = words[:1].upper() + words[1:]
    return words if words.endswith((".", "!", "?")) else f"{words}."
