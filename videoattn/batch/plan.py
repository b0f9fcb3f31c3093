"""From rows to jobs that can be rendered: validated, named, hashed, in the order that avoids reloads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from videoattn.batch.expand import ExpandError, expand
from videoattn.batch.jobfile import EXTRAS, Row, read
from videoattn.batch.problems import Place, Problems
from videoattn.jobs.errors import StoreError
from videoattn.jobs.outputs import check_name
from videoattn.jobs.rendering import content_hash
from videoattn.render.checks import Prepared, check
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded

_OPTION = re.compile(r"--([a-z][a-z-]+)")
_NAME = re.compile(r"[a-z_]+")
# Columns that name something outside the job file, which a message about it quotes.
_PLACES = ("model", "components", "upsampler", "image")
_COMMA = re.compile(r"\s*([+-]?\d+),(\d+)\s*")
_WORDS = re.compile(r"[^a-z0-9]+")
# A different value of one of these means another model in memory.
_LOADS = (
    "model",
    "revision",
    "components",
    "recipe",
    "upsampler",
    "lora",
    "dtype",
    "offload",
    "vae_tiling",
    "compile",
    "fast",
    "attention",
)
# And of one of these another shape: new graphs, new buffers.
_SHAPES = ("width", "height", "num_frames")


@dataclass(frozen=True, slots=True)
class Planned:
    """One job of a batch: checked and explicit, with its output name and the place it comes from."""

    prepared: Prepared
    name: str
    hash: str
    place: Place
    allow_offload: bool = False

    @property
    def job(self) -> RenderJob:
        """The settings, all explicit."""
        return self.prepared.job


@dataclass(frozen=True, slots=True)
class _Draft:
    job: RenderJob
    place: Place
    name: str | None
    allow_offload: bool


def plan(
    path: Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    local_files_only: bool = False,
    device: str | None = None,
    compare: tuple[str, ...] = (),
    warn: Callable[[str], None] = lambda text: None,
) -> list[Planned]:
    """Read, expand and check a job file; the jobs come grouped by model and shape, else in the file's order.

    Reads model configs and images, no weights. With `device`, kernels that are asked for by name must run
    there. Raises `JobFileError` with everything that is wrong, or `UsageError` when the file can't be read
    at all. `warn` receives one line for each job that repeats another one (it is rendered once) and
    whatever a check finds odd.
    """
    problems = Problems()
    rows = read(path, problems, defaults=defaults)
    drafts = [draft for row in rows for draft in _drafts(row, path.parent, problems)]
    checked: list[Planned] = []
    said: set[str] = set()

    def warn_once(text: str) -> None:
        if text not in said:
            said.add(text)
            warn(text)

    for draft in drafts:
        try:
            prepared = check(draft.job, local_files_only=local_files_only, warn=warn_once)
        except (UsageError, RenderError) as error:
            problems.add(draft.place, _column(str(error), draft.job), str(error))
            continue
        if device is not None and (compare or draft.job.attention != "auto"):
            _check_kernels(prepared, device, compare, draft.place, problems)
        hashed = content_hash(prepared.job.model_dump(mode="json"), prepared.image_sha256)
        name = draft.name or _name(prepared.job, hashed)
        checked.append(Planned(prepared, name, hashed, draft.place, draft.allow_offload))
    planned = _without_repeats(checked, problems, warn_once)
    problems.raise_if_any()
    return _grouped(planned)


def _drafts(row: Row, folder: Path, problems: Problems) -> Iterable[_Draft]:
    """The jobs of one row; what is wrong with it becomes problems, each once."""
    try:
        points = list(expand(row.values))
    except ExpandError as error:
        problems.add(row.place, error.column, str(error))
        return
    for number, (values, varying) in enumerate(points, start=1):
        name, allow_offload = values.get("name"), False
        if name is not None:
            name = _checked_name(row.place, name, number, len(points), values, varying, problems)
        if "allow_offload" in values:
            try:
                allow_offload = TypeAdapter(bool).validate_python(values["allow_offload"])
            except ValidationError:
                given = values["allow_offload"]
                problems.add(row.place, "allow_offload", f"{given!r} is neither true nor false")
        settings = {key: value for key, value in values.items() if key not in EXTRAS and value is not None}
        _resolve_paths(settings, folder)
        try:
            job = RenderJob.model_validate(settings)
        except ValidationError as error:
            for item in error.errors():
                column = str(item["loc"][0]) if item["loc"] else None
                message = item["msg"].removeprefix("Value error, ")
                value = "" if item["type"] == "value_error" else f"{item['input']!r}: "
                hint = _decimal_point(item) if column == "frame_rate" or "float" in item["type"] else ""
                problems.add(row.place, column, value + message[0].lower() + message[1:] + hint)
            continue
        yield _Draft(job, row.place, name, allow_offload)


def _decimal_point(item: Mapping[str, Any]) -> str:
    """What to write for a number with a decimal comma."""
    match = _COMMA.fullmatch(str(item["input"]))
    return "" if match is None else f": write {match[1]}.{match[2]}"


def _checked_name(
    place: Place,
    name: Any,
    number: int,
    total: int,
    values: Mapping[str, Any],
    varying: tuple[str, ...],
    problems: Problems,
) -> str | None:
    """The row's name, made unique when the row makes several jobs."""
    try:
        name = check_name(str(name))
    except StoreError as error:
        problems.add(place, "name", str(error))
        return None
    if total == 1:
        return name
    if varying == ("seed",):
        return f"{name}-seed{values['seed']}"
    return f"{name}-{number:0{len(str(total))}d}"


def _resolve_paths(settings: dict[str, Any], folder: Path) -> None:
    """Relative paths are relative to the job file; what names no file there is left as it is."""
    image = settings.get("image")
    if isinstance(image, str) and image:
        settings["image"] = str(folder / expanded(image))
    for column in ("model", "components", "upsampler"):
        value = settings.get(column)
        if isinstance(value, str) and value not in ("", "demo") and os.path.exists(folder / value):
            settings[column] = str(folder / value)


def _check_kernels(
    prepared: Prepared, device: str, compare: tuple[str, ...], place: Place, problems: Problems
) -> None:
    from videoattn.render.devices import pick_device, require_kernels

    try:
        require_kernels(prepared, pick_device(device), ())
    except (UsageError, RenderError) as error:
        problems.add(place, "attention", str(error))
        return
    try:
        require_kernels(prepared, pick_device(device), compare)
    except (UsageError, RenderError) as error:
        problems.add(place, None, str(error))


def _column(message: str, job: RenderJob) -> str | None:
    """The column that a check complains about: named as an option, quoted by its value, or named as such."""
    options = [name.replace("-", "_") for name in _OPTION.findall(message)]
    places = [name for name in _PLACES if getattr(job, name) and str(getattr(job, name)) in message]
    said = _NAME.findall(message.partition(":")[0].replace("this model", ""))
    for name in (*options, *places, *said):
        if name in RenderJob.model_fields:
            return name
    return None


def _name(job: RenderJob, hashed: str) -> str:
    words = _WORDS.sub("-", job.prompt.lower()).strip("-")[:48].rstrip("-") or "clip"
    return f"{words}-seed{job.seed}-{hashed[:8]}"


def _without_repeats(jobs: list[Planned], problems: Problems, warn: Callable[[str], None]) -> list[Planned]:
    by_hash: dict[str, Planned] = {}
    by_name: dict[str, Planned] = {}
    for job in jobs:
        first = by_hash.get(job.hash)
        if first is not None:
            # In a file with a misspelt column they may be meant to differ.
            if not problems:
                warn(
                    f"{job.place} repeats row {first.place.row}: the same settings and seed are rendered once"
                )
            continue
        other = by_name.get(job.name.lower())
        if other is not None:
            problems.add(job.place, "name", f"'{job.name}' is the name of row {other.place.row} too")
        by_hash[job.hash] = by_name[job.name.lower()] = job
    return list(by_hash.values())


def _grouped(jobs: list[Planned]) -> list[Planned]:
    """Jobs of one model side by side, within these the ones of one shape, in order of appearance."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Planned]]] = {}
    for job in jobs:
        loads = tuple(getattr(job.job, name) for name in _LOADS)
        shape = tuple(getattr(job.job, name) for name in _SHAPES)
        groups.setdefault(loads, {}).setdefault(shape, []).append(job)
    return [job for shapes in groups.values() for group in shapes.values() for job in group]
