"""A Ray cluster of two real nodes on the loopback interface, each with one CPU, for the tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

# Ray's head listens on all interfaces, whatever address it is given: a token keeps everybody else out. Ray
# reads both when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# Not 127.0.0.1: Ray would take the address of a network card for it.
HEAD, SECOND = "127.0.0.2", "127.0.0.3"


def wait_until(condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
    """Wait for a condition with a limit that only a hang reaches."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Node:
    """One `ray start --block` and everything below it."""

    def __init__(self, ip: str, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "node.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    str(RAY),
                    "start",
                    "--block",
                    f"--node-ip-address={ip}",
                    "--num-cpus=1",
                    "--num-gpus=0",
                    "--object-store-memory=80000000",
                    "--disable-usage-stats",
                    *options,
                ],
                cwd=folder,
                env=os.environ | ENVIRONMENT | {"TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the whole node as a power cut would: nobody gets to say goodbye."""
        tree: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            tree = [top, *top.children(recursive=True)]
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(tree, timeout=30)
        self.process.wait(timeout=30)


class TwoNodes:
    """The cluster; use as a context manager, which removes every trace of it."""

    def __init__(self) -> None:
        # Ray puts sockets there, whose paths may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        with socket.create_server((HEAD, 0)) as listener:
            port = listener.getsockname()[1]
        self.address = f"{HEAD}:{port}"
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.folder}")
        self.nodes = {HEAD: Node(HEAD, self.folder / "head", *head)}
        wait_until(self._listens, "the head of the cluster", 120)
        self.start_second()

    def _listens(self) -> bool:
        assert self.nodes[HEAD].process.poll() is None, self.nodes[HEAD].log.read_text()
        host, port = self.address.split(":")
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        return False

    def start_second(self) -> None:
        """Start the node that may be killed, unless it runs."""
        if SECOND not in self.nodes:
            self.nodes[SECOND] = Node(SECOND, self.folder / "second", f"--address={self.address}")

    def kill_second(self) -> None:
        """Kill it."""
        self.nodes.pop(SECOND).kill()

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *error: object) -> None:
        for node in reversed(self.nodes.values()):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
