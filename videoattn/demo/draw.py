"""Draws scenes: motions become tracks, tracks become antialiased pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from videoattn.demo.scenes import (
    BACKGROUND_RGB,
    COLOUR_RGB,
    HEIGHT,
    MOTIONS,
    NUM_FRAMES,
    RADIUS_RANGES,
    SHAPES,
    WIDTH,
    Scenes,
)

_MOTION = {name: index for index, name in enumerate(MOTIONS)}
# Inner radius over circumradius of a regular pentagram's star; arm half-width over circumradius of the cross.
STAR_INNER = 0.42
CROSS_ARM = 0.34
_CROSS_LENGTH = math.sqrt(1 - CROSS_ARM**2)
MAX_TRAVEL = 36.0


@dataclass
class Tracks:
    """Where each shape is: float32 arrays `(batch, shapes, frames)` in pixels and radians."""

    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    angle: np.ndarray


def make_tracks(rng: np.random.Generator, scenes: Scenes, num_frames: int = NUM_FRAMES) -> Tracks:
    """Draw a random track for every shape that carries out its motion inside its own part of the frame."""
    batch = len(scenes)
    motion = scenes.motion
    time = np.linspace(0.0, 1.0, num_frames, dtype=np.float32)

    low, high = RADIUS_RANGES[scenes.size, 0], RADIUS_RANGES[scenes.size, 1]
    radius = rng.uniform(low, high).astype(np.float32)

    centre, half = _regions(rng, scenes)
    growing = motion == _MOTION["growing"]
    room_for_radius = half.min(axis=-1) - 1.0
    growth = np.where(growing, np.minimum(rng.uniform(1.5, 2.0, (batch, 2)), room_for_radius / radius), 1.0)
    room = half - (radius * growth)[..., None] - np.where(scenes.present[:, 1], 1.0, 3.0)[:, None, None]
    room = np.maximum(room, 0.0)

    travel = np.minimum(rng.uniform(0.75, 1.0, (batch, 2, 1)) * room, MAX_TRAVEL)
    horizontal = np.isin(motion, (_MOTION["left"], _MOTION["right"]))
    vertical = np.isin(motion, (_MOTION["up"], _MOTION["down"], _MOTION["bouncing"]))
    circling = motion == _MOTION["circling"]
    orbit = np.minimum(rng.uniform(0.8, 1.0, (batch, 2)) * room.min(axis=-1), 26.0)
    reach_x = np.where(horizontal, travel[..., 0], np.where(circling, orbit, 0.0))
    bounce = np.minimum(travel[..., 1], 28.0)
    reach_y = np.where(
        motion == _MOTION["bouncing"],
        bounce,
        np.where(vertical, travel[..., 1], np.where(circling, orbit, 0.0)),
    )
    jitter = rng.uniform(-1.0, 1.0, (batch, 2, 2)) * np.minimum(room - np.stack([reach_x, reach_y], -1), 24.0)
    centre = centre + jitter

    sign = np.where(np.isin(motion, (_MOTION["left"], _MOTION["up"])), -1.0, 1.0)
    ramp = 2.0 * time - 1.0
    phase = rng.uniform(0.0, 2 * math.pi, (batch, 2, 1))
    turn = np.where(rng.random((batch, 2, 1)) < 0.5, -1.0, 1.0)
    # The last frame is one step short of the first, so that a looped clip turns evenly.
    orbit_angle = phase + turn * 2 * math.pi * time * (num_frames - 1) / num_frames
    hop = 1.0 - 2.0 * np.abs(np.sin(2 * math.pi * time))

    def along(reach: np.ndarray, moving: np.ndarray, wave: np.ndarray, which: np.ndarray) -> np.ndarray:
        linear = (sign * reach)[..., None] * ramp
        return np.where(moving[..., None], linear, np.where(which[..., None], reach[..., None] * wave, 0.0))

    x = centre[..., 0, None] + along(reach_x, horizontal, np.cos(orbit_angle), circling)
    y = centre[..., 1, None] + np.where(
        (motion == _MOTION["bouncing"])[..., None],
        reach_y[..., None] * hop,
        along(reach_y, vertical, np.sin(orbit_angle), circling),
    )
    spin = np.radians(rng.uniform(180.0, 324.0, (batch, 2, 1))) * turn
    angle = np.where((motion == _MOTION["rotating"])[..., None], spin * time, 0.0)
    radii = radius[..., None] * (1.0 + (growth[..., None] - 1.0) * time)
    return Tracks(*(np.ascontiguousarray(a, dtype=np.float32) for a in (x, y, radii, angle)))


def _regions(rng: np.random.Generator, scenes: Scenes) -> tuple[np.ndarray, np.ndarray]:
    """Centre and half extent `(batch, 2, 2)`, x before y, of the part of the frame each shape may use.

    Two shapes share the frame side by side or one above the other, whichever gives their motions more room.
    """
    batch = len(scenes)
    horizontal = np.isin(scenes.motion, (_MOTION["left"], _MOTION["right"])).sum(axis=1)
    vertical = np.isin(scenes.motion, (_MOTION["up"], _MOTION["down"], _MOTION["bouncing"])).sum(axis=1)
    stacked = np.where(horizontal == vertical, rng.random(batch) < 0.5, horizontal > vertical)
    two = scenes.present[:, 1]
    centre = np.full((batch, 2, 2), (WIDTH - 1) / 2)
    half = np.full((batch, 2, 2), WIDTH / 2)
    for axis, split in ((0, two & ~stacked), (1, two & stacked)):
        half[split, :, axis] = WIDTH / 4
        centre[split, 0, axis] -= WIDTH / 4
        centre[split, 1, axis] += WIDTH / 4
    return centre, half


def signed_distance(
    shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor
) -> torch.Tensor:
    """Distance in pixels from (x, y) to the outline of an upright shape, negative inside.

    All arguments broadcast; `shape` indexes SHAPES. Beyond a corner the distance is to the extended edges,
    which is smaller than the Euclidean one and makes no difference within a pixel of the outline.
    """
    distance = torch.sqrt(x * x + y * y + 1e-12)
    # Angle from straight up, where every shape but the square has a corner.
    angle = torch.atan2(x, -y)

    def folded(n: int) -> torch.Tensor:
        sector = 2 * math.pi / n
        return torch.remainder(angle + sector / 2, sector) - sector / 2

    ax, ay = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    triangle = distance * torch.cos(math.pi / 3 - folded(3).abs()) - radius * 0.5
    square = ax - radius * math.sqrt(0.5)
    tip_x, tip_y = distance * torch.cos(folded(5)), distance * torch.sin(folded(5).abs())
    inner = (STAR_INNER * math.cos(math.pi / 5), STAR_INNER * math.sin(math.pi / 5))
    edge = math.hypot(1 - inner[0], inner[1])
    star = (tip_x - radius) * (inner[1] / edge) + tip_y * ((1 - inner[0]) / edge)
    cross = torch.maximum(ax - radius * _CROSS_LENGTH, ay - radius * CROSS_ARM)

    result = distance - radius
    for name, value in (("square", square), ("triangle", triangle), ("star", star), ("cross", cross)):
        result = torch.where(shape == SHAPES.index(name), value, result)
    return result


def draw_shapes(
    background_rgb: torch.Tensor,
    rgb: torch.Tensor,
    shape: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    radius: torch.Tensor,
    angle: torch.Tensor,
) -> torch.Tensor:
    """Paint shapes one over the other, antialiased over one pixel.

    `background_rgb` is `(batch, 3)` and `rgb` `(batch, shapes, 3)` in [0, 1], `shape` `(batch, shapes)`
    int64, the tracks `(batch, shapes, frames)`; a radius of 0 or less leaves a shape out. Returns `(batch,
    3, frames, height, width)` in [-1, 1] on the device of the arguments.
    """
    frames = x.shape[-1]
    device = x.device
    rows = torch.arange(HEIGHT, device=device, dtype=torch.float32)[None, None, :, None]
    columns = torch.arange(WIDTH, device=device, dtype=torch.float32)[None, None, None, :]
    clip = background_rgb[:, :, None, None, None].expand(-1, -1, frames, HEIGHT, WIDTH)
    for index in range(shape.shape[1]):
        cx, cy, r, a = (t[:, index, :, None, None] for t in (x, y, radius, angle))
        dx, dy = columns - cx, rows - cy
        cos, sin = torch.cos(a), torch.sin(a)
        distance = signed_distance(
            shape[:, index, None, None, None], cos * dx + sin * dy, cos * dy - sin * dx, r
        )
        alpha = ((0.5 - distance).clamp(0.0, 1.0) * (r > 0))[:, None]
        clip = clip + alpha * (rgb[:, index, :, None, None, None] - clip)
    return clip * 2 - 1


def draw(scenes: Scenes, tracks: Tracks, device: torch.device | str = "cpu") -> torch.Tensor:
    """Draw scenes as clips `(batch, 3, frames, height, width)`, fp32 in [-1, 1], on `device`."""
    radius = np.where(scenes.present[..., None], tracks.radius, 0.0).astype(np.float32)
    arrays = (
        BACKGROUND_RGB[scenes.background],
        COLOUR_RGB[scenes.colour],
        scenes.shape,
        tracks.x,
        tracks.y,
        radius,
        tracks.angle,
    )
    tensors = [torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays]
    if torch.device(device).type != "cpu":
        return draw_shapes(*tensors)
    # A clip's temporaries fit the cache and are used again for the next; a batch's are fresh pages each time.
    clips = torch.empty((len(scenes), 3, tracks.x.shape[-1], HEIGHT, WIDTH))
    for index in range(len(scenes)):
        clips[index] = draw_shapes(*(t[index : index + 1] for t in tensors))[0]
    return clips
