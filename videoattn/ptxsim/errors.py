"""Errors a user of the simulator meets; each message is one line."""

from __future__ import annotations


class PtxSimError(Exception):
    """Base class of every error the simulator raises."""


class PtxSyntaxError(PtxSimError):
    """The PTX text is malformed; `line` is its 1-based line."""

    def __init__(self, message: str, line: int):
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


class UnsupportedInstruction(PtxSimError):
    """The instruction, or this form of it, is outside the model; carries `opcode` and `line`."""

    def __init__(self, opcode: str, line: int, detail: str = ""):
        super().__init__(f"PTX line {line}: {opcode} is outside the model{': ' + detail if detail else ''}")
        self.opcode = opcode
        self.line = line


class LaunchError(PtxSimError):
    """The launch itself is impossible: wrong arguments, alignment, sizes."""


class ExecutionError(PtxSimError):
    """The kernel did something that leaves no defined state to go on from, such as a wild address."""
