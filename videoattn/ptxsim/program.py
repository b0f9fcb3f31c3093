"""A kernel decoded for execution: basic blocks, where divergent lanes meet, lazily compiled functions."""

from __future__ import annotations

from typing import Any

from .codegen import Emitter
from .errors import UnsupportedInstruction
from .ptx import Entry, Instr, Neg, ParsedModule, Reg

_BLOCKING = {"bar", "barrier", "elect", "vote", "shfl", "redux", "match", "setmaxnreg"}


def _stands_alone(ins: Instr) -> bool:
    p = ins.parts
    if p[0] in _BLOCKING:
        return True
    if p[0] == "mbarrier":
        return p[1:2] in (("test_wait",), ("try_wait",))
    return p[:2] == ("tcgen05", "alloc") or p[:4] == ("cp", "async", "bulk", "wait_group")


class Block:
    """Instructions [first, last), the successors, and the block where both sides of a branch meet again."""

    __slots__ = ("first", "join", "last", "next", "target")

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.target: int | None = None
        self.next: int | None = None
        self.join = -1


class Program:
    """Executable form of one entry. `full[i]` and `masked[i]` are the functions of block i."""

    def __init__(self, module: ParsedModule, entry: Entry, traced: bool = False):
        self.module, self.entry, self.traced = module, entry, traced
        self.name, self.target = entry.name, module.target
        self.instrs = entry.instrs
        self.blocks: list[Block] = []
        self._split()
        self._joins()
        self._locals()
        self.full: list[Any] = [self._stub(i, False) for i in range(len(self.blocks))]
        self.masked: list[Any] = [self._stub(i, True) for i in range(len(self.blocks))]

    def _split(self) -> None:
        instrs = self.instrs
        leaders = {0, *self.entry.labels.values()}
        for i, ins in enumerate(instrs):
            if ins.parts[0] in ("bra", "ret", "exit"):
                leaders.add(i + 1)
            elif _stands_alone(ins):
                leaders |= {i, i + 1}
        starts = sorted(x for x in leaders if x < len(instrs))
        index = {s: k for k, s in enumerate(starts)}
        end = len(starts)  # running off the end exits
        for k, s in enumerate(starts):
            block = Block(s, starts[k + 1] if k + 1 < len(starts) else len(instrs))
            last = instrs[block.last - 1]
            fall = k + 1
            if last.parts[0] == "bra":
                block.target = index.get(self.entry.labels[last.operands[-1].name], end)
                block.next = fall if last.pred is not None else None
            elif last.parts[0] in ("ret", "exit"):
                block.target = end
                block.next = fall if last.pred is not None else None
            else:
                block.next = fall
            self.blocks.append(block)
        self.end = end

    def _joins(self) -> None:
        """Immediate post-dominators, by iteration over the reversed graph (Cooper, Harvey, Kennedy)."""
        n = self.end
        succ = [[s for s in (b.target, b.next) if s is not None] for b in self.blocks] + [[]]
        preds: list[list[int]] = [[] for _ in range(n + 1)]
        for i, ss in enumerate(succ):
            for s in ss:
                preds[s].append(i)
        order, seen, stack = [], {n}, [(n, iter(preds[n]))]
        while stack:
            node, it = stack[-1]
            for p in it:
                if p not in seen:
                    seen.add(p)
                    stack.append((p, iter(preds[p])))
                    break
            else:
                order.append(node)
                stack.pop()
        rank = {node: k for k, node in enumerate(order)}  # post-order of the reversed graph
        idom = {n: n}
        changed = True
        while changed:
            changed = False
            for node in reversed(order):
                if node == n:
                    continue
                new = None
                for s in succ[node]:
                    if s in idom:
                        new = s if new is None else self._meet(idom, rank, new, s)
                if new is not None and idom.get(node) != new:
                    idom[node] = new
                    changed = True
        for i, b in enumerate(self.blocks):
            join = idom.get(i, n)
            b.join = -1 if join == n else join

    @staticmethod
    def _meet(idom: dict[int, int], rank: dict[int, int], a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = idom[a]
            while rank[b] < rank[a]:
                b = idom[b]
        return a

    def _locals(self) -> None:
        """Registers that live in one block only need not be written back; `used` are all that occur."""
        home: dict[int, int] = {}
        shared: set[int] = set()

        def visit(o, k: int) -> None:
            if isinstance(o, Reg):
                if home.setdefault(o.index, k) != k:
                    shared.add(o.index)
            elif isinstance(o, Neg):
                visit(o.reg, k)
            elif hasattr(o, "items") and isinstance(o.items, tuple):
                for x in o.items:
                    visit(x, k)
            elif hasattr(o, "first"):
                visit(o.first, k)
                visit(o.second, k)
            elif hasattr(o, "base"):
                visit(o.base, k)
                for x in o.coords or ():
                    visit(x, k)

        upward: set[int] = set()
        for k, b in enumerate(self.blocks):
            written: set[int] = set()
            for ins in self.instrs[b.first : b.last]:
                for o in ins.operands:
                    visit(o, k)
                if ins.pred is not None:
                    visit(ins.pred, k)
                d = ins.operands[0] if ins.operands else None
                for o in ins.operands[1:] if isinstance(d, Reg) else ins.operands:
                    for r in _regs(o):
                        if r.index not in written:
                            upward.add(r.index)
                if isinstance(d, Reg):
                    if ins.pred is None:
                        written.add(d.index)
                    else:
                        upward.add(d.index)
        self.block_local = {r for r in home if r not in shared and r not in upward}
        self.used = sorted(home)

    def _stub(self, i: int, masked: bool):
        def compile_and_run(C, R, W):
            fn: Any = self._compile(i, masked)
            (self.masked if masked else self.full)[i] = fn
            return fn(C, R, W)

        return compile_and_run

    def _compile(self, i: int, masked: bool):
        block = self.blocks[i]
        g = Emitter(self, masked)
        body = self.instrs[block.first : block.last]
        last = body[-1] if body else None
        ends = last is not None and last.parts[0] in ("bra", "ret", "exit")
        for ins in body[:-1] if ends else body:
            try:
                g.emit(ins)
            except UnsupportedInstruction as error:  # raised when, and only when, it would execute
                g.line(f"raise {g.const(error)}")
                break
        g.dirty -= self.block_local
        g.flush()
        if ends and last is not None:
            g.ins = last
            self._branch(g, block, last)
        else:
            g.line(f"return {block.next}")
        return g.build(f"block{i}{'_masked' if masked else ''}")

    def _branch(self, g: Emitter, block: Block, last: Instr) -> None:
        if last.pred is None:
            g.line(f"return {block.target}")
            return
        p = g.src(Neg(last.pred) if last.pred_neg else last.pred, "pred")
        if g.masked:
            p = g.let(f"{p} & C.mask")
            g.line(f"if not {p}.any(): return {block.next}")
            g.line(f"if ({p} == C.mask).all(): return {block.target}")
        else:
            g.line(f"if {p}.all(): return {block.target}")
            g.line(f"if not {p}.any(): return {block.next}")
        g.line(f"C.at = {last.index}")
        g.line(f"return C.diverge({p}, {block.target}, {block.next}, {block.join})")

    def unsupported(self) -> list[UnsupportedInstruction]:
        """Every instruction outside the model, whether or not it would execute."""
        out = []
        for ins in self.instrs:
            if ins.parts[0] in ("bra", "ret", "exit"):
                continue
            g = Emitter(self, True)
            try:
                g.emit(ins)
            except UnsupportedInstruction as error:
                out.append(error)
        return out


def _regs(o):
    if isinstance(o, Reg):
        yield o
    elif isinstance(o, Neg):
        yield o.reg
    elif hasattr(o, "items") and isinstance(o.items, tuple):
        for x in o.items:
            yield from _regs(x)
    elif hasattr(o, "first"):
        yield from _regs(o.first)
        yield from _regs(o.second)
    elif hasattr(o, "base"):
        yield from _regs(o.base)
        for x in o.coords or ():
            yield from _regs(x)
