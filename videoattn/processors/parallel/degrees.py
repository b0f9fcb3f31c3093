"""How many ranks share one clip, and in which way; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

FORMS = "ulysses:N, ring:N or ulysses:A,ring:B"


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks of one Ulysses group, and such groups in a ring; ranks of a Ulysses group follow each other."""

    ulysses: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.ulysses * self.ring

    def __str__(self) -> str:
        parts = (("ulysses", self.ulysses), ("ring", self.ring))
        return ",".join(f"{name}:{degree}" for name, degree in parts if degree > 1)

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """Degrees from `ulysses:2`, `ring:2` or `ulysses:2,ring:2`; ValueError says what would work."""
        given: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            if (
                name not in ("ulysses", "ring")
                or name in given
                or not (number.isascii() and number.isdigit())
            ):
                raise ValueError(f"'{text}' names no degrees: write {FORMS}")
            given[name] = int(number)
        degrees = cls(**given)
        if degrees.ulysses < 1 or degrees.ring < 1 or degrees.ranks < 2:
            raise ValueError(f"'{text}' shares nothing out: one degree is at least 2")
        return degrees


def refuse_heads(heads: int, ulysses: int) -> str | None:
    """Why a Ulysses degree does not fit a number of heads, with those that do; None if it fits."""
    if heads % ulysses == 0:
        return None
    legal = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
    return (
        f"Ulysses shares out whole heads, and {ulysses} does not divide this model's {heads}: take a degree "
        f"of {legal}, or the ring"
    )
