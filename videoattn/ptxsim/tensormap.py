"""TensorMap: what cuTensorMapEncodeTiled encodes, with its rules (cuda.h)."""

from __future__ import annotations

import itertools
import struct
import weakref
from functools import lru_cache

import numpy as np

from .errors import LaunchError
from .layouts import swizzle
from .memory import Buffer

ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2,
    "f32_ftz": 4, "tf32": 4, "tf32_ftz": 4,
}  # fmt: skip
# the "special NaN" of out-of-bounds fill, as an H200 writes it
_NAN = {
    "f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7, "f32_ftz": 0x7FF77FF7, "tf32": 0x7FF77FF7,
    "tf32_ftz": 0x7FF77FF7, "f64": 0x7FF77FF77FF77FF7,
}  # fmt: skip
_SWIZZLE_SPAN = {"none": None, "32B": 32, "64B": 64, "128B": 128, "128B_ATOM_32B": 128, "128B_ATOM_64B": 128}
_MAGIC = b"ptxsimTM"
_ids = itertools.count(1)
_known: weakref.WeakValueDictionary[int, TensorMap] = weakref.WeakValueDictionary()


@lru_cache(1024)
def _chunks(offset: int, rows: int, row_bytes: int, pitch: int, mode: str) -> np.ndarray:
    at = offset + np.arange(rows, dtype=np.int64)[:, None] * pitch + np.arange(0, row_bytes, 16)
    return (swizzle(at, mode) >> 4).ravel()


class TensorMap:
    """A tiled tensor map over global memory.

    base: Buffer or device address (multiple of 16). dtype: element type such as "bf16". dims: elements of
    each of the 1..5 dimensions, innermost first. strides: bytes of dimensions 1.. (one fewer than dims). box:
    elements a copy moves in each dimension. swizzle: none, 32B, 64B, 128B, 128B_ATOM_32B or 128B_ATOM_64B.
    oob: zero or nan. element_strides: step in each dimension. l2_promotion has no effect on results. Raises
    LaunchError where cuTensorMapEncodeTiled would refuse.
    """

    def __init__(self, base: Buffer | int, *, dtype: str, dims, strides, box, swizzle: str = "none",
                 l2_promotion: str = "none", oob: str = "zero", element_strides=None):  # fmt: skip
        self.buffer = base if isinstance(base, Buffer) else None
        self.address = base.address if isinstance(base, Buffer) else int(base)
        self.dtype, self.swizzle, self.oob, self.l2_promotion = dtype, swizzle, oob, l2_promotion
        self.dims, self.strides, self.box = (
            tuple(map(int, dims)),
            tuple(map(int, strides)),
            tuple(map(int, box)),
        )
        self.rank = len(self.dims)
        self.element_strides = tuple(element_strides) if element_strides else (1,) * self.rank
        self._validate()
        self.element_strides = (
            1,
            *self.element_strides[1:],
        )  # the innermost has no effect without interleave
        self.elem = ELEMENT_BYTES[dtype]
        self.steps = (self.elem, *self.strides)
        self.counts = tuple(-(-b // s) for b, s in zip(self.box, self.element_strides, strict=True))
        self.box_bytes = int(np.prod(self.counts)) * self.elem
        inner = self.counts[0] * self.elem
        span = _SWIZZLE_SPAN[swizzle]
        self.row_bytes, self.row_pitch = inner, span or inner  # a swizzled row takes the whole span
        self.image_bytes = self.box_bytes // inner * self.row_pitch
        self.fill = _NAN[dtype] if oob == "nan" else 0
        self.id = next(_ids)
        _known[self.id] = self

    def _validate(self) -> None:
        def need(ok: bool, message: str) -> None:
            if not ok:
                raise LaunchError(f"TensorMap: {message}")

        need(self.dtype in ELEMENT_BYTES, f"dtype {self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        need(1 <= self.rank <= 5, f"{self.rank} dimensions; must be 1..5")
        need(len(self.strides) == self.rank - 1, f"{len(self.strides)} strides for {self.rank} dimensions")
        need(len(self.box) == self.rank, f"box has {len(self.box)} extents for {self.rank} dimensions")
        need(len(self.element_strides) == self.rank, "one element stride for each dimension")
        need(
            self.swizzle in _SWIZZLE_SPAN,
            f"swizzle {self.swizzle!r} is not one of {', '.join(_SWIZZLE_SPAN)}",
        )
        need(self.l2_promotion in ("none", "64B", "128B", "256B"), f"l2_promotion {self.l2_promotion!r}")
        need(self.oob in ("zero", "nan"), f"oob {self.oob!r} is not zero or nan")
        need(self.oob == "zero" or self.dtype in _NAN, f"oob nan needs a float type, not {self.dtype}")
        need(self.address % 16 == 0, f"base address {self.address:#x} is not a multiple of 16")
        need(all(1 <= d <= 2**32 for d in self.dims), f"dims {self.dims}; each must be 1..2^32")
        need(
            all(s % 16 == 0 and 0 < s < 2**40 for s in self.strides),
            f"strides {self.strides}; multiples of 16 bytes",
        )
        need(all(1 <= b <= 256 for b in self.box), f"box {self.box}; each extent must be 1..256")
        need(
            all(1 <= s <= 8 for s in self.element_strides),
            f"element strides {self.element_strides}; each 1..8",
        )
        inner = self.box[0] * ELEMENT_BYTES[self.dtype]
        need(inner % 16 == 0, f"the box's inner extent is {inner} bytes; must be a multiple of 16")
        span = _SWIZZLE_SPAN[self.swizzle]
        need(
            span is None or inner <= span,
            f"the box's inner extent is {inner} bytes; {self.swizzle} allows {span}",
        )

    def encode(self) -> bytes:
        """128 opaque bytes that stand for this map in a parameter or in global memory."""
        return _MAGIC + struct.pack("<Q", self.id) + bytes(112)

    @staticmethod
    def decode(raw: bytes) -> TensorMap | None:
        """The map behind encode()'s bytes."""
        if raw[:8] != _MAGIC:
            return None
        return _known.get(struct.unpack("<Q", raw[8:16])[0])

    def chunks(self, offset: int) -> np.ndarray:
        """16-byte chunk numbers, in box order, of the image at shared offset `offset`."""
        return _chunks(offset, self.box_bytes // self.row_bytes, self.row_bytes, self.row_pitch, self.swizzle)

    def window(self, coords: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """For each dimension: (first box index inside the tensor, one past the last, coordinate of the
        first).
        """
        out = []
        for c, n, dim, step in zip(coords, self.counts, self.dims, self.element_strides, strict=True):
            lo = max(0, -(c // step))  # ceil(-c / step)
            hi = min(n, -((c - dim) // step)) if dim > c else 0
            out.append((min(lo, n), max(hi, min(lo, n)), c + lo * step))
        return out

    def _inside(self, memory, coords):
        """A strided byte view [.., inner bytes] of the part of the box inside the tensor, or None."""
        win = self.window(coords)
        if any(hi <= lo for lo, hi, _ in win):
            return None, win
        offset = sum(first * step for (_, _, first), step in zip(win, self.steps, strict=True))
        extent = [hi - lo for lo, hi, _ in win]
        strides = [s * e for s, e in zip(self.steps, self.element_strides, strict=True)]
        last = offset + sum((n - 1) * s for n, s in zip(extent, strides, strict=True)) + self.elem
        buf, start = memory.span(self.address, last)
        view = np.lib.stride_tricks.as_strided(
            buf.data[start + offset :], (*extent[::-1], self.elem), (*strides[::-1], 1), writeable=True
        )
        return view, win

    def load(self, memory, coords: tuple[int, ...]) -> np.ndarray:
        """The dense box as bytes, outside elements filled."""
        box = np.zeros((*self.counts[::-1], self.elem), np.uint8)
        if self.oob == "nan":
            box[...] = np.frombuffer(self.fill.to_bytes(self.elem, "little"), np.uint8)
        view, win = self._inside(memory, coords)
        if view is not None:
            box[tuple(slice(lo, hi) for lo, hi, _ in win[::-1])] = view
        return box.reshape(-1)

    def store(self, memory, coords: tuple[int, ...], data: np.ndarray, reduce: str | None = None) -> None:
        """Write (or combine) a dense box of bytes; outside elements are dropped."""
        box = data.reshape(*self.counts[::-1], self.elem)
        view, win = self._inside(memory, coords)
        if view is None:
            return
        part = box[tuple(slice(lo, hi) for lo, hi, _ in win[::-1])]
        if reduce is None:
            view[...] = part
            return
        kind = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "f16": np.float16, "u64": np.uint64}[
            self.dtype
        ]
        old = np.ascontiguousarray(view).view(kind)
        new = np.ascontiguousarray(part).view(kind)
        fn = {"add": np.add, "min": np.minimum, "max": np.maximum}[reduce]
        view[...] = fn(old, new).view(np.uint8)

    def __repr__(self) -> str:
        return f"TensorMap({self.dtype}, dims={self.dims}, box={self.box}, swizzle={self.swizzle})"
