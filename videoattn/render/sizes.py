"""Sizes and frame counts that a model can make, and the nearest ones when it can't."""

from __future__ import annotations

from dataclasses import dataclass

from videoattn.render.errors import UsageError


@dataclass(frozen=True, slots=True)
class Grid:
    """The steps in which a model's clips grow: pixels for width and height, frames for `num_frames - 1`."""

    pixels: int
    frames: int

    def halved_first(self) -> Grid:
        """The grid of a two-stage render, whose first stage works at half the size."""
        return Grid(2 * self.pixels, self.frames)

    def check(self, width: int, height: int, num_frames: int) -> None:
        """Raise UsageError naming the nearest legal values unless all three lie on the grid."""
        problems = []
        for name, value in (("width", width), ("height", height)):
            if value % self.pixels:
                problems.append(f"{name} {value}: use {_either(_around(value, self.pixels, 0))}")
        if (num_frames - 1) % self.frames:
            near = _either(_around(num_frames, self.frames, 1))
            problems.append(f"num_frames {num_frames}: use {near}")
        if problems:
            raise UsageError(
                f"this model cannot make {'; '.join(problems)} "
                f"(sizes in steps of {self.pixels} pixels, frame counts of {self.frames} after the first)"
            )


def _around(value: int, step: int, offset: int) -> list[int]:
    below = (value - offset) // step * step + offset
    return [legal for legal in (below, below + step) if legal > 0]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
