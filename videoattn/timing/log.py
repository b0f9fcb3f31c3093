"""The timing log: one row a call, and its JSON Lines file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from videoattn.typed_json import EXACT, fit, parse, shown

Mark = Literal["launch gap", "graph capture"]


@dataclass(slots=True)
class ArmTime:
    """A shadow arm's run on the inputs of one call.

    `ratio` is the arm's milliseconds over the kernel's: above 1 the render's kernel was faster. It is None
    where either time carries a mark. `max_abs_diff` is max|kernel's output − arm's output|; a difference that
    is not finite is None with `finite` false. `reason` says why the arm did not run; then the rest is None.
    """

    milliseconds: float | None = None
    ratio: float | None = None
    max_abs_diff: float | None = None
    finite: bool = True
    mark: Mark | None = None
    reason: str | None = None


@dataclass(slots=True)
class CallRow:
    """One attention call of a render.

    Lengths are in tokens. `step`, `forward` and `layer` count from 0 within the stage and are None where
    they are unknown; connector calls have no step. `mask` is `none`, `kv_lengths` or `dense`, and
    `kv_tokens` the keys that count, summed over the batch: fewer than batch · kv_len under key lengths.
    `tflops` is `flops` over the time, in TFLOP/s. It is None where `mark` is set: `launch gap` when the
    call was so short that an event pair measured the wait for its launch, `graph capture` when it went into
    a CUDA graph, where a call has no time of its own.
    """

    __pydantic_config__ = EXACT

    clip: str | None
    stage: str | None
    step: int | None
    forward: int | None
    layer: int | None
    kind: str | None
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    kernel: str
    mask: str
    kv_tokens: int | None
    milliseconds: float | None
    tflops: float | None
    mark: Mark | None = None
    arms: dict[str, ArmTime] = field(default_factory=dict)

    @property
    def flops(self) -> int | None:
        """Matrix FLOPs, 4·H·Sq·D for each key that counts; softmax and padding are not counted."""
        if self.kv_tokens is None:
            return None
        return 4 * self.heads * self.q_len * self.head_dim * self.kv_tokens


@dataclass(slots=True)
class StageTime:
    """Wall seconds of one stage of one clip, and how many of them the shadow arms took."""

    __pydantic_config__ = EXACT

    clip: str | None
    stage: str | None
    seconds: float
    shadow_seconds: float = 0.0


@dataclass(slots=True)
class ForwardTime:
    """Milliseconds of one whole forward, from `Recording.forward`.

    `replayed_calls` counts the attention calls that it replayed as a CUDA graph: these have no rows.
    """

    __pydantic_config__ = EXACT

    clip: str | None
    stage: str | None
    step: int | None
    milliseconds: float
    replayed_calls: int = 0


@dataclass(slots=True)
class TimingLog:
    """Everything one recording measured; `compare` names its shadow arms, `device` where it ran.

    `around` says what ran otherwise than in diffusers besides the calls, empty where nothing did.
    """

    __pydantic_config__ = EXACT

    device: str
    version: str
    torch: str
    compare: tuple[str, ...] = ()
    rows: list[CallRow] = field(default_factory=list)
    stages: list[StageTime] = field(default_factory=list)
    forwards: list[ForwardTime] = field(default_factory=list)
    around: str = ""

    def lines(self) -> Iterator[dict[str, Any]]:
        """The log as JSON-ready dicts; `type` is `run` (once, first), `stage`, `forward` or `call`."""
        head = {"device": self.device, "version": self.version, "torch": self.torch}
        yield {"type": "run", **head, "compare": list(self.compare), "around": self.around}
        for name, records in (("stage", self.stages), ("forward", self.forwards), ("call", self.rows)):
            for record in records:
                yield {"type": name, **asdict(record)}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the log as JSON Lines; the file appears whole or not at all."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                for line in self.lines():
                    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> TimingLog:
    """Read back a timing log.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a timing log; the message names the line.
    """
    log: TimingLog | None = None
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = parse(text)
                if not isinstance(line, dict):
                    raise ValueError("it is no object")
                kind = line.pop("type", None)
                if kind == "run" and log is not None:
                    raise ValueError("only the first line has the type 'run'")
                if kind == "run":
                    log = fit(TimingLog, line)
                elif log is None:
                    raise ValueError("the first line must have the type 'run'")
                else:
                    _append(log, kind, line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a line of a timing log ({error})") from None
    if log is None:
        raise ValueError(f"{path} is empty: not a timing log")
    return log


def _append(log: TimingLog, kind: Any, line: dict[str, Any]) -> None:
    if kind == "call":
        log.rows.append(fit(CallRow, line))
    elif kind == "stage":
        log.stages.append(fit(StageTime, line))
    elif kind == "forward":
        log.forwards.append(fit(ForwardTime, line))
    else:
        raise ValueError(f"unknown type {shown(kind)}")
