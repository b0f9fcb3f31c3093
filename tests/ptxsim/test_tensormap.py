"""Tensor maps: random boxes against plain indexing, and what the encoder refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from videoattn.ptxsim import Device, LaunchError, TensorMap


@st.composite
def boxes(draw):
    rank = draw(st.integers(1, 5))
    dims = [draw(st.sampled_from([8, 16, 24])), *(draw(st.integers(1, 5)) for _ in range(rank - 1))]
    box = [draw(st.sampled_from([8, 16])), *(draw(st.integers(1, 4)) for _ in range(rank - 1))]
    steps = [1, *(draw(st.integers(1, 3)) for _ in range(rank - 1))]
    coords = [draw(st.integers(-20, 28)), *(draw(st.integers(-4, 7)) for _ in range(rank - 1))]
    return dims, box, steps, coords


def brute_force(array: np.ndarray, box, steps, coords, fill: int) -> np.ndarray:
    """Element by element; axis 0 of `box` is the innermost."""
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    out = np.full(counts[::-1], fill, array.dtype)
    for index in itertools.product(*map(range, counts)):
        at = [c + i * s for c, i, s in zip(coords, index, steps, strict=True)]
        if all(0 <= a < d for a, d in zip(at, array.shape[::-1], strict=True)):
            out[index[::-1]] = array[tuple(at[::-1])]
    return out


def make(array: np.ndarray, box, steps, oob: str):
    device = Device()
    buffer = device.upload(array)
    strides = list(array.strides[::-1][1:])
    tm = TensorMap(
        buffer, dtype="bf16", dims=array.shape[::-1], strides=strides, box=box, element_strides=steps, oob=oob
    )
    return device, buffer, tm


@settings(max_examples=150, deadline=None)
@given(boxes(), st.booleans())
def test_loads_match_plain_indexing(case, nan):
    dims, box, steps, coords = case
    array = np.arange(1, 1 + int(np.prod(dims)), dtype=np.uint16).reshape(dims[::-1])
    device, _, tm = make(array, box, steps, "nan" if nan else "zero")
    got = tm.load(device.memory, tuple(coords)).view(np.uint16)
    want = brute_force(array, box, steps, coords, int(tm.fill) if nan else 0)
    assert np.array_equal(got, want.reshape(-1))
    assert tm.box_bytes == got.nbytes


@settings(max_examples=150, deadline=None)
@given(boxes())
def test_stores_touch_the_inside_only(case):
    dims, box, steps, coords = case
    array = np.zeros(dims[::-1], np.uint16)
    device, buffer, tm = make(array, box, steps, "zero")
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    data = np.arange(1, 1 + int(np.prod(counts)), dtype=np.uint16).reshape(counts[::-1])
    tm.store(device.memory, tuple(coords), data.reshape(-1).view(np.uint8))
    want = array.copy()
    for index in itertools.product(*map(range, counts)):
        at = [c + i * s for c, i, s in zip(coords, index, steps, strict=True)]
        if all(0 <= a < d for a, d in zip(at, dims, strict=True)):
            want[tuple(at[::-1])] = data[index[::-1]]
    assert np.array_equal(buffer.download(), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (64, 300)}, r"each extent must be 1\.\.256"),
        ({"box": (72, 8), "swizzle": "128B"}, "128B allows 128"),
        ({"box": (12, 8)}, "multiple of 16"),
        ({"strides": (136,)}, "multiples of 16 bytes"),
        ({"strides": ()}, "0 strides for 2 dimensions"),
        ({"dims": (0, 8)}, r"each must be 1\.\.2\^32"),
        ({"dtype": "u32", "oob": "nan", "box": (16, 8)}, "oob nan needs a float type"),
        ({"swizzle": "256B"}, "is not one of"),
        ({"element_strides": (1, 9)}, r"each 1\.\.8"),
    ],
)
def test_what_the_encoder_refuses(change, message):
    buffer = Device().upload(np.zeros((64, 64), np.uint16))
    good = {"dtype": "bf16", "dims": (64, 64), "strides": (128,), "box": (64, 8)}
    TensorMap(buffer, **good)
    with pytest.raises(LaunchError, match=message) as error:
        TensorMap(buffer, **(good | change))
    assert "\n" not in str(error.value)


def test_an_unaligned_base_is_refused():
    buffer = Device().upload(np.zeros((64, 64), np.uint16))
    with pytest.raises(LaunchError, match="multiple of 16"):
        TensorMap(buffer.address + 8, dtype="bf16", dims=(64, 8), strides=(128,), box=(64, 8))
