"""The node's side of a batch on Ray: an actor that owns a render process and, where needed, its files."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from videoattn.jobs import outputs
from videoattn.jobs.process import ChildProcess, Program
from videoattn.version import __version__

DRIVER, ACTOR = "driver", "actor"


class NodeWorker:
    """A render process on a node of a cluster, driven by the messages of `videoattn.jobs.child`.

    Its methods are called by the driver, several at a time: `receive` waits while others come in.
    """

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._scratch: Path | None = None

    def look(self, probe: str, token: str, inputs: list[str]) -> dict[str, Any]:
        """Where this is, which version, what of `inputs` is missing here, whether `probe` is visible.

        The folder is visible if the driver's token can be read in it and another file written.
        """
        import ray

        context = ray.get_runtime_context()
        folder = Path(probe)
        visible = False
        with suppress(OSError):
            visible = (folder / DRIVER).read_text() == token
            if visible:
                (folder / ACTOR).write_text(token)
        return {
            "node": context.get_node_id(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
            "version": __version__,
            "visible": visible,
            "missing": [path for path in inputs if not os.path.exists(path)],
        }

    def start(self, program: Program, log_file: str | None, folder: str) -> int:
        """Start the render process; without a `log_file` its files stay on this node until they are read.

        `folder` is its current folder if it exists here. Returns the process id.
        """
        log = None if log_file is None else Path(log_file)
        if log is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="videoattn-"))
            log = self._scratch / "worker.log"
        self._child = ChildProcess(program, log, folder=folder if Path(folder).is_dir() else None)
        return self._child.pid

    def send(self, message: dict[str, Any]) -> None:
        """Pass a message on to the render process."""
        assert self._child is not None
        if message["type"] == "run" and self._scratch is not None:
            work = self._work(message["fence"])
            outputs.discard(work)
            work.mkdir()
            message = message | {"work": str(work)}
        self._child.send(**message)

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """What the render process has said, waiting up to `timeout` seconds for something.

        `exit` comes with its `fate`.
        """
        assert self._child is not None
        messages = []
        while (message := self._child.receive(0.0 if messages else timeout)) is not None:
            messages.append(message)
            if message["type"] == "exit":
                message["fate"] = self._child.fate()
                break
        return messages

    def files(self, fence: int) -> dict[str, int]:
        """The files of a complete attempt with their sizes in bytes."""
        work = self._work(fence)
        manifest = outputs.read_manifest(work)
        assert manifest is not None
        names = [*manifest["files"].values(), outputs.MANIFEST]
        return {name: (work / name).stat().st_size for name in names}

    def read(self, fence: int, name: str, offset: int, size: int) -> bytes:
        """A piece of such a file."""
        with open(self._work(fence) / name, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def discard(self, fence: int) -> None:
        """Remove the files of an attempt."""
        outputs.discard(self._work(fence))

    def stop(self, grace: float) -> None:
        """End the render process and remove what it left on this node."""
        if self._child is not None:
            self._child.stop(grace)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _work(self, fence: int) -> Path:
        assert self._scratch is not None
        return self._scratch / str(fence)
