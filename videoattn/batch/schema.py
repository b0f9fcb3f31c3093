"""The JSON schema of job files."""

from __future__ import annotations

from typing import Any

from videoattn.batch.expand import LIST_COLUMNS
from videoattn.batch.jobfile import EXTRAS
from videoattn.render.job import RenderJob


def schema() -> dict[str, Any]:
    """JSON schema of a YAML or JSON job file; `$defs/job` is a line of a JSONL file."""
    settings = RenderJob.model_json_schema()
    columns: dict[str, Any] = {}
    for name, field in settings["properties"].items():
        described = {key: field.pop(key) for key in ("description", "default") if key in field}
        field.pop("title", None)
        sweep = {"type": "array", "items": field, "minItems": 1}
        if name in LIST_COLUMNS:
            # A plain list is one value here; only a list of lists is several.
            columns[name] = {"anyOf": [field, {"type": "string"}, sweep], **described}
        else:
            columns[name] = {"anyOf": [field, sweep], **described}
    names = {"type": "array", "items": {"type": "string"}}
    seed = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
    extras = {
        "name": {"type": "string"},
        "seeds": {"anyOf": [*seed["anyOf"], {"type": "array", "items": seed}]},
        "zip": {"anyOf": [names, {"type": "array", "items": names}, {"type": "string"}]},
        "allow_offload": {"type": "boolean"},
    }
    for name, description in EXTRAS.items():
        columns[name] = {**extras[name], "description": description}
    job = {"type": "object", "properties": columns, "additionalProperties": False}
    jobs = {"type": "array", "items": {"$ref": "#/$defs/job"}, "minItems": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "videoattn job file",
        "anyOf": [
            jobs,
            {
                "type": "object",
                "properties": {"defaults": {"$ref": "#/$defs/job"}, "jobs": jobs},
                "required": ["jobs"],
                "additionalProperties": False,
            },
        ],
        "$defs": {**settings.get("$defs", {}), "job": job},
    }
