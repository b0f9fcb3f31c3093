"""Register fragments of mma.sync m16n8k8/k16 and ldmatrix (PTX ISA 9.7.14.5)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .scalar import bf16_to_f32

_LANE = np.arange(32)
_GROUP, _IN_GROUP = _LANE // 4, _LANE % 4


def halves_to_f32(bits: np.ndarray, typ: str) -> np.ndarray:
    """16-bit patterns of type bf16 or f16 as f32."""
    return bf16_to_f32(bits) if typ == "bf16" else bits.view(np.float16).astype(np.float32)


def ldmatrix_lanes(matrix: np.ndarray) -> np.ndarray:
    """The register of each lane for one 8x8 matrix of 16-bit elements: row lane/4, columns 2(lane%4) and
    next.
    """
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32).copy()


@lru_cache
def operand_halves(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Which 16-bit half of a warp's registers, one register after the other, each element of A and B is."""
    a, b = np.empty((16, k), np.intp), np.empty((k, 8), np.intp)
    for half in range(2):
        for r in range(k // 4):
            a[_GROUP + 8 * (r % 2), 2 * _IN_GROUP + 8 * (r // 2) + half] = 64 * r + 2 * _LANE + half
        for r in range(k // 8):
            b[2 * _IN_GROUP + 8 * r + half, _GROUP] = 64 * r + 2 * _LANE + half
    return a, b


# Where each lane's four results lie in D (16, 8).
_RESULT = np.stack([(_GROUP + 8 * (r // 2)) * 8 + 2 * _IN_GROUP + r % 2 for r in range(4)])


def mma_m16n8(k: int, typ: str, a: tuple, b: tuple, c: tuple) -> list[np.ndarray]:
    """D = A B + C in f32 for one warp; the summation order of hardware is not specified."""
    a_halves, b_halves = operand_halves(k)
    am = np.concatenate(a).view(np.uint16)[a_halves]
    bm = np.concatenate(b).view(np.uint16)[b_halves]
    product = halves_to_f32(am, typ) @ halves_to_f32(bm, typ)
    return [held + c[r] for r, held in enumerate(product.ravel()[_RESULT])]
