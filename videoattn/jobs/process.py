"""The parent's end of a worker's child process: start, messages, death."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from videoattn.jobs.child import resolve
from videoattn.jobs.errors import StoreError

_LOG_BYTES = 4 << 20


class RenderProcess(Protocol):
    """Where a worker's jobs are rendered: a process beside it, or one that it reaches through a cluster."""

    @property
    def pid(self) -> int | None:
        """The id of the process on its machine; None while there is none."""
        ...

    @property
    def where(self) -> str | None:
        """The machine, None for this one."""
        ...

    def send(self, **message: Any) -> None:
        """Send a message; one to a dead process is dropped, its death is received instead."""
        ...

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, None after `timeout` seconds without.

        The last one is `exit`, or `lost` with a `reason` when nobody knows whether the process still runs.
        """
        ...

    def wait_until_ready(
        self, timeout: float, stopping: threading.Event, say: Callable[[str], None]
    ) -> str | None:
        """Wait until jobs can be sent; returns what is wrong, or None. `say` receives what is waited for."""
        ...

    def deliver(self, fence: int, work: Path) -> None:
        """Make the files of a complete attempt appear in its work folder.

        Raises `OSError` when they can't be written here, and `ProcessLost`.
        """
        ...

    def alive(self) -> bool:
        """Whether further jobs can be sent."""
        ...

    def fate(self) -> str:
        """How a process that has sent `exit` ended, in words."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...

    def stop(self, grace: float = 2.0) -> None:
        """Ask an idle process to end, kill it if it has not after `grace` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """What a render process is to run: `render` is `module:function`, the rest as in `Worker`."""

    render: str
    device: str
    options: Mapping[str, Any]
    environment: Mapping[str, str]


# Starts a program with its prints in the file: `ChildProcess`, or what an engine puts in its place.
Launch = Callable[[Program, Path], RenderProcess]


class ProcessLost(Exception):
    """The process can't be reached; it may still run, so what it was doing must be fenced off."""


class ChildProcess:
    """A running `videoattn.jobs.child`, in a session of its own, its prints in `log_file`.

    `folder` is the child's current folder. Must be made by a thread that lives as long as the child is to
    live: the kernel's death signal follows the thread that started the process.
    """

    where = None

    def __init__(self, program: Program, log_file: Path, *, folder: str | None = None) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._log_file = log_file
        # The child imports what this process would, whatever the current folder is (-P).
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        keep = log_file.exists() and log_file.stat().st_size < _LOG_BYTES
        with open(log_file, "ab" if keep else "wb") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "videoattn.jobs.child", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"PYTHONPATH": path} | dict(program.environment),
                start_new_session=True,
                cwd=folder,
            )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, name=f"child {self.pid}", daemon=True).start()
        options = dict(program.options)
        self.send(type="hello", render=program.render, device=program.device, options=options)

    def send(self, **message: Any) -> None:
        """As `RenderProcess.send`."""
        assert self._process.stdin is not None
        with self._sending, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """As `RenderProcess.receive`."""
        try:
            return self._messages.get(timeout=timeout)
        except queue.Empty:
            return None

    def wait_until_ready(
        self, timeout: float, stopping: threading.Event, say: Callable[[str], None]
    ) -> str | None:
        """Wait for the render function to be imported; returns what is wrong, or None."""
        return wait_for_ready(self, timeout, stopping)

    def deliver(self, fence: int, work: Path) -> None:
        """The child has written them there itself."""

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fate(self) -> str:
        """How a process that has closed its pipe ended, in words, with the last line it printed."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its pipe and was killed"
        if code >= 0:
            fate = f"ended with exit code {code}"
        else:
            fate = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                fate += ", often a sign that memory ran out"
        last = self._last_line()
        return f"{fate}: {last}" if last else fate

    def kill(self) -> None:
        """Kill the process and what it has started, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, grace: float = 2.0) -> None:
        """Ask an idle child to end, kill it if it has not after `grace` seconds."""
        self.send(type="stop")
        assert self._process.stdin is not None
        with self._sending, suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace)
        self.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._messages.put(json.loads(line))
        self._messages.put({"type": "exit"})

    def _last_line(self) -> str:
        with open(self._log_file, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - 2000))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def wait_for_ready(process: RenderProcess, timeout: float, stopping: threading.Event) -> str | None:
    """Wait for the child's first message; returns what is wrong, or None."""
    deadline = time.monotonic() + timeout
    while not stopping.is_set():
        message = process.receive(0.1)
        if message is not None:
            if message["type"] == "ready":
                return None
            return message.get("error") or message.get("reason") or f"the worker process {process.fate()}"
        if time.monotonic() > deadline:
            return f"the worker process was not ready after {timeout:g} s"
    return "the worker is stopping"


def import_name(render: Callable[..., Any] | str) -> str:
    """`module:name` of a function that another process can import; raises `StoreError` for any other."""
    if isinstance(render, str):
        return render
    name = f"{render.__module__}:{render.__qualname__}"
    if render.__module__ == "__main__" or "<" in name or resolve(name) is not render:
        raise StoreError(f"the worker's process cannot import {name}: use a function of an importable module")
    return name
