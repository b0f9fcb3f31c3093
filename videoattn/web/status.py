"""The Status tab: device, workers, model, kernels and why not, disk."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import gradio as gr

from videoattn.jobs import JobState
from videoattn.render.metadata import versions
from videoattn.web.actions import Actions
from videoattn.web.choices import kernel_verdicts
from videoattn.web.panel import panel, render


def build(actions: Actions) -> gr.HTML:
    """The tab's panel."""
    return panel("status", lambda query: show(actions, query), seconds=3.0)


def show(actions: Actions, query: Mapping[str, Any]) -> dict[str, str]:
    """What this machine and its workers are doing."""
    counts = actions.store.counts()
    usage = shutil.disk_usage(actions.store.folder)
    return {
        "workers": render(
            "status_workers.html",
            workers=[
                (each.name, describe_device(each.name), each.status, loaded(actions, each.name))
                for each in actions.workers
            ],
        ),
        "kernels": render(
            "status_kernels.html", verdicts=kernel_verdicts(actions.device), device=actions.device
        ),
        "machine": render(
            "status_machine.html",
            free=usage.free,
            total=usage.total,
            low=usage.free < 2e9,
            clips=counts[JobState.DONE],
            versions={"python": platform.python_version(), **versions()},
        ),
    }


@lru_cache(maxsize=16)
def describe_device(name: str) -> str:
    """A device as its maker names it, with its memory; imports torch."""
    import torch

    if name == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(torch.device(name))
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
    )


def loaded(actions: Actions, worker: str) -> str | None:
    """The model that a worker's process keeps in memory: that of its last job since it was started."""
    status = next((each.status for each in actions.workers if each.name == worker), None)
    if status is None or status.pid is None:
        return None
    if status.job is not None:
        return str(actions.store.get(status.job).payload["job"]["model"])
    return next(
        (
            str(job.payload["job"]["model"])
            for job in actions.store.ended(JobState.DONE, limit=20)
            if job.worker == worker and (job.started or 0) >= _started(status.pid)
        ),
        None,
    )


def _started(pid: int) -> float:
    """When a process was started, in seconds since the epoch."""
    from pathlib import Path

    try:
        return Path(f"/proc/{pid}").stat().st_ctime
    except OSError:
        return float("inf")
