"""Barriers, fences, votes, shuffles and mbarrier instructions.

Instructions that may block stand alone in their block; they return -1 to be run again once woken.
"""

from __future__ import annotations

from .codegen import Emitter, pair
from .isa_common import op
from .ptx import Imm, Instr, Mem, Sym


def _blocking(g: Emitter, call: str) -> str:
    out = g.effect(call)
    g.line(f"if {out} is None: return -1")
    return out


@op("bar", "barrier")
def _bar(g: Emitter, ins: Instr) -> None:
    parts = ins.parts
    if "warp" in parts:
        _blocking(g, f"C.warp_sync({g.mask}, {g.src(ins.operands[0], 'u32')}, {ins.index})")
        return
    if "cluster" in parts:
        return _cluster(g, ins)
    if "red" in parts:
        return _bar_red(g, ins)
    action = "sync" if "sync" in parts else "arrive" if "arrive" in parts else None
    if action is None or set(parts) - {"bar", "barrier", "cta", "sync", "arrive", "aligned"}:
        raise g.bad()
    aligned = parts[0] == "bar" or "aligned" in parts
    ident = g.src(ins.operands[0], "u32")
    count = g.src(ins.operands[1], "u32") if len(ins.operands) > 1 else "None"
    _blocking(g, f"C.bar({action!r}, {g.mask}, {ident}, {count}, {aligned})")


def _bar_red(g: Emitter, ins: Instr) -> None:
    kind = next((k for k in ("and", "or", "popc") if k in ins.parts), None)
    if kind is None:
        raise g.bad()
    d, ident, *rest = ins.operands
    p = g.src(rest[-1], "pred")
    count = g.src(rest[0], "u32") if len(rest) > 1 else "None"
    out = _blocking(g, f"C.bar_red({kind!r}, {g.mask}, {g.src(ident, 'u32')}, {count}, {p})")
    g.write(d, out, "u32" if kind == "popc" else "pred")


def _cluster(g: Emitter, ins: Instr) -> None:
    if "arrive" in ins.parts:
        g.effect(f"C.cluster_arrive({g.mask}, {'relaxed' not in ins.parts})")
    elif "wait" in ins.parts:
        _blocking(g, f"C.cluster_wait({g.mask})")
    else:
        raise g.bad()


@op("elect")
def _elect(g: Emitter, ins: Instr) -> None:
    d, p = pair(ins.operands[0])
    member = g.src(ins.operands[1], "u32")
    out = _blocking(g, f"C.elect({g.mask}, {member}, {ins.index})")
    if p is None:
        p, d = d, None
    if d is not None:
        g.write(d, f"{out}[0]", "u32")
    g.write(p, f"{out}[1]", "pred")


@op("vote")
def _vote(g: Emitter, ins: Instr) -> None:
    kind = next((k for k in ("any", "all", "uni", "ballot") if k in ins.parts), None)
    if kind is None or "sync" not in ins.parts:
        raise g.bad()
    d, p, member = ins.operands
    out = _blocking(g, f"C.vote({kind!r}, {g.mask}, {g.src(p, 'pred')}, {g.src(member, 'u32')}, {ins.index})")
    g.write(d, out, "u32" if kind == "ballot" else "pred")


@op("shfl")
def _shfl(g: Emitter, ins: Instr) -> None:
    mode = next((k for k in ("up", "down", "bfly", "idx") if k in ins.parts), None)
    if mode is None or "sync" not in ins.parts or ins.parts[-1] != "b32":
        raise g.bad()
    d, p = pair(ins.operands[0])
    a, b, c, member = (g.src(v, "u32") for v in ins.operands[1:])
    out = _blocking(g, f"C.shfl({mode!r}, {g.mask}, {a}, {b}, {c}, {member}, {ins.index})")
    g.write(d, f"{out}[0]", "u32")
    if p is not None:
        g.write(p, f"{out}[1]", "pred")


@op("redux")
def _redux(g: Emitter, ins: Instr) -> None:
    kind = ins.parts[2]
    typ = ins.parts[-1]
    if kind not in ("add", "min", "max", "and", "or", "xor") or typ not in ("u32", "s32", "b32", "f32"):
        raise g.bad()
    if typ == "f32" and (kind not in ("min", "max") or set(ins.parts) & {"NaN", "abs"}):
        raise g.bad()
    d, a, member = ins.operands
    args = f"{kind!r}, {g.mask}, {g.src(a, typ)}, {g.src(member, 'u32')}, {ins.index}"
    g.write(d, _blocking(g, f"C.redux({args})"), typ)


@op("match")
def _match(g: Emitter, ins: Instr) -> None:
    if "any" not in ins.parts or ins.parts[-1] != "b32":
        raise g.bad()
    d, a, member = ins.operands
    g.write(
        d,
        _blocking(g, f"C.match_any({g.mask}, {g.src(a, 'u32')}, {g.src(member, 'u32')}, {ins.index})"),
        "u32",
    )


@op("activemask")
def _activemask(g: Emitter, ins: Instr) -> None:
    g.write(ins.operands[0], f"C.activemask({g.mask})", "u32")


@op("setmaxnreg")
def _setmaxnreg(g: Emitter, ins: Instr) -> None:
    if not isinstance(ins.operands[0], Imm):
        raise g.malformed("the register count is not an immediate")
    action = ins.parts[1]
    if action not in ("inc", "dec"):
        raise g.bad()
    _blocking(g, f"C.setmaxnreg({action!r}, {g.mask}, {ins.operands[0].value})")


@op("nanosleep", "pmevent")
def _nothing(g: Emitter, ins: Instr) -> None:
    pass


@op("griddepcontrol")
def _griddep(g: Emitter, ins: Instr) -> None:
    if ins.parts[1] not in ("wait", "launch_dependents"):
        raise g.bad()


@op("membar", "fence")
def _fence(g: Emitter, ins: Instr) -> None:
    parts = ins.parts[1:]
    if "proxy" in parts:
        rest = [p for p in parts if p != "proxy"]
        if rest[0] == "async":
            space = rest[1] if len(rest) > 1 else "all"
            if space not in ("all", "global", "shared::cta", "shared::cluster"):
                raise g.bad()
            g.effect(f"C.fence_proxy_async({g.mask}, {space!r})")
        elif rest[0].startswith("async::generic"):
            g.effect(f"C.fence_proxy_async({g.mask}, 'all')")
        elif rest[0].startswith("tensormap::generic"):
            pass
        else:
            raise g.bad()
    elif "mbarrier_init" in parts:
        g.effect(f"C.fence_mbarrier_init({g.mask})")
    else:
        g.effect(f"C.fence({g.mask})")


@op("mbarrier")
def _mbarrier(g: Emitter, ins: Instr) -> None:
    action = ins.parts[1]
    mods = set(ins.parts[2:])
    ops = list(ins.operands)
    known = {
        "shared",
        "shared::cta",
        "shared::cluster",
        "b64",
        "release",
        "relaxed",
        "acquire",
        "cta",
        "cluster",
        "expect_tx",
        "noComplete",
        "parity",
    }
    if mods - known:
        raise g.bad(f"modifier .{sorted(mods - known)[0]}")
    order = "relaxed" not in mods
    if action in ("init", "inval", "expect_tx", "complete_tx"):
        value = g.src(ops[1], "u32") if len(ops) > 1 else "None"
        g.effect(f"C.mbarrier_{action}({g.mask}, {g.address(ops[0])}, {value})")
    elif action in ("arrive", "arrive_drop"):
        if not isinstance(ops[0], Mem):
            state, ops = ops[0], ops[1:]
        else:
            state = None
        addr = g.address(ops[0])
        arg = g.src(ops[1], "u32") if len(ops) > 1 else "None"
        kind = "expect_tx" if "expect_tx" in mods else "noComplete" if "noComplete" in mods else ""
        drop = action == "arrive_drop"
        out = g.effect(f"C.mbarrier_arrive({g.mask}, {addr}, {arg}, {kind!r}, {drop}, {order})")
        if state is not None and not (isinstance(state, Sym) and state.name == "_"):
            g.write(state, out, "b64")
    elif action in ("test_wait", "try_wait"):
        d, m, value, *_hint = ops
        parity = "parity" in mods
        v = g.src(value, "u32" if parity else "b64")
        args = f"{g.mask}, {g.address(m)}, {v}, {parity}, {order}, {ins.index}"
        g.write(d, _blocking(g, f"C.mbarrier_{action}({args})"), "pred")
    else:
        raise g.bad()


@op("trap", "brkpt")
def _trap(g: Emitter, ins: Instr) -> None:
    g.effect(f"C.trap({g.mask})")
