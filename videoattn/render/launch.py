"""Starting the ranks of one clip by torch's elastic launcher, and telling their failure in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from videoattn.processors.parallel.degrees import Degrees, refuse_heads
from videoattn.render.errors import NonFinite, RenderError, UsageError
from videoattn.render.files import Leftovers
from videoattn.render.rank import TERMINATED, Request
from videoattn.render.sources import ModelInfo

OWN_ERRORS = {error.__name__: error for error in (UsageError, RenderError, NonFinite)}
# The launcher takes these for itself and does not give them back.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What a rank says whose peer is gone; another rank's failure is the cause.
CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError", "Connection closed", "gloo", "NCCL")
# Seconds that torch's launcher gives the other ranks to end by SIGTERM before it sends SIGKILL.
GRACE = 30


def parse_degrees(text: str, info: ModelInfo) -> Degrees:
    """The degrees of `--context-parallel`, checked against the model's heads; raises UsageError."""
    try:
        degrees = Degrees.parse(text)
    except ValueError as error:
        raise UsageError(f"--context-parallel: {error}") from None
    refusal = refuse_heads(info.video_heads[0], degrees.ulysses)
    if refusal is not None:
        raise UsageError(f"--context-parallel: {refusal}")
    return degrees


def pick_kind(device: str | None, degrees: Degrees) -> str:
    """`cuda` or `cpu` for the ranks of this machine; UsageError if it cannot hold them."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UsageError(
            f"--device {device}: --context-parallel takes one GPU a rank, so give cuda or cpu, and choose "
            "among GPUs by CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if device == "cpu" or (device is None and count == 0):
        return "cpu"
    if count < degrees.ranks:
        raise UsageError(
            f"--context-parallel {degrees} takes {degrees.ranks} GPUs, and this machine has {count}: lower "
            "the degrees, or give --device cpu"
        )
    return "cuda"


def launch(request: Request) -> None:
    """Render a clip by ranks on this machine; returns when all have ended well.

    Raises the UsageError or RenderError of the rank that failed. A signal ends the ranks, then acts here.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = Degrees.parse(request.degrees).ranks
    received = None
    places = (request.output, request.poster, request.preview, request.timing)
    leftovers = Leftovers([place for place in places if place is not None])
    with TemporaryDirectory(prefix="videoattn-ranks-") as folder, _launchers_own():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(
                folder, redirects={rank: Std.NONE if rank == 0 else Std.ALL for rank in range(count)}
            ),
        )
        command = ("-m", "videoattn.render.rank", str(os.getpid()), request.model_dump_json())
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            leftovers.remove()
            raise failure(error.failures, Path(folder)) from None
        except SignalException as error:
            leftovers.remove()
            received = error.sigval
    if received is not None:
        signal.raise_signal(received)


@contextmanager
def _launchers_own() -> Iterator[None]:
    """Give back the signal handlers that the launcher replaces, and keep what it logs from the terminal."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(failures: Mapping[int, Any], folder: Path) -> UsageError | RenderError:
    """The error of the rank whose failure explains the others', from torch's `ProcessFailure` of each.

    `folder` holds what the ranks but the first printed.
    """
    first = min(each.timestamp for each in failures.values())

    def order(rank: int) -> tuple[bool, bool, int, int]:
        found = failures[rank]
        # Timestamps are whole seconds, too coarse to tell a cause from what it brought about.
        return _was_stopped(found, first), _is_consequence(found), found.timestamp, rank

    rank = min(failures, key=order)
    found = failures[rank]
    if isinstance(found.message, dict):
        name, _, text = found.message["message"].partition(": ")
        own = OWN_ERRORS.get(name)
        if own is not None:
            place = f"rank {rank}: " if rank else ""
            return (UsageError if own is UsageError else RenderError)(place + text)
        return RenderError(f"rank {rank}: {found.message['message']}")
    if found.exitcode < 0:
        hint = ": this machine may be out of memory" if found.signal_name() == "SIGKILL" else ""
        return RenderError(f"rank {rank} was killed by {found.signal_name()}{hint}")
    if found.exitcode == TERMINATED:
        return RenderError(f"rank {rank} was ended by SIGTERM")
    said = [line for log in folder.glob(f"*/*/{rank}/stderr.log") for line in log.read_text().splitlines()]
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    return RenderError(f"rank {rank} ended with status {found.exitcode}: {last}")


def _is_consequence(found: Any) -> bool:
    text = found.message["message"] if isinstance(found.message, dict) else ""
    return any(word in text for word in CONSEQUENCES)


def _was_stopped(found: Any, first: int) -> bool:
    """Whether the launcher ended this rank because of another's failure, the earliest of them at `first`."""
    if found.exitcode == -signal.SIGKILL:
        return found.timestamp >= first + GRACE - 1
    return found.exitcode in (TERMINATED, -signal.SIGTERM)
