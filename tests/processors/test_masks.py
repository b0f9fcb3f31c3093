"""The form of a mask, the bias it becomes, and which masks count as seen."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.pipelines import padding_mask
from videoattn.processors import masks
from videoattn.processors.masks import Watch, apply, classify

ONES = torch.ones(2, 6, dtype=torch.int64)
PADDED = padding_mask([6, 2], 6)
HOLES = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
LEFT_PADDED = PADDED.flip(1)
EMPTY_ENTRY = padding_mask([6, 0], 6)


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (ONES, "none"),
        (PADDED, "kv_lengths"),
        (padding_mask([1, 5], 6), "kv_lengths"),
        (HOLES, "dense"),
        (LEFT_PADDED, "dense"),
        # diffusers' finite bias makes an entry without valid keys attend to all of them.
        (EMPTY_ENTRY, "dense"),
        (torch.ones(1, 1, dtype=torch.int64), "none"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_multiplicative_masks(mask, form, dtype):
    assert classify(mask.to(dtype)) == form


@pytest.mark.parametrize(
    "mask", [PADDED * 0.5, torch.full((2, 6), float("nan")), torch.ones(2, 6, device="meta")]
)
def test_masks_of_no_known_form(mask):
    assert classify(mask) == "dense"


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (ONES, "none"),
        (PADDED, "kv_lengths"),
        (HOLES, "dense"),
        (LEFT_PADDED, "dense"),
        (EMPTY_ENTRY, "dense"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extreme", [False, True])
def test_additive_masks(mask, form, dtype, extreme):
    bias = (1 - mask.to(dtype)) * (torch.finfo(dtype).min if extreme else -10000.0)
    assert classify(bias[:, None]) == classify(bias[:, None, None]) == form
    dense, lengths = apply(form, bias[:, None], 6)
    assert (dense is None) == (form != "dense")
    assert (lengths is None) == (form != "kv_lengths")
    if lengths is not None:
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == mask.sum(1).tolist()
    if dense is not None:
        assert dense.shape == (2, 1, 1, 6)


def test_masks_with_a_query_axis():
    assert classify(torch.zeros(1, 4, 6)) == "none"
    assert classify(torch.zeros(1, 4, 6).masked_fill(torch.ones(4, 6).triu(1) == 1, -10000.0)) == "dense"


def test_a_weak_bias_is_not_padding():
    bias = torch.zeros(1, 1, 6)
    bias[..., 4:] = -3.0
    assert classify(bias) == "dense"


@pytest.fixture
def reads(monkeypatch):
    seen = []
    monkeypatch.setattr(masks, "classify", lambda mask: seen.append(mask) or classify(mask))
    return seen


def test_seen_masks_are_not_read_again(reads):
    watch, mask = Watch({}), PADDED.clone()
    for part in (mask, mask, mask.chunk(2)[1], mask[:1], mask[1:]):
        assert watch.form(part) == "kv_lengths"
    assert len(reads) == 1


def test_other_masks_are_read(reads):
    watch, mask = Watch({}), torch.ones(6, 6, dtype=torch.int64)
    assert watch.form(mask) == "none"
    for other in (mask.T, mask[:, :4], mask.clone(), mask[2:3].expand(6, 6)):
        watch.form(other)
    assert len(reads) == 5
    mask[3, 2:] = 0
    assert watch.form(mask) == "kv_lengths"


def test_a_slice_beside_the_mask_that_was_seen_is_read(reads):
    whole = torch.cat([ONES, HOLES])
    watch = Watch({})
    assert watch.form(whole[:2]) == "none"
    assert watch.form(whole[1:3]) == "dense"
    assert watch.form(whole[3:]) == "none"
    assert len(reads) == 3


def test_a_new_mask_at_the_same_address_is_read():
    watch = Watch({})
    for mask, form in ((ONES, "none"), (HOLES, "dense"), (PADDED, "kv_lengths")) * 3:
        fresh = mask.clone()
        assert watch.form(fresh) == form
        del fresh
        gc.collect()
