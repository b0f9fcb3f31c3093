"""Shared-memory operand layouts: descriptors, canonical layouts, swizzles (PTX ISA 9.7.16.5, 5.5.6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

SWIZZLES = ("none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_64B")
Address = TypeVar("Address", int, np.ndarray)
_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
ATOM_BYTES = {"none": 16, "32B": 256, "64B": 512, "128B": 1024}  # where a pattern repeats


def swizzle(address: Address, mode: str) -> Address:
    """Physical shared address of a logical one: XOR of 16-byte chunk bits with row bits."""
    if mode == "none":
        return address
    if mode == "128B":
        return address ^ (((address >> 7) & 7) << 4)
    if mode == "64B":
        return address ^ (((address >> 7) & 3) << 4)
    if mode == "32B":
        return address ^ (((address >> 7) & 1) << 4)
    if mode == "128B_ATOM_32B":
        return address ^ (((address >> 7) & 3) << 5)
    if mode == "128B_ATOM_64B":
        return address ^ (((address >> 7) & 1) << 6)
    raise ValueError(f"swizzle {mode!r} is not one of {', '.join(SWIZZLES)}")


@dataclass(frozen=True)
class SmemDescriptor:
    """A decoded matrix descriptor; offsets in bytes. `problem` says what is illegal about it."""

    start: int
    lbo: int
    sbo: int
    swizzle: str
    base_offset: int
    problem: str = ""


@lru_cache(4096)
def decode_tcgen05(bits: int) -> SmemDescriptor:
    """The 64-bit descriptor of tcgen05.mma."""
    code = bits >> 61
    modes = {0: "none", 2: "128B", 4: "64B", 6: "32B", 1: "128B_ATOM_32B"}
    problem = ""
    if code not in modes:
        problem = f"swizzle code {code}"
    elif code == 1:
        problem = "swizzle code 1 (32-byte atoms) with 16-bit operands"
    elif (bits >> 46) & 7 != 1:
        problem = f"bits 46-48 are {(bits >> 46) & 7:#05b}, not 0b001"
    elif (bits >> 14) & 3 or (bits >> 30) & 3 or (bits >> 53) & 0xFF:
        problem = "reserved bits are set"
    elif bits >> 52 & 1:
        problem = "absolute LBO mode, which 16-bit operands do not have"
    return SmemDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4,
        modes.get(code, "none"), bits >> 49 & 7, problem,
    )  # fmt: skip


@lru_cache(4096)
def decode_wgmma(bits: int) -> SmemDescriptor:
    """The 64-bit descriptor of wgmma."""
    problem = ""
    if (bits >> 14) & 3 or (bits >> 30) & 3 or (bits >> 46) & 7 or (bits >> 52) & 0x3FF:
        problem = "reserved bits are set"
    return SmemDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4,
        ("none", "128B", "64B", "32B")[bits >> 62], bits >> 49 & 7, problem,
    )  # fmt: skip


def linear_offsets(rows: int, ks: int, mode: str, lbo: int, sbo: int, mn_major: bool) -> np.ndarray:
    """Byte offset of 16-bit element (row along M or N, k) from the descriptor's start, before the swizzle."""
    r = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(ks, dtype=np.int64)[None, :]
    if not mn_major:
        if mode == "none":
            return r % 8 * 16 + r // 8 * sbo + k % 8 * 2 + k // 8 * lbo
        return r % 8 * _SPAN[mode] + r // 8 * sbo + k * 2
    if mode == "none":
        return r % 8 * 2 + r // 8 * sbo + k % 8 * 16 + k // 8 * lbo
    span = _SPAN[mode]
    per = span // 2
    return r % per * 2 + r // per * lbo + k % 8 * span + k // 8 * sbo


@lru_cache(2048)
def operand_index(
    desc: SmemDescriptor, rows: int, mn_major: bool, ks: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """(16-bit element index [rows, ks], sorted distinct 4-byte words) of an operand in shared memory."""
    lin = linear_offsets(rows, ks, desc.swizzle, desc.lbo, desc.sbo, mn_major)
    physical = swizzle(desc.start + lin, desc.swizzle)
    return physical >> 1, np.unique(physical >> 2)
