"""Where in a model a call sits, told from the order of the calls alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from videoattn.dispatch import Kind

# The order of the calls in one block of LTX2VideoTransformer3DModel (diffusers 0.42, transformer_ltx2.py);
# LTX-Video's blocks have the two video ones.
BLOCK_ORDER = ("video_self", "audio_self", "video_text", "audio_text", "audio_to_video", "video_to_audio")
_RANK = {kind: rank for rank, kind in enumerate(BLOCK_ORDER)}


@dataclass(slots=True)
class Place:
    """A call's number among those of its kind in the stage, and its forward and layer where known."""

    index: int
    forward: int | None
    layer: int | None


class Places:
    """Gives the calls of one stage their places, in the order they are made.

    `layers` holds the calls of each kind in one forward. A transformer's block starts where the order of its
    calls starts over, so a block that skips a call (STG, isolated modalities) does not shift those after it.
    A block left out whole (FirstBlockCache, layer skipping) does, for the rest of the step: a call does not
    know its module, since one processor and one compiled graph serve all blocks. A step starts a forward.
    Calls of other kinds are counted.
    """

    def __init__(self, layers: Mapping[Kind, int]) -> None:
        for kind, count in layers.items():
            if count < 1:
                raise ValueError(f"layers[{kind!r}] must be at least 1, got {count}")
        self._layers: dict[str, int] = {**layers}
        self._calls: Counter[str | None] = Counter()
        # Of the forwards so far, and of those before the step.
        self._forwards = self._before = 0
        self._start(None)

    def _start(self, step: int | None) -> None:
        self._step = step
        self._before = self._forwards
        self._block = -1
        self._rank = len(BLOCK_ORDER)

    def next(self, kind: str | None, step: int | None = None) -> Place:
        """The place of the next call of that kind, in that denoising step."""
        index = self._calls[kind]
        self._calls[kind] += 1
        layers = self._layers.get(kind or "")
        rank = _RANK.get(kind or "")
        if rank is None:
            return Place(index, None, None) if layers is None else Place(index, *divmod(index, layers))
        if step != self._step:
            self._start(step)
        if rank <= self._rank:
            self._block += 1
        self._rank = rank
        if layers is None:
            return Place(index, None, None)
        forward, layer = divmod(self._block, layers)
        self._forwards = max(self._forwards, self._before + forward + 1)
        return Place(index, self._before + forward, layer)
