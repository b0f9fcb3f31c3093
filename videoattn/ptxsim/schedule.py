"""When asynchronous work completes and which warp runs next."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How the simulator interleaves warps and asynchronous agents; construct with early(), late(),
    random(seed) or slow(first, last).

    early: an asynchronous operation takes effect when it is issued. late: it takes effect only when nothing
    else can run, or when its issuer waits for it; the first try_wait that would block answers false. random:
    in between, by seed; every warp that can run is as likely to be next. slow: some warps of each CTA run
    only while no other warp and no asynchronous agent can, so that the others get as far ahead of them as
    the kernel lets them.
    """

    mode: str = "early"
    seed: int = 0
    warps: range = range(0)

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
    def slow(cls, first: int, last: int | None = None) -> Schedule:
        """Warps `first` to `last` of each CTA, or `first` alone, fall as far behind as they can."""
        return cls("slow", warps=range(first, (first if last is None else last) + 1))

    @classmethod
    def named(cls, text: str) -> Schedule:
        """From "early", "late", "random", "random:SEED", "slow:WARP" or "slow:FIRST-LAST".

        Raises ValueError otherwise.
        """
        if text in ("early", "late", "random"):
            return cls(text)
        if match := re.fullmatch(r"random:([0-9]+)", text):
            return cls.random(int(match[1]))
        if match := re.fullmatch(r"slow:([0-9]+)(?:-([0-9]+))?", text):
            first, last = int(match[1]), int(match[2] or match[1])
            if first <= last:
                return cls.slow(first, last)
        raise ValueError(
            f"schedule {text!r} is not early, late, random, random:SEED, slow:WARP or slow:FIRST-LAST"
        )

    def rng(self) -> random.Random:
        """The generator behind every random choice."""
        return random.Random(self.seed)

    def __str__(self) -> str:
        if self.mode == "slow":
            first, last = self.warps[0], self.warps[-1]
            return f"slow:{first}" if first == last else f"slow:{first}-{last}"
        return f"random:{self.seed}" if self.mode == "random" else self.mode
