"""Arithmetic on integers and floats: sums, products, quotients, extremes, signs, approximate functions."""

from __future__ import annotations

from .codegen import DTYPES, Emitter
from .isa_common import (
    INTEGERS,
    ROUNDINGS,
    UNSIGNED,
    flushed,
    half_in,
    half_out,
    modifiers,
    op,
    operands,
    type_of,
)
from .ptx import TYPE_BYTES, Instr


@op("add", "sub", "mul")
def _arith(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    name = ins.parts[0]
    sign = {"add": "+", "sub": "-", "mul": "*"}[name]
    if typ in ("f32", "f32x2", "f64"):
        mods = modifiers(g, ins, "rn", "rz", "rm", "rp", "ftz", "sat")
        d, a, b = operands(g, ins, 3)
        x, y = (flushed(g, g.src(v, typ), mods) for v in (a, b))
        mode = next((ROUNDINGS[m] for m in mods if m in ROUNDINGS), "n")
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
        mods = modifiers(g, ins, "rn")
        d, a, b = operands(g, ins, 3)
        x, y = (half_in(g, v, typ) for v in (a, b))
        g.write(d, half_out(f"{x} {sign} {y}", typ), typ)
        return
    if typ not in INTEGERS:
        raise g.bad()
    if name == "mul":
        return _mul_int(g, ins, typ)
    modifiers(g, ins)
    d, a, b = operands(g, ins, 3)
    u = UNSIGNED[typ]
    g.write(d, f"{g.src(a, u)} {sign} {g.src(b, u)}", u)


def _mul_int(g: Emitter, ins: Instr, typ: str) -> None:
    mods = modifiers(g, ins, "lo", "hi", "wide")
    d, a, b = operands(g, ins, 3)
    g.write(d, *_product(g, typ, mods, a, b))


def _product(g: Emitter, typ: str, mods: set[str], a, b) -> tuple[str, str]:
    u, bits = UNSIGNED[typ], 8 * TYPE_BYTES[typ]
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
    typ = type_of(g, ins)
    if typ == "f32":
        return _fma(g, ins)
    mods = modifiers(g, ins, "lo", "hi", "wide")
    d, a, b, c = operands(g, ins, 4)
    expr, out = _product(g, typ, mods, a, b)
    g.write(d, f"({expr}) + {g.src(c, out)}", out)


@op("fma")
def _fma(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    mods = modifiers(g, ins, "rn", "rz", "rm", "rp", "ftz", "sat", "relu")
    d, a, b, c = operands(g, ins, 4)
    if typ in ("f32", "f32x2"):
        x, y, z = (flushed(g, g.src(v, typ), mods) for v in (a, b, c))
        mode = next((ROUNDINGS[m] for m in mods if m in ROUNDINGS), "n")
        expr = f"sc.fma({x}, {y}, {z})" if mode == "n" else f"sc.fma_rounded({x}, {y}, {z}, {mode!r})"
        expr = f"sc.canonical({expr})"
        if "ftz" in mods:
            expr = f"sc.ftz({expr})"
        if "sat" in mods:
            expr = f"sc.saturate({expr})"
    elif typ == "f64":
        expr = f"sc.fma64({g.src(a, typ)}, {g.src(b, typ)}, {g.src(c, typ)})"
    elif typ in ("f16", "f16x2", "bf16", "bf16x2"):
        x, y, z = (half_in(g, v, typ) for v in (a, b, c))
        expr = half_out(f"sc.fma_to_half({x}, {y}, {z}, {'bf' in typ})", typ)
    else:
        raise g.bad()
    if "relu" in mods:
        raise g.bad("modifier .relu")
    g.write(d, expr, typ)


@op("div", "rem")
def _div(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    d, a, b = operands(g, ins, 3)
    if typ in ("f32", "f64"):
        mods = modifiers(g, ins, "rn", "ftz", "approx", "full")
        x, y = (flushed(g, g.src(v, typ), mods) for v in (a, b))
        expr = f"{x} / {y}" if typ == "f64" else f"sc.canonical({x} / {y})"
        g.write(d, f"sc.ftz({expr})" if "ftz" in mods else expr, typ)
        return
    modifiers(g, ins)
    fn = "div_trunc" if ins.parts[0] == "div" else "rem_trunc"
    g.write(d, f"sc.{fn}({g.src(a, typ)}, {g.src(b, typ)})", typ)


@op("max", "min")
def _minmax(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    mods = modifiers(g, ins, "ftz", "NaN", "abs", "relu")
    name = ins.parts[0]
    if len(ins.operands) not in (3, 4):
        raise g.malformed("needs 3 or 4 operands")
    d, *srcs = ins.operands
    if typ == "f32":
        if "relu" in mods:
            raise g.bad("modifier .relu")
        xs = [flushed(g, g.src(v, typ), mods) for v in srcs]
        if "abs" in mods:
            xs = [g.let(f"abs({x})") for x in xs]
        fn = f"sc.{name}_nan" if "NaN" in mods else f"sc.f{name}"
        expr = f"{fn}({xs[0]}, {xs[1]})"
        if len(xs) == 3:
            expr = f"{fn}({expr}, {xs[2]})"
        g.write(d, f"sc.canonical({expr})", typ)
    elif typ == "f64":
        g.write(d, f"np.f{name}({g.src(srcs[0], typ)}, {g.src(srcs[1], typ)})", typ)
    elif typ in INTEGERS:
        x, y = g.src(srcs[0], typ), g.src(srcs[1], typ)
        expr = f"np.{name}imum({x}, {y})"
        if "relu" in mods:
            expr = f"np.maximum({expr}, 0)"
        g.write(d, expr, typ)
    elif typ in ("f16", "f16x2", "bf16", "bf16x2"):
        if mods:
            raise g.bad(f"modifier .{sorted(mods)[0]}")
        x, y = (half_in(g, v, typ) for v in srcs)
        g.write(d, half_out(f"sc.f{name}({x}, {y})", typ), typ)
    else:
        raise g.bad()


@op("neg", "abs", "not", "cnot")
def _unary(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    mods = modifiers(g, ins, "ftz")
    d, a = operands(g, ins, 2)
    name = ins.parts[0]
    if name == "not":
        u = typ if typ == "pred" else UNSIGNED[typ]
        g.write(d, f"~{g.src(a, u)}", u)
    elif name == "cnot":
        u = UNSIGNED[typ]
        g.write(d, f"({g.src(a, u)} == 0).astype(_{DTYPES[u]})", u)
    elif typ in ("f16x2", "bf16x2", "bf16", "f16"):
        bits = 0x80008000 if typ.endswith("x2") else 0x8000
        b = "b32" if typ.endswith("x2") else "b16"
        mask = g.fill(bits if name == "neg" else bits ^ (2 ** (8 * TYPE_BYTES[b]) - 1), DTYPES[b])
        g.write(d, f"{g.src(a, b)} {'^' if name == 'neg' else '&'} {mask}", b)
    elif typ in ("f32", "f64", "f32x2", *INTEGERS):
        if name == "neg" and typ in INTEGERS:
            u = UNSIGNED[typ]
            g.write(d, f"{g.fill(0, DTYPES[u])} - {g.src(a, u)}", u)
        else:
            x = flushed(g, g.src(a, typ), mods)
            expr = f"-{x}" if name == "neg" else f"abs({x})"
            g.write(d, f"sc.canonical({expr})" if typ in ("f32", "f32x2") else expr, typ)
    else:
        raise g.bad()


@op("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def _special(g: Emitter, ins: Instr) -> None:
    typ = type_of(g, ins)
    mods = modifiers(g, ins, "approx", "ftz", "rn")
    d, a = operands(g, ins, 2)
    name = ins.parts[0]
    if typ == "f32":
        x = flushed(g, g.src(a, typ), mods)
        expr = f"sc.canonical({f'np.sqrt({x})' if name == 'sqrt' else f'sc.{name}({x})'})"
        g.write(d, f"sc.ftz({expr})" if "ftz" in mods else expr, typ)
    elif name == "ex2" and typ in ("f16", "f16x2", "bf16", "bf16x2"):
        g.write(d, half_out(f"sc.ex2({half_in(g, a, typ)})", typ), typ)
    else:
        raise g.bad()
