"""Processes that run functions as the ranks of gloo or nccl groups, started once for many checks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 300


class Ranks:
    """Use as a context manager; `run` starts a fresh gloo group for every check, or keeps one nccl group."""

    def __init__(self, folder: Path, count: int = 4, backend: str = "gloo") -> None:
        self._folder = folder
        self._backend = backend
        self._checks = 0
        if backend == "nccl":
            # Importing diffusers asks for accelerators, after which CUDA refuses to start in a fork.
            context = multiprocessing.get_context("spawn")
        else:
            # The server imports once, and the ranks fork from it.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, "tests.processors.parallel_checks"])
        self._workers = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, check: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
        """What `check(*arguments)` returns on each rank; fails with the tracebacks of those that fail."""
        self._checks += 1
        store = self._folder / f"store{self._checks}"
        for rank in range(ranks):
            self._workers[rank][1].send((check, arguments, rank, ranks, str(store), self._backend))
        answers = []
        for rank, (process, pipe) in enumerate(self._workers[:ranks]):
            assert pipe.poll(SECONDS), f"rank {rank} does not answer: {process}"
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join(10)
                answers.append((False, f"it ended with exit code {process.exitcode}"))
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    while True:
        try:
            check, arguments, rank, ranks, store, backend = pipe.recv()
        except EOFError:
            break
        try:
            device = torch.device("cuda", rank) if backend == "nccl" else None
            if device is not None:
                torch.cuda.set_device(device)
            if not dist.is_initialized():
                dist.init_process_group(
                    backend, init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device
                )
            pipe.send((True, check(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            # A second nccl group in one process ended it on the GPUs tried, without a word.
            if dist.is_initialized() and backend != "nccl":
                dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
