"""How much two clips are alike: PSNR and SSIM over their frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from videoattn.render.errors import RenderError, UsageError

# Frames compared at most: SSIM of a full-HD frame takes a good part of a second on a CPU.
FRAMES = 48


@dataclass(frozen=True, slots=True)
class Likeness:
    """PSNR in dB (None if no pixel differs) and SSIM, means over `compared` of `frames`, and the worst frame.

    PSNR is of the mean squared error over all compared frames, SSIM as in Wang et al. 2004 (11×11 Gaussian
    window), both of RGB in 0…255 as decoded from the files.
    """

    psnr: float | None
    ssim: float
    worst_psnr: float | None
    worst_frame: int
    compared: int
    frames: int


def measure(a: Path | None, b: Path | None) -> Likeness:
    """Compare two clips of the same size and length; UsageError if they differ in those."""
    if a is None or b is None:
        raise UsageError("a clip has disappeared")
    import torch
    from torchmetrics.functional.image import structural_similarity_index_measure

    count, shape = _extent(a)
    others = _extent(b)
    if (count, shape) != others:
        raise UsageError(
            f"no PSNR or SSIM: A has {count} frames of {shape[0]}x{shape[1]}, B {others[0]} of "
            f"{others[1][0]}x{others[1][1]}"
        )
    picked = {
        round(index * (count - 1) / max(1, min(count, FRAMES) - 1)) for index in range(min(count, FRAMES))
    }
    errors: list[float] = []
    similarities: list[float] = []
    places: list[int] = []
    for number, (left, right) in enumerate(zip(_frames(a), _frames(b), strict=False)):
        if number not in picked:
            continue
        pair = [torch.from_numpy(frame).permute(2, 0, 1)[None].float() for frame in (left, right)]
        errors.append(float(torch.mean((pair[0] - pair[1]) ** 2)))
        similarity = structural_similarity_index_measure(pair[0], pair[1], data_range=255.0)
        assert isinstance(similarity, torch.Tensor)
        similarities.append(float(similarity))
        places.append(number)
    worst = int(np.argmax(errors))
    return Likeness(
        _psnr(float(np.mean(errors))),
        float(np.mean(similarities)),
        _psnr(errors[worst]),
        places[worst],
        len(places),
        count,
    )


def _psnr(error: float) -> float | None:
    return 10 * math.log10(255.0**2 / error) if error > 0 else None


def _extent(path: Path) -> tuple[int, tuple[int, int]]:
    import av
    import av.error

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            return stream.frames or sum(1 for _ in container.decode(stream)), (stream.width, stream.height)
    except (av.error.FFmpegError, IndexError) as error:
        raise RenderError(f"a clip cannot be decoded: {error}") from None


def _frames(path: Path) -> Iterator[np.ndarray]:
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")
