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
    Calls of other kinds are counted.
    """

    def __init__(self, layers: Mapping[Kind, int]) -> None:
        for kind, count in layers.items():
            if count < 1:
                raise ValueError(f"layers[{kind!r}] must be at least 1, got {count}")
        self._layers: dict[str, int] = {**layers}
        self._calls: Counter[str | None] = Counter()
        self._block = -1
        self._rank = len(BLOCK_ORDER)

    def next(self, kind: str | None) -> Place:
        """The place of the next call of that kind."""
        index = self._calls[kind]
        self._calls[kind] += 1
        number = index
        rank = _RANK.get(kind or "")
        if rank is not None:
            if rank <= self._rank:
                self._block += 1
            self._rank = rank
            number = self._block
        layers = self._layers.get(kind or "")
        if layers is None:
            return Place(index, None, None)
        return Place(index, number // layers, number % layers)
