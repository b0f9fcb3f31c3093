"""A batch on a Ray cluster: one actor a GPU, fed by this driver, which stays the store's only writer.

An actor takes the place of a worker's child process and nothing else: jobs, tokens, retries, the report and
the view are those of a local run. Ray restarts nothing (`max_restarts` and `max_task_retries` are 0): when an
actor is dead, unavailable, or silent for longer than its lease, its attempt's token is void before the job is
offered to another one, so that what it may still be rendering is never published.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from videoattn.batch.actor import ACTOR, DRIVER, NodeWorker
from videoattn.batch.run import Slot
from videoattn.jobs import Store, outputs
from videoattn.jobs.process import ProcessLost, Program, wait_for_ready
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded
from videoattn.version import __version__

# Seconds without any answer after which an actor counts as lost; Ray itself finds dead nodes sooner.
LEASE = 60.0
_LONG_POLL = 1.0
_PIECE = 8 << 20
# A cluster without room is said after this many seconds.
_PATIENCE = 10.0
# Where Ray notes the cluster that was last started on a machine.
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


class Ray:
    """An engine whose workers render in the actors of a Ray cluster.

    `address` is `HOST:PORT` of the cluster's head or `auto`; by default RAY_ADDRESS, else a Ray of this
    machine's own for the time of the run. `device` is `cuda` or `cpu`, by default `cuda` where the cluster
    has GPUs. `actors` is their number, by default one for each GPU, or CPU. Raises `RenderError` when nothing
    listens at the address, `UsageError` when it is none.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        device: str | None = None,
        actors: int | None = None,
        lease: float = LEASE,
    ) -> None:
        self._address = _resolve(address or os.environ.get("RAY_ADDRESS"))
        self._device = device
        self._actors = actors
        self._lease = lease
        self._taken = ExitStack()

    def slots(self, store: Store, todo: Sequence[int], note: Callable[[str], None]) -> list[Slot]:
        """Connect to the cluster and make a slot for each actor.

        Raises `RenderError` when the cluster can't be used or has no GPU that was asked for.
        """
        self._connect(store.state_folder / "ray.log")
        device, count = self._room()
        inputs = _local_inputs(store, todo)
        slots = []
        for number in range(1, min(count, len(todo)) + 1):
            name = f"ray-{number}"
            launch = partial(
                ActorProcess, name=name, store=store, inputs=inputs, lease=self._lease, note=note
            )
            slots.append(Slot(name, "cuda:0" if device == "cuda" else "cpu", launch))
        return slots

    def close(self) -> None:
        """Leave the cluster; actors that are left end with the connection."""
        self._taken.close()

    def _connect(self, log: Path) -> None:
        # Ray prints what it notices about nodes, pages at times, and always to standard output.
        said = self._taken.enter_context(log.open("a"))
        self._taken.enter_context(redirect_stdout(said))
        address = self._address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {} if address != "local" else {"include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (RuntimeError, ValueError, OSError, RayError) as error:
            # With an address given, Ray does not look for the token that `ray start` has made.
            hint = "; if it asks for a token, set RAY_AUTH_MODE=token"
            if address == "local" or os.environ.get("RAY_AUTH_MODE") == "token":
                hint = ""
            raise RenderError(f"cannot use the Ray at {address}: {_first_line(error)}{hint}") from None
        self._taken.callback(ray.shutdown)

    def _room(self) -> tuple[str, int]:
        """The device to render on and the number of actors."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(each.get("GPU", 0)) for each in nodes)
        device = self._device or ("cuda" if gpus else "cpu")
        if device == "cpu":
            return device, self._actors or max(1, sum(int(each.get("CPU", 0)) for each in nodes))
        # A cluster that grows on demand may have no GPU yet: then their number must be said.
        if not gpus and self._actors is None:
            raise RenderError(
                f"the Ray cluster has no GPU on its {len(nodes)} nodes: give --device cpu, or --actors N to "
                "wait for N GPUs"
            )
        return device, self._actors or gpus


class ActorProcess:
    """A `RenderProcess` in an actor on some node of the cluster."""

    def __init__(
        self,
        program: Program,
        log_file: Path,
        *,
        name: str,
        store: Store,
        inputs: Sequence[str],
        lease: float,
        note: Callable[[str], None],
    ) -> None:
        self.pid: int | None = None
        self.where: str | None = None
        self._program = program
        self._log_file = log_file.absolute()
        self._name, self._folder, self._lease, self._note = name, store.folder.absolute(), lease, note
        self._inbox: deque[dict[str, Any]] = deque()
        self._poll: Any = None
        self._asked = 0.0
        self._lost: str | None = None
        self._over = False
        self._streamed = False
        self._fate = ""
        self._token = secrets.token_hex(16)
        self._probe = store.state_folder.absolute() / "work" / f"probe-{self._token}"
        self._probe.mkdir()
        (self._probe / DRIVER).write_text(self._token)
        gpu = program.device != "cpu"
        self._needs = "GPU" if gpu else "CPU"
        self._actor: Any = (
            ray.remote(NodeWorker)
            .options(
                num_cpus=1,
                num_gpus=int(gpu),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=8,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        self._hello = self._actor.look.remote(str(self._probe), self._token, list(inputs))

    def wait_until_ready(
        self, timeout: float, stopping: threading.Event, say: Callable[[str], None]
    ) -> str | None:
        """Wait for a place in the cluster, without limit, then for the render process there."""
        try:
            problem = self._wait_for_room(stopping, say)
            if problem is None:
                say(f"starting on {self.where}")
                problem = wait_for_ready(self, timeout, stopping)
        except RayError as error:
            problem = f"{self._name} could not start: {_first_line(error)}"
        finally:
            outputs.discard(self._probe)
        if problem is None:
            how = f"streams its clips back, since it does not see {self._folder}"
            if not self._streamed:
                how = f"writes into {self._folder}"
            self._note(f"{self._name} renders on {self.where} and {how}")
        return problem

    def _wait_for_room(self, stopping: threading.Event, say: Callable[[str], None]) -> str | None:
        say(f"waiting for a free {self._needs} in the cluster")
        asked, said = time.monotonic(), False
        while not ray.wait([self._hello], timeout=0.2)[0]:
            if stopping.is_set():
                return "the worker is stopping"
            if not said and time.monotonic() - asked > _PATIENCE:
                said = True
                self._note(f"{self._name} waits for a free {self._needs} in the cluster")
        hello: dict[str, Any] = self._ask(self._hello)
        node = next((each for each in ray.nodes() if each["NodeID"] == hello["node"]), None)
        if node is None:
            return f"the node of {self._name} has left the cluster"
        self.where = where = str(node["NodeManagerAddress"])
        if hello["version"] != __version__:
            return f"{where} has videoattn {hello['version']}, this is {__version__}: install the same one"
        if missing := hello["missing"]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{where} does not see {missing[0]}{more}: every node needs it at that path"
        if hello["gpus"]:
            resources = node["Resources"]
            threads = max(1, int(resources.get("CPU", 1)) // int(resources["GPU"]))
            # Ray sets it to the CPUs that an actor has reserved, which is one.
            environment = {"OMP_NUM_THREADS": str(threads), **self._program.environment}
            self._program = replace(self._program, environment=environment)
            self.where = f"{where} GPU {','.join(map(str, hello['gpus']))}"
        self._streamed = not (hello["visible"] and self._sees_answer())
        self.pid = self._ask(
            self._actor.start.remote(
                self._program, None if self._streamed else str(self._log_file), os.getcwd()
            )
        )
        return None

    def _sees_answer(self) -> bool:
        with suppress(OSError):
            return (self._probe / ACTOR).read_text() == self._token
        return False

    def send(self, **message: Any) -> None:
        """As `RenderProcess.send`."""
        if not self.alive():
            return
        sent = self._actor.send.remote(message)
        # A job that never arrives would be waited for without end; a cancellation has its own deadline.
        if message["type"] == "run":
            try:
                self._ask(sent)
            except RayError as error:
                self._lose(error)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """As `RenderProcess.receive`."""
        if not self._inbox and self._lost is None and not self._over:
            if self._poll is None:
                self._poll, self._asked = self._actor.receive.remote(_LONG_POLL), time.monotonic()
            try:
                if ray.wait([self._poll], timeout=timeout)[0]:
                    poll, self._poll = self._poll, None
                    self._inbox.extend(ray.get(poll))
                elif time.monotonic() - self._asked > _LONG_POLL + self._lease:
                    raise GetTimeoutError
            except RayError as error:
                self._lose(error)
        if self._inbox:
            message = self._inbox.popleft()
            if message["type"] == "exit":
                self._over, self._fate = True, message["fate"]
            return message
        if self._lost is not None:
            return {"type": "lost", "reason": self._lost}
        return {"type": "exit"} if self._over else None

    def deliver(self, fence: int, work: Path) -> None:
        """As `RenderProcess.deliver`: copies the files unless the actor has written them there itself."""
        if not self._streamed:
            return
        try:
            # The manifest is the last of them, and appears whole.
            for name, size in self._ask(self._actor.files.remote(fence)).items():
                partial_file = work / f".{name}.partial"
                with open(partial_file, "wb") as file:
                    while file.tell() < size:
                        file.write(self._ask(self._actor.read.remote(fence, name, file.tell(), _PIECE)))
                outputs.sync_file(partial_file)
                os.replace(partial_file, work / name)
        except RayError as error:
            self._lose(error)
            raise ProcessLost(self._lost) from error
        self._actor.discard.remote(fence)

    def alive(self) -> bool:
        """As `RenderProcess.alive`."""
        return self._lost is None and not self._over

    def fate(self) -> str:
        """As `RenderProcess.fate`."""
        return f"on {self.where} {self._fate}"

    def kill(self) -> None:
        """Have Ray kill the actor as soon as it can be reached; its render process dies with it."""
        self._over = True
        ray.kill(self._actor, no_restart=True)

    def stop(self, grace: float = 2.0) -> None:
        """As `RenderProcess.stop`."""
        if self.alive() and self.pid is not None:
            with suppress(RayError):
                ray.get(self._actor.stop.remote(grace), timeout=grace + 5.0)
        self.kill()

    def _ask(self, answer: Any) -> Any:
        return ray.get(answer, timeout=self._lease)

    def _lose(self, error: RayError) -> None:
        """Give the actor up, whether it is dead or only out of reach."""
        if isinstance(error, GetTimeoutError):
            reason = f"no answer for {self._lease:g} s"
        elif isinstance(error, ActorUnavailableError):
            reason = "Ray can't reach it"
        else:
            reason = _first_line(error)
        self._lost = f"{self._name} on {self.where}: {reason}"
        self._note(f"lost {self._lost}")


def _resolve(address: str | None) -> str:
    """The address to connect to, where something listens.

    Ray itself would wait for minutes where nothing does.
    """
    if address in (None, "", "local"):
        return "local"
    given = address
    if address == "auto":
        try:
            address = _CURRENT_CLUSTER.read_text().strip()
        except OSError:
            raise RenderError("no Ray cluster runs on this machine: give --address HOST:PORT") from None
    assert address is not None
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        raise UsageError(
            f"--address {address}: give HOST:PORT of the cluster's head (its port is 6379 unless it was "
            "chosen) on a machine that belongs to the cluster, or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise RenderError(
            f"cannot reach a Ray cluster at {address} ({reason.lower()}): start one with `ray start --head`"
        ) from None
    return str(given)


def _local_inputs(store: Store, todo: Sequence[int]) -> list[str]:
    """The absolute paths of all files and folders that the jobs name and that exist here."""
    found: dict[str, None] = {}
    for job in map(store.get, todo):
        settings = RenderJob.parse(job.payload["job"])
        loras = [lora.source for lora in settings.loras]
        for name in (settings.model, settings.components, settings.upsampler, settings.image, *loras):
            if name and name != "demo":
                path = expanded(name).absolute()
                if os.path.exists(path):
                    found[str(path)] = None
    return list(found)


def _first_line(error: BaseException) -> str:
    """What a Ray error says: the last line of an error on a node, the first one of anything else."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[-1] if isinstance(error, (RayActorError, RayTaskError)) else lines[0]
    # The cause of a death comes with several sentences of advice.
    return (line.partition(". ")[0] if isinstance(error, RayActorError) else line)[:300]
