"""Layouts against brute force: the simulator's index formulas against element-by-element constructions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoattn.ptxsim.layouts import decode_tcgen05, decode_wgmma, linear_offsets, operand_index, swizzle
from videoattn.ptxsim.tcgen05 import decode_idesc
from videoattn.ptxsim.tmem import accumulator_map, shape_map
from videoattn.ptxsim.wgmma import accumulator_fragment

SPAN = {"32B": 32, "64B": 64, "128B": 128}


@given(st.integers(0, 2**18 - 1), st.sampled_from(["32B", "64B", "128B"]))
def test_a_swizzle_permutes_chunks_of_one_line_and_undoes_itself(address, mode):
    out = swizzle(address, mode)
    assert out >> 7 == address >> 7
    assert out % 16 == address % 16
    assert swizzle(out, mode) == address


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
def test_k_major_tiles_are_what_tma_writes(mode):
    """A dense box [rows][span bytes], swizzled by address, read back through a K-major descriptor."""
    rows = 64
    if mode == "none":  # eight-column boxes one after another: core matrices
        memory = np.zeros(rows * 16, np.uint16)
        values = np.arange(rows * 16, dtype=np.uint16).reshape(rows, 16)
        for half in range(2):
            memory[half * rows * 8 : (half + 1) * rows * 8] = values[:, half * 8 : half * 8 + 8].reshape(-1)
        lin = linear_offsets(rows, 16, mode, lbo=rows * 16, sbo=128, mn_major=False)
        assert np.array_equal(memory[lin // 2], values)
        return
    columns = SPAN[mode] // 2
    values = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    memory = np.zeros(rows * columns, np.uint16)
    for r in range(rows):
        for c in range(columns):
            memory[swizzle((r * columns + c) * 2, mode) // 2] = values[r, c]
    for step in range(columns // 16):
        code = {"32B": 6, "64B": 4, "128B": 2}[mode]
        bits = step * 2 | 1 << 16 | (8 * SPAN[mode] >> 4) << 32 | 1 << 46 | code << 61
        index, words = operand_index(decode_tcgen05(bits), rows, False)
        assert np.array_equal(memory[index], values[:, 16 * step : 16 * step + 16])
        assert np.array_equal(words, np.unique(index // 2))


@pytest.mark.parametrize("mode", ["32B", "64B", "128B"])
def test_the_same_box_reads_mn_major_as_the_transpose(mode):
    """Keys in rows, features across: V of attention. LBO steps over column blocks, SBO over 8 keys."""
    keys, span = 32, SPAN[mode]
    per, blocks = span // 2, 2
    values = np.arange(keys * per * blocks, dtype=np.uint16).reshape(keys, per * blocks)
    memory = np.zeros(keys * per * blocks, np.uint16)
    for block in range(blocks):
        for key in range(keys):
            for c in range(per):
                logical = block * keys * span + key * span + 2 * c
                memory[swizzle(logical, mode) // 2] = values[key, block * per + c]
    code = {"32B": 3, "64B": 2, "128B": 1}[mode]
    for step in range(keys // 16):
        start = step * 16 * span
        bits = start >> 4 | (keys * span >> 4) << 16 | (8 * span >> 4) << 32 | code << 62
        index, _ = operand_index(decode_wgmma(bits), per * blocks, True)
        assert np.array_equal(memory[index], values[16 * step : 16 * step + 16].T)


def test_descriptor_fields():
    d = decode_tcgen05(0x4000404000010040)
    assert (d.start, d.lbo, d.sbo, d.swizzle, d.base_offset, d.problem) == (0x400, 16, 1024, "128B", 0, "")
    assert decode_tcgen05(0x4000004000010040).problem
    assert decode_wgmma(0x4000004000010040).swizzle == "128B"
    assert decode_wgmma(0x4000404000010040).problem


@pytest.mark.parametrize(
    ("bits", "m", "n", "b_mn"),
    [(0x08200490, 128, 128, False), (0x08210490, 128, 128, True), (0x08110490, 128, 64, True),
     (0x08400490, 128, 256, False), (0x04200490, 64, 128, False)],
)  # fmt: skip
def test_known_instruction_descriptors(bits, m, n, b_mn):
    d = decode_idesc(bits, 1, False)
    assert (d.m, d.n, d.b_mn, d.a_type, d.d_type, d.problem) == (m, n, b_mn, "bf16", "f32", "")


def test_the_pair_descriptor_needs_cta_group_2():
    assert decode_idesc(0x10200490, 2, False).problem == ""
    assert "M = 256" in decode_idesc(0x10200490, 1, False).problem


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_tmem_shapes_cover_their_rectangle_once(shape, n):
    lanes, columns = shape_map(shape, n, 0)
    height = 32 if shape == "32x32b" else 16
    width = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}[shape] * n
    cells = {
        (int(a), int(b))
        for a, b in zip(
            np.broadcast_to(lanes, np.broadcast_shapes(lanes.shape, columns.shape)).ravel(),
            np.broadcast_to(columns, np.broadcast_shapes(lanes.shape, columns.shape)).ravel(),
            strict=True,
        )
    }
    assert cells == {(r, c) for r in range(height) for c in range(width)}


def test_16x256b_is_the_mma_fragment():
    lanes, columns = shape_map("16x256b", 4, 0)
    rows, cols = accumulator_fragment(32)
    assert np.array_equal(np.broadcast_to(lanes, cols.shape), np.broadcast_to(rows, cols.shape))
    assert np.array_equal(columns, cols)


@pytest.mark.parametrize(("m", "group", "n"), [(128, 1, 64), (64, 1, 64), (256, 2, 64), (128, 2, 64)])
def test_accumulators_place_each_element_once(m, group, n):
    seen = np.zeros((m, n), int)
    for rows, cols, lanes, columns in accumulator_map(m, group, n):
        shape = np.broadcast_shapes(rows.shape, cols.shape)
        places = np.stack([np.broadcast_to(lanes, shape).ravel(), np.broadcast_to(columns, shape).ravel()])
        assert len(np.unique(places, axis=1).T) == places.shape[1]
        assert places[0].max() < 128
        np.add.at(seen, (np.broadcast_to(rows, shape), np.broadcast_to(cols, shape)), 1)
    assert (seen == 1).all()
