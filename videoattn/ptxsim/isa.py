"""Scalar, move, convert and compare instructions: one emitter per opcode."""

from __future__ import annotations

from collections.abc import Callable

from .codegen import DTYPES, Emitter, pair, vector_items
from .ptx import TYPE_BYTES, Imm, Instr, Reg, Special, Sym, Vec

EMITTERS: dict[str, Callable[[Emitter, Instr], None]] = {}

_ROUND = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}


def op(*names: str):
    """Register an emitter for opcodes."""

    def register(fn):
        for name in names:
            EMITTERS[name] = fn
        return fn

    return register


def _type(g: Emitter, ins: Instr) -> str:
    if ins.parts[-1] not in TYPE_BYTES:
        raise g.bad("no type suffix that is modelled")
    return ins.parts[-1]


def _only(g: Emitter, ins: Instr, *allowed: str) -> set[str]:
    mods = set(ins.parts[1:-1])
    extra = mods - set(allowed)
    if extra:
        raise g.bad(f"modifier .{sorted(extra)[0]}")
    return mods


def _count(g: Emitter, ins: Instr, n: int) -> list:
    if len(ins.operands) != n:
        raise g.malformed(f"needs {n} operands, has {len(ins.operands)}")
    return ins.operands


def _flushed(g: Emitter, x: str, mods: set[str]) -> str:
    return g.let(f"sc.ftz({x})") if "ftz" in mods else x


_INT = {"u16", "s16", "u32", "s32", "u64", "s64"}
_UNSIGNED = {"u16": "u16", "s16": "u16", "u32": "u32", "s32": "u32", "u64": "u64", "s64": "u64",
             "b16": "u16", "b32": "u32", "b64": "u64"}  # fmt: skip


@op("add", "sub", "mul")
def _arith(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    name = ins.parts[0]
    sign = {"add": "+", "sub": "-", "mul": "*"}[name]
    if typ in ("f32", "f32x2", "f64"):
        mods = _only(g, ins, "rn", "rz", "rm", "rp", "ftz", "sat")
        d, a, b = _count(g, ins, 3)
        x, y = (_flushed(g, g.src(v, typ), mods) for v in (a, b))
        mode = next((_ROUND[m] for m in mods if m in _ROUND), "n")
        if mode == "n":
            expr = f"{x} {sign} {y}"
        elif typ == "f64":
            raise g.bad("directed rounding in f64")
        elif name == "mul":
            expr = f"sc.mul_rounded({x}, {y}, {mode!r})"
        else:
            expr = f"sc.add_rounded({x}, {'-' if name == 'sub' else ''}{y}, {mode!r})"
        if typ != "f64":
            expr = f"sc.canonical({expr})"
        if "ftz" in mods:
            expr = f"sc.ftz({expr})"
        if "sat" in mods:
            expr = f"sc.saturate({expr})"
        g.write(d, expr, typ)
        return
    if typ in ("f16", "bf16", "f16x2", "bf16x2"):
        mods = _only(g, ins, "rn")
        d, a, b = _count(g, ins, 3)
        x, y = (_half_in(g, v, typ) for v in (a, b))
        g.write(d, _half_out(f"{x} {sign} {y}", typ), typ)
        return
    if typ not in _INT:
        raise g.bad()
    if name == "mul":
        return _mul_int(g, ins, typ)
    _only(g, ins)
    d, a, b = _count(g, ins, 3)
    u = _UNSIGNED[typ]
    g.write(d, f"{g.src(a, u)} {sign} {g.src(b, u)}", u)


def _half_in(g: Emitter, v, typ: str) -> str:
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


def _half_out(expr: str, typ: str) -> str:
    if typ == "f16":
        return f"sc.f32_to_f16({expr}).view(_f2)"
    if typ == "f16x2":
        return f"sc.f32_to_f16({expr}).view(_u4)"
    if typ == "bf16":
        return f"sc.f32_to_bf16({expr})"
    return f"sc.f32_to_bf16({expr}).view(_u4)"


def _mul_int(g: Emitter, ins: Instr, typ: str) -> None:
    mods = _only(g, ins, "lo", "hi", "wide")
    d, a, b = _count(g, ins, 3)
    g.write(d, *_product(g, typ, mods, a, b))


def _product(g: Emitter, typ: str, mods: set[str], a, b) -> tuple[str, str]:
    u, bits = _UNSIGNED[typ], 8 * TYPE_BYTES[typ]
    if "lo" in mods:
        return f"{g.src(a, u)} * {g.src(b, u)}", u
    x, y = g.src(a, typ), g.src(b, typ)
    if bits == 64:
        if "wide" in mods:
            raise g.bad("wide 64-bit product")
        if typ == "u64":
            return f"sc.mul_hi64({x}, {y})", "u64"
        ux, uy = g.src(a, "u64"), g.src(b, "u64")
        z = g.fill(0, "u8")
        return f"sc.mul_hi64({ux}, {uy}) - where({x} < 0, {uy}, {z}) - where({y} < 0, {ux}, {z})", "u64"
    wide = typ[0] + str(2 * bits)
    expr = f"{x}.astype(_{DTYPES[wide]}) * {y}.astype(_{DTYPES[wide]})"
    if "wide" in mods:
        return expr, wide
    return f"(({expr}) >> {bits}).astype(_{DTYPES[typ]})", typ


@op("mad")
def _mad(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    if typ == "f32":
        return _fma(g, ins)
    mods = _only(g, ins, "lo", "hi", "wide")
    d, a, b, c = _count(g, ins, 4)
    expr, out = _product(g, typ, mods, a, b)
    g.write(d, f"({expr}) + {g.src(c, out)}", out)


@op("fma")
def _fma(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    mods = _only(g, ins, "rn", "rz", "rm", "rp", "ftz", "sat", "relu")
    d, a, b, c = _count(g, ins, 4)
    if typ in ("f32", "f32x2"):
        x, y, z = (_flushed(g, g.src(v, typ), mods) for v in (a, b, c))
        mode = next((_ROUND[m] for m in mods if m in _ROUND), "n")
        expr = f"sc.fma({x}, {y}, {z})" if mode == "n" else f"sc.fma_rounded({x}, {y}, {z}, {mode!r})"
        expr = f"sc.canonical({expr})"
        if "ftz" in mods:
            expr = f"sc.ftz({expr})"
        if "sat" in mods:
            expr = f"sc.saturate({expr})"
    elif typ == "f64":
        expr = f"sc.fma64({g.src(a, typ)}, {g.src(b, typ)}, {g.src(c, typ)})"
    elif typ in ("f16", "f16x2", "bf16", "bf16x2"):
        x, y, z = (_half_in(g, v, typ) for v in (a, b, c))
        expr = _half_out(f"sc.fma_to_half({x}, {y}, {z}, {'bf' in typ})", typ)
    else:
        raise g.bad()
    if "relu" in mods:
        raise g.bad("modifier .relu")
    g.write(d, expr, typ)


@op("div", "rem")
def _div(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    d, a, b = _count(g, ins, 3)
    if typ in ("f32", "f64"):
        mods = _only(g, ins, "rn", "ftz", "approx", "full")
        x, y = (_flushed(g, g.src(v, typ), mods) for v in (a, b))
        expr = f"{x} / {y}" if typ == "f64" else f"sc.canonical({x} / {y})"
        g.write(d, f"sc.ftz({expr})" if "ftz" in mods else expr, typ)
        return
    _only(g, ins)
    fn = "div_trunc" if ins.parts[0] == "div" else "rem_trunc"
    g.write(d, f"sc.{fn}({g.src(a, typ)}, {g.src(b, typ)})", typ)


@op("max", "min")
def _minmax(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    mods = _only(g, ins, "ftz", "NaN", "abs", "relu")
    name = ins.parts[0]
    if len(ins.operands) not in (3, 4):
        raise g.malformed("needs 3 or 4 operands")
    d, *srcs = ins.operands
    if typ == "f32":
        if "relu" in mods:
            raise g.bad("modifier .relu")
        xs = [_flushed(g, g.src(v, typ), mods) for v in srcs]
        if "abs" in mods:
            xs = [g.let(f"abs({x})") for x in xs]
        fn = f"sc.{name}_nan" if "NaN" in mods else f"sc.f{name}"
        expr = f"{fn}({xs[0]}, {xs[1]})"
        if len(xs) == 3:
            expr = f"{fn}({expr}, {xs[2]})"
        g.write(d, f"sc.canonical({expr})", typ)
    elif typ == "f64":
        g.write(d, f"np.f{name}({g.src(srcs[0], typ)}, {g.src(srcs[1], typ)})", typ)
    elif typ in _INT:
        x, y = g.src(srcs[0], typ), g.src(srcs[1], typ)
        expr = f"np.{name}imum({x}, {y})"
        if "relu" in mods:
            expr = f"np.maximum({expr}, 0)"
        g.write(d, expr, typ)
    elif typ in ("f16", "f16x2", "bf16", "bf16x2"):
        if mods:
            raise g.bad(f"modifier .{sorted(mods)[0]}")
        x, y = (_half_in(g, v, typ) for v in srcs)
        g.write(d, _half_out(f"sc.f{name}({x}, {y})", typ), typ)
    else:
        raise g.bad()


@op("neg", "abs", "not", "cnot")
def _unary(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    mods = _only(g, ins, "ftz")
    d, a = _count(g, ins, 2)
    name = ins.parts[0]
    if name == "not":
        u = typ if typ == "pred" else _UNSIGNED[typ]
        g.write(d, f"~{g.src(a, u)}", u)
    elif name == "cnot":
        u = _UNSIGNED[typ]
        g.write(d, f"({g.src(a, u)} == 0).astype(_{DTYPES[u]})", u)
    elif typ in ("f16x2", "bf16x2", "bf16", "f16"):
        bits = 0x80008000 if typ.endswith("x2") else 0x8000
        b = "b32" if typ.endswith("x2") else "b16"
        mask = g.fill(bits if name == "neg" else bits ^ (2 ** (8 * TYPE_BYTES[b]) - 1), DTYPES[b])
        g.write(d, f"{g.src(a, b)} {'^' if name == 'neg' else '&'} {mask}", b)
    elif typ in ("f32", "f64", "f32x2", *_INT):
        if name == "neg" and typ in _INT:
            u = _UNSIGNED[typ]
            g.write(d, f"{g.fill(0, DTYPES[u])} - {g.src(a, u)}", u)
        else:
            x = _flushed(g, g.src(a, typ), mods)
            expr = f"-{x}" if name == "neg" else f"abs({x})"
            g.write(d, f"sc.canonical({expr})" if typ in ("f32", "f32x2") else expr, typ)
    else:
        raise g.bad()


_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@op("and", "or", "xor")
def _logic(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a, b = _count(g, ins, 3)
    u = typ if typ == "pred" else _UNSIGNED[typ]
    g.write(
        d,
        f"{g.src(a, u)} {_LOGIC[ins.parts[0]]} {g.src(b, u)}",
        u,
    )


@op("shl", "shr")
def _shift(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a, n = _count(g, ins, 3)
    bits = 8 * TYPE_BYTES[typ]
    t = _UNSIGNED[typ] if ins.parts[0] == "shl" or typ[0] == "b" else typ
    x = g.src(a, t)
    if isinstance(n, Imm) and 0 <= n.value < bits:
        g.write(d, f"{x} {'<<' if ins.parts[0] == 'shl' else '>>'} {g.fill(n.value, DTYPES[t])}", t)
    else:
        g.write(d, f"sc.{ins.parts[0]}({x}, {g.src(n, 'u32')}, {bits})", t)


@op("shf")
def _shf(g: Emitter, ins: Instr) -> None:
    mods = _only(g, ins, "l", "r", "clamp", "wrap")
    d, a, b, c = _count(g, ins, 4)
    lo, hi, n = (g.src(v, "u32") for v in (a, b, c))
    g.write(d, f"sc.funnel({lo}, {hi}, {n}, {'l' in mods}, {'clamp' in mods})", "u32")


@op("prmt")
def _prmt(g: Emitter, ins: Instr) -> None:
    if ins.parts[1:] != ("b32",):
        raise g.bad("modes other than the default")
    d, a, b, c = _count(g, ins, 4)
    g.write(d, f"sc.prmt({g.src(a, 'u32')}, {g.src(b, 'u32')}, {g.src(c, 'u32')})", "u32")


@op("lop3")
def _lop3(g: Emitter, ins: Instr) -> None:
    if ins.parts[1:] != ("b32",):
        raise g.bad()
    d, a, b, c, table = _count(g, ins, 5)
    if not isinstance(table, Imm):
        raise g.malformed("the truth table is not an immediate")
    g.write(
        d, f"sc.lop3({g.src(a, 'u32')}, {g.src(b, 'u32')}, {g.src(c, 'u32')}, {table.value & 255})", "u32"
    )


@op("bfe")
def _bfe(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a, pos, length = _count(g, ins, 4)
    g.write(d, f"sc.bfe({g.src(a, typ)}, {g.src(pos, 'u32')}, {g.src(length, 'u32')})", typ)


@op("bfi")
def _bfi(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a, b, pos, length = _count(g, ins, 5)
    args = ", ".join(g.src(v, t) for v, t in ((a, typ), (b, typ), (pos, "u32"), (length, "u32")))
    g.write(d, f"sc.bfi({args})", typ)


@op("popc", "clz", "brev")
def _bits(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a = _count(g, ins, 2)
    name = ins.parts[0]
    g.write(d, f"sc.{name}({g.src(a, typ)})", typ if name == "brev" else "u32")


@op("bfind")
def _bfind(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    mods = _only(g, ins, "shiftamt")
    d, a = _count(g, ins, 2)
    g.write(d, f"sc.bfind({g.src(a, typ)}, {'shiftamt' in mods})", "u32")


@op("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def _special(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    mods = _only(g, ins, "approx", "ftz", "rn")
    d, a = _count(g, ins, 2)
    name = ins.parts[0]
    if typ == "f32":
        x = _flushed(g, g.src(a, typ), mods)
        expr = f"sc.canonical({f'np.sqrt({x})' if name == 'sqrt' else f'sc.{name}({x})'})"
        g.write(d, f"sc.ftz({expr})" if "ftz" in mods else expr, typ)
    elif name == "ex2" and typ in ("f16", "f16x2", "bf16", "bf16x2"):
        g.write(d, _half_out(f"sc.ex2({_half_in(g, a, typ)})", typ), typ)
    else:
        raise g.bad()


@op("mov")
def _mov(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    _only(g, ins)
    d, a = _count(g, ins, 2)
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
    d, a = _count(g, ins, 2)
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


SHARED_WINDOW = 0x7A00_0000_0000
LOCAL_WINDOW = 0x7C00_0000_0000


@op("selp")
def _selp(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    d, a, b, p = _count(g, ins, 4)
    t = typ if typ in ("f32", "f64") else _UNSIGNED.get(typ, typ)
    g.write(d, f"where({g.src(p, 'pred')}, {g.src(a, t)}, {g.src(b, t)})", t)


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_UNSIGNED_CMP = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _comparison(g: Emitter, ins: Instr, cmp: str, typ: str, a, b, mods: set[str]) -> str:
    if typ in ("f16", "bf16"):
        x, y = (_half_in(g, v, typ) for v in (a, b))
        flt = True
    else:
        t = typ if typ[0] in "sf" or typ == "pred" else _UNSIGNED[typ]
        x, y = g.src(a, t), g.src(b, t)
        flt = typ[0] == "f"
        if flt and "ftz" in mods:
            x, y = _flushed(g, x, mods), _flushed(g, y, mods)
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
    typ = _type(g, ins)
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
    d, a, b = _count(g, ins, 3)
    t = g.let(_comparison(g, ins, cmp, typ, a, b, set(ins.parts[2:-2])))
    if dtype == "f32":
        g.write(d, f"{t}.astype(_f4)", "f32")
    else:
        g.write(d, f"where({t}, _u4(0xFFFFFFFF), _u4(0))", "u32")


@op("copysign")
def _copysign(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    d, a, b = _count(g, ins, 3)
    g.write(d, f"np.copysign({g.src(b, typ)}, {g.src(a, typ)})", typ)


@op("slct")
def _slct(g: Emitter, ins: Instr) -> None:
    typ, ctyp = ins.parts[-2], ins.parts[-1]
    d, a, b, c = _count(g, ins, 4)
    g.write(d, f"where({g.src(c, ctyp)} >= 0, {g.src(a, typ)}, {g.src(b, typ)})", typ)


@op("testp")
def _testp(g: Emitter, ins: Instr) -> None:
    typ = _type(g, ins)
    d, a = _count(g, ins, 2)
    fn = {"finite": "np.isfinite", "infinite": "np.isinf", "notanumber": "np.isnan"}.get(ins.parts[1])
    if fn is None:
        raise g.bad()
    g.write(d, f"{fn}({g.src(a, typ)})", "pred")


__all__ = ["EMITTERS", "LOCAL_WINDOW", "SHARED_WINDOW", "op", "vector_items"]

from . import isa_cvt, isa_memory, isa_sync, isa_tensor  # noqa: E402, F401  (register their emitters)
