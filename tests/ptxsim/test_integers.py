"""Integer instructions against Python: all types, registers and immediates, whole and split warps."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import numpy as np
import pytest

from videoattn.ptxsim import Device, Module, Schedule

LANES = 32
OTHER = 77  # what lanes that take the other side of a branch write


def unsigned(x: int, bits: int) -> int:
    return x & ((1 << bits) - 1)


def typed(x: int, typ: str) -> int:
    """The bits of x as a value of an integer type."""
    bits = int(typ[1:])
    x = unsigned(x, bits)
    return x - (1 << bits) if typ[0] == "s" and x >> (bits - 1) else x


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shift_right(a: int, n: int, bits: int) -> int:
    return a >> min(n, bits)


def permute(a: int, b: int, sel: int) -> int:
    data = [(a | b << 32) >> 8 * i & 255 for i in range(8)]
    out = 0
    for i in range(4):
        nibble = sel >> 4 * i & 15
        byte = data[nibble & 7]
        out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return out


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def bit_field(a: int, pos: int, length: int, typ: str) -> int:
    """bfe: past the top come zeros, or copies of the highest bit that is there."""
    bits = int(typ[1:])
    pos, length = pos & 255, length & 255
    top = min(pos + length - 1, bits - 1)
    sign = a >> top & 1 if typ[0] == "s" and length else 0
    field = sum(
        (unsigned(a, bits) >> pos + i & 1 if pos + i < bits else sign) << i for i in range(min(length, bits))
    )
    return field | (-sign << length if length < bits else 0)


def insert(a: int, b: int, pos: int, length: int, bits: int) -> int:
    pos, length = pos & 255, length & 255
    for i in range(min(length, max(bits - pos, 0))):
        b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
    return b


def highest(a: int, typ: str) -> int:
    """bfind: the highest bit that differs from the sign."""
    a = typed(a, typ)
    return (~a if a < 0 else a).bit_length() - 1


def distance_from_top(a: int, typ: str) -> int:
    """bfind.shiftamt: how far a shift must go to bring that bit to the top."""
    at = highest(a, typ)
    return at if at < 0 else int(typ[1:]) - 1 - at


# opcode -> (types, operand types, result type, model); T is the instruction's type, W its double
ALL = ("u16", "s16", "u32", "s32", "u64", "s64")
NARROW = ("u16", "s16", "u32", "s32")
WORDS = ("u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
OPS: dict[str, tuple[tuple[str, ...], str, str, Callable[..., int]]] = {
    "add": (ALL, "T T", "T", lambda a, b, t: a + b),
    "sub": (ALL, "T T", "T", lambda a, b, t: a - b),
    "mul.lo": (ALL, "T T", "T", lambda a, b, t: a * b),
    "mul.hi": (ALL, "T T", "T", lambda a, b, t: a * b >> int(t[1:])),
    "mul.wide": (NARROW, "T T", "W", lambda a, b, t: a * b),
    "mad.lo": (ALL, "T T T", "T", lambda a, b, c, t: a * b + c),
    "mad.hi": (ALL, "T T T", "T", lambda a, b, c, t: (a * b >> int(t[1:])) + c),
    "mad.wide": (NARROW, "T T W", "W", lambda a, b, c, t: a * b + c),
    "div": (ALL, "T T", "T", lambda a, b, t: trunc_div(a, b)),
    "rem": (ALL, "T T", "T", lambda a, b, t: a - trunc_div(a, b) * b),
    "min": (ALL, "T T", "T", lambda a, b, t: min(a, b)),
    "max": (ALL, "T T", "T", lambda a, b, t: max(a, b)),
    "max.relu": (("s32",), "T T", "T", lambda a, b, t: max(a, b, 0)),
    "neg": (("s16", "s32", "s64"), "T", "T", lambda a, t: -a),
    "abs": (("s16", "s32", "s64"), "T", "T", lambda a, t: abs(a)),
    "not": (BITS, "T", "T", lambda a, t: ~a),
    "cnot": (BITS, "T", "T", lambda a, t: int(a == 0)),
    "and": (BITS, "T T", "T", lambda a, b, t: a & b),
    "or": (BITS, "T T", "T", lambda a, b, t: a | b),
    "xor": (BITS, "T T", "T", lambda a, b, t: a ^ b),
    "shl": (BITS, "T u32", "T", lambda a, n, t: a << min(n, 64)),
    "shr": (BITS + ALL, "T u32", "T", lambda a, n, t: shift_right(a, n, int(t[1:]))),
    "shf.l.wrap": (("b32",), "T T u32", "T", lambda a, b, n, t: (b << 32 | a) << (n & 31) >> 32),
    "shf.r.wrap": (("b32",), "T T u32", "T", lambda a, b, n, t: (b << 32 | a) >> (n & 31)),
    "shf.l.clamp": (("b32",), "T T u32", "T", lambda a, b, n, t: (b << 32 | a) << min(n, 32) >> 32),
    "shf.r.clamp": (("b32",), "T T u32", "T", lambda a, b, n, t: (b << 32 | a) >> min(n, 32)),
    "prmt": (("b32",), "T T T", "T", lambda a, b, c, t: permute(a, b, c)),
    "lop3": (("b32",), "T T T table", "T", lambda a, b, c, table, t: lop3(a, b, c, table)),
    "bfe": (WORDS, "T u32 u32", "T", bit_field),
    "bfi": (("b32", "b64"), "T T u32 u32", "T", lambda a, b, p, n, t: insert(a, b, p, n, int(t[1:]))),
    "popc": (("b32", "b64"), "T", "u32", lambda a, t: a.bit_count()),
    "clz": (("b32", "b64"), "T", "u32", lambda a, t: int(t[1:]) - a.bit_length()),
    "brev": (("b32", "b64"), "T", "T", lambda a, t: int(f"{a:0{t[1:]}b}"[::-1], 2)),
    "bfind": (WORDS, "T", "u32", highest),
    "bfind.shiftamt": (WORDS, "T", "u32", distance_from_top),
    "mov": (BITS + ALL, "T", "T", lambda a, t: a),
    "selp": (BITS + ALL, "T T pred", "T", lambda a, b, p, t: a if p else b),
    "slct.S.s32": (BITS + ALL, "T T s32", "T", lambda a, b, c, t: a if c >= 0 else b),
}  # fmt: skip


def cases() -> list[tuple[str, str, list[str], str, Callable[..., int]]]:
    """(opcode, type, operand types, result type, model) of every instruction under test."""
    out = []
    for name, (types, operands, result, model) in OPS.items():
        for t in types:
            wide = {"T": t, "W": f"{t[0]}{2 * int(t[1:])}"}
            opcode = name.replace(".S.", f".{t}.") if ".S." in name else f"{name}.{t}"
            out.append(
                (opcode, t, [wide.get(o, o) for o in operands.split()], wide.get(result, result), model)
            )
    for t in (*BITS[1:], *ALL):
        for relation in ("eq", "ne") if t[0] == "b" else ("eq", "ne", "lt", "le", "gt", "ge"):
            compare = getattr(operator, relation)
            model: Callable[..., int] = lambda a, b, t, f=compare: int(f(a, b))  # noqa: E731
            out.append((f"setp.{relation}.{t}", t, [t, t], "pred", model))
            out.append(
                (f"set.{relation}.u32.{t}", t, [t, t], "u32", lambda a, b, t, f=compare: -int(f(a, b)))
            )
    sizes = ("u8", "s8", *ALL)
    for s in sizes:
        for d in sizes:
            out.append((f"cvt.{d}.{s}", s, [s], d, lambda a, t: a))
            low, high = typed(1 << int(d[1:]) - 1, d), (1 << int(d[1:]) - 1) - 1
            low, high = (0, 2 * high + 1) if d[0] == "u" else (low, high)
            out.append((f"cvt.sat.{d}.{s}", s, [s], d, lambda a, t, lo=low, hi=high: min(max(a, lo), hi)))
    return out


def interesting(rng: random.Random, typ: str, divides: bool = False) -> int:
    """A random value, often at an edge; `divides`: no zero, and no quotient that overflows."""
    bits = int(typ[1:])
    edge = rng.choice((0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1))
    if divides:
        return rng.choice((1, 3, (1 << bits - 1) - 1, (1 << bits - 1) + 1, 1 + rng.getrandbits(bits - 1)))
    return rng.choice((edge, rng.getrandbits(bits), rng.getrandbits(5)))


def kernel(instructions: list[str], form: str) -> str:
    """Code that runs the instructions in all lanes, in those of one side of a branch, or under a guard."""
    if form == "whole":
        body = "\n".join(instructions)
    elif form == "guard":
        body = "\n".join(f"@%odd {line}\n@!%odd {other(line)}" for line in instructions)
    else:
        body = "\n".join(
            ["@!%odd bra EVEN;", *instructions, "bra JOIN;", "EVEN:", *map(other, instructions), "JOIN:"]
        )
    return body


def other(line: str) -> str:
    """The write of the lanes that an instruction leaves out."""
    dest = line.split()[1].rstrip(",")
    if dest.startswith("%p"):
        return f"setp.ne.u32 {dest}, {OTHER}, 0;"
    return f"mov.b{dest.split('_')[0][2:]} {dest}, {OTHER};"


@pytest.mark.parametrize("form", ["whole", "branch", "guard"])
@pytest.mark.parametrize("group", range(4))
def test_integer_instructions_are_python_s(form, group):
    rng = random.Random(f"{group}/{form}")
    picked = cases()[group::4]
    loads, code, stores, expected = [], [], [], []
    columns: list[list[int]] = []
    declared = set()

    def register(typ: str, prefix: str, n: int) -> str:
        bits = max(int(typ[1:]), 16) if typ != "pred" else "p"
        name = f"%{prefix}{bits}_{n}" if typ != "pred" else f"%p_{prefix}{n}"
        declared.add(f".reg .{'pred' if typ == 'pred' else f'b{bits}'} {name};")
        return name

    for n, (opcode, typ, operand_types, result, model) in enumerate(picked):
        written, values = [], []
        constant = rng.randrange(-1, len(operand_types))  # which operand is an immediate, if any
        for k, t in enumerate(operand_types):
            if t == "pred":
                written.append("%odd")
                values.append([lane & 1 for lane in range(LANES)])
                continue
            divides = opcode.startswith(("div", "rem"))
            shift = (t == "u32" and typ != "u32") or (opcode.startswith(("shr", "bfe")) and k)
            if t == "table" or (k == constant and (len(operand_types) > 1 or opcode.startswith("mov"))):
                value = (
                    rng.randrange(256 if t == "table" else 80)
                    if t == "table" or shift
                    else interesting(rng, t, divides)
                )
                number = value if t == "table" else typed(value, t.replace("b", "u"))
                wide = (
                    [number] if t == "table" else [number, *(number + (k << int(t[1:])) for k in (-1, 1, 5))]
                )
                written.append(str(number if shift else rng.choice(wide)))
                values.append([number] * LANES)
                continue
            lanes = [rng.randrange(80) if shift else interesting(rng, t, divides) for _ in range(LANES)]
            name = register(t, "x", len(columns))
            loads.append(f"ld.global.{t} {name}, [%in+{8 * LANES * len(columns)}];")
            columns.append(lanes)
            written.append(name)
            values.append([typed(x, t.replace("b", "u")) for x in lanes])
        dest = register(result, "d", n)
        code.append(f"{opcode} {dest}, {', '.join(written)};")
        bits = 32 if result == "pred" else max(int(result[1:]), 16)
        if result == "pred":
            flag = register("u32", "f", n)
            stores.append(f"selp.b32 {flag}, 1, 0, {dest}; st.global.b32 [%out+{8 * LANES * n}], {flag};")
        else:
            stores.append(f"st.global.b{bits} [%out+{8 * LANES * n}], {dest};")
        rows = [
            model(*row, typ.replace("b", "u") if typ[0] == "b" else typ) for row in zip(*values, strict=True)
        ]
        rows = [r if result == "pred" else typed(r, result.replace("b", "u")) for r in rows]
        left_out = 1 if result == "pred" else OTHER
        expected.append([unsigned(r if form == "whole" or lane & 1 else left_out, bits)
                         for lane, r in enumerate(rows)])  # fmt: skip
    text = f""".version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
.reg .b32 %lane; .reg .b64 %in, %out, %o; .reg .pred %odd;
{" ".join(sorted(declared))}
ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %lane, %tid.x; mul.wide.u32 %o, %lane, 8;
add.u64 %in, %in, %o; add.u64 %out, %out, %o; and.b32 %lane, %lane, 1; setp.ne.u32 %odd, %lane, 0;
{chr(10).join(loads)}
{kernel(code, form)}
{chr(10).join(stores)}
ret;
}}
"""
    device = Device("sm_90a")
    data = device.upload(np.array(columns, np.uint64))
    out = device.upload(np.zeros((len(picked), LANES), np.uint64))
    module = Module.from_ptx(text)
    report = device.launch(module.entry("k"), block=LANES, args=[data, out], schedule=Schedule.early())
    assert not report.findings, str(report)
    wrong = [
        (line, got, want)
        for line, got, want in zip(code, out.download().tolist(), expected, strict=True)
        if got != want
    ]
    assert not wrong, wrong[0]
