"""PTX text to instructions: lexical scopes for registers and labels, vectors, addresses, `.loc` lines."""

from __future__ import annotations

import re
import struct
from typing import Any

from .errors import PtxSyntaxError
from .ptx import TYPE_BYTES, Entry, Imm, Instr, Mem, Neg, Pair, ParsedModule, Reg, Special, Sym, Variable, Vec

_TOKEN = re.compile(
    r"""(?P<ws>[ \t\r]+)|(?P<nl>\n)
    |(?P<num>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
        |\d+\.\d*(?:[eE][-+]?\d+)?|\d+(?:[eE][-+]?\d+)?U?)
    |(?P<str>"(?:[^"\\]|\\.)*")
    |(?P<id>[A-Za-z_$%.][\w$%.]*(?:::[\w$.]+)*)
    |(?P<p>[\[\]{},+\-|!;():<>=@*/&~?])""",
    re.X,
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_SPECIAL = re.compile(
    r"^%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|^%(laneid|warpid|nwarpid|smid|nsmid|cluster_ctarank|cluster_nctarank|is_explicit_cluster|clock|clock64"
    r"|clock_hi|globaltimer|globaltimer_lo|globaltimer_hi|gridid|lanemask_(eq|le|lt|ge|gt)"
    r"|dynamic_smem_size|total_smem_size|aggr_smem_size|envreg\d+|reserved_smem_\w+|current_graph_exec)$"
)


def _tokenize(text: str) -> list[tuple[str, str, int]]:
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)
    tokens, pos, line = [], 0, 1
    match = _TOKEN.match
    while pos < len(text):
        m = match(text, pos)
        if m is None:
            raise PtxSyntaxError(f"unexpected character {text[pos]!r}", line)
        kind = m.lastgroup
        if kind == "nl":
            line += 1
        elif kind != "ws":
            tokens.append((kind, m.group(), line))
        pos = m.end()
    tokens.append(("end", "<end of file>", line))
    return tokens


def number(text: str) -> Imm:
    """An Imm from PTX number syntax (decimal, hex, binary, 0f/0d bit patterns, decimal floats)."""
    head = text[:2].lower()
    if head == "0f":
        return Imm(int(text[2:], 16), "f32")
    if head == "0d":
        return Imm(int(text[2:], 16), "f64")
    text = text.rstrip("Uu") if head != "0x" else text.rstrip("U")
    if head in ("0x", "0b"):
        return Imm(int(text, 0), "i")
    if "." in text or "e" in text or "E" in text:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    return Imm(int(text, 8) if len(text) > 1 and text[0] == "0" and text.isdigit() else int(text), "i")


class _Scope:
    def __init__(self, parent: _Scope | None, tag: str):
        self.parent, self.tag = parent, tag
        self.names: dict[str, object] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: dict[str, str] = {}


class _Parser:
    def __init__(self, text: str):
        self.toks = _tokenize(text)
        self.i = 0
        self.module = ParsedModule()

    def peek(self) -> str:
        return self.toks[self.i][1]

    @property
    def line(self) -> int:
        return self.toks[self.i][2]

    def next(self) -> str:
        tok = self.toks[self.i]
        if tok[0] == "end":
            raise PtxSyntaxError("the file ends inside a statement", tok[2])
        self.i += 1
        return tok[1]

    def expect(self, text: str) -> None:
        line, got = self.line, self.next()
        if got != text:
            raise PtxSyntaxError(f"expected {text!r}, found {got!r}", line)

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.i += 1
            return True
        return False

    def literal(self) -> Imm:
        line, kind = self.line, self.toks[self.i][0]
        text = self.next()
        if kind != "num":
            raise PtxSyntaxError(f"expected a number, found {text!r}", line)
        return number(text)

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        line, text = self.line, self.peek()
        value = self.literal()
        if value.kind != "i":
            raise PtxSyntaxError(f"expected an integer, found {text!r}", line)
        return sign * value.value

    def skip_to(self, *stops: str) -> None:
        while self.next() not in stops:
            pass

    def parse(self) -> ParsedModule:
        while self.toks[self.i][0] != "end":
            tok = self.peek()
            if tok == ".version":
                self.next()
                self.module.version = self.next()
            elif tok == ".target":
                self.next()
                self.module.target = self.next()
                while self.accept(","):
                    self.next()
            elif tok == ".address_size":
                self.next()
                if (size := self.integer()) != 64:
                    raise PtxSyntaxError(f".address_size {size}: only 64 is modelled", self.line)
            elif tok == ".file":
                self.next()
                index = self.integer()
                self.module.files[index] = self.next().strip('"')
                while self.accept(","):
                    self.next()
            elif tok == ".section":
                self.skip_to("{")
                depth = 1
                while depth:
                    depth += {"{": 1, "}": -1}.get(self.next(), 0)
            elif tok in (".visible", ".extern", ".weak", ".common"):
                self.next()
            elif tok == ".entry":
                self.entry()
            elif tok == ".func":
                self.skip_func()
            elif tok in (".global", ".shared", ".const"):
                var = self.variable()
                self.module.variables[var.name] = var
            elif tok in (";",):
                self.next()
            elif tok in (".pragma", ".alias", ".callprototype"):
                self.skip_to(";")
            else:
                raise PtxSyntaxError(f"unexpected {tok!r} at module level", self.line)
        if not self.module.target:
            raise PtxSyntaxError("no .target directive", 1)
        return self.module

    def skip_func(self) -> None:
        while self.peek() not in (";", "{"):
            self.next()
        if self.next() == "{":
            depth = 1
            while depth:
                depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def variable(self) -> Variable:
        space, align, typ, pointer = self.next()[1:], 0, "", False
        while self.peek().startswith("."):
            tok = self.next()
            if tok == ".align":
                value = self.integer()
                align = align if pointer else value
            elif tok == ".ptr":
                pointer = True  # what follows describes the pointee
            elif tok[1:] in TYPE_BYTES:
                typ = tok[1:]
            elif tok in (".global", ".shared", ".const", ".local", ".generic"):
                continue
            elif tok.startswith(".attribute"):
                self.skip_to(")")
            elif tok in (".v2", ".v4"):
                align = align or int(tok[2])
        if not typ:
            raise PtxSyntaxError(f"variable without a type, near {self.peek()!r}", self.line)
        name = self.next()
        elem = TYPE_BYTES[typ]
        size, is_array = elem, False
        while self.accept("["):
            is_array = True
            if self.accept("]"):
                size = 0
            else:
                size *= self.integer()
                self.expect("]")
        init = b""
        if self.accept("="):
            init = self.initializer(elem)
            if is_array and size == 0:
                size = len(init)
        if space != "param":
            self.expect(";")
        return Variable(name, space, align or max(elem, 1), size, typ, init)

    def initializer(self, elem: int) -> bytes:
        out = bytearray()
        depth = 0
        while True:
            tok = self.peek()
            if tok == "{":
                depth += 1
                self.next()
            elif tok == "}":
                depth -= 1
                self.next()
                if not depth:
                    return bytes(out)
            elif tok == ",":
                self.next()
            else:
                sign = -1 if self.accept("-") else 1
                line, tok = self.line, self.next()
                if not tok[0].isdigit():
                    raise PtxSyntaxError(f"initializer {tok!r} is not a number", line)
                out += (sign * number(tok).value & ((1 << 8 * elem) - 1)).to_bytes(elem, "little")
                if not depth:
                    return bytes(out)

    def entry(self) -> None:
        self.expect(".entry")
        entry = Entry(self.next(), self.line)
        if self.accept("("):
            while not self.accept(")"):
                if self.peek() != ".param":
                    raise PtxSyntaxError(f"expected .param, found {self.peek()!r}", self.line)
                entry.params.append(self.variable())
                self.accept(",")
        while self.peek() not in ("{", ";"):
            name = self.next()
            values = []
            while self.toks[self.i][0] == "num":
                values.append(self.integer())
                self.accept(",")
            entry.directives[name[1:]] = tuple(values)
        if self.accept(";"):
            return
        offset = 0
        for var in entry.params:
            offset = -(-offset // var.align) * var.align
            var.address, offset = offset, offset + var.size
        _Body(self, entry).parse()
        self.module.entries[entry.name] = entry


class _Body:
    """Parses one kernel body; labels get scope-qualified names so that they may repeat."""

    def __init__(self, parser: _Parser, entry: Entry):
        self.p, self.entry = parser, entry
        self.scope_count = 0
        self.loc: tuple[int, ...] | None = None
        self.fixups: list[tuple[Instr, _Scope]] = []
        self.params = {v.name for v in entry.params}

    def parse(self) -> None:
        self.p.expect("{")
        self.block(_Scope(None, ""))
        labels = self.entry.labels
        for ins, scope in self.fixups:
            name = ins.operands[-1].name
            s: _Scope | None = scope
            while s is not None and name not in s.labels:
                s = s.parent
            if s is None:
                raise PtxSyntaxError(f"branch to unknown label {name}", ins.line)
            ins.operands[-1] = Sym(s.labels[name])
        for i, ins in enumerate(self.entry.instrs):
            ins.index = i
        assert all(i <= len(self.entry.instrs) for i in labels.values())

    def block(self, scope: _Scope) -> None:
        p = self.p
        while True:
            tok = p.peek()
            if tok == "}":
                p.next()
                return
            if tok == "{":
                p.next()
                self.scope_count += 1
                self.block(_Scope(scope, f"@{self.scope_count}"))
            elif tok == ";":
                p.next()
            elif tok == ".reg":
                self.registers(scope)
            elif tok in (".shared", ".local", ".param", ".const", ".global"):
                var = p.variable()
                if var.space == "param":
                    p.accept(";")
                scope.names[var.name] = Sym(var.name)
                self.entry.variables[var.name] = var
            elif tok == ".loc":
                self.location()
            elif tok in (".pragma", ".branchtargets", ".callprototype", ".alias"):
                p.skip_to(";")
            elif p.toks[p.i][0] == "id" and p.toks[p.i + 1][1] == ":":
                name = p.next()
                p.expect(":")
                if name in scope.labels:
                    raise PtxSyntaxError(f"label {name} appears twice in one scope", p.line)
                unique = name + scope.tag
                scope.labels[name] = unique
                self.entry.labels[unique] = len(self.entry.instrs)
            else:
                self.instruction(scope)

    def location(self) -> None:
        """.loc file line column [, function_name label [+ n], inlined_at file line column]"""
        p = self.p
        p.next()
        self.loc = (p.integer(), p.integer())
        p.integer()
        while p.accept(","):
            if p.next() == "inlined_at":
                self.loc += (p.integer(), p.integer())
                p.integer()
            else:
                p.next()
                if p.accept("+"):
                    p.integer()

    def registers(self, scope: _Scope) -> None:
        p = self.p
        p.expect(".reg")
        line, typ = p.line, p.next()[1:]
        if typ not in TYPE_BYTES:
            raise PtxSyntaxError(f"register type .{typ} is not known", line)
        while True:
            name = p.next()
            if p.accept("<"):
                count = p.integer()
                p.expect(">")
                for k in range(count):
                    self.declare(scope, f"{name}{k}", typ)
            else:
                self.declare(scope, name, typ)
            if not p.accept(","):
                break
        p.expect(";")

    def declare(self, scope: _Scope, name: str, typ: str) -> None:
        reg = Reg(len(self.entry.regs), typ, name)
        self.entry.regs.append(reg)
        scope.names[name] = reg

    def lookup(self, scope: _Scope, name: str) -> object:
        s: _Scope | None = scope
        while s is not None:
            if name in s.names:
                return s.names[name]
            s = s.parent
        return None

    def instruction(self, scope: _Scope) -> None:
        p = self.p
        pred, neg = None, False
        line = p.line
        if p.accept("@"):
            neg = p.accept("!")
            pred = self.lookup(scope, p.next())
            if not isinstance(pred, Reg) or pred.type != "pred":
                raise PtxSyntaxError("the guard is not a declared predicate register", line)
        kind, opcode, line = p.toks[p.i]
        p.next()
        if kind != "id":
            raise PtxSyntaxError(f"expected an instruction, found {opcode!r}", line)
        parts = tuple(opcode.split("."))
        ins = Instr(opcode, parts, [], line, pred, neg, self.loc)
        if parts[0] == "call":
            p.skip_to(";")
        else:
            if not p.accept(";"):
                while True:
                    ins.operands.append(self.operand(scope))
                    if p.accept(";"):
                        break
                    if p.peek() != ",":
                        raise PtxSyntaxError(f"{opcode}: expected ',' or ';', found {p.peek()!r}", p.line)
                    p.next()
            if parts[0] == "bra":
                if len(ins.operands) != 1 or not isinstance(ins.operands[0], Sym):
                    raise PtxSyntaxError("bra needs one label", line)
                self.fixups.append((ins, scope))
        self.entry.instrs.append(ins)

    def operand(self, scope: _Scope) -> Any:
        p = self.p
        if p.accept("["):
            return self.address(scope)
        if p.accept("{"):
            items = []
            while not p.accept("}"):
                items.append(self.operand(scope))
                p.accept(",")
            return Vec(tuple(items))
        if p.accept("!"):
            reg = self.operand(scope)
            if not isinstance(reg, Reg):
                raise PtxSyntaxError("'!' must stand before a predicate register", p.line)
            return Neg(reg)
        first = self.atom(scope)
        if p.accept("|"):
            return Pair(first, self.atom(scope))
        if isinstance(first, Sym) and p.peek() in ("+", "-"):
            sign = -1 if p.next() == "-" else 1
            return Sym(first.name, sign * p.integer())
        return first

    def atom(self, scope: _Scope) -> Any:
        p = self.p
        if p.accept("-"):
            imm = p.literal()
            if imm.kind == "f64":
                return Imm(imm.value ^ (1 << 63), "f64")
            if imm.kind == "f32":
                return Imm(imm.value ^ (1 << 31), "f32")
            return Imm(-imm.value, "i")
        kind, text, line = p.toks[p.i]
        p.next()
        if kind == "num":
            return number(text)
        if kind != "id":
            raise PtxSyntaxError(f"unexpected {text!r} in an operand", line)
        found = self.lookup(scope, text)
        if found is not None:
            return found
        if text.startswith("%"):
            if _SPECIAL.match(text):
                return Special(text)
            raise PtxSyntaxError(f"register {text} is not declared", line)
        if text in ("WARP_SZ",):
            return Imm(32, "i")
        return Sym(text)

    def address(self, scope: _Scope) -> Mem:
        p = self.p
        base = self.atom(scope)
        offset, coords = 0, None
        if p.peek() in ("+", "-"):
            sign = -1 if p.next() == "-" else 1
            offset = sign * p.integer()
        elif p.accept(","):
            coords = self.operand(scope)
            coords = coords.items if isinstance(coords, Vec) else (coords,)
            while p.accept(","):  # im2col offsets
                coords += (self.operand(scope),)
        p.expect("]")
        return Mem(base, offset, coords)


def parse_ptx(text: str) -> ParsedModule:
    """Parse a PTX file; raises PtxSyntaxError with the line."""
    return _Parser(text).parse()
