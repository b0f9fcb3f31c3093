"""Loads, stores, atomics and matrix moves between registers and memories."""

from __future__ import annotations

from .codegen import DTYPES, Emitter, vector_items
from .inflight import loaded
from .isa_common import op
from .ptx import TYPE_BYTES, Imm, Instr, Mem, Reg, Sym

_IGNORED = {
    "relaxed",
    "acquire",
    "release",
    "volatile",
    "weak",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::cache_hint",
}
_SPACES = {"global", "shared", "shared::cta", "shared::cluster", "local", "param", "const", "param::entry"}


def _decode(g: Emitter, ins: Instr) -> tuple[str, str, int, set[str]]:
    """(space, element type, vector length, modifiers)"""
    typ = ins.parts[-1]
    if typ not in TYPE_BYTES:
        raise g.bad()
    space, count, mods = "generic", 1, set()
    for part in ins.parts[1:-1]:
        if part in _SPACES:
            space = "shared" if part.startswith("shared") else part.split("::")[0]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
        elif part in _IGNORED:
            mods.add(part)
        else:
            raise g.bad(f"modifier .{part}")
    if typ == "b128":
        typ, count = "b64", 2 * count
        raise g.bad("128-bit elements")
    return space, typ, count, mods


def _order(mods: set[str]) -> str:
    scope = next((s for s in ("cta", "cluster", "gpu", "sys") if s in mods), "")
    kind = next((k for k in ("acquire", "release", "relaxed", "volatile") if k in mods), "")
    return f"{kind}.{scope}" if kind else ""


@op("ld", "ldu")
def _ld(g: Emitter, ins: Instr) -> None:
    space, typ, count, mods = _decode(g, ins)
    d, m = ins.operands[:2]
    items = vector_items(g, d, count)
    size = TYPE_BYTES[typ]
    u = "u" + str(size)
    if not isinstance(m, Mem):
        raise g.malformed("expected an address in brackets")
    if space == "param":
        if isinstance(m.base, Sym):
            if m.base.name not in {p.name for p in g.program.entry.params}:
                raise g.malformed(f"{m.base.name} is no parameter")
            out = g.effect(f"C.ld_param({m.base.name!r}, {m.base.offset + m.offset}, {size}, {count})")
        else:
            out = g.effect(f"C.ld_param_at({g.mask}, {g.address(m)}, {size}, {count})")
    else:
        if space == "shared" and isinstance(m.base, Imm):
            raise g.bad("absolute shared addresses")
        addr = g.address(m)
        out = g.effect(f"C.ld_{space}({g.mask}, {addr}, {size}, {count}, {_order(mods)!r})")
        if space in ("shared", "generic"):
            _load_registers(g, items, out, typ)
            return
    for i, item in enumerate(items):
        dt = DTYPES[typ]
        expr = f"{out}[{i}]" if dt == u else f"{out}[{i}].view(_{dt})"
        g.write(item, expr, typ)


def _load_registers(g: Emitter, items: tuple, out: str, typ: str) -> None:
    """Destinations of a load from shared memory, whose data may arrive later; they live in R at once."""
    size, signed = TYPE_BYTES[typ], typ[0] == "s"
    for i, item in enumerate(items):
        if isinstance(item, Sym) and item.name == "_":
            continue
        if not isinstance(item, Reg):
            raise g.malformed("the destination is not a register")
        have = TYPE_BYTES[item.type]
        if item.type == "pred":
            raise g.malformed(f"destination {item.name} is .pred, the instruction gives .{typ}")
        if have < size:
            raise g.malformed(f"destination {item.name} is too narrow")
        letter = "i" if signed else "u"
        widen = (
            g.const((f"{letter}{size}", f"{letter}{have}"), ("widen", signed, size, have))
            if have > size
            else None
        )
        kept = f"{g.mask}, R[{item.index}]" if g.guarded else "None, None"
        g.forget(item)
        call = f"{g.const(loaded, 'loaded')}({out}, {i}, {item.index}, {widen}, {kept})"
        g.line(f"R[{item.index}] = {call}")


@op("st")
def _st(g: Emitter, ins: Instr) -> None:
    space, typ, count, mods = _decode(g, ins)
    m, s = ins.operands[:2]
    items = vector_items(g, s, count)
    size = TYPE_BYTES[typ]
    if space in ("param", "const"):
        raise g.bad()
    values = ", ".join(_value(g, v, typ) for v in items)
    addr = g.address(m)
    g.effect(f"C.st_{space}({g.mask}, {addr}, {size}, ({values},), {_order(mods)!r})")


def _value(g: Emitter, v, typ: str) -> str:
    if isinstance(v, Imm) and typ in ("f32", "f64"):
        return g.let(f"{g.src(v, typ)}.view(_u{TYPE_BYTES[typ]})")
    return g.src(v, f"b{8 * TYPE_BYTES[typ]}")


@op("atom", "red")
def _atom(g: Emitter, ins: Instr) -> None:
    mods = list(ins.parts[1:-1])
    typ = ins.parts[-1]
    space, action, rest = "generic", None, set()
    for part in mods:
        if part in ("global", "shared", "shared::cta", "shared::cluster"):
            space = part.split("::")[0]
        elif part in ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"):
            action = part
        elif part in _IGNORED or part in ("acq_rel", "noftz"):
            rest.add(part)
        else:
            raise g.bad(f"modifier .{part}")
    if action is None or typ in ("f16", "bf16", "f16x2", "bf16x2", "b128") or typ not in TYPE_BYTES:
        raise g.bad()
    operands = list(ins.operands)
    d = operands.pop(0) if ins.parts[0] == "atom" else None
    m, *args = operands
    order = (
        "acq_rel" if "acq_rel" in rest else next((k for k in ("acquire", "release") if k in rest), "relaxed")
    )
    values = ", ".join(g.src(v, typ) for v in args)
    addr = g.address(m)
    out = g.effect(
        f"C.atomic({space!r}, {action!r}, {g.mask}, {addr}, _{DTYPES[typ]}, ({values},), {order!r})"
    )
    if d is not None:
        g.write(d, out, typ)


@op("prefetch", "prefetchu", "applypriority", "discard")
def _prefetch(g: Emitter, ins: Instr) -> None:
    if ins.parts[0] == "discard":
        raise g.bad()


@op("createpolicy")
def _createpolicy(g: Emitter, ins: Instr) -> None:
    g.write(ins.operands[0], g.fill(0, "u8"), "b64")


@op("isspacep")
def _isspacep(g: Emitter, ins: Instr) -> None:
    d, a = ins.operands
    g.write(d, f"C.is_space({ins.parts[1]!r}, {g.src(a, 'u64')})", "pred")


@op("mapa")
def _mapa(g: Emitter, ins: Instr) -> None:
    d, a, rank = ins.operands
    typ = ins.parts[-1]
    if "shared::cluster" not in ins.parts or typ != "u32":
        raise g.bad("only .shared::cluster.u32")
    mask = g.fill(0xFFFFFF, "u4")
    g.write(d, f"({g.src(a, 'u32')} & {mask}) | ({g.src(rank, 'u32')} << {g.fill(24, 'u4')})", "u32")


@op("getctarank")
def _getctarank(g: Emitter, ins: Instr) -> None:
    d, a = ins.operands
    if "shared::cluster" not in ins.parts:
        raise g.bad()
    g.write(d, f"{g.src(a, 'u32')} >> {g.fill(24, 'u4')}", "u32")


@op("ldmatrix")
def _ldmatrix(g: Emitter, ins: Instr) -> None:
    mods = set(ins.parts[1:])
    count = next((int(p[1]) for p in ins.parts if p in ("x1", "x2", "x4")), 0)
    if not count or mods - {
        "sync",
        "aligned",
        "m8n8",
        "x1",
        "x2",
        "x4",
        "trans",
        "shared",
        "shared::cta",
        "b16",
    }:
        raise g.bad()
    d, m = ins.operands
    out = g.effect(f"C.ldmatrix({g.mask}, {g.address(m)}, {count}, {'trans' in mods})")
    _load_registers(g, vector_items(g, d, count), out, "b32")


@op("stmatrix")
def _stmatrix(g: Emitter, ins: Instr) -> None:
    mods = set(ins.parts[1:])
    count = next((int(p[1]) for p in ins.parts if p in ("x1", "x2", "x4")), 0)
    if not count or mods - {
        "sync",
        "aligned",
        "m8n8",
        "x1",
        "x2",
        "x4",
        "trans",
        "shared",
        "shared::cta",
        "b16",
    }:
        raise g.bad()
    m, s = ins.operands
    values = ", ".join(g.src(v, "b32") for v in vector_items(g, s, count))
    g.effect(f"C.stmatrix({g.mask}, {g.address(m)}, ({values},), {'trans' in mods})")


@op("mma")
def _mma(g: Emitter, ins: Instr) -> None:
    allowed = {"sync", "aligned", "m16n8k16", "m16n8k8", "row", "col", "f32", "bf16", "f16"}
    mods = ins.parts[1:]
    if set(mods) - allowed or mods[-4] != "f32" or mods[-1] != "f32" or mods[-3] != mods[-2]:
        raise g.bad("only m16n8k16/k8 row.col f32 += bf16/f16")
    k = 16 if "m16n8k16" in mods else 8
    d, a, b, c = ins.operands
    a_regs = ", ".join(g.src(v, "b32") for v in vector_items(g, a, k // 4))
    b_regs = ", ".join(g.src(v, "b32") for v in vector_items(g, b, k // 8))
    c_regs = ", ".join(g.src(v, "f32") for v in vector_items(g, c, 4))
    out = g.effect(f"C.mma_sync({g.mask}, {k}, {mods[-2]!r}, ({a_regs},), ({b_regs},), ({c_regs},))")
    for i, item in enumerate(vector_items(g, d, 4)):
        assert isinstance(item, Reg)
        g.write(item, f"{out}[{i}]", "f32")
