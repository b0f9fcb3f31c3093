"""Every opcode's emitter; importing a group registers its own."""

from __future__ import annotations

from . import isa_arithmetic, isa_bits, isa_cvt, isa_memory, isa_move, isa_sync, isa_tensor
from .isa_common import EMITTERS

GROUPS = (isa_arithmetic, isa_bits, isa_cvt, isa_memory, isa_move, isa_sync, isa_tensor)

__all__ = ["EMITTERS", "GROUPS"]
