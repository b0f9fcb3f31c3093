"""Measures what a clip shows, from its pixels alone, and compares it with what was asked for.

The checker is told how many shapes to look for, and nothing else. It knows the palette, the shape classes and
the sizes that `scenes` draws, and rests on no trained model.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from videoattn.demo.draw import CROSS_ARM, STAR_INNER, signed_distance
from videoattn.demo.scenes import (
    BACKGROUND_RGB,
    BACKGROUNDS,
    COLOUR_RGB,
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZES,
    Scenes,
)

ATTRIBUTES = ("colour", "shape", "size", "motion", "background", "count")

_PALETTE_NAMES = list(dict.fromkeys([*COLOURS, *BACKGROUNDS]))
_PALETTE = np.stack(
    [
        COLOUR_RGB[COLOURS.index(n)] if n in COLOURS else BACKGROUND_RGB[BACKGROUNDS.index(n)]
        for n in _PALETTE_NAMES
    ]
)
# Area over circumradius squared.
_AREA = {
    "circle": math.pi,
    "square": 2.0,
    "triangle": 3 * math.sqrt(3) / 4,
    "star": 5 * math.sin(math.pi / 5) * STAR_INNER,
    "cross": 4 * CROSS_ARM * (2 * math.sqrt(1 - CROSS_ARM**2) - CROSS_ARM),
}
_SYMMETRY = {"circle": 1, "square": 4, "triangle": 3, "star": 5, "cross": 4}
_TEMPLATE = 40
_ANGLES = 18
# Half width of a template in units of sqrt(area): wide enough for a star's tips.
_TEMPLATE_REACH = 1.15
_SIZE_CUTS = (16.6, 23.5)
_KEY_FRAMES = 7


@dataclass(frozen=True)
class SeenShape:
    """What the checker read off one shape of a clip; "none" where nothing fits."""

    colour: str
    shape: str
    size: str
    motion: str
    shape_overlap: float
    radius: float


@dataclass(frozen=True)
class Seen:
    """What the checker read off a clip."""

    shapes: tuple[SeenShape, ...]
    background: str
    count: int


@functools.cache
def _templates() -> torch.Tensor:
    """Filled shapes, centred, of unit area: bool `(shapes, angles, 40 * 40)`."""
    axis = (torch.arange(_TEMPLATE) + 0.5) / _TEMPLATE * 2 - 1
    y, x = torch.meshgrid(axis * _TEMPLATE_REACH, axis * _TEMPLATE_REACH, indexing="ij")
    result = []
    for index, name in enumerate(SHAPES):
        radius = torch.tensor(1 / math.sqrt(_AREA[name]))
        for k in range(_ANGLES):
            a = 2 * math.pi / _SYMMETRY[name] * k / _ANGLES
            turned = (math.cos(a) * x + math.sin(a) * y, math.cos(a) * y - math.sin(a) * x)
            result.append(signed_distance(torch.tensor(index), *turned, radius) < 0)
    return torch.stack(result).view(len(SHAPES), _ANGLES, -1)


def look(clip: torch.Tensor, expected: int) -> Seen:
    """Read background, shapes and their number off a clip `(frames, 3, height, width)` in [0, 1]."""
    clip = clip.float()
    key = np.linspace(0, len(clip) - 1, _KEY_FRAMES).round().astype(int)
    palette = torch.from_numpy(_PALETTE)
    pixels = clip[key]
    labels = ((pixels[:, None] - palette[None, :, :, None, None]) ** 2).sum(2).argmin(1)

    border = torch.ones(clip.shape[-2:], dtype=torch.bool)
    border[3:-3, 3:-3] = False
    on_border = torch.bincount(labels[:, border].flatten(), minlength=len(palette))
    background_label = int(on_border.argmax())
    background_rgb = pixels.movedim(1, -1)[(labels == background_label) & border].mean(0)

    one_hot = F.one_hot(labels, len(palette)).movedim(-1, 1).float()
    # A 5 x 5 erosion takes away antialiased edges, whose colours are mixtures.
    core = -F.max_pool2d(-one_hot, 5, stride=1, padding=2)
    core_area = core.sum((2, 3)).median(0).values
    core_area[background_label] = 0
    order = core_area.argsort(descending=True).tolist()
    found = [label for label in order[:expected] if core_area[label] >= 2]

    colours = []
    for label in found:
        inside = core[:, label] > 0
        colours.append(pixels.movedim(1, -1)[inside].mean(0))
    masks = _masks(clip, background_rgb, colours)
    shapes = tuple(
        _look_at_shape(mask, _PALETTE_NAMES[label]) for mask, label in zip(masks, found, strict=True)
    )
    count = _count(masks[:, key], core_area, order, found)
    background = _PALETTE_NAMES[background_label]
    return Seen(shapes, background if background in BACKGROUNDS else "none", count)


def _masks(clip: torch.Tensor, background: torch.Tensor, colours: list[torch.Tensor]) -> torch.Tensor:
    """Pixels more than half covered by each colour, bool `(colours, frames, height, width)`.

    Each pixel is projected on the line from the background to the colour; where two colours compete, the
    smaller residual wins.
    """
    pixels = clip.movedim(1, -1) - background
    alphas, residuals = [], []
    for colour in colours:
        axis = colour - background
        alpha = (pixels @ axis) / (axis @ axis)
        residuals.append(((pixels - alpha.clamp(0, 1)[..., None] * axis) ** 2).sum(-1))
        alphas.append(alpha)
    if not colours:
        return torch.zeros((0, *clip.shape[:1], *clip.shape[2:]), dtype=torch.bool)
    best = torch.stack(residuals).argmin(0)
    return torch.stack([(alpha > 0.5) & (best == k) for k, alpha in enumerate(alphas)])


def _count(key_masks: torch.Tensor, core_area: torch.Tensor, order: list[int], found: list[int]) -> int:
    """Blobs of the found colours (median over key frames) plus further colours that cover a good area."""
    if not found:
        return 0
    blobs = sum(int(np.median([_count_blobs(frame) for frame in mask])) for mask in key_masks)
    smallest = float(core_area[found[-1]])
    return blobs + sum(1 for label in order[len(found) :] if core_area[label] > max(0.2 * smallest, 6.0))


def _count_blobs(mask: torch.Tensor) -> int:
    """Connected pieces of a mask that hold at least a fifth of its area."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    if not len(rows):
        return 0
    mask = mask[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    labels = torch.arange(1, mask.numel() + 1, dtype=torch.float32).view(mask.shape) * mask
    while True:
        spread = labels
        for _ in range(8):
            spread = F.max_pool2d(spread[None, None], 3, stride=1, padding=1)[0, 0] * mask
        if torch.equal(spread, labels):
            break
        labels = spread
    sizes = torch.unique(labels[mask], return_counts=True)[1]
    return int((sizes >= 0.2 * mask.sum()).sum())


def _look_at_shape(mask: torch.Tensor, colour: str) -> SeenShape:
    """Read shape, size and motion off one shape's masks `(frames, height, width)`."""
    weights = mask.float()
    area = weights.sum((1, 2))
    visible = area > 12
    if int(visible.sum()) < 0.8 * len(mask):
        return SeenShape(colour, "none", "none", "none", 0.0, 0.0)
    rows = torch.arange(mask.shape[1], dtype=torch.float32)
    columns = torch.arange(mask.shape[2], dtype=torch.float32)
    safe = area.clamp(min=1)
    y = (weights.sum(2) * rows).sum(1) / safe
    x = (weights.sum(1) * columns).sum(1) / safe

    shape, overlap = _classify(mask, x, y, area)
    if shape == "none":
        return SeenShape(colour, shape, "none", "none", overlap, 0.0)
    x, y, area = x[visible].numpy(), y[visible].numpy(), area[visible].numpy()
    grows = float(np.median(area[-4:]) / np.median(area[:4]))
    growing = grows > 1.6
    base = np.median(area[:4]) / (1 + 0.09 * (grows**0.5 - 1)) if growing else np.median(area)
    radius = math.sqrt(float(base) / _AREA[shape])
    size = SIZES[sum(radius > cut for cut in _SIZE_CUTS)]
    if growing:
        motion = "growing"
    else:
        motion = _motion(x, y)
        if motion == "none" and _SYMMETRY[shape] > 1 and _turn(mask[visible], x, y, _SYMMETRY[shape]) > 60:
            motion = "rotating"
    return SeenShape(colour, shape, size, motion, overlap, radius)


def _classify(mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor, area: torch.Tensor) -> tuple[str, float]:
    """The shape class whose best-turned template overlaps most, and that overlap (mean IoU of key frames)."""
    frames = [f for f in np.linspace(0, len(mask) - 1, _KEY_FRAMES).round().astype(int) if area[f] > 12]
    height, width = mask.shape[1:]
    axis = ((torch.arange(_TEMPLATE) + 0.5) / _TEMPLATE * 2 - 1) * _TEMPLATE_REACH
    scale = area[frames].sqrt()[:, None]
    sample_x = (x[frames, None] + axis * scale + 0.5) / width * 2 - 1
    sample_y = (y[frames, None] + axis * scale + 0.5) / height * 2 - 1
    grid = torch.stack(
        [
            sample_x[:, None, :].expand(-1, _TEMPLATE, -1),
            sample_y[:, :, None].expand(-1, -1, _TEMPLATE),
        ],
        dim=-1,
    )
    patch = F.grid_sample(mask[frames, None].float(), grid, align_corners=False)[:, 0] > 0.5
    patch = patch.flatten(1).float()
    templates = _templates().float()
    both = torch.einsum("fp,sap->fsa", patch, templates)
    union = patch.sum(1)[:, None, None] + templates.sum(2)[None] - both
    overlap = (both / union).amax(2).mean(0)
    best = int(overlap.argmax())
    return (SHAPES[best] if overlap[best] > 0.7 else "none"), float(overlap[best])


def _motion(x: np.ndarray, y: np.ndarray) -> str:
    """Name the path of a centroid; "none" for one that stays within 5 pixels."""
    x, y = _smooth(x), _smooth(y)
    range_x, range_y = float(np.ptp(x)), float(np.ptp(y))
    wide, narrow = max(range_x, range_y), min(range_x, range_y)
    if wide < 5:
        return "none"
    gap = math.hypot(x[-1] - x[0], y[-1] - y[0])
    if narrow > 6 and narrow > 0.55 * wide:
        return "circling" if gap < 0.6 * wide else "none"
    along, across = (x, range_y) if range_x > range_y else (y, range_x)
    if across > 0.5 * wide:
        return "none"
    net = float(along[-1] - along[0])
    turns = _turning_points(along, 0.2 * wide)
    if abs(net) > 0.6 * wide and turns <= 1:
        if range_x > range_y:
            return "right" if net > 0 else "left"
        return "down" if net > 0 else "up"
    return "bouncing" if range_y > range_x and turns >= 2 else "none"


def _smooth(values: np.ndarray) -> np.ndarray:
    padded = np.pad(values, 1, mode="edge")
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def _turning_points(values: np.ndarray, least: float) -> int:
    """How often a path turns back by at least `least`."""
    turns, heading, extreme = 0, 0, values[0]
    for value in values[1:]:
        if heading == 0:
            if abs(value - extreme) >= least:
                heading, extreme = (1 if value > extreme else -1), value
        elif (value - extreme) * heading > 0:
            extreme = value
        elif (extreme - value) * heading >= least:
            turns, heading, extreme = turns + 1, -heading, value
    return turns


def _turn(mask: torch.Tensor, x: np.ndarray, y: np.ndarray, symmetry: int) -> float:
    """Degrees that a shape turns over the clip, from the phase of its angular moment of order `symmetry`."""
    rows, columns = torch.meshgrid(
        torch.arange(mask.shape[1], dtype=torch.float64),
        torch.arange(mask.shape[2], dtype=torch.float64),
        indexing="ij",
    )
    dx = columns[None] - torch.from_numpy(x).double()[:, None, None]
    dy = rows[None] - torch.from_numpy(y).double()[:, None, None]
    moment = (torch.complex(dx, dy) ** symmetry * mask).sum((1, 2))
    phase = np.unwrap(np.angle(moment.numpy()))
    return abs(math.degrees(float(phase[-1] - phase[0]) / symmetry))


def compare(seen: Seen, scenes: Scenes, index: int) -> dict[str, bool]:
    """Which attributes of a scene a clip shows; with two shapes both must be right for an attribute to count.

    Shapes are paired with the prompt's by colour, and the rest in order.
    """
    wanted = [
        (
            COLOURS[scenes.colour[index, k]],
            SHAPES[scenes.shape[index, k]],
            SIZES[scenes.size[index, k]],
            MOTIONS[scenes.motion[index, k]],
        )
        for k in range(2)
        if scenes.present[index, k]
    ]
    left = list(seen.shapes)
    pairs: list[tuple[tuple[str, str, str, str], SeenShape | None]] = []
    for want in wanted:
        match = next((s for s in left if s.colour == want[0]), None)
        if match is not None:
            left.remove(match)
        pairs.append((want, match))
    pairs = [(want, match or (left.pop(0) if left else None)) for want, match in pairs]

    def right(position: int, field: str) -> bool:
        return all(match is not None and getattr(match, field) == want[position] for want, match in pairs)

    return {
        "colour": right(0, "colour"),
        "shape": right(1, "shape"),
        "size": right(2, "size"),
        "motion": right(3, "motion"),
        "background": seen.background == BACKGROUNDS[scenes.background[index]],
        "count": seen.count == len(wanted),
    }
