"""A store's jobs as JSON Lines, for other tools."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from videoattn.jobs import StoreReader
from videoattn.jobs.outputs import write_atomic


def export(output: Path, target: Path) -> int:
    """Write one line for every job of the store in `output`, by id; returns how many.

    A line has the job's row, its `report` and `clip`, the clip's path. Raises `StoreError` if there is no
    store.
    """
    lines = []
    with StoreReader(output) as store:
        for job in store.all():
            path = store.path(job)
            row = asdict(job) | {"clip": None if path is None else str(path), "report": store.report(job.id)}
            lines.append(json.dumps(row, ensure_ascii=False))
    write_atomic(target, "".join(line + "\n" for line in lines))
    return len(lines)
