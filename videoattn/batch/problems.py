"""Everything that is wrong with a job file, collected before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from videoattn.render.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job was written: the file, the row (the first job is 1) and the line in the file."""

    file: str
    row: int | None = None
    line: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {"file": self.file, "row": self.row, "line": self.line}

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return where if self.row is None else f"{where}: row {self.row}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, with its column where there is one."""

    place: Place
    column: str | None
    message: str

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return f"{self.place}{column}: {self.message}"


class JobFileError(UsageError):
    """A job file can't be rendered; `problems` holds all reasons, the message has one line for each."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


class Problems:
    """Collects problems, each once."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    def add(self, place: Place, column: str | None, message: str) -> None:
        """Note a problem."""
        self._found[Problem(place, column, message)] = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        """Raise `JobFileError` with everything noted so far, in the order of the file."""
        if self._found:
            raise JobFileError(
                sorted(self._found, key=lambda each: (each.place.line or 0, each.place.row or 0))
            )
