"""Reading job files: CSV, JSON Lines, YAML (and JSON) into rows of plain values with their places.

CSV     a header line with column names, one job a row; empty cells mean the default
JSONL   one object a line; a line {"defaults": {...}} sets what later lines leave out
YAML    a list of jobs, or a mapping with `defaults` and `jobs`
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from videoattn.batch.problems import Place, Problems
from videoattn.render.errors import UsageError
from videoattn.render.job import RenderJob

# What a row may say beside the settings of a render.
EXTRAS = {
    "name": "Name of the clip without its suffix; made from prompt and seed when left out.",
    "seeds": "Several seeds: 1..8, a list, or both as in 1..4,10; one job for each.",
    "zip": "Columns whose lists advance together, as in [prompt, image]; other lists are crossed.",
    "allow_offload": "Out of GPU memory, go on with the next offload level instead of failing.",
}
COLUMNS = (*RenderJob.model_fields, *EXTRAS)
# What other tools, and people, call some of them.
ALIASES = {
    "caption": "prompt",
    "text": "prompt",
    "negative": "negative_prompt",
    "checkpoint": "model",
    "frames": "num_frames",
    "length": "num_frames",
    "fps": "frame_rate",
    "rate": "frame_rate",
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "start_image": "image",
    "first_frame": "image",
    "filename": "name",
    "kernel": "attention",
}


_SEEDS = {"seed", "seeds"}


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one row, defaults filled in, as the file has them."""

    place: Place
    values: dict[str, Any]


def read(path: Path, problems: Problems, *, defaults: Mapping[str, Any] | None = None) -> list[Row]:
    """The rows of a job file that are right in form; `defaults` come before the file's own.

    What is wrong in form goes to `problems`. A misspelt column counts as the one that it resembles, so that
    what it holds is checked too. Raises `UsageError` for a file that can't be read or holds no jobs.
    """
    parsers = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
        ".json": _read_yaml,
    }
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"cannot read {path}: a job file ends in {', '.join(parsers)}")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such job file: {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    text = _decode(path, content, "CSV UTF-8" if parse is _read_csv else "UTF-8")
    rows = parse(path.name, text, problems)
    if not rows and not problems:
        raise UsageError(f"{path} holds no jobs")
    return [Row(row.place, merged(defaults or {}, row.values)) for row in rows]


def _decode(path: Path, content: bytes, wanted: str) -> str:
    """The text of a job file, lines ended by `\\n`: UTF-8, or UTF-16 with its mark.

    `wanted` is what programs that could have written it call UTF-8.
    """
    encoding = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "UTF-8"
    try:
        text, end = content.decode(encoding), None
    except UnicodeDecodeError as error:
        text = content[: error.start].decode(encoding)
        end = len(text)
    # Without a mark UTF-16 passes for UTF-8 with a NUL in every other place.
    if end is None and "\0" in text:
        end = text.index("\0")
    if end is not None:
        line = 1 + _one_line_end(text[:end]).count("\n")
        raise UsageError(f"cannot read {path}: line {line} is not {encoding}: save it as '{wanted}'")
    return _one_line_end(text.removeprefix("\ufeff"))


def _one_line_end(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values over defaults; its `seed` also replaces default `seeds`, and the reverse."""
    other = {"seed": "seeds", "seeds": "seed"}
    hidden = {other[name] for name in other if name in values and other[name] not in values}
    return {**{name: value for name, value in defaults.items() if name not in hidden}, **values}


def known(place: Place, values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """The columns that mean something, and under its right name what is nearly one of them.

    Every column that means nothing is noted, with the nearest one that does.
    """
    found = {column: value for column, value in values.items() if column in COLUMNS}
    for column, value in values.items():
        if column in COLUMNS:
            continue
        near = _nearest(str(column))
        hint = f"did you mean {near}?" if near else f"the columns are {', '.join(COLUMNS)}"
        problems.add(place, str(column), f"no such column; {hint}")
        if near and (near not in _SEEDS or not _SEEDS & found.keys()):
            found.setdefault(near, value)
    return found


@cache
def _nearest(column: str) -> str | None:
    name = re.sub(r"[\s-]+", "_", column.strip().lower())
    near = difflib.get_close_matches(name, (*COLUMNS, *ALIASES), n=1)
    return ALIASES.get(near[0], near[0]) if near else None


def _read_csv(file: str, text: str, problems: Problems) -> list[Row]:
    first = text.partition("\n")[0]
    # Spreadsheets write what their language uses; the header has the right one most often.
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    header: list[str | None] | None = None
    number = 0
    try:
        line = 1
        for cells in reader:
            start, line = line, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = _header(Place(file, line=start), [cell.strip() for cell in cells], problems)
                continue
            number += 1
            place = Place(file, number, start)
            if len(cells) > len(header):
                problems.add(
                    place,
                    None,
                    f"{len(cells)} cells for {len(header)} columns: quote text that has commas",
                )
                continue
            cells = [cell.strip() for cell in cells]
            rows.append(
                Row(place, {name: cell for name, cell in zip(header, cells, strict=False) if name and cell})
            )
    except csv.Error as error:
        problems.add(Place(file, line=reader.line_num), None, f"not well-formed CSV: {error}")
    return rows


def _header(place: Place, header: list[str], problems: Problems) -> list[str | None]:
    """The column that each cell of a row belongs to; None for those that mean nothing."""
    meant = {
        given: name for name, given in known(place, {name: name for name in header if name}, problems).items()
    }
    for name in {name for name in header if name and header.count(name) > 1}:
        problems.add(place, name, "the column is there twice")
    if not all(header):
        problems.add(place, None, "a column has no name")
    return [meant.get(name) for name in header]


def _read_jsonl(file: str, text: str, problems: Problems) -> list[Row]:
    rows: list[Row] = []
    defaults: dict[str, Any] = {}
    number = 0
    for index, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = Place(file, line=index)
        try:
            value = json.loads(line, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            problems.add(place, None, f"not JSON: {error.msg} at character {error.pos + 1}")
            continue
        except RecursionError:
            problems.add(place, None, "not a job: it is nested too deep")
            continue
        except ValueError as error:
            problems.add(place, None, str(error))
            continue
        if not isinstance(value, dict):
            problems.add(place, None, 'a line is an object such as {"prompt": "a red ball", "seed": 1}')
            continue
        if set(value) == {"defaults"}:
            defaults = _mapping(place, "defaults", value["defaults"], problems)
            continue
        number += 1
        place = Place(file, number, index)
        rows.append(Row(place, merged(defaults, known(place, value, problems))))
    return rows


def _read_yaml(file: str, text: str, problems: Problems) -> list[Row]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        construct = _constructor(file, problems)
        if node is None:
            return []
        if isinstance(node, yaml.SequenceNode):
            return _yaml_rows(file, node, {}, construct, problems)
        if not isinstance(node, yaml.MappingNode):
            problems.add(
                Place(file), None, "a job file is a list of jobs, or a mapping with defaults and jobs"
            )
            return []
        parts = {str(key.value): value for key, value in node.value}
        for key, _ in node.value:
            if key.value not in ("defaults", "jobs"):
                line = key.start_mark.line + 1
                problems.add(
                    Place(file, line=line), str(key.value), "the top level has defaults and jobs only"
                )
        defaults: dict[str, Any] = {}
        if "defaults" in parts:
            place = Place(file, line=parts["defaults"].start_mark.line + 1)
            defaults = _mapping(place, "defaults", construct(parts["defaults"]), problems)
        jobs = parts.get("jobs")
        if not isinstance(jobs, yaml.SequenceNode):
            problems.add(Place(file), "jobs", "jobs is a list with one mapping for each job")
            return []
        return _yaml_rows(file, jobs, defaults, construct, problems)
    except ReaderError as error:
        line = 1 + text.count("\n", 0, error.position)
        problems.add(Place(file, line=line), None, f"not well-formed YAML: U+{error.character:04X} is in it")
        return []
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = None if mark is None else mark.line + 1
        problems.add(Place(file, line=line), None, f"not well-formed YAML: {error.problem}")
        return []
    except RecursionError:
        problems.add(Place(file), None, "no list of jobs: it is nested too deep")
        return []
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner turns the number in an escape into a character unseen.
        problems.add(Place(file), None, f"not well-formed YAML: {error}")
        return []


def _yaml_rows(
    file: str,
    node: yaml.SequenceNode,
    defaults: dict[str, Any],
    construct: Callable[[yaml.Node], Any],
    problems: Problems,
) -> list[Row]:
    rows = []
    for number, item in enumerate(node.value, start=1):
        place = Place(file, number, item.start_mark.line + 1)
        value = construct(item)
        if not isinstance(value, dict):
            problems.add(place, None, "a job is a mapping such as {prompt: a red ball, seed: 1}")
            continue
        rows.append(Row(place, merged(defaults, known(place, value, problems))))
    return rows


def _constructor(file: str, problems: Problems) -> Callable[[yaml.Node], Any]:
    """Plain values of a YAML node; a key that is there twice is a problem, unlike in PyYAML."""
    loader = _Loader("")

    def construct(node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for name in {key for key in keys if keys.count(key) > 1}:
                line = node.start_mark.line + 1
                problems.add(Place(file, line=line), str(name), "the column is there twice")
        try:
            return loader.construct_object(node, deep=True)
        except (yaml.YAMLError, RecursionError, MemoryError):
            raise
        except Exception as error:
            # PyYAML makes dates and numbers of whatever looks like some, and lets Python complain.
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None

    return construct


class _Loader(yaml.SafeLoader):
    """Whole numbers have at most 64 bits, as in JSON."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if value.bit_length() > 64:
            raise ValueError(f"{node.value[:20]} is too large a number")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _mapping(place: Place, name: str, value: Any, problems: Problems) -> dict[str, Any]:
    if not isinstance(value, dict):
        problems.add(place, name, f"{name} is a mapping of columns to values")
        return {}
    columns = known(place, value, problems)
    if columns.pop("name", None) is not None:
        problems.add(place, "name", "a name belongs to one job, not to the defaults")
    return columns


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the column {key} is there twice")
        found[key] = value
    return found
