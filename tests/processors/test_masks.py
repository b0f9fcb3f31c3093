"""The form of a mask, the bias it becomes, and which masks count as seen."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.pipelines import padding_mask
from videoattn.processors import masks
from videoattn.processors.masks import Watch, apply, classify, classify_all

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
    monkeypatch.setattr(masks, "classify_all", lambda read: seen.append(len(read)) or classify_all(read))
    return seen


def test_seen_masks_are_not_read_again(reads):
    watch, mask = Watch({}), PADDED.clone()
    for part in (mask, mask, mask.chunk(2)[1], mask[:1], mask[1:]):
        assert watch.forms([part]) == ["kv_lengths"]
    assert reads == [1]


def test_other_masks_are_read(reads):
    watch, mask = Watch({}), torch.ones(6, 6, dtype=torch.int64)
    assert watch.forms([mask]) == ["none"]
    for other in (mask.T, mask[:, :4], mask.clone(), mask[2:3].expand(6, 6)):
        watch.forms([other])
    assert len(reads) == 5
    mask[3, 2:] = 0
    assert watch.forms([mask]) == ["kv_lengths"]


def test_a_slice_beside_the_mask_that_was_seen_is_read(reads):
    whole = torch.cat([ONES, HOLES])
    watch = Watch({})
    assert watch.forms([whole[:2]]) == ["none"]
    assert watch.forms([whole[1:3]]) == ["dense"]
    assert watch.forms([whole[3:]]) == ["none"]
    assert len(reads) == 3


def test_the_masks_of_a_forward_are_read_together(reads):
    watch = Watch({})
    assert watch.forms([HOLES, PADDED, ONES, PADDED]) == ["dense", "kv_lengths", "none", "kv_lengths"]
    assert watch.forms([PADDED, HOLES]) == ["kv_lengths", "dense"]
    assert watch.forms([ONES, LEFT_PADDED]) == ["none", "dense"]
    assert watch.forms([]) == []
    assert reads == [3, 1]


def test_masks_without_a_version_are_read_every_time(reads):
    watch = Watch({})
    with torch.inference_mode():
        mask = PADDED.clone()
        assert watch.forms([mask, mask]) == ["kv_lengths", "kv_lengths"]
        mask[0, 2] = 0
        assert watch.forms([mask, ONES.clone()]) == ["dense", "none"]
    assert reads == [1, 2]


def test_masks_of_several_kinds_at_once():
    query_axis = torch.zeros(1, 4, 6)
    several = [ONES, torch.ones(2, 6, device="meta"), query_axis, query_axis - 1, PADDED.float()]
    assert classify_all(several) == ["none", "dense", "none", "dense", "kv_lengths"]


def test_a_new_mask_at_the_same_address_is_read():
    watch = Watch({})
    for mask, form in ((ONES, "none"), (HOLES, "dense"), (PADDED, "kv_lengths")) * 3:
        fresh = mask.clone()
        assert watch.forms([fresh]) == [form]
        del fresh
        gc.collect()
