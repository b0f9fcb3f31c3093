"""What a finished render prints: kernels, timing and seconds to one console, the files to the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from videoattn.render.run import RenderResult


def print_result(result: RenderResult, files: tuple[Path | None, ...], *, out: Console, err: Console) -> None:
    """Print a result and the names of the files that were asked for beside the clip."""
    if result.receipt is not None:
        err.print(str(result.receipt), markup=False)
    if result.report is not None:
        err.print(result.report)
    if result.total_seconds is not None:
        err.print(f"{result.total_seconds:.1f} s without loading, {result.load_seconds:.1f} s loading")
    for path in (*files, result.path):
        if path is not None:
            out.print(str(path), markup=False)
