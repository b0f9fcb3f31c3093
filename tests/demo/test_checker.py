"""The analytic checker, against clips whose content is known because they were drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from videoattn.demo.checker import ATTRIBUTES, compare, look
from videoattn.demo.draw import draw, make_tracks
from videoattn.demo.evaluation import check_clips, format_table, tally
from videoattn.demo.scenes import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, Scenes, sample_scenes


def drawn(seed: int, count: int, two_shapes: float, held_out: bool = False) -> tuple[torch.Tensor, Scenes]:
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, two_shapes, held_out)
    clips = draw(scenes, make_tracks(rng, scenes))
    return ((clips + 1) * 127.5).round().byte().transpose(1, 2), scenes


def one_scene(colour: str, shape: str, size: str, motion: str, background: str) -> Scenes:
    def pair(names: tuple[str, ...], name: str) -> np.ndarray:
        return np.full((1, 2), names.index(name))

    return Scenes(
        pair(COLOURS, colour),
        pair(SHAPES, shape),
        pair(SIZES, size),
        pair(MOTIONS, motion),
        np.array([[True, False]]),
        np.array([BACKGROUNDS.index(background)]),
    )


@pytest.mark.parametrize(("two_shapes", "held_out"), [(0.0, False), (1.0, True)])
def test_drawn_clips_are_read_right(two_shapes: float, held_out: bool) -> None:
    clips, scenes = drawn(1, 20, two_shapes, held_out)
    for verdict in check_clips(clips, scenes):
        assert all(verdict.values())


@pytest.mark.slow
def test_at_least_995_of_1000_attributes_are_read_right() -> None:
    wrong = total = 0
    for seed in range(10):
        clips, scenes = drawn(100 + seed, 20, 0.5, held_out=seed % 2 == 1)
        for verdict in check_clips(clips, scenes):
            wrong += sum(not right for right in verdict.values())
            total += len(ATTRIBUTES)
    assert wrong <= 0.005 * total


@pytest.mark.parametrize(
    ("field", "attribute", "values"),
    [
        ("colour", "colour", len(COLOURS)),
        ("shape", "shape", len(SHAPES)),
        ("size", "size", len(SIZES)),
        ("motion", "motion", len(MOTIONS)),
        ("background", "background", len(BACKGROUNDS)),
    ],
)
def test_another_wish_is_found_unmet(field: str, attribute: str, values: int) -> None:
    clips, scenes = drawn(2, 4, 0.0)
    wished = dataclasses.replace(scenes, **{field: (getattr(scenes, field) + 1) % values})
    for index, clip in enumerate(clips):
        verdict = compare(look(clip.float() / 255, 1), wished, index)
        assert not verdict.pop(attribute)
        assert all(verdict.values())


def test_count_is_wrong_when_a_shape_is_missing_or_too_many() -> None:
    clips, scenes = drawn(3, 4, 1.0)
    alone, single = drawn(3, 4, 0.0)
    for index in range(4):
        assert not compare(look(clips[index].float() / 255, 1), single, index)["count"]
        assert not compare(look(alone[index].float() / 255, 2), scenes, index)["count"]


def test_two_pieces_of_one_colour_count_as_two() -> None:
    scenes = one_scene("red", "square", "medium", "up", "black")
    rng = np.random.default_rng(0)
    clip = draw(scenes, make_tracks(rng, scenes))
    both = torch.maximum(clip, clip.roll(64, dims=-1))
    assert look((both[0].transpose(0, 1) + 1) / 2, 1).count == 2


def test_empty_and_noisy_clips_pass_nothing_but_their_background() -> None:
    scenes = one_scene("red", "square", "medium", "up", "gray")
    empty = compare(look(torch.full((33, 3, 128, 128), 0.5), 1), scenes, 0)
    assert [name for name, right in empty.items() if right] == ["background"]
    noise = torch.rand((33, 3, 128, 128), generator=torch.Generator().manual_seed(0))
    verdict = compare(look(noise, 1), scenes, 0)
    assert not verdict["shape"]
    assert not verdict["count"]


def test_a_shape_that_vanishes_on_its_way_has_no_motion() -> None:
    scenes = one_scene("yellow", "circle", "large", "right", "blue")
    clip = draw(scenes, make_tracks(np.random.default_rng(0), scenes))[0].transpose(0, 1)
    clip[22:] = clip[0, :, :1, :1]
    assert look((clip + 1) / 2, 1).shapes[0].motion == "none"


def test_tally_counts_both_groups() -> None:
    scenes = sample_scenes(np.random.default_rng(0), 4, np.array([False, False, True, True]))
    right = dict.fromkeys(ATTRIBUTES, True)
    table = tally([right, right | {"shape": False}, right, right], scenes)
    assert table["one"]["shape"] == 50.0
    assert table["one"]["all"] == 50.0
    assert table["two"]["all"] == 100.0
    assert "| one shape (2) | 100.0 | 50.0 |" in format_table(table)
