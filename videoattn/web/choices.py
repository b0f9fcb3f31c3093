"""What the form offers: models, the sizes and lengths each can make, the kernels that run here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from videoattn.render import sources
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded
from videoattn.render.settings import GUIDED, KNOBS, SIZES
from videoattn.render.sizes import Grid
from videoattn.render.sources import HUB_ID, ModelInfo

# Width and height in pixels, the model's own size comes first; brought onto the model's grid.
SHAPES = {
    "ltx": ((704, 512), (768, 512), (512, 704), (512, 512), (1216, 704), (704, 1216)),
    "ltx2": (
        (768, 512),
        (512, 768),
        (768, 768),
        (960, 544),
        (1280, 704),
        (704, 1280),
        (1536, 1024),
        (1920, 1088),
    ),
}
SECONDS = {"ltx": (1, 2, 4, 6, 8, 10), "ltx2": (1, 2, 4, 5, 8, 10, 15, 20)}


@dataclass(frozen=True, slots=True)
class Presets:
    """What a model can make: `(label, "WxH")` and `(label, frames)` pairs, and its own settings."""

    name: str
    sizes: list[tuple[str, str]]
    lengths: list[tuple[str, int]]
    defaults: dict[str, Any]
    recipes: tuple[str, ...]
    knobs: tuple[str, ...]
    pixels: int
    frames: int


@dataclass(frozen=True, slots=True)
class Models:
    """The models a visitor may name: the demo, hub ids, and pipelines in the server's folders."""

    folders: tuple[Path, ...] = ()
    local_files_only: bool = False
    _roots: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_roots", tuple(folder.resolve() for folder in self.folders))

    def offered(self) -> list[tuple[str, str]]:
        """`(label, value)` pairs: the demo if it is there, pipelines in the folders, cached LTX models."""
        found: list[tuple[str, str]] = []
        try:
            sources.describe(sources.find(RenderJob(model="demo")))
            found.append(("demo (any CPU)", "demo"))
        except (ImportError, UsageError, RenderError):
            pass
        for root in self._roots:
            places = [root, *sorted(each for each in root.iterdir() if each.is_dir())]
            for place in places:
                if (place / "model_index.json").is_file() and _is_ltx(place):
                    found.append((place.name, str(place)))
        found += [(hub_id, hub_id) for hub_id in _cached_hub_models()]
        return found

    def require(self, job: RenderJob) -> None:
        """UsageError for a model, LoRA or other part that lies outside what this server offers."""
        places = [("model", job.model), *(("LoRA", lora.source) for lora in job.loras)]
        places += [("components", job.components or ""), ("upsampler", job.upsampler or "")]
        for what, place in places:
            if place in ("", "demo") or self._inside(place):
                continue
            path = expanded(place)
            # A hub id that is also a path from the current folder would be taken for the path.
            if HUB_ID.match(place) and not os.path.exists(path):
                continue
            raise UsageError(
                f"{what} {place}: choose demo, a hub id such as Lightricks/LTX-2, or a folder below one that "
                "the server was started with (--models DIR)"
            )

    def _inside(self, place: str) -> bool:
        if "\0" in place:
            return False
        path = Path(os.path.realpath(expanded(place)))
        return any(path == root or path.is_relative_to(root) for root in self._roots)

    def info(self, model: str) -> ModelInfo:
        """What a model can make; UsageError or RenderError in one line when it can't be found."""
        job = RenderJob(model=model)
        self.require(job)
        return sources.describe(sources.find(job, local_files_only=self.local_files_only))

    def presets(self, model: str) -> Presets:
        """The form's choices for a model."""
        info = self.info(model)
        defaults: dict[str, Any] = dict(SIZES[info.family]) | GUIDED[info.generation]
        shapes: Iterable[tuple[int, int]] = SHAPES[info.family]
        seconds: Iterable[float] = SECONDS[info.family]
        if model == "demo":
            from videoattn import demo

            defaults |= demo.DEFAULTS
            shapes, seconds = (), ()
        own = (defaults["width"], defaults["height"])
        sizes = dict.fromkeys(_on_grid(shape, info.grid) for shape in (own, *shapes))
        rate = float(defaults["frame_rate"])
        frames = dict.fromkeys(
            [defaults["num_frames"], *(_frames(each * rate, info.grid) for each in sorted(seconds))]
        )
        return Presets(
            "Demo model" if model == "demo" else info.name,
            [(f"{width} × {height}{_shape(width, height)}", f"{width}x{height}") for width, height in sizes],
            [(f"{count / rate:.1f} s ({count} frames)", count) for count in sorted(frames)],
            defaults,
            ("one-stage", "distilled") if info.family == "ltx2" else ("one-stage",),
            KNOBS if info.family == "ltx2" else ("guidance_scale", "guidance_rescale"),
            info.grid.pixels,
            info.grid.frames,
        )


def _on_grid(shape: tuple[int, int], grid: Grid) -> tuple[int, int]:
    width, height = (max(grid.pixels, round(each / grid.pixels) * grid.pixels) for each in shape)
    return width, height


def _frames(count: float, grid: Grid) -> int:
    return round(count / grid.frames) * grid.frames + 1


def _shape(width: int, height: int) -> str:
    if width == height:
        return ", square"
    return ", wide" if width > height else ", tall"


def _is_ltx(folder: Path) -> bool:
    try:
        sources.describe(sources.Source(str(folder), folder))
    except (UsageError, RenderError):
        return False
    return True


def _cached_hub_models() -> list[str]:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if not cache.is_dir():
        return []
    found = []
    for place in sorted(cache.glob("models--*--*")):
        snapshots = [each for each in place.glob("snapshots/*") if (each / "model_index.json").is_file()]
        if snapshots and _is_ltx(snapshots[0]):
            found.append(place.name.removeprefix("models--").replace("--", "/"))
    return found


@lru_cache(maxsize=8)
def kernel_verdicts(device: str) -> dict[str, str | None]:
    """For each kernel None if it can serve a plain video call on `device`, or why it can't; imports torch."""
    import torch

    from videoattn import kernels
    from videoattn.dispatch import AttentionCall, device_capability

    where = torch.device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    call = AttentionCall(1, 32, 1024, 1024, 128, dtype, where.type, device_capability(where))
    return {name: kernels.get(name).supports(call) for name in kernels.NAMES}
