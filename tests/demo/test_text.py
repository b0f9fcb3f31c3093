"""Captions, the tokenizer, and what the shipped text encoder makes of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from videoattn import demo
from videoattn.demo.captions import BACKGROUND, FIRST, SECOND, caption, vocabulary
from videoattn.demo.scenes import COLOURS, sample_scenes
from videoattn.demo.tokenizer import UNKNOWN, build_tokenizer, word_ids
from videoattn.demo.training.text import SWAPS, TEXT_LENGTH, swap_distance, write_captions


def test_every_caption_survives_the_tokenizer() -> None:
    scenes = sample_scenes(np.random.default_rng(0), 500, 0.5)
    tokenizer, rng, ids = build_tokenizer(), random.Random(0), word_ids()
    for index in range(len(scenes)):
        written = caption(rng, scenes, index)
        coded = tokenizer(written.text).input_ids
        assert coded == [*(ids[word] for word in written.words), ids["</s>"]]
        assert tokenizer.decode(coded, skip_special_tokens=True).split() == written.words
        assert len(coded) <= TEXT_LENGTH


def test_the_shipped_tokenizer_is_the_built_one() -> None:
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(demo.weights_path() / "tokenizer", local_files_only=True)
    built = build_tokenizer()
    for prompt in ("A Medium-sized RED star, circling.", "", "a zebra on a blue background"):
        settings = {"padding": "max_length", "max_length": 128, "truncation": True}
        assert shipped(prompt, **settings).input_ids == built(prompt, **settings).input_ids


def test_words_speak_of_their_own_shape() -> None:
    scenes = sample_scenes(np.random.default_rng(1), 200, 1.0)
    rng = random.Random(1)
    for index in range(len(scenes)):
        written = caption(rng, scenes, index, synonyms=0.0, drop=False)
        for part, colour in ((FIRST, scenes.colour[index, 0]), (SECOND, scenes.colour[index, 1])):
            spoken = [word for word, p in zip(written.words, written.parts, strict=True) if p == part]
            assert COLOURS[colour] in spoken
        assert BACKGROUND in written.parts


def test_labels_fit_the_tokens() -> None:
    scenes = sample_scenes(np.random.default_rng(2), 50, 1.0)
    batch = write_captions(random.Random(2), scenes)
    names = {index: word for word, index in word_ids().items()}
    checked = 0
    for row in range(len(scenes)):
        for token, part, colour in zip(batch.ids[row], batch.part[row], batch.colour[row], strict=True):
            word = names[int(token)]
            if word in COLOURS and int(part) in (FIRST, SECOND):
                assert COLOURS[int(colour)] == word
                checked += 1
    assert checked > 60


def test_unknown_words_are_named_once_and_in_order() -> None:
    assert demo.unknown_words("a red Dragon moving left over a dragon-green sea") == ["dragon", "sea"]
    assert demo.unknown_words("a medium-sized red star, circling.") == []
    with pytest.warns(UserWarning, match=r"'dragon'.*it knows: .*circling"):
        assert demo.warn_of_unknown_words("a red dragon") == ["dragon"]
    assert word_ids()[UNKNOWN] == 2
    assert set(demo.known_words()) <= set(vocabulary())


@pytest.fixture(scope="module")
def encoder():
    from transformers import T5EncoderModel

    folder = demo.weights_path() / "text_encoder"
    return T5EncoderModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_swapping_two_colours_changes_their_embeddings(encoder, first: str, second: str) -> None:
    assert swap_distance(encoder, first, second) > 0.05
    assert swap_distance(encoder, first, first) < 1e-6
