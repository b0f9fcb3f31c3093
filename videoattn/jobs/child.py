"""The worker's child process: `python -m videoattn.jobs.child`, driven by JSON lines on its standard input.

parent → child   hello, run, cancel, stop; end of file means that the parent is dead
child → parent   ready | broken, progress, done | failed | cancelled
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from videoattn.jobs import lifeline, outputs
from videoattn.jobs.context import Context, JobCancelled, LoadedModels, PermanentError
from videoattn.jobs.errors import is_disk_full
from videoattn.jobs.model import Job, JobState, Progress, Result

RenderFunction = Callable[[Job, Context], Result]
_ERROR_CHARACTERS = 2000
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Child:
    """Runs the jobs it is sent, one after another, with one render function."""

    def __init__(self, control: IO[str], reports: IO[str]) -> None:
        self._control = control
        self._reports = reports
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._models = LoadedModels()

    def serve(self) -> None:
        """Import the render function, then run jobs until told to stop."""
        hello = json.loads(self._control.readline())
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            render = resolve(hello["render"])
        except Exception as error:
            traceback.print_exc()
            self._send(type="broken", error=f"cannot load {hello['render']}: {describe(error)}")
            return
        self._send(type="ready")
        while (message := self._inbox.get())["type"] != "stop":
            self._send(fence=message["fence"], **self._run(render, message, hello))
            self._cancelled.discard(message["fence"])
            give_back_memory()

    def _run(self, render: RenderFunction, message: dict[str, Any], hello: dict[str, Any]) -> dict[str, Any]:
        fence, work = message["fence"], Path(message["work"])
        job, *upcoming = (Job(**each | {"state": JobState(each["state"])}) for each in message["jobs"])
        context = Context(
            work=work,
            device=hello["device"],
            attempt=job.attempt,
            options=hello["options"],
            upcoming=upcoming,
            models=self._models,
            is_cancelled=lambda: fence in self._cancelled,
            report=lambda progress: self._report(fence, progress),
        )
        try:
            context.check()
            outputs.write_manifest(work, render(job, context))
        except JobCancelled:
            return {"type": "cancelled"}
        except Exception as error:
            with suppress(OSError):  # the log may be on the disk that is full
                print(f"job {job.id}, attempt {job.attempt}:", file=sys.stderr)
                traceback.print_exc()
            return {
                "type": "failed",
                "error": describe(error),
                "retry": not isinstance(error, PermanentError),
                "disk_full": any(is_disk_full(one) for one in _chain(error)),
            }
        return {"type": "done"}

    def _report(self, fence: int, progress: Progress) -> None:
        self._send(type="progress", fence=fence, progress=asdict(progress))

    def _listen(self) -> None:
        for line in self._control:
            message = json.loads(line)
            if message["type"] == "cancel":
                self._cancelled.add(message["fence"])
            else:
                self._inbox.put(message)
        os._exit(1)

    def _send(self, **message: Any) -> None:
        with self._sending:
            self._reports.write(json.dumps(message) + "\n")
            self._reports.flush()


def resolve(name: str) -> RenderFunction:
    """The function named `module:qualified.name`."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def give_back_memory() -> None:
    """Return the free pages of the C heap to the system, which keeps its fragments from adding up.

    glibc only (`malloc_trim(3)`); elsewhere nothing happens.
    """
    if _trim is not None:
        _trim(0)


def describe(error: BaseException) -> str:
    """One line for the user about an exception of a render function."""
    text = " ".join(str(error).split())
    if not isinstance(error, PermanentError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:_ERROR_CHARACTERS]


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def main() -> None:
    lifeline.die_with_parent(int(sys.argv[1]))
    # What libraries print goes to the log; the pipe to the parent is a descriptor of its own.
    control = os.fdopen(os.dup(0), "r", encoding="utf-8")
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    Child(control, reports).serve()


if __name__ == "__main__":
    main()
