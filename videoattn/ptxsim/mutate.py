"""Mutants of a clean kernel: one instruction dropped or altered, to see whether the simulator notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from .launch import Kernel
from .ptx import Entry, Imm, Instr, Mem, Reg

LANE = 1 << 16


@dataclass(frozen=True)
class Mutant:
    """A changed kernel and what was changed, in words."""

    operator: str
    line: int
    text: str
    kernel: Kernel


class _Editor:
    """A copy of an entry to change one place of."""

    def __init__(self, entry: Entry):
        self.entry = replace(
            entry, instrs=[replace(i, operands=list(i.operands)) for i in entry.instrs],
            labels=dict(entry.labels), regs=list(entry.regs),
        )  # fmt: skip

    def drop(self, i: int) -> None:
        old = self.entry.instrs[i]
        self.entry.instrs[i] = replace(
            old, opcode="nanosleep.u32", parts=("nanosleep", "u32"), operands=[], pred=None
        )

    def insert(self, i: int, opcode: str, typ: str, source, value: int) -> Reg:
        """Put `opcode new, source, value` before instruction i."""
        reg = Reg(len(self.entry.regs), typ, "mutant")
        self.entry.regs.append(reg)
        old = self.entry.instrs[i]
        ins = Instr(opcode, tuple(opcode.split(".")), [reg, source, Imm(value, "i")], old.line, loc=old.loc)
        self.entry.instrs.insert(i, ins)
        self.entry.labels.update({k: v + 1 for k, v in self.entry.labels.items() if v > i})
        return reg


def _is(ins: Instr, *parts: str) -> bool:
    return ins.parts[: len(parts)] == parts


def _descriptor_imm(ins: Instr) -> int | None:
    """Position of an operand that holds the constant fields of a shared-memory descriptor."""
    for k, o in enumerate(ins.operands):
        if isinstance(o, Imm) and o.kind == "i" and o.value >> 46 & 7 == 1 and o.value >> 32 & 0x3FFF:
            return k
    return None


def _sites(entry: Entry, operator: str) -> list[int]:
    tests: dict[str, Callable[[Instr], bool]] = {
        "drop mbarrier wait": lambda i: _is(i, "mbarrier", "try_wait"),
        "drop tcgen05 wait": lambda i: i.opcode.startswith("tcgen05.wait"),
        "drop fence": lambda i: i.opcode.startswith(("fence.", "tcgen05.fence")),
        "drop commit": lambda i: _is(i, "tcgen05", "commit"),
        "drop arrive": lambda i: (
            _is(i, "mbarrier", "arrive") or i.opcode.startswith(("bar.sync", "bar.arrive"))
        ),
        "arrival count": lambda i: _is(i, "mbarrier", "init"),
        "parity": lambda i: _is(i, "mbarrier", "try_wait"),
        "byte count": lambda i: "expect_tx" in i.parts,
        "LBO or SBO": lambda i: _descriptor_imm(i) is not None,
        "swizzle code": lambda i: _descriptor_imm(i) is not None,
        "lane base": lambda i: i.opcode.startswith(("tcgen05.ld", "tcgen05.st")),
        "column offset": lambda i: i.opcode.startswith(("tcgen05.ld", "tcgen05.st", "tcgen05.mma")),
        "predicate": lambda i: (
            (i.pred is not None and not i.opcode.startswith("bra.uni")) or _is(i, "tcgen05", "mma")
        ),
    }
    return [k for k, ins in enumerate(entry.instrs) if tests[operator](ins)]


OPERATORS = (
    "drop mbarrier wait",
    "drop tcgen05 wait",
    "drop fence",
    "drop commit",
    "drop arrive",
    "arrival count",
    "parity",
    "byte count",
    "LBO or SBO",
    "swizzle code",
    "lane base",
    "column offset",
    "predicate",
)


def _apply(operator: str, ed: _Editor, i: int, rng: random.Random) -> str:
    ins = ed.entry.instrs[i]
    ops = ins.operands
    if operator == "drop mbarrier wait":
        zero = Imm(0, "i")
        ed.entry.instrs[i] = replace(
            ins, opcode="setp.eq.u32", parts=("setp", "eq", "u32"), operands=[ops[0], zero, zero]
        )
        return "the wait always passes"
    if operator.startswith("drop"):
        ed.drop(i)
        return f"{ins.opcode} dropped"
    if operator == "arrival count":
        if not isinstance(ops[1], Imm):
            delta = rng.choice((-1, 1))
            ops[1] = ed.insert(i, "add.s32", "b32", ops[1], delta)
            return f"{delta:+d} arrival"
        n = max(ops[1].value + rng.choice((-1, 1)), 1)
        n = n if n != ops[1].value else n + 1
        text = f"{ops[1].value} arrivals become {n}"
        ops[1] = Imm(n, "i")
        return text
    if operator == "parity":
        if isinstance(ops[2], Imm):
            ops[2] = Imm(ops[2].value ^ 1, "i")
        else:
            ops[2] = ed.insert(i, "xor.b32", "b32", ops[2], 1)
        return "parity inverted"
    if operator == "byte count":
        delta = rng.choice((-2048, -16, 16, 2048))
        if isinstance(ops[-1], Imm):
            ops[-1] = Imm(ops[-1].value + delta, "i")
        else:
            ops[-1] = ed.insert(i, "add.s32", "b32", ops[-1], delta)
        return f"expects {delta:+d} bytes"
    if operator in ("LBO or SBO", "swizzle code"):
        return _mutate_descriptor(operator, ops, _descriptor_imm(ins) or 0, rng)
    if operator in ("lane base", "column offset"):
        places = [k for k, o in enumerate(ops) if isinstance(o, Mem)]
        k = rng.choice(places)
        delta = 32 * LANE if operator == "lane base" else rng.choice((-8, 8, 16, 32))
        ops[k] = replace(ops[k], offset=ops[k].offset + delta)
        return f"{ins.opcode}: address {delta:+#x}"
    if ins.pred is not None:
        ins.pred_neg = not ins.pred_neg
        return f"guard of {ins.opcode} inverted"
    old = ops[4]
    from .ptx import Neg

    ops[4] = Imm(1 - old.value, "i") if isinstance(old, Imm) else Neg(old)
    return "enable-input-d inverted"


def _mutate_descriptor(operator: str, ops: list, k: int, rng: random.Random) -> str:
    value = ops[k].value & (2**64 - 1)
    if operator == "swizzle code":
        codes = [c for c in (0, 2, 4, 6) if c != value >> 61]
        code = rng.choice(codes)
        ops[k] = Imm(value & ~(7 << 61) | code << 61, "i")
        return f"swizzle code {value >> 61} becomes {code}"
    # an LBO of 1 is the conventional value where the hardware ignores the field
    fields = [(s, n) for s, n in ((16, "LBO"), (32, "SBO")) if value >> s & 0x3FFF > 1]
    shift, name = rng.choice(fields)
    field = value >> shift & 0x3FFF
    new = rng.choice([x for x in (field * 2, field // 2, field + 1, 8) if x != field and x < 0x4000])
    ops[k] = Imm(value & ~(0x3FFF << shift) | new << shift, "i")
    return f"{name} {field * 16} becomes {new * 16}"


def mutants(kernel: Kernel, operator: str, count: int, seed: int) -> list[Mutant]:
    """Up to `count` different mutants by one operator; `seed` draws the places, all once before any twice.

    Fewer where the kernel has fewer places for it and a second visit of a place can only repeat the first.
    """
    rng = random.Random(f"{seed}/{operator}/{kernel.name}")
    sites = _sites(kernel.entry, operator)
    rng.shuffle(sites)
    once = operator.startswith(("drop", "parity"))
    out: dict[tuple[int, str], Mutant] = {}
    for n in range(len(sites) if once else 8 * count if sites else 0):
        if len(out) == count:
            break
        i = sites[n % len(sites)]
        ed = _Editor(kernel.entry)
        line = ed.entry.instrs[i].line
        text = _apply(operator, ed, i, rng)
        for k, ins in enumerate(ed.entry.instrs):
            ins.index = k
        out.setdefault((line, text), Mutant(operator, line, text, Kernel(kernel.module, ed.entry)))
    return list(out.values())
