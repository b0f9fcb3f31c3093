"""The registry of emitters, one per opcode, and what they share."""

from __future__ import annotations

from collections.abc import Callable

from .codegen import Emitter
from .ptx import TYPE_BYTES, Instr

EMITTERS: dict[str, Callable[[Emitter, Instr], None]] = {}

ROUNDINGS = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}
INTEGERS = {"u16", "s16", "u32", "s32", "u64", "s64"}
UNSIGNED = {"u16": "u16", "s16": "u16", "u32": "u32", "s32": "u32", "u64": "u64", "s64": "u64",
             "b16": "u16", "b32": "u32", "b64": "u64"}  # fmt: skip


def op(*names: str):
    """Register an emitter for opcodes."""

    def register(fn):
        for name in names:
            EMITTERS[name] = fn
        return fn

    return register


def type_of(g: Emitter, ins: Instr) -> str:
    """The type suffix; raises UnsupportedInstruction when it is not modelled."""
    if ins.parts[-1] not in TYPE_BYTES:
        raise g.bad("no type suffix that is modelled")
    return ins.parts[-1]


def modifiers(g: Emitter, ins: Instr, *allowed: str) -> set[str]:
    """What stands between opcode and type; raises UnsupportedInstruction unless all of it is `allowed`."""
    mods = set(ins.parts[1:-1])
    extra = mods - set(allowed)
    if extra:
        raise g.bad(f"modifier .{sorted(extra)[0]}")
    return mods


def operands(g: Emitter, ins: Instr, n: int) -> list:
    """The operands; raises PtxSyntaxError unless there are n."""
    if len(ins.operands) != n:
        raise g.malformed(f"needs {n} operands, has {len(ins.operands)}")
    return ins.operands


def flushed(g: Emitter, x: str, mods: set[str]) -> str:
    """An f32 expression, with subnormals flushed if the modifiers say so."""
    return g.let(f"sc.ftz({x})") if "ftz" in mods else x


def half_in(g: Emitter, v, typ: str) -> str:
    """f16/bf16 (x2) operand as f32 elements; f32 holds their sums and products exactly enough for one
    rounding.
    """
    if typ == "f16":
        return g.let(f"{g.src(v, 'f16')}.astype(_f4)")
    if typ == "f16x2":
        return g.let(f"{g.src(v, 'b32')}.view(_f2).astype(_f4)")
    if typ == "bf16":
        return g.let(f"sc.bf16_to_f32({g.src(v, 'b16')})")
    return g.let(f"sc.bf16_to_f32({g.src(v, 'b32')}.view(_u2))")


def half_out(expr: str, typ: str) -> str:
    """f32 elements rounded to f16/bf16 (x2)."""
    if typ == "f16":
        return f"sc.f32_to_f16({expr}).view(_f2)"
    if typ == "f16x2":
        return f"sc.f32_to_f16({expr}).view(_u4)"
    if typ == "bf16":
        return f"sc.f32_to_bf16({expr})"
    return f"sc.f32_to_bf16({expr}).view(_u4)"
