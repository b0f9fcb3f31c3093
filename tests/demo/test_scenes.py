"""Random scenes and how they are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from videoattn.demo.draw import draw, make_tracks, signed_distance
from videoattn.demo.evaluation import evaluation_set
from videoattn.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    HEIGHT,
    MOTIONS,
    SHAPES,
    SIZES,
    WIDTH,
    possible,
    sample_scenes,
    withheld,
)


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_withheld_combinations_never_meet(held_out: bool) -> None:
    scenes = sample_scenes(np.random.default_rng(0), 4000, 0.5, held_out)
    triples = withheld(scenes.colour, scenes.shape, scenes.motion)[scenes.present]
    assert triples.all() if held_out else not triples.any()


def test_every_value_of_every_attribute_is_drawn_and_colours_can_be_told_apart() -> None:
    scenes = sample_scenes(np.random.default_rng(0), 4000, 0.5)
    for field, names in (("colour", COLOURS), ("shape", SHAPES), ("size", SIZES), ("motion", MOTIONS)):
        assert set(getattr(scenes, field)[scenes.present]) == set(range(len(names)))
    assert possible(scenes.shape, scenes.motion)[scenes.present].all()
    two = scenes.present[:, 1]
    assert (scenes.colour[two, 0] != scenes.colour[two, 1]).all()
    for index in range(len(scenes)):
        background = BACKGROUNDS[scenes.background[index]]
        assert all(
            COLOURS[scenes.colour[index, k]] != background for k in range(2) if scenes.present[index, k]
        )


def test_tracks_stay_inside_the_frame_and_shapes_apart() -> None:
    rng = np.random.default_rng(0)
    scenes = sample_scenes(rng, 2000, 0.5)
    tracks = make_tracks(rng, scenes)
    there = scenes.present
    for centre, limit in ((tracks.x, WIDTH), (tracks.y, HEIGHT)):
        assert (centre - tracks.radius)[there].min() > -0.5
        assert (centre + tracks.radius)[there].max() < limit - 0.5
    two = there[:, 1]
    gap = np.hypot(tracks.x[:, 0] - tracks.x[:, 1], tracks.y[:, 0] - tracks.y[:, 1])
    assert (gap > tracks.radius.sum(axis=1))[two].all()
    before = (tracks.x[:, 0] + tracks.radius[:, 0] < tracks.x[:, 1] - tracks.radius[:, 1] + 1).all(axis=1)
    above = (tracks.y[:, 0] + tracks.radius[:, 0] < tracks.y[:, 1] - tracks.radius[:, 1] + 1).all(axis=1)
    assert (before | above)[two].all()


@pytest.mark.parametrize("name", SHAPES)
def test_outlines_pass_through_the_circumradius(name: str) -> None:
    shape, radius = torch.tensor(SHAPES.index(name)), torch.tensor(20.0)
    axis = torch.linspace(-25, 25, 401)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inside = signed_distance(shape, x, y, radius) < 0
    reach = torch.hypot(x, y)[inside].max()
    assert 19.0 < float(reach) <= 20.1
    assert (inside != inside.flip(1)).float().mean() < 1e-3


def test_clips_are_reproducible_and_in_range() -> None:
    first, second = (
        draw(scenes, make_tracks(rng, scenes))
        for rng in (np.random.default_rng(5), np.random.default_rng(5))
        for scenes in (sample_scenes(rng, 2, 1.0),)
    )
    assert torch.equal(first, second)
    assert first.shape == (2, 3, 33, HEIGHT, WIDTH)
    assert first.abs().max() <= 1


def test_the_evaluation_set_is_what_was_published() -> None:
    wanted = evaluation_set()
    assert len(wanted) == 256
    assert wanted.scenes.present[:, 1].sum() == 64
    there = wanted.scenes.present
    assert withheld(wanted.scenes.colour, wanted.scenes.shape, wanted.scenes.motion)[there].all()
    assert wanted.prompts == evaluation_set().prompts
    assert len(set(wanted.prompts)) > 240
    assert "a huge yellow star is going in circles on a green background" in wanted.prompts
