"""Valid JSON of the wrong shape: everything that a document becomes when one part of it is another type."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

VALUES = (
    None, True, 7, 0, -1, 1.5, 2**70, "text", "7", "\ud800", [], [1], ["text"], [None], [[]], {}, {"a": 1},
    math.nan, math.inf,
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000


def mutations(document: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Each part in turn replaced by every one of VALUES, and each field left out; named by what is done."""
    for value in VALUES:
        yield f"{where or 'all'} = {value!r:.12}", value
    if isinstance(document, dict):
        for name, part in document.items():
            rest = {other: value for other, value in document.items() if other != name}
            yield f"{where}.{name} left out", rest
            for what, changed in mutations(part, f"{where}.{name}"):
                yield what, document | {name: changed}
    elif isinstance(document, list):
        for index, part in enumerate(document):
            for what, changed in mutations(part, f"{where}.{index}"):
                yield what, [*document[:index], changed, *document[index + 1 :]]


def texts(document: Any) -> Iterator[tuple[str, str]]:
    """The mutations as JSON text, and two documents that a parser itself may break on."""
    for what, changed in mutations(document):
        yield what, json.dumps(changed)
    yield "too deep", DEEP
    yield "a number of 5000 digits", HUGE


def outcomes(
    document: Any, read: Callable[[str], object], errors: tuple[type[Exception], ...], name: str
) -> dict[str, str | None]:
    """What `read` says to the document and to each of its mutations: None where it is content.

    Asserts that the document itself is read, that every complaint is one of `errors`, one line of bounded
    length which names the file `name`, and that some mutations are complained about.
    """
    read(json.dumps(document))
    said: dict[str, str | None] = {}
    for what, text in texts(document):
        try:
            read(text)
        except errors as error:
            message = str(error)
            assert name in message, (what, message)
            assert "\n" not in message, (what, message)
            assert len(message) < 1000, (what, message)
            said[what] = message
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            said[what] = None
    assert all(said[what] for what in ("all = None", "all = []", "all = 7", "all = 'text'", "too deep"))
    return said
