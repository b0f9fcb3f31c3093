"""Moves, address conversions, selections and comparisons."""

from __future__ import annotations

from .codegen import Emitter, pair
from .isa_common import UNSIGNED, flushed, half_in, modifiers, op, operands, type_of
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .ptx import TYPE_BYTES, Instr, Reg, Special, Sym, Vec


@op("mov")
def _mov(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    modifiers(g, ins)
    d, a = operands(g, ins, 2)
    size = TYPE_BYTES[typ]
    if isinstance(a, Vec):
        n = len(a.items)
        if n not in (2, 4) or size % n:
            raise g.malformed(f"cannot pack {n} elements into .{typ}")
        part = size // n
        xs = [g.src(v, f"b{8 * part}") for v in a.items]
        name = g.let(f"empty({32 * n}, _u{part})")
        for i, x in enumerate(xs):
            g.line(f"{name}[{i}::{n}] = {x}")
        g.write(d, f"{name}.view(_u{size})", f"b{8 * size}")
    elif isinstance(d, Vec):
        n = len(d.items)
        if n not in (2, 4) or size % n:
            raise g.malformed(f"cannot unpack .{typ} into {n} elements")
        part = size // n
        x = g.let(f"{g.src(a, f'b{8 * size}')}.view(_u{part}).reshape(32, {n}).T.copy()")
        for i, item in enumerate(d.items):
            g.write(item, f"{x}[{i}]", f"b{8 * part}")
    elif isinstance(a, Reg) and isinstance(d, Reg):
        if TYPE_BYTES[a.type] != TYPE_BYTES[d.type]:
            raise g.malformed(f"{a.name} and {d.name} differ in size")
        if g.guarded and TYPE_BYTES[d.type]:
            bits = f"b{8 * TYPE_BYTES[d.type]}"
            g.write(d, g.src(a, bits), bits)
        elif g.guarded:
            g.write(d, g.raw_reg(a), d.type)
        else:  # shares the array; a pending or poisoned value travels unseen
            name = g.raw_reg(a)
            for key in [k for k in g.views if k[0] == d.index]:
                del g.views[key]
            for (index, dt), view in list(g.views.items()):
                if index == a.index:
                    g.views[d.index, dt] = view
            g.raw[d.index] = name
            g.dirty.add(d.index)
    else:
        t = typ if typ in ("pred", "f32", "f64") else f"b{8 * size}"
        if isinstance(a, (Special, Sym)):
            t = f"b{8 * size}"
        g.write(d, g.src(a, t), t)


@op("cvta")
def _cvta(g: Emitter, ins: Instr) -> None:
    d, a = operands(g, ins, 2)
    to = "to" in ins.parts
    space = ins.parts[2] if to else ins.parts[1]
    typ = ins.parts[-1]
    if space in ("global", "param", "const") or space == "param::entry":
        g.write(d, g.src(a, typ), typ)
    elif space.startswith("shared") and typ == "u64":
        x = g.src(a, "u64")
        base = g.fill(SHARED_WINDOW, "u8")
        g.write(d, f"{x} - {base}" if to else f"{x} + {base}", "u64")
    elif space == "local" and typ == "u64":
        x = g.src(a, "u64")
        base = g.fill(LOCAL_WINDOW, "u8")
        g.write(d, f"{x} - {base}" if to else f"{x} + {base}", "u64")
    else:
        raise g.bad()


@op("selp")
def _selp(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    d, a, b, p = operands(g, ins, 4)
    t = typ if typ in ("f32", "f64") else UNSIGNED.get(typ, typ)
    g.write(d, f"where({g.src(p, 'pred')}, {g.src(a, t)}, {g.src(b, t)})", t)


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_UNSIGNED_CMP = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _comparison(g: Emitter, ins: Instr, cmp: str, typ: str, a, b, mods: set[str]) -> str:
    if typ in ("f16", "bf16"):
        x, y = (half_in(g, v, typ) for v in (a, b))
        flt = True
    else:
        t = typ if typ[0] in "sf" or typ == "pred" else UNSIGNED[typ]
        x, y = g.src(a, t), g.src(b, t)
        flt = typ[0] == "f"
        if flt and "ftz" in mods:
            x, y = flushed(g, x, mods), flushed(g, y, mods)
    if cmp == "num":
        return f"({x} == {x}) & ({y} == {y})"
    if cmp == "nan":
        return f"({x} != {x}) | ({y} != {y})"
    if cmp in _UNSIGNED_CMP:
        return f"{x} {_UNSIGNED_CMP[cmp]} {y}"
    if flt and cmp in _UNORDERED:
        if cmp == "neu":
            return f"{x} != {y}"
        inverse = {"equ": "!=", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[cmp]
        if cmp == "equ":
            return f"({x} == {y}) | ({x} != {x}) | ({y} != {y})"
        return f"~({x} {inverse} {y})"
    if cmp not in _COMPARE:
        raise g.bad(f"comparison .{cmp}")
    if flt and cmp == "ne":
        return f"({x} != {y}) & ({x} == {x}) & ({y} == {y})"
    return f"{x} {_COMPARE[cmp]} {y}"


@op("setp")
def _setp(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    cmp, rest = ins.parts[1], ins.parts[2:-1]
    mods = set(rest)
    combine = next((m for m in rest if m in ("and", "or", "xor")), None)
    if mods - {"ftz", "and", "or", "xor"}:
        raise g.bad()
    if len(ins.operands) != (4 if combine else 3):
        raise g.malformed("wrong number of operands")
    d, q = pair(ins.operands[0])
    a, b = ins.operands[1:3]
    expr = _comparison(g, ins, cmp, typ, a, b, mods)
    if combine:
        c = g.src(ins.operands[3], "pred")
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        if q is not None:
            t = g.let(expr)
            g.write(q, f"~{t} {sign} {c}", "pred")
            g.write(d, f"{t} {sign} {c}", "pred")
            return
        expr = f"({expr}) {sign} {c}"
    elif q is not None:
        t = g.let(expr)
        g.write(q, f"~{t}", "pred")
        expr = t
    g.write(d, expr, "pred")


@op("set")
def _set(g: Emitter, ins: Instr) -> None:
    cmp, dtype, typ = ins.parts[1], ins.parts[-2], ins.parts[-1]
    if dtype not in ("u32", "s32", "f32") or set(ins.parts[2:-2]) - {"ftz"}:
        raise g.bad()
    d, a, b = operands(g, ins, 3)
    t = g.let(_comparison(g, ins, cmp, typ, a, b, set(ins.parts[2:-2])))
    if dtype == "f32":
        g.write(d, f"{t}.astype(_f4)", "f32")
    else:
        g.write(d, f"where({t}, _u4(0xFFFFFFFF), _u4(0))", "u32")


@op("copysign")
def _copysign(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    d, a, b = operands(g, ins, 3)
    g.write(d, f"np.copysign({g.src(b, typ)}, {g.src(a, typ)})", typ)


@op("slct")
def _slct(g: Emitter, ins: Instr) -> None:
    typ, ctyp = ins.parts[-2], ins.parts[-1]
    d, a, b, c = operands(g, ins, 4)
    g.write(d, f"where({g.src(c, ctyp)} >= 0, {g.src(a, typ)}, {g.src(b, typ)})", typ)


@op("testp")
def _testp(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    d, a = operands(g, ins, 2)
    fn = {"finite": "np.isfinite", "infinite": "np.isinf", "notanumber": "np.isnan"}.get(ins.parts[1])
    if fn is None:
        raise g.bad()
    g.write(d, f"{fn}({g.src(a, typ)})", "pred")
