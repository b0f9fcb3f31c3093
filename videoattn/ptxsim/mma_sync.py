"""Register fragments of mma.sync m16n8k8/k16 and ldmatrix (PTX ISA 9.7.14.5)."""

from __future__ import annotations

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


def mma_m16n8(k: int, typ: str, a: tuple, b: tuple, c: tuple) -> list[np.ndarray]:
    """D = A B + C in f32 for one warp; the summation order of hardware is not specified."""
    am = np.empty((16, k), np.uint16)
    for r, reg in enumerate(a):
        pair = reg.view(np.uint16).reshape(32, 2)
        row = _GROUP + 8 * (r % 2)
        col = 2 * _IN_GROUP + 8 * (r // 2)
        am[row, col], am[row, col + 1] = pair[:, 0], pair[:, 1]
    bm = np.empty((k, 8), np.uint16)
    for r, reg in enumerate(b):
        pair = reg.view(np.uint16).reshape(32, 2)
        row = 2 * _IN_GROUP + 8 * r
        bm[row, _GROUP], bm[row + 1, _GROUP] = pair[:, 0], pair[:, 1]
    product = halves_to_f32(am, typ) @ halves_to_f32(bm, typ)
    out = []
    for r in range(4):
        row, col = _GROUP + 8 * (r // 2), 2 * _IN_GROUP + r % 2
        out.append(product[row, col] + c[r])
    return out
