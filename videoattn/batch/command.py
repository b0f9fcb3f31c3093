"""The verb `batch`, for the command line to mount."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from videoattn.batch.problems import JobFileError
from videoattn.jobs.errors import BadFolder, StoreError
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob

if TYPE_CHECKING:
    from videoattn.batch.run import Engine

DONE, FAILED, BAD_FILE = 0, 1, 2
DEFAULTS = RenderJob()

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def batch(
    jobs: Path | None = None,
    /,
    *,
    settings: Annotated[RenderJob, Parameter(name="*")] = DEFAULTS,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("batch"),
    dry_run: bool = False,
    schema: bool = False,
    export: Path | None = None,
    resume: bool = True,
    retries: int = 1,
    timing: bool = False,
    compare: str = "",
    device: str | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    actors: int | None = None,
    local_files_only: bool = False,
) -> int:
    """Render every job of a CSV, JSON Lines or YAML file into a folder.

    What is done already is not done again, so the same command goes on after any interruption. Settings
    given as options are defaults for rows that leave them out. Exit status: 0 all done, 1 some failed, 2
    bad job file, 130 interrupted.

    Parameters
    ----------
    jobs
        The job file: .csv, .jsonl or .yaml. Columns are the settings of a render, and name, seeds, zip,
        allow_offload.
    output
        The folder for clips, posters, report.html and report.csv.
    dry_run
        Check everything and print the expanded jobs with predicted time, memory and disk; render nothing.
    schema
        Print the JSON schema of job files.
    export
        Write the jobs in the output folder's store to this file, one JSON object a line; render nothing.
    resume
        --no-resume renders again what is done.
    retries
        Further attempts for a job that failed.
    timing
        Log every attention call of every clip.
    compare
        Kernels to run beside the chosen one on the same inputs, comma-separated: flash4,sdpa.
    device
        cpu, cuda:N or several, comma-separated; by default all GPUs, or the CPU. With --engine ray: cuda or
        cpu.
    engine
        local renders on this machine, ray in the actors of a Ray cluster, one a GPU or CPU core.
    address
        HOST:PORT of the Ray cluster, or auto; by default RAY_ADDRESS, else a Ray on this machine for this
        run.
    actors
        The number of Ray actors, if not all GPUs or cores are to be used.
    local_files_only
        Never ask the hub.
    """
    if schema:
        from videoattn.batch.schema import schema as job_file_schema

        sys.stdout.write(json.dumps(job_file_schema(), indent=2) + "\n")
        return DONE
    try:
        if export is not None:
            from videoattn.batch.export import export as export_jobs

            _say(f"{export_jobs(output, export)} jobs in {export}")
            return DONE
        if jobs is None:
            raise UsageError("no job file was given: videoattn batch jobs.csv -o DIR")
        if not 0 <= retries <= 10:
            raise UsageError(f"--retries {retries}: give 0 to 10")
        return _render(
            jobs,
            settings.model_dump(include=settings.model_fields_set),
            output,
            _place(engine, device, address, actors),
            dry_run=dry_run,
            resume=resume,
            retries=retries,
            timing=timing,
            compare=_arms(compare),
            local_files_only=local_files_only,
        )
    except JobFileError as error:
        for problem in error.problems:
            _complain(str(problem))
        count = len(error.problems)
        _complain(f"{count} problem{'s' if count > 1 else ''} in {jobs}: nothing was rendered")
        return BAD_FILE
    except (UsageError, BadFolder) as error:
        _complain(str(error))
        return BAD_FILE
    except (RenderError, StoreError) as error:
        _complain(str(error))
        return FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        what = str(error) if error.strerror is None else error.strerror.lower()
        _complain(what if error.filename is None else f"{error.filename}: {what}")
        return FAILED


def _render(
    path: Path,
    defaults: dict[str, Any],
    output: Path,
    place: _Place,
    *,
    dry_run: bool,
    resume: bool,
    retries: int,
    timing: bool,
    compare: tuple[str, ...],
    local_files_only: bool,
) -> int:
    from videoattn.batch.plan import plan

    # Before a cluster is asked for anything, and in a dry run too.
    existing = next(folder for folder in (output, *output.absolute().parents) if os.path.exists(folder))
    if not existing.is_dir():
        raise UsageError(f"cannot write {output}: not a directory")
    engine = None if dry_run else place.engine()
    # A dry run may happen on another machine than the render, unless its device is named, and Ray's actors
    # are on others anyway.
    here = place.devices if place.named or not dry_run else ()
    with err.status(Text(f"checking {path}")) if err.is_terminal else nullcontext():
        planned = plan(
            path,
            defaults=defaults,
            local_files_only=local_files_only,
            device=here[0] if here else None,
            compare=compare,
            warn=_warn,
        )
    if engine is None:
        _print_plan(planned, output, place)
        return DONE

    from videoattn.batch import report
    from videoattn.batch.run import Options, run
    from videoattn.batch.view import view_for
    from videoattn.jobs import StoreReader

    options = Options(retries, timing, compare, resume, local_files_only)
    outcome = run(planned, output, options, view_for(err), engine=engine, note=_say)
    with StoreReader(output) as store:
        # The run's order avoids reloads; a reader looks for the file's.
        rows = sorted(zip(planned, outcome.ids, strict=True), key=lambda each: each[0].place.row or 0)
        page, sheet = report.write(store, [job for _, job in rows])
        for job in outcome.failed:
            failed = store.get(job)
            where = failed.origin or {}
            _complain(f"{failed.name} ({where.get('file')} row {where.get('row')}): {failed.error}")
    parts = [f"{len(outcome.done)} rendered"]
    for ids, text in ((outcome.skipped, "done before"), (outcome.failed, "failed"), (outcome.left, "left")):
        if ids:
            parts.append(f"{len(ids)} {text}")
    if outcome.interrupted:
        parts.append("interrupted: the same command goes on")
    elif outcome.stopped:
        parts.append(f"stopped: {outcome.stopped}; the same command goes on")
    _say(", ".join(parts))
    for path in (page, sheet):
        out.print(str(path), markup=False)
    return outcome.exit_code


def _print_plan(planned: list[Any], output: Path, place: _Place) -> None:
    """The dry run's table, and totals."""
    from videoattn.batch.estimate import estimate
    from videoattn.batch.rows import print_rows
    from videoattn.batch.view import duration
    from videoattn.jobs import JobState, StoreReader

    states: dict[str, tuple[str, str]] = {}
    if (output / ".videoattn").is_dir():
        with StoreReader(output) as store:
            states = {job.name: (job.hash, job.state) for job in store.all()}
    rows: list[tuple[str, ...]] = []
    devices = place.devices or _devices(None)[:1] * place.actors
    where = ", ".join(devices)
    if not place.devices:
        where = f"{place.actors} Ray actor{'s' if place.actors > 1 else ''} as fast as {devices[0]} here"
    estimates = estimate(planned, output, devices[0])
    seconds, disk, todo, unknown, measured = 0.0, 0, 0, 0, True
    for each, needed in zip(planned, estimates, strict=True):
        hashed, state = states.get(each.name, ("", ""))
        status = "new" if not state else "changed" if hashed != each.hash else str(state)
        if status != JobState.DONE:
            todo += 1
            disk += needed.disk_bytes
            seconds += needed.seconds or 0.0
            unknown += needed.seconds is None
            measured = measured and needed.measured
        job = each.job
        rows.append(
            (
                str(each.place.row),
                each.name,
                f"{job.width}x{job.height}",
                str(job.num_frames),
                str(job.num_inference_steps),
                str(job.seed),
                job.model,
                status,
                "?" if needed.seconds is None else duration(needed.seconds),
                "?" if needed.memory_bytes is None else _size(needed.memory_bytes),
                _size(needed.disk_bytes),
            )
        )
    columns = ("row", "name", "size", "frames", "steps", "seed", "model", "state", "time", "memory", "disk")
    print_rows(out, columns, rows, left={"name", "size", "model", "state"}, cut=("name", "model"))
    source = (
        "scaled from clips in this folder"
        if measured
        else "predicted from the model's FLOPs, decode left out"
    )
    time = duration(seconds / len(devices)) if not unknown else "unknown time"
    out.print(
        f"{len(planned)} jobs, {todo} to render: {time} on {where} ({source}), about {_size(disk)} of disk",
        markup=False,
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where to render: the engine, and this machine's devices, or so many actors on others.

    `named`: the user chose the devices.
    """

    engine: Callable[[], Engine]
    devices: tuple[str, ...] = ()
    named: bool = False
    actors: int = 1


def _place(engine: str, device: str | None, address: str | None, actors: int | None) -> _Place:
    if engine == "local":
        if address is not None or actors is not None:
            raise UsageError(f"--{'actors' if address is None else 'address'} belongs to --engine ray")
        from videoattn.batch.run import Local

        devices = _devices(device)
        return _Place(lambda: Local(devices), devices, named=device is not None)
    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"--device {device}: with --engine ray give cuda or cpu, Ray chooses which")
    if actors is not None and actors < 1:
        raise UsageError(f"--actors {actors}: give 1 or more")

    def connect() -> Engine:
        try:
            from videoattn.batch.on_ray import Ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UsageError("--engine ray needs Ray: pip install 'videoattn[cluster]'") from None
        return Ray(address, device=device, actors=actors)

    return _Place(connect, actors=actors or 1)


def _devices(text: str | None) -> tuple[str, ...]:
    """The devices asked for, each checked; by default all GPUs, or the CPU."""
    if text is None:
        # Asking torch takes seconds; without a driver there is nothing to ask.
        if not Path("/dev/nvidiactl").exists():
            return ("cpu",)
        import torch

        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())) or ("cpu",)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--device {text}: name each device once, as in cuda:0,cuda:1")
    if names != ["cpu"]:
        from videoattn.render.devices import pick_device

        return tuple(str(pick_device(name)) for name in names)
    return ("cpu",)


def _arms(text: str) -> tuple[str, ...]:
    from videoattn.kernels import NAMES

    arms = tuple(arm.strip() for arm in text.split(",") if arm.strip())
    for arm in arms:
        if arm not in NAMES:
            raise UsageError(f"unknown attention kernel '{arm}' in --compare: choose from {', '.join(NAMES)}")
    return arms


def _say(text: str) -> None:
    err.print(text, markup=False)


def _warn(text: str) -> None:
    err.print(f"warning: {text}", style="yellow", markup=False)


def _complain(text: str) -> None:
    err.print(f"videoattn: {' '.join(text.split())}", style="red", markup=False)
