"""One rank of a clip that several share: what it is asked for, and its process when the command starts it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel
from rich.console import Console

from videoattn.processors.parallel.degrees import Degrees
from videoattn.render.errors import UsageError
from videoattn.render.job import RenderJob

INTERRUPTED, TERMINATED = 130, 143


class Request(BaseModel):
    """One clip and its files, the same on every rank; `device` is `cpu` or `cuda`."""

    job: RenderJob
    degrees: str
    output: Path
    poster: Path | None = None
    preview: Path | None = None
    timing: Path | None = None
    compare: tuple[str, ...] = ()
    device: str = "cpu"
    local_files_only: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among the ranks: its number, how many there are, its number on this machine."""

    index: int
    count: int
    local: int

    @property
    def first(self) -> bool:
        """Whether this rank reports, decodes and writes."""
        return self.index == 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Rank | None:
        """What torchrun says in a process that it started; None in any other."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environment for name in names):
            return None
        return cls(*(int(environment[name]) for name in names[:3]))


def take_part(request: Request, rank: Rank, *, out: Console, err: Console) -> None:
    """Join the other ranks and render; the first one shows progress and writes the files."""
    import torch
    import torch.distributed as dist

    from videoattn.render import models
    from videoattn.render.printing import print_result
    from videoattn.render.progress import Terminal
    from videoattn.render.run import Renderer

    degrees = Degrees.parse(request.degrees)
    if rank.count != degrees.ranks:
        raise UsageError(
            f"--context-parallel {degrees} takes {degrees.ranks} ranks, and torchrun started {rank.count}"
        )
    models.quiet()
    name = request.device
    if name == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.count))
        dist.init_process_group("gloo")
    else:
        name = f"cuda:{rank.local}"
        torch.cuda.set_device(rank.local)
        dist.init_process_group("nccl", device_id=torch.device(name))
    renderer = Renderer(device=name, local_files_only=request.local_files_only, parallel=degrees)
    if rank.first:
        files = {name: getattr(request, name) for name in ("output", "poster", "preview", "timing")}
        with Terminal(err) as progress:
            result = renderer.render(request.job, compare=request.compare, progress=progress, **files)
        print_result(result, (request.poster, request.preview, request.timing), out=out, err=err)
    else:
        renderer.follow(request.job)
    dist.destroy_process_group()


def main() -> None:
    """`python -m videoattn.render.rank PARENT REQUEST`: leaves it to the parent to tell an error."""
    from videoattn.jobs import lifeline

    lifeline.die_with_parent(int(sys.argv[1]))
    # A lost peer is told in one line, not by a backtrace from C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    signal.signal(signal.SIGTERM, _on_terminate)
    rank = Rank.of(os.environ)
    assert rank is not None
    out = Console(highlight=False, soft_wrap=True)
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        take_part(Request.model_validate_json(sys.argv[2]), rank, out=out, err=err)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except SystemExit:
        _leave(TERMINATED)
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        _leave(getattr(error, "exit_code", 1))


def _on_terminate(*_: object) -> NoReturn:
    raise SystemExit


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # The regular way out may wait for ever for a peer that is gone.
    os._exit(status)


if __name__ == "__main__":
    main()
