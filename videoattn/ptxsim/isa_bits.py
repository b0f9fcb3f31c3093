"""Logic, shifts, bytes and bit fields."""

from __future__ import annotations

from .codegen import DTYPES, Emitter
from .isa_common import UNSIGNED, modifiers, op, operands, type_of
from .ptx import TYPE_BYTES, Imm, Instr

_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@op("and", "or", "xor")
def _logic(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a, b = operands(g, ins, 3)
    u = typ if typ == "pred" else UNSIGNED[typ]
    g.write(
        d,
        f"{g.src(a, u)} {_LOGIC[ins.parts[0]]} {g.src(b, u)}",
        u,
    )


@op("shl", "shr")
def _shift(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a, n = operands(g, ins, 3)
    bits = 8 * TYPE_BYTES[typ]
    t = UNSIGNED[typ] if ins.parts[0] == "shl" or typ[0] == "b" else typ
    x = g.src(a, t)
    if isinstance(n, Imm) and 0 <= n.value < bits:
        g.write(d, f"{x} {'<<' if ins.parts[0] == 'shl' else '>>'} {g.fill(n.value, DTYPES[t])}", t)
    else:
        g.write(d, f"sc.{ins.parts[0]}({x}, {g.src(n, 'u32')}, {bits})", t)


@op("shf")
def _shf(g: Emitter, ins: Instr) -> None:
    mods = modifiers(g, ins, "l", "r", "clamp", "wrap")
    d, a, b, c = operands(g, ins, 4)
    lo, hi, n = (g.src(v, "u32") for v in (a, b, c))
    g.write(d, f"sc.funnel({lo}, {hi}, {n}, {'l' in mods}, {'clamp' in mods})", "u32")


@op("prmt")
def _prmt(g: Emitter, ins: Instr) -> None:
    if ins.parts[1:] != ("b32",):
        raise g.bad("modes other than the default")
    d, a, b, c = operands(g, ins, 4)
    g.write(d, f"sc.prmt({g.src(a, 'u32')}, {g.src(b, 'u32')}, {g.src(c, 'u32')})", "u32")


@op("lop3")
def _lop3(g: Emitter, ins: Instr) -> None:
    if ins.parts[1:] != ("b32",):
        raise g.bad()
    d, a, b, c, table = operands(g, ins, 5)
    if not isinstance(table, Imm):
        raise g.malformed("the truth table is not an immediate")
    g.write(
        d, f"sc.lop3({g.src(a, 'u32')}, {g.src(b, 'u32')}, {g.src(c, 'u32')}, {table.value & 255})", "u32"
    )


@op("bfe")
def _bfe(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a, pos, length = operands(g, ins, 4)
    g.write(d, f"sc.bfe({g.src(a, typ)}, {g.src(pos, 'u32')}, {g.src(length, 'u32')})", typ)


@op("bfi")
def _bfi(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a, b, pos, length = operands(g, ins, 5)
    args = ", ".join(g.src(v, t) for v, t in ((a, typ), (b, typ), (pos, "u32"), (length, "u32")))
    g.write(d, f"sc.bfi({args})", typ)


@op("popc", "clz", "brev")
def _bits(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a = operands(g, ins, 2)
    name = ins.parts[0]
    g.write(d, f"sc.{name}({g.src(a, typ)})", typ if name == "brev" else "u32")


@op("bfind")
def _bfind(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    mods = modifiers(g, ins, "shiftamt")
    d, a = operands(g, ins, 2)
    g.write(d, f"sc.bfind({g.src(a, typ)}, {'shiftamt' in mods})", "u32")
