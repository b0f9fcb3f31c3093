"""Printing a table of very many rows, for which rich's own takes a millisecond each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console

# What a column that is cut off keeps.
_LEAST = 8


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    cut: Sequence[str] = (),
) -> None:
    """Print rows of one-line cells under their columns, numbers to the right, those in `left` to the left.

    On a terminal that is too narrow gaps shrink and the columns in `cut` lose their ends, the first one most.
    A pipe has no width to keep to: nothing is cut off for those who read the table by a program.
    """
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    gap = 2
    if console.is_terminal and sum(widths) + gap * (len(widths) - 1) > console.width:
        gap = 1
        excess = sum(widths) + gap * (len(widths) - 1) - console.width
        for index in map(columns.index, cut):
            less = max(0, min(excess, widths[index] - _LEAST))
            widths[index] -= less
            excess -= less

    def line(cells: Sequence[str]) -> str:
        fitted = zip(cells, widths, columns, strict=True)
        return (" " * gap).join(_fit(cell, width, name in left) for cell, width, name in fitted).rstrip()

    console.print(line(columns), style="bold", markup=False)
    for row in rows:
        console.file.write(line(row) + "\n")
    console.file.flush()


def _fit(cell: str, width: int, left: bool) -> str:
    room = width - cell_len(cell)
    if room < 0:
        return set_cell_size(cell, width - 1) + "…"
    return cell + " " * room if left else " " * room + cell
