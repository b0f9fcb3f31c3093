"""A store's jobs as JSON Lines, for other tools."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from videoattn.jobs import StoreReader
from videoattn.render.files import StagedFiles, write_failed


def export(output: Path, target: Path) -> int:
    """Write one line for every job of the store in `output`, by id; returns how many.

    A line has the job's row, its `report` and `clip`, the clip's path. Raises `StoreError` if there is no
    store, and `UsageError` if `target` can't be written; its folder is made when it is missing.
    """
    count = 0
    with StagedFiles() as files, StoreReader(output) as store:
        staged = files.stage(target)
        try:
            with open(staged, "w", encoding="utf-8") as file:
                for job in store.all():
                    path = store.path(job)
                    clip = None if path is None else str(path)
                    row = asdict(job) | {"clip": clip, "report": store.report(job.id)}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
        except OSError as error:
            raise write_failed(error, target) from None
        files.commit()
    return count
