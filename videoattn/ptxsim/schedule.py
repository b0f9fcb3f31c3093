"""When asynchronous work completes and which warp runs next."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How the simulator interleaves warps and asynchronous agents; construct with early(), late() or
    random(seed).

    early: an asynchronous operation takes effect when it is issued. late: it takes effect only when nothing
    else can run, or when its issuer waits for it; the first try_wait that would block answers false. random:
    in between, by seed, with warps of uneven speed.
    """

    mode: str = "early"
    seed: int = 0

    @classmethod
    def early(cls) -> Schedule:
        """Everything asynchronous completes at once."""
        return cls("early")

    @classmethod
    def late(cls) -> Schedule:
        """Everything asynchronous completes as late as is legal."""
        return cls("late")

    @classmethod
    def random(cls, seed: int = 0) -> Schedule:
        """Completion and warp order drawn from `seed`."""
        return cls("random", seed)

    @classmethod
    def named(cls, text: str) -> Schedule:
        """From "early", "late", "random" or "random:SEED"; raises ValueError otherwise."""
        mode, _, seed = text.partition(":")
        if mode not in ("early", "late", "random") or (seed and (mode != "random" or not seed.isdigit())):
            raise ValueError(f"schedule {text!r} is not early, late, random or random:SEED")
        return cls(mode, int(seed or 0))

    def rng(self) -> random.Random:
        """The generator behind every random choice."""
        return random.Random(self.seed)

    def __str__(self) -> str:
        return f"random:{self.seed}" if self.mode == "random" else self.mode
