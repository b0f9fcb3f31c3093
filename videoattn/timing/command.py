"""`videoattn timing FILE`: the tables of a timing log that a render wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from videoattn.render.errors import RenderError, UsageError
from videoattn.timing.log import TimingLog, load


def timing(file: Path, /, *, whole: Path | None = None, json: bool = False) -> None:
    """Print the tables of a timing log.

    Parameters
    ----------
    file
        A log written by `videoattn render --timing`.
    whole
        The log of the same render without --compare: seconds and shares are then taken from it.
    json
        Print the numbers as JSON.
    """
    from videoattn.timing.report import summarise

    log, base = _load(file), None if whole is None else _load(whole)
    try:
        report = summarise(log, whole=base)
    except ValueError as error:
        raise UsageError(f"{whole} does not go with {file}: {error}") from None
    if json:
        sys.stdout.write(report.to_json() + "\n")
        return
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(report)


def _load(path: Path) -> TimingLog:
    try:
        return load(path)
    except FileNotFoundError:
        raise UsageError(f"no such timing log: {path}") from None
    except OSError as error:
        raise RenderError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RenderError(str(error)) from None
