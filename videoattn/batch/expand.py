"""One row into several jobs: seeds, lists that are crossed, lists that are zipped."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_JOBS = 100_000
# A list is the value of these; a list of lists gives several.
LIST_COLUMNS = frozenset({"lora", "spatio_temporal_guidance_blocks"})
_RANGE = re.compile(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")


class ExpandError(ValueError):
    """A column can't be expanded; carries the column's name."""

    def __init__(self, column: str, message: str) -> None:
        self.column = column
        super().__init__(message)


def expand(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The settings of each job of a row, with the columns that vary in it.

    Lists are crossed, the last one fastest, except those that `zip` names: these advance together. Raises
    `ExpandError`.
    """
    if "seeds" in values and "seed" in values:
        raise ExpandError("seeds", "give seed or seeds, not both")
    fixed: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for name, value in values.items():
        if name == "seeds":
            lists["seed"] = parse_seeds(value)
        elif _is_sweep(name, value):
            if not value:
                raise ExpandError(name, "the list is empty")
            lists[name] = value
        elif name != "zip":
            fixed[name] = value
    axes = _axes(lists, values.get("zip"))
    total = math.prod(len(axis) for axis in axes)
    if total > MAX_JOBS:
        raise ExpandError(next(iter(lists)), f"the row makes {total} jobs, more than {MAX_JOBS}")
    for choice in itertools.product(*axes):
        yield {**fixed, **{name: value for part in choice for name, value in part.items()}}, tuple(lists)


def parse_seeds(value: Any) -> list[int]:
    """Seeds from `1..8`, `3`, `1..4,10` or a list of these; both ends belong to a range."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    seeds: list[int] = []
    for part in parts:
        match = None if isinstance(part, bool) else _RANGE.fullmatch(str(part))
        if match is None:
            raise ExpandError("seeds", f"'{part}' is no seed or range: write 1..8, 3, or 1..4,10")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_JOBS:
            raise ExpandError("seeds", f"'{part}': a range goes up, and over at most {MAX_JOBS} seeds")
        seeds.extend(range(first, last + 1))
    if not seeds:
        raise ExpandError("seeds", "there is no seed in it")
    if len(set(seeds)) < len(seeds):
        raise ExpandError("seeds", "a seed is there twice")
    return seeds


def _is_sweep(name: str, value: Any) -> bool:
    if not isinstance(value, list) or name in ("name", "zip"):
        return False
    return name not in LIST_COLUMNS or any(isinstance(each, list) for each in value)


def _axes(lists: dict[str, list[Any]], zipped: Any) -> list[list[dict[str, Any]]]:
    """One axis a crossed list or zipped group: the settings of each of its points."""
    groups = [[_column(name) for name in group] for group in _groups(zipped)]
    names = [name for group in groups for name in group]
    for name in names:
        if name not in lists:
            raise ExpandError("zip", f"{name} is not given as a list in this row")
        if names.count(name) > 1:
            raise ExpandError("zip", f"{name} is named twice")
    for group in groups:
        lengths = {name: len(lists[name]) for name in group}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ExpandError("zip", f"lists that advance together must be equally long: {text}")
    groups += [[name] for name in lists if name not in names]
    # Crossed in the order in which the row names them, whatever is zipped.
    order = list(lists)
    groups.sort(key=lambda group: min(order.index(name) for name in group))
    return [
        [dict(zip(group, point, strict=True)) for point in zip(*(lists[name] for name in group), strict=True)]
        for group in groups
    ]


def _column(name: str) -> str:
    return "seed" if name == "seeds" else name


def _groups(zipped: Any) -> list[list[str]]:
    if zipped in (None, "", []):
        return []
    if isinstance(zipped, str):
        zipped = [name.strip() for name in zipped.split(",")]
    if isinstance(zipped, list) and all(isinstance(name, str) for name in zipped):
        return [zipped]
    if isinstance(zipped, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in zipped
    ):
        return [group for group in zipped if group]
    raise ExpandError("zip", "zip is a list of columns, or a list of such lists")
