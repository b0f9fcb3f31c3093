"""Captions of scenes, and the words they are made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from videoattn.demo.scenes import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, Scenes

# What each word of a caption speaks of.
OTHER, FIRST, SECOND, BACKGROUND = range(4)

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in COLOURS},
    "purple": ("purple", "violet"),
    "cyan": ("cyan", "turquoise"),
}
BACKGROUND_WORDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in BACKGROUNDS},
    "gray": ("gray", "grey"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in SHAPES},
    "circle": ("circle", "ball", "disc", "disk"),
    "square": ("square", "box"),
    "cross": ("cross", "plus"),
}
SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "medium": ("", "", "", "medium", "medium sized"),
    "large": ("large", "big", "huge"),
}


def _directions(direction: str, *others: str) -> tuple[str, ...]:
    verbs = ("moving", "going", "sliding", "drifting", "moves", "gliding")
    return (*(f"{verb} {direction}" for verb in verbs), *others)


MOTION_PHRASES: dict[str, tuple[str, ...]] = {
    "left": _directions("left", "moving to the left", "flying left", "sliding to the left"),
    "right": _directions("right", "moving to the right", "flying right", "sliding to the right"),
    "up": _directions("up", "rising", "moving upwards", "floating up", "flying up", "rises"),
    "down": _directions("down", "falling", "moving downwards", "sinking", "falling down", "falls"),
    "circling": ("circling", "orbiting", "moving in circles", "going around", "going in circles"),
    "bouncing": ("bouncing", "hopping", "jumping", "bounces", "bouncing up and down"),
    "growing": ("growing", "expanding", "getting bigger", "grows", "getting larger"),
    "rotating": ("rotating", "spinning", "turning", "rotates", "spins"),
}
_LINKS = (("and",), ("and",), ("and",), ("with",), (",", "and"), ("while",), (",",), ("next", "to"))
_BACKGROUND_LINKS = (("on",), ("on",), ("on",), ("over",), ("against",), ("in", "front", "of"))
_OPENINGS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (),
    (),
    (),
    ("a", "video", "of"),
    ("a", "clip", "of"),
    ("video", "of"),
)
_SPARE_WORDS = ("an", "the", "one", "is", "both", ".", "background", "animation", "showing", "of")


def _flat(phrases: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> list[str]:
    return [word for group in phrases for phrase in group for word in phrase.split()]


def vocabulary() -> list[str]:
    """Every word a prompt may use, in a fixed order."""
    words = _flat([*COLOUR_WORDS.values(), *BACKGROUND_WORDS.values(), *SHAPE_WORDS.values()])
    words += _flat([*SIZE_WORDS.values(), *MOTION_PHRASES.values(), *_LINKS, *_BACKGROUND_LINKS, *_OPENINGS])
    return list(dict.fromkeys([*words, *_SPARE_WORDS]))


@dataclass(frozen=True)
class Caption:
    """A caption's words, what each speaks of (OTHER, FIRST, SECOND, BACKGROUND), and what it says at all."""

    words: list[str]
    parts: list[int]
    says_motion: tuple[bool, bool]
    says_background: bool

    @property
    def text(self) -> str:
        return " ".join(self.words).replace(" ,", ",").replace(" .", ".")


_MOTIONS_SPLIT: dict[str, list[list[str]]] = {
    name: [phrase.split() for phrase in phrases] for name, phrases in MOTION_PHRASES.items()
}


def caption(
    rng: random.Random, scenes: Scenes, index: int, synonyms: float = 0.4, drop: bool = True
) -> Caption:
    """Write a caption of one scene of a batch.

    `synonyms` is the chance of each word to be another than the attribute's own name; with `drop` a few
    captions leave out the background (6 %) or a motion (4 %).
    """
    chance = rng.random

    def word(table: dict[str, tuple[str, ...]], name: str) -> str:
        first, *others = table[name]
        return rng.choice(table[name]) if others and chance() < synonyms else first

    count = 2 if scenes.present[index, 1] else 1
    motions = [MOTIONS[m] for m in scenes.motion[index, :count]]
    verbs = [rng.choice(_MOTIONS_SPLIT[m]) if chance() < synonyms else _MOTIONS_SPLIT[m][0] for m in motions]
    both = count == 2 and motions[0] == motions[1] and chance() < 0.3

    words: list[str] = []
    parts: list[int] = []
    says_motion = [not (drop and chance() < 0.04) for _ in range(2)] if not both else [True, True]

    def say(speaks_of: int, *said: str) -> None:
        words.extend(said)
        parts.extend([speaks_of] * len(said))

    def say_background() -> None:
        colour = word(BACKGROUND_WORDS, BACKGROUNDS[scenes.background[index]])
        say(OTHER, *(rng.choice(_BACKGROUND_LINKS) if chance() < synonyms else ("on",)))
        if chance() < 0.9:
            say(BACKGROUND, "a", colour, "background")
        else:
            say(BACKGROUND, colour)

    with_background = not (drop and chance() < 0.06)
    say(OTHER, *(rng.choice(_OPENINGS) if chance() < synonyms else ()))
    background_first = with_background and not words and chance() < 0.1
    if background_first:
        say_background()
        say(OTHER, ",")
    for k in range(count):
        speaks_of = FIRST if k == 0 else SECOND
        if k:
            say(OTHER, *(rng.choice(_LINKS) if chance() < synonyms else ("and",)))
        described = word(SIZE_WORDS, SIZES[scenes.size[index, k]]).split()
        described += [word(COLOUR_WORDS, COLOURS[scenes.colour[index, k]])]
        described += [word(SHAPE_WORDS, SHAPES[scenes.shape[index, k]])]
        article = "an" if described[0][0] in "aeo" else "a"
        if chance() < synonyms * 0.2:
            article = rng.choice(("the", "one"))
        say(speaks_of, article, *described)
        if not both and says_motion[k]:
            if chance() < synonyms * 0.2 and verbs[k][0].endswith("ing"):
                say(speaks_of, "is")
            say(speaks_of, *verbs[k])
    if both:
        say(OTHER, *(("both",) if chance() < 0.5 else (",", "both")), *verbs[0])
    if with_background and not background_first:
        say_background()
    if chance() < synonyms * 0.2:
        say(OTHER, ".")
    return Caption(words, parts, (says_motion[0], says_motion[1]), with_background)
