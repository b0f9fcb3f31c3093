"""Attributes of the demo model's world, and random scenes made of them.

A scene is one or two flat shapes on a flat background. Every name below is also a word of the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "white")
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIZES = ("small", "medium", "large")
MOTIONS = ("left", "right", "up", "down", "circling", "bouncing", "growing", "rotating")
BACKGROUNDS = ("black", "white", "gray", "blue", "green", "pink")

COLOUR_RGB = np.array(
    [
        [0.88, 0.10, 0.12],
        [0.12, 0.66, 0.22],
        [0.13, 0.24, 0.88],
        [0.98, 0.88, 0.12],
        [0.98, 0.52, 0.06],
        [0.54, 0.16, 0.72],
        [0.12, 0.84, 0.90],
        [0.98, 0.98, 0.98],
    ],
    dtype=np.float32,
)
BACKGROUND_RGB = np.array(
    [
        [0.03, 0.03, 0.04],
        COLOUR_RGB[COLOURS.index("white")],
        [0.50, 0.50, 0.50],
        COLOUR_RGB[COLOURS.index("blue")],
        COLOUR_RGB[COLOURS.index("green")],
        [0.98, 0.62, 0.76],
    ],
    dtype=np.float32,
)
# Circumradius in pixels of a 128-pixel frame. The checker's cuts rest on the gaps between the ranges.
RADIUS_RANGES = np.array([[13.0, 15.0], [18.5, 20.5], [27.0, 30.0]], dtype=np.float32)

NUM_FRAMES = 33
FRAME_RATE = 24
HEIGHT = WIDTH = 128

_CIRCLE, _ROTATING = SHAPES.index("circle"), MOTIONS.index("rotating")
_SAME_AS_BACKGROUND = np.array([[colour == background for background in BACKGROUNDS] for colour in COLOURS])


@dataclass
class Scenes:
    """A batch of scenes as indices into the names above.

    `colour`, `shape`, `size` and `motion` are int64 arrays `(batch, 2)`; `present` is a bool array of the
    same shape whose first column is all true; `background` is int64 `(batch,)`. With two shapes the first
    one is to the left of the second, or above it.
    """

    colour: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    motion: np.ndarray
    present: np.ndarray
    background: np.ndarray

    def __len__(self) -> int:
        return len(self.background)

    def __getitem__(self, index) -> Scenes:
        return Scenes(*(getattr(self, field)[index] for field in self.__dataclass_fields__))

    @staticmethod
    def concatenate(parts: list[Scenes]) -> Scenes:
        return Scenes(*(np.concatenate([getattr(p, f) for p in parts]) for f in Scenes.__dataclass_fields__))


def possible(shape: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """Whether each motion can be seen on each shape: a turning circle can't."""
    return ~((shape == _CIRCLE) & (motion == _ROTATING))


def withheld(colour: np.ndarray, shape: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """Whether a (colour, shape, motion) triple is kept out of training: one colour a shape and motion."""
    return (colour + 3 * shape + 5 * motion) % len(COLOURS) == 0


def sample_scenes(
    rng: np.random.Generator, batch: int, two_shapes: float | np.ndarray = 0.5, held_out: bool = False
) -> Scenes:
    """Draw random scenes.

    `two_shapes` is the share of scenes with two shapes, or a bool array `(batch,)`. With `held_out` every
    triple is a withheld one, otherwise none is.
    """
    two = two_shapes if isinstance(two_shapes, np.ndarray) else rng.random(batch) < two_shapes
    present = np.stack([np.ones(batch, dtype=bool), two], axis=1)
    background = rng.integers(len(BACKGROUNDS), size=batch)
    shape = rng.integers(len(SHAPES), size=(batch, 2))
    motion = rng.integers(len(MOTIONS), size=(batch, 2))
    motion[:, 1] = np.where(rng.random(batch) < 0.3, motion[:, 0], motion[:, 1])
    colour = rng.integers(len(COLOURS), size=(batch, 2))
    while True:
        # A first draw of a turning circle is mended in its shape, so that motions stay equally likely.
        bad = ~possible(shape, motion) | (withheld(colour, shape, motion) != held_out)
        bad |= _SAME_AS_BACKGROUND[colour, background[:, None]]
        bad[:, 1] |= (colour[:, 0] == colour[:, 1]) & ~bad[:, 0]
        bad &= present
        rows, columns = np.nonzero(bad)
        if not len(rows):
            break
        shape[rows, columns] = rng.integers(len(SHAPES), size=len(rows))
        colour[rows, columns] = rng.integers(len(COLOURS), size=len(rows))
        impossible = ~possible(shape, motion)
        shape[impossible] = rng.integers(1, len(SHAPES), size=int(impossible.sum()))
    size = np.where(two[:, None], rng.integers(2, size=(batch, 2)), rng.integers(3, size=(batch, 1)))
    return Scenes(colour, shape, size, motion, present, background)
