"""Tensor cores and the copy engine: cp.async.bulk, tcgen05, wgmma."""

from __future__ import annotations

from .codegen import Emitter, vector_items
from .isa_common import op
from .isa_sync import _blocking
from .ptx import Imm, Instr, Mem, Reg, Vec


@op("cp")
def _cp(g: Emitter, ins: Instr) -> None:
    p = ins.parts
    if p[1] == "reduce":
        return _bulk(g, ins, p[4:], reduce=True)
    if p[1] != "async":
        raise g.bad()
    if len(p) > 2 and p[2] == "bulk":
        return _bulk(g, ins, p[3:], reduce=False)
    raise g.bad("only .bulk copies")


def _bulk(g: Emitter, ins: Instr, mods: tuple[str, ...], reduce: bool) -> None:
    if mods[0] == "commit_group":
        g.effect(f"C.bulk_commit({g.mask})")
        return
    if mods[0] == "wait_group":
        n = ins.operands[0]
        if not isinstance(n, Imm):
            raise g.malformed("the group count is not an immediate")
        _blocking(g, f"C.bulk_wait({g.mask}, {n.value}, {'read' in mods})")
        return
    if mods[0] == "prefetch":
        return
    known = {
        "tensor",
        "1d",
        "2d",
        "3d",
        "4d",
        "5d",
        "shared::cta",
        "shared::cluster",
        "global",
        "tile",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "cta_group::1",
        "cta_group::2",
        "L2::cache_hint",
        "bulk_group",
    }
    reductions = {"add", "min", "max", "f32", "u32", "s32", "u64", "f16", "bf16", "noftz"}
    extra = set(mods) - known - (reductions if reduce else set())
    if extra:
        raise g.bad(f"modifier .{sorted(extra)[0]}")
    kind = next((m for m in mods if m in ("add", "min", "max")), None)
    if reduce and kind is None:
        raise g.bad()
    spaces = [m for m in mods if m in ("global", "shared::cta", "shared::cluster")]
    group = 2 if "cta_group::2" in mods else 1 if "cta_group::1" in mods else 0
    multicast = "multicast::cluster" in mods
    if "tensor" in mods:
        rank = int(next(m for m in mods if m in ("1d", "2d", "3d", "4d", "5d"))[0])
        _tensor_copy(g, ins, rank, spaces, group, multicast, kind)
    else:
        _plain_copy(g, ins, mods, spaces, multicast, kind)


def _coords(g: Emitter, m, rank: int) -> tuple[str, str]:
    if not isinstance(m, Mem) or m.coords is None or len(m.coords) != rank:
        raise g.malformed(f"needs [tensorMap, {{{rank} coordinates}}]")
    addr = g.address(Mem(m.base))
    return addr, "(" + ", ".join(g.src(c, "s32") for c in m.coords) + ",)"


def _tensor_copy(g, ins, rank, spaces, group, multicast, kind) -> None:
    if spaces[0].startswith("shared"):
        dst, tmap, bar, *rest = ins.operands
        taddr, coords = _coords(g, tmap, rank)
        mask = g.src(rest[0], "b16") if multicast else "None"
        args = f"{g.mask}, {g.address(dst)}, {taddr}, {coords}, {g.address(bar)}, {mask}, {group}"
        g.effect(f"C.tma_load({args}, {spaces[0] == 'shared::cta'})")
    else:
        tmap, src, *rest = ins.operands
        taddr, coords = _coords(g, tmap, rank)
        g.effect(f"C.tma_store({g.mask}, {taddr}, {coords}, {g.address(src)}, {kind!r})")


def _plain_copy(g, ins, mods, spaces, multicast, kind) -> None:
    dst, src, size, *rest = ins.operands
    n = g.src(size, "u32")
    if spaces[0].startswith("shared"):
        bar = g.address(rest[0])
        mask = g.src(rest[1], "b16") if multicast else "None"
        if kind:
            raise g.bad("reduction into shared memory")
        if spaces[1] == "global":
            g.effect(f"C.bulk_load({g.mask}, {g.address(dst)}, {g.address(src)}, {n}, {bar}, {mask})")
        else:
            g.effect(f"C.bulk_peer({g.mask}, {g.address(dst)}, {g.address(src)}, {n}, {bar})")
    else:
        typ = mods[-1] if kind else None
        if kind and (kind != "add" or typ != "f32"):
            raise g.bad("only .add.f32 reductions")
        g.effect(f"C.bulk_store({g.mask}, {g.address(dst)}, {g.address(src)}, {n}, {kind!r})")


@op("tcgen05")
def _tcgen05(g: Emitter, ins: Instr) -> None:
    action = ins.parts[1]
    group = 2 if "cta_group::2" in ins.parts else 1
    ops = ins.operands
    if action == "alloc":
        _blocking(g, f"C.tmem_alloc({g.mask}, {g.address(ops[0])}, {g.src(ops[1], 'u32')}, {group})")
    elif action == "dealloc":
        g.effect(f"C.tmem_dealloc({g.mask}, {g.src(ops[0], 'u32')}, {g.src(ops[1], 'u32')}, {group})")
    elif action == "relinquish_alloc_permit":
        g.effect(f"C.tmem_relinquish({g.mask}, {group})")
    elif action in ("ld", "st"):
        _tmem_move(g, ins, action)
    elif action.startswith("wait::"):
        g.effect(f"C.tmem_wait({g.mask}, {action[6:]!r})")
    elif action.startswith("fence::"):
        g.effect(f"C.tmem_fence({g.mask}, {'before' in action})")
    elif action == "commit":
        multicast = "multicast::cluster" in ins.parts
        mask = g.src(ops[1], "b16") if multicast else "None"
        g.effect(f"C.tcgen05_commit({g.mask}, {g.address(ops[0])}, {group}, {mask})")
    elif action == "mma":
        _tcgen05_mma(g, ins, group)
    else:
        raise g.bad()


_SHAPES = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


def _tmem_move(g: Emitter, ins: Instr, action: str) -> None:
    shape = next((p for p in ins.parts if p in _SHAPES), None)
    n = next((int(p[1:]) for p in ins.parts if p[0] == "x" and p[1:].isdigit()), 0)
    packed = "pack::16b" in ins.parts or "unpack::16b" in ins.parts
    red = "red" in ins.parts
    extra = set(ins.parts[2:]) - {"sync", "aligned", shape, f"x{n}", "b32", "pack::16b", "unpack::16b"}
    if red:
        return _tmem_ld_red(g, ins, shape, n)
    if shape is None or not n or extra:
        raise g.bad()
    if shape == "16x32bx2" and packed:
        raise g.bad("how the split counts columns of packed halves is not known")
    count = n * _SHAPES[shape]
    ops = list(ins.operands)
    if action == "ld":
        items = vector_items(g, ops[0], count)
        addr, split = ops[1], ops[2:]
    else:
        addr, items = ops[0], None
        split = ops[1:-1]
        items = vector_items(g, ops[-1], count)
    off = split[0].value if split else 0
    where = f"{g.mask}, {g.address(addr)}, {shape!r}, {n}, {packed}, {off}"
    if action == "ld":
        out = g.effect(f"C.tmem_ld({where}, {tuple(r.index if isinstance(r, Reg) else -1 for r in items)})")
        for i, item in enumerate(items):
            if isinstance(item, Reg):
                _write_raw(g, item, f"{out}[{i}]")
    else:
        values = ", ".join(g.src(v, "b32") for v in items)
        g.effect(f"C.tmem_st({where}, ({values},))")


def _write_raw(g: Emitter, reg: Reg, expr: str) -> None:
    """Assign a value that may be a placeholder for a load still in flight; it lives in R at once."""
    g.forget(reg)
    g.line(f"R[{reg.index}] = {expr}")


def _tmem_ld_red(g: Emitter, ins: Instr, shape, n: int) -> None:
    kind = "min" if "min" in ins.parts else "max" if "max" in ins.parts else None
    typ = next((p for p in ins.parts if p in ("f32", "u32", "s32")), None)
    if shape not in ("32x32b", "16x32bx2") or kind is None or typ is None:
        raise g.bad()
    if not g.program.target.startswith(("sm_103", "sm_110")):
        raise g.bad(f"not available on {g.program.target}")
    if shape != "32x32b":
        raise g.bad("only shape 32x32b")
    items = vector_items(g, ins.operands[0], n)
    redval, addr = ins.operands[1:3]
    where = f"{g.mask}, {g.address(addr)}, {n}, {kind!r}, {typ!r}, {'abs' in ins.parts}, {'NaN' in ins.parts}"
    regs = tuple(r.index if isinstance(r, Reg) else -1 for r in (*items, redval))
    out = g.effect(f"C.tmem_ld_red({where}, {regs})")
    for i, item in enumerate((*items, redval)):
        _write_raw(g, item, f"{out}[{i}]")


def _tcgen05_mma(g: Emitter, ins: Instr, group: int) -> None:
    mods = set(ins.parts[2:])
    collectors = {m for m in mods if m.startswith("collector::")}
    if mods - collectors - {"cta_group::1", "cta_group::2", "kind::f16"}:
        raise g.bad()
    d, a, b, idesc, *rest = ins.operands
    lanes = "None"
    if rest and isinstance(rest[0], Vec):
        if group == 2:
            raise g.bad("disable-output-lane with cta_group::2")
        if len(rest[0].items) != 4:
            raise g.malformed(f"disable-output-lane has {len(rest[0].items)} words, not 4")
        lanes = "(" + ", ".join(g.src(v, "u32") for v in rest.pop(0).items) + ",)"
    if not rest:
        raise g.malformed("needs enable-input-d")
    enable = g.src(rest[0], "pred")
    scale = 0
    if len(rest) > 1:
        if not isinstance(rest[1], Imm) or not 0 <= rest[1].value <= 15:
            raise g.malformed("scale-input-d must be an immediate 0..15")
        scale = rest[1].value
    in_tmem = isinstance(a, Mem)
    av = g.address(a) if in_tmem else g.src(a, "b64")
    args = f"{g.mask}, {g.address(d)}, {av}, {g.src(b, 'b64')}, {g.src(idesc, 'u32')}, {enable}"
    g.effect(f"C.tcgen05_mma({args}, {in_tmem}, {group}, {scale}, {lanes})")


@op("wgmma")
def _wgmma(g: Emitter, ins: Instr) -> None:
    action = ins.parts[1]
    if action == "fence":
        g.effect(f"C.wgmma_fence({g.mask})")
    elif action == "commit_group":
        g.effect(f"C.wgmma_commit({g.mask})")
    elif action == "wait_group":
        g.effect(f"C.wgmma_wait({g.mask}, {ins.operands[0].value})")
    elif action == "mma_async":
        _wgmma_mma(g, ins)
    else:
        raise g.bad()


def _wgmma_mma(g: Emitter, ins: Instr) -> None:
    parts = ins.parts
    shape = next((p for p in parts if p.startswith("m64n")), "")
    types = parts[-3:]
    if types not in (("f32", "bf16", "bf16"), ("f32", "f16", "f16")) or not shape.endswith("k16"):
        raise g.bad("only f32 += bf16 x bf16 or f16 x f16")
    n = int(shape[4:-3])
    d, a, b, *rest = ins.operands
    d_regs = vector_items(g, d, n // 2)
    scale_d = g.src(rest[0], "pred") if not isinstance(rest[0], Imm) else g.fill(bool(rest[0].value), "b1")
    imms = [v.value if isinstance(v, Imm) else None for v in rest[1:]]
    if None in imms:
        raise g.malformed("scale and transpose operands must be immediates")
    in_regs = isinstance(a, Vec)
    av = (
        "(" + ", ".join(g.src(v, "b32") for v in vector_items(g, a, 4)) + ",)" if in_regs else g.src(a, "b64")
    )
    scale_a, scale_b = imms[0], imms[1]
    trans_a, trans_b = (0, imms[2]) if in_regs else (imms[2], imms[3])
    for r in d_regs:
        if r.index in g.raw and r.index in g.dirty:
            g.line(f"R[{r.index}] = {g.raw[r.index]}")
            g.dirty.discard(r.index)
    regs = tuple(r.index for r in d_regs)
    where = (
        f"{g.mask}, {regs}, {av}, {g.src(b, 'b64')}, {scale_d}, {scale_a}, {scale_b}, {trans_a}, {trans_b}"
    )
    g.effect(f"C.wgmma_mma({where}, {n}, {types[1]!r})")
    for r in d_regs:
        g.forget(r)
