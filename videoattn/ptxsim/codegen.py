"""Turns basic blocks into Python functions over whole warps.

A block's function has the form f(C, R, W) -> next block: C the lanes' context, R the warp's registers, W the
warp. A register holds one array with an element a lane and is replaced, never written in place, so moves
share arrays. Each block exists twice: for a full warp without masks, and for a lane subset where every write
merges.
"""

from __future__ import annotations

import numpy as np

from . import scalar
from .errors import PtxSimError, PtxSyntaxError, UnsupportedInstruction
from .ptx import TYPE_BYTES, Imm, Instr, Mem, Neg, Pair, Reg, Special, Sym, Vec

DTYPES = {
    "pred": "b1", "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2",
    "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "f32x2": "f4",
}  # fmt: skip
_NUMPY = {
    "b1": np.bool_, "u1": np.uint8, "i1": np.int8, "u2": np.uint16, "i2": np.int16, "f2": np.float16,
    "u4": np.uint32,
    "i4": np.int32, "f4": np.float32, "u8": np.uint64, "i8": np.int64, "f8": np.float64,
}  # fmt: skip
PARAM_BASE = 0x7E00_0000_0000
FULL = np.ones(32, np.bool_)
_REG_DTYPE = {0: "b1", 1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def merge(mask: np.ndarray, new, old):
    """The register after a write under `mask`; either side may be a placeholder object."""
    if type(new) is not np.ndarray:
        new = new.view(np.uint32)
    kind = np.bool_ if new.dtype == np.bool_ else _NUMPY[f"u{new.nbytes // 32}"]
    if type(old) is not np.ndarray:
        return old.merged(mask, new.view(kind))
    return np.where(mask, new.view(kind), old.view(kind))


def under(value, mask: np.ndarray):
    """A register as seen by the lanes of `mask`."""
    return value if type(value) is np.ndarray else value.under(mask)


RUNTIME = {
    "merge": merge, "under": under, "FULL": FULL, "where": np.where, "empty": np.empty, "np": np,
    "sc": scalar,
    **{f"_{k}": v for k, v in _NUMPY.items()},
}  # fmt: skip


class Emitter:
    """Writes the body of one block's function."""

    def __init__(self, program, masked: bool):
        self.program = program
        self.masked = masked
        self.lines: list[str] = []
        self.globals: dict[str, object] = dict(RUNTIME)
        self.consts: dict[object, str] = {}
        self.count = 0
        self.raw: dict[int, str] = {}  # register -> variable that holds its newest value
        self.views: dict[tuple[int, str], str] = {}
        self.dirty: set[int] = set()
        self.mask = "C.mask" if masked else "FULL"
        self.guarded = masked  # whether writes merge
        self.ins = Instr("", ("",), [], 0)  # the one being emitted

    # ---- pieces for the emitters

    def temp(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def line(self, text: str) -> None:
        self.lines.append(text)

    def let(self, expr: str) -> str:
        name = self.temp()
        self.line(f"{name} = {expr}")
        return name

    def const(self, value, key=None) -> str:
        key = key if key is not None else ("id", id(value))
        if key not in self.consts:
            name = f"k{len(self.consts)}"
            self.consts[key] = name
            self.globals[name] = value
        return self.consts[key]

    def fill(self, value, dt: str, lanes: int = 32) -> str:
        """A constant array."""
        array = np.full(lanes, value, _NUMPY[dt])
        array.flags.writeable = False
        return self.const(array, (dt, lanes, array[:1].tobytes()))

    def bad(self, detail: str = "") -> UnsupportedInstruction:
        return UnsupportedInstruction(self.ins.opcode, self.ins.line, detail)

    def malformed(self, detail: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"{self.ins.opcode}: {detail}", self.ins.line)

    def raw_reg(self, reg: Reg) -> str:
        name = self.raw.get(reg.index)
        if name is None:
            expr = f"R[{reg.index}]"
            name = self.let(f"under({expr}, {self.mask})" if self.guarded else expr)
            if self.guarded and self.mask != "C.mask":
                return name
            self.raw[reg.index] = name
        return name

    def src(self, op, typ: str, signed_offset: bool = False) -> str:
        """The operand as an array of PTX type `typ`."""
        dt = DTYPES[typ]
        if isinstance(op, Reg):
            if (op.type == "pred") != (typ == "pred"):
                raise self.malformed(f"{op.name} is .{op.type}, the instruction needs .{typ}")
            have, want = TYPE_BYTES[op.type], TYPE_BYTES[typ]
            if have == want:
                key = (op.index, dt)
                if key in self.views:
                    return self.views[key]
                name = self.let(f"{self.raw_reg(op)}.view(_{dt})")
                if self.raw.get(op.index):
                    self.views[key] = name
                return name
            if have > want:
                low = self.let(f"{self.raw_reg(op)}.view(_{_REG_DTYPE[have]}).astype(_{_REG_DTYPE[want]})")
                return low if dt.startswith("u") else self.let(f"{low}.view(_{dt})")
            raise self.malformed(f"{op.name} is too narrow for .{typ}")
        if isinstance(op, Imm):
            return self.immediate(op, typ)
        if isinstance(op, Neg):
            return self.let(f"~{self.src(op.reg, 'pred')}")
        if isinstance(op, Special):
            return self.special(op, typ)
        if isinstance(op, Sym):
            return self.symbol(op, typ)
        raise self.malformed("this operand form is not allowed here")

    def immediate(self, op: Imm, typ: str) -> str:
        size, dt = TYPE_BYTES[typ], DTYPES[typ]
        if typ == "pred":
            return self.fill(bool(op.value), "b1")
        bits = op.value
        if typ in ("f32", "f64") and op.kind != "i":
            value = np.array(bits, np.uint64).view(np.float64) if op.kind == "f64" else None
            if op.kind == "f64" and typ == "f32":
                bits = int(np.float32(value).view(np.uint32))
            elif op.kind == "f32" and typ == "f64":
                raise self.malformed("a 0f constant where .f64 is needed")
        elif op.kind == "f64" and size == 4:
            bits = int(np.float32(np.array(bits, np.uint64).view(np.float64)).view(np.uint32))
        elif op.kind == "i" and typ in ("f32", "f64"):
            raise self.malformed("integer constant where a float is needed")
        bits &= (1 << 8 * size) - 1
        arr = np.full(32, bits, _NUMPY[_REG_DTYPE[size]]).view(_NUMPY[dt])
        arr.flags.writeable = False
        return self.const(arr, (dt, len(arr), bits))

    def special(self, op: Special, typ: str) -> str:
        name = self.let(f"C.special({op.name!r})")
        size = TYPE_BYTES[typ]
        have = 8 if op.name in ("%clock64", "%globaltimer", "%gridid") else 4
        if have != size:
            name = self.let(f"{name}.astype(_u{size})")
        return name if DTYPES[typ].startswith("u") else self.let(f"{name}.view(_{DTYPES[typ]})")

    def symbol(self, op: Sym, typ: str) -> str:
        size = TYPE_BYTES[typ]
        if size not in (4, 8):
            raise self.malformed(f"the address of {op.name} does not fit .{typ}")
        return self.let(f"C.symbol({op.name!r}, {op.offset}, _u{size}, {self.ins.line})")

    def address(self, op, space_bits: int = 64) -> str:
        """The address of a Mem operand, u32 for 32-bit registers and shared symbols, else u64."""
        if not isinstance(op, Mem):
            raise self.malformed("expected an address in brackets")
        base = op.base
        if isinstance(base, Reg):
            typ = "u32" if TYPE_BYTES[base.type] == 4 else "u64"
            name = self.src(base, typ)
            if op.offset:
                name = self.let(
                    f"{name} + {self.fill(op.offset & (2 ** (32 if typ == 'u32' else 64) - 1), DTYPES[typ])}"
                )
            return name
        if isinstance(base, Imm):
            return self.fill(base.value + op.offset, "u8")
        return self.let(f"C.symbol({base.name!r}, {base.offset + op.offset}, _u8, {self.ins.line})")

    def write(self, op, expr: str, typ: str) -> None:
        """Assign an expression of PTX type `typ` to a destination register."""
        if isinstance(op, Sym) and op.name == "_":
            return
        if not isinstance(op, Reg):
            raise self.malformed("the destination is not a register")
        have, want = TYPE_BYTES[op.type], TYPE_BYTES[typ]
        if (op.type == "pred") != (typ == "pred"):
            raise self.malformed(f"destination {op.name} is .{op.type}, the instruction gives .{typ}")
        if have > want:
            dt = DTYPES[typ]
            signed = typ[0] == "s"
            wide = ("i" if signed else "u") + str(have)
            source = expr if dt[0] in "ui" else f"({expr}).view(_u{want})"
            expr = f"({source}).astype(_{wide})"
            typ = ("s" if signed else "u") + str(8 * have)
        elif have < want:
            raise self.malformed(f"destination {op.name} is too narrow")
        name = self.let(expr)
        for key in [k for k in self.views if k[0] == op.index]:
            del self.views[key]
        if self.guarded:
            self.line(f"R[{op.index}] = merge({self.mask}, {name}, R[{op.index}])")
            if self.mask != "C.mask":
                self.raw.pop(op.index, None)
                return
        else:
            self.dirty.add(op.index)
        self.raw[op.index] = name  # under a mask, these lanes need not look at the others' values
        self.views[op.index, DTYPES[typ]] = name

    def forget(self, op) -> None:
        """A helper will write (or read) this register through R: drop what is cached."""
        if isinstance(op, Reg):
            self.raw.pop(op.index, None)
            self.dirty.discard(op.index)
            for key in [k for k in self.views if k[0] == op.index]:
                del self.views[key]

    def flush(self) -> None:
        for index in sorted(self.dirty):
            self.line(f"R[{index}] = {self.raw[index]}")
        self.dirty.clear()

    def effect(self, call: str) -> str:
        """Call a machine operation; its position is recorded for findings."""
        self.line(f"C.at = {self.ins.index}")
        if self.program.traced:
            self.line(f"C.machine.trace.note(C, {self.ins.index})")
        return self.let(call)

    # ---- blocks

    def emit(self, ins: Instr) -> None:
        from .isa import EMITTERS

        self.ins = ins
        emitter = EMITTERS.get(ins.parts[0])
        if emitter is None:
            raise self.bad()
        try:
            if ins.pred is not None and ins.parts[0] not in ("bra", "ret", "exit"):
                self._guarded(emitter, ins)
            else:
                emitter(self, ins)
        except PtxSimError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise self.malformed("its operands or modifiers do not fit it") from error

    def _guarded(self, emitter, ins: Instr) -> None:
        assert ins.pred is not None
        p = self.src(Neg(ins.pred) if ins.pred_neg else ins.pred, "pred")
        self.flush()
        saved = self.mask, self.guarded
        self.mask = self.let(f"{p} & C.mask" if self.masked else p)
        self.guarded = True
        self.raw.clear()
        self.views.clear()
        emitter(self, ins)
        self.raw.clear()
        self.views.clear()
        self.mask, self.guarded = saved

    def build(self, name: str):
        """Compile the collected lines."""
        body = "\n    ".join(self.lines) or "pass"
        source = f"def {name}(C, R, W):\n    {body}\n"
        exec(compile(source, f"<{name}>", "exec"), self.globals)
        return self.globals[name]


def vector_items(g: Emitter, op, count: int) -> tuple:
    """The elements of a vector operand of `count` elements (a bare register for one)."""
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise g.malformed(f"needs {count} registers, has {len(items)}")
    return items


def pair(op) -> tuple:
    """(d, p) of a d|p operand; p is None when absent."""
    return (op.first, op.second) if isinstance(op, Pair) else (op, None)
