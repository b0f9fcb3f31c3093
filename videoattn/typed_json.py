"""JSON out of a user's files, checked against the types that describe it: what does not fit is one line."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

# As `__pydantic_config__` of a dataclass: a field that it does not have is an error, else it is left out.
EXACT = {"extra": "forbid"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text whose integers fit 64 bits and whose numbers are finite.

    Not `finite`: Python's NaN, Infinity and -Infinity are taken as well. Raises ValueError that says in a few
    words why it is none.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        constant = _no_number if finite else float
        value = json.loads(text, parse_constant=constant, parse_float=_finite, parse_int=_integer)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("it holds bytes that are not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("one of its \\u escapes is half a character") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def fit(kind: type[T], value: Any) -> T:
    """A parsed value as an instance of `kind`, a dataclass; nothing is converted but integers to floats.

    Raises ValueError that names the first field which does not fit, and what would.
    """
    from pydantic import ValidationError

    try:
        # Strict Python input takes no dataclass from a dict and no tuple from a list; strict JSON does.
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _first(error: Any) -> str:
    item = error.errors(include_url=False)[0]
    if item["type"] == "json_invalid":
        return "it is nested too deep"
    where = ".".join(map(str, item["loc"])) or "it"
    if item["type"] == "missing":
        return f"{where} is missing"
    if item["type"] == "unexpected_keyword_argument":
        return f"{where} is not known here"
    message = item["msg"].replace("a valid array", "a list")
    if item["type"] == "dataclass_type":
        message = "Input should be an object"
    return f"{where} is {shown(item['input'])}: {message[0].lower()}{message[1:]}"


def shown(value: Any) -> str:
    """A parsed value as a message names it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"{text[:20]}{'…' * (len(text) > 20)} is too large a number")
    return int(text)
