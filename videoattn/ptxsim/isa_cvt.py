"""cvt: conversions between integers, f32, f64, f16 and bf16."""

from __future__ import annotations

from .codegen import DTYPES, Emitter
from .isa_common import op
from .ptx import TYPE_BYTES, Instr

_INT_ROUND = {"rni": "ni", "rzi": "zi", "rmi": "mi", "rpi": "pi"}
_FLT_ROUND = {"rn": "n", "rz": "z", "rm": "m", "rp": "p"}
_INTS = {f"{s}{n}" for s in "us" for n in (8, 16, 32, 64)}


@op("cvt")
def _cvt(g: Emitter, ins: Instr) -> None:
    dtype, stype = ins.parts[-2], ins.parts[-1]
    mods = set(ins.parts[1:-2])
    known = {*_INT_ROUND, *_FLT_ROUND, "ftz", "sat", "satfinite", "relu"}
    if mods - known:
        raise g.bad(f"modifier .{sorted(mods - known)[0]}")
    if dtype in ("bf16x2", "f16x2"):
        return _packed(g, ins, dtype, stype, mods)
    d, a = ins.operands
    irnd = next((_INT_ROUND[m] for m in mods if m in _INT_ROUND), None)
    frnd = next((_FLT_ROUND[m] for m in mods if m in _FLT_ROUND), None)
    if mods & {"satfinite", "relu"}:
        raise g.bad()
    if dtype in _INTS and stype in _INTS:
        return _int_to_int(g, ins, dtype, stype, "sat" in mods)
    if dtype in _INTS and stype in ("f32", "f64", "f16", "bf16"):
        if irnd is None:
            raise g.malformed("float to integer needs an integer rounding")
        x = _float_src(g, a, stype)
        if "ftz" in mods:
            x = f"sc.ftz({x})"
        g.write(d, f"sc.float_to_int({x}, _{DTYPES[dtype]}, {irnd!r})", dtype)
        return
    if stype in _INTS and dtype in ("f32", "f64", "f16", "bf16"):
        x = g.src(a, stype)
        if dtype == "f64":
            g.write(d, f"{x}.astype(_f8)", "f64")
        elif dtype == "f32":
            g.write(d, f"sc.int_to_f32({x}, {frnd or 'n'!r})", "f32")
        elif dtype == "f16" and frnd == "n":
            g.write(d, f"{x}.astype(_f8).astype(_f2)", "f16")
        else:
            raise g.bad()
        return
    _float_to_float(g, ins, dtype, stype, mods, irnd, frnd)


def _float_src(g: Emitter, a, stype: str) -> str:
    if stype == "f16":
        return g.let(f"{g.src(a, 'f16')}.astype(_f4)")
    if stype == "bf16":
        return g.let(f"sc.bf16_to_f32({g.src(a, 'b16')})")
    return g.src(a, stype)


def _int_to_int(g: Emitter, ins: Instr, dtype: str, stype: str, sat: bool) -> None:
    d, a = ins.operands
    x = g.src(a, stype)
    if sat:
        lo = 0 if dtype[0] == "u" else -(2 ** (8 * TYPE_BYTES[dtype] - 1))
        hi = 2 ** (8 * TYPE_BYTES[dtype] - (dtype[0] == "s")) - 1
        slo, shi = (0, 2 ** (8 * TYPE_BYTES[stype]) - 1) if stype[0] == "u" else (
            -(2 ** (8 * TYPE_BYTES[stype] - 1)), 2 ** (8 * TYPE_BYTES[stype] - 1) - 1)  # fmt: skip
        x = f"np.clip({x}, {max(lo, slo)}, {min(hi, shi)})"
    g.write(d, f"{x}.astype(_{DTYPES[dtype]})", dtype)


def _float_to_float(g: Emitter, ins: Instr, dtype: str, stype: str, mods: set[str], irnd, frnd) -> None:
    d, a = ins.operands
    x = _float_src(g, a, stype)
    if "ftz" in mods and stype == "f32":
        x = g.let(f"sc.ftz({x})")
    if irnd is not None:
        if dtype != stype:
            raise g.bad("integer rounding between different float types")
        x = f"sc.round_int({x}, {irnd!r})"
    wide = stype in ("f16", "bf16")  # x is f32 by now
    if dtype == "f32":
        if stype == "f64":
            if frnd != "n":
                raise g.bad("only .rn from f64")
            x = f"{x}.astype(_f4)"
        if "sat" in mods:
            x = f"sc.saturate({x})"
        g.write(d, x if stype == "bf16" else f"sc.canonical({x})", "f32")
    elif dtype == "f64":
        g.write(d, f"{x}.astype(_f8)", "f64")
    elif dtype == "bf16" and (stype == "f32" or wide) and frnd in ("n", "z", None):
        g.write(d, f"sc.f32_to_bf16({x}, {frnd or 'n'!r})", "b16")
    elif dtype == "f16" and (stype == "f32" or wide) and frnd in ("n", None):
        g.write(d, f"sc.f32_to_f16({x})", "b16")
    else:
        raise g.bad()


def _packed(g: Emitter, ins: Instr, dtype: str, stype: str, mods: set[str]) -> None:
    if stype != "f32" or len(ins.operands) != 3 or "rn" not in mods or mods - {"rn", "relu"}:
        raise g.bad()
    d, hi, lo = ins.operands
    x, y = g.src(hi, "f32"), g.src(lo, "f32")
    if "relu" in mods:
        zero = g.fill(0.0, "f4")
        x, y = f"sc.max_nan({x}, {zero})", f"sc.max_nan({y}, {zero})"
    g.write(d, f"sc.pack_{dtype}({x}, {y})", "b32")
