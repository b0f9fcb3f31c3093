"""The parsed form of PTX: operands, instructions, variables, kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_BYTES = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: `index` into the warp's register file."""

    index: int
    type: str
    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate; `kind` is i (integer), f32 or f64 (value holds the raw bits)."""

    value: int
    kind: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, parameter or label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset], or [base, {coords}] for tensor accesses."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple | None = None


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, …}"""

    items: tuple


@dataclass(frozen=True, slots=True)
class Neg:
    """!p"""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p"""

    first: object
    second: object


SINK = Sym("_")


@dataclass(slots=True)
class Instr:
    """One instruction with its predicate, PTX line and, where `.loc` gave one, source position."""

    opcode: str
    parts: tuple[str, ...]
    operands: list
    line: int
    pred: Reg | None = None
    pred_neg: bool = False
    loc: tuple[int, ...] | None = None
    index: int = -1

    @property
    def base(self) -> str:
        return self.parts[0]


@dataclass(slots=True)
class Variable:
    """A .shared, .local, .global, .const or .param variable; `size` 0 means extern, sized at launch."""

    name: str
    space: str
    align: int
    size: int
    type: str = "b8"
    init: bytes = b""
    address: int = 0


@dataclass(slots=True)
class Entry:
    """A parsed kernel."""

    name: str
    line: int
    params: list[Variable] = field(default_factory=list)
    regs: list[Reg] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class ParsedModule:
    """Everything in one PTX file."""

    target: str = ""
    version: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
