"""One timed piece of training: processes, clock, log and checkpoints."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Session:
    """Keeps time and state for one stage in a run folder; every stage can stop and go on in a later process.

    The stage's clock counts training time over all its pieces. A piece ends after `minutes`, the stage after
    `total_minutes` on that clock; learning rates follow the latter. With
    `until`, seconds since 1970, both end then. Under torchrun each process has its own GPU and
    rank 0 decides.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        minutes: float,
        total_minutes: float,
        device: str,
        until: float | None = None,
    ) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
        self.folder, self.stage = folder, stage
        self.total = total_minutes * 60
        self.limit = minutes * 60
        self.until = until
        self.before = 0.0
        self.step = 0
        self.clock = 0.0
        self.started: float | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the clock: call it after compilation."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.started = time.monotonic()
        if self.until is not None:
            self.limit = self.until - time.time()
            self.total = self.before + self.limit

    def tick(self, every: int = 20) -> bool:
        """Count a step; false when this piece is over. The same answer in every process."""
        assert self.started is not None
        if self.step % every == 0 or self.world == 1:
            elapsed = time.monotonic() - self.started
            if self.world > 1:
                shared = torch.tensor([elapsed], dtype=torch.float64, device=self.device)
                dist.broadcast(shared, 0)
                elapsed = float(shared.item())
            self.clock = elapsed
        self.step += 1
        return self.clock < self.limit and self.before + self.clock < self.total

    @property
    def progress(self) -> float:
        """Share of the stage's time that is spent."""
        return min(1.0, (self.before + self.clock) / self.total)

    def log(self, **values: Any) -> None:
        if self.rank == 0:
            row = {
                "stage": self.stage,
                "step": self.step,
                "minutes": round((self.before + self.clock) / 60, 3),
            }
            line = json.dumps({**row, **values})
            print(line, flush=True)
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(line + "\n")

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.stage}.pt"

    def save(self, **state: Any) -> None:
        if self.rank == 0:
            state |= {"step": self.step, "clock": self.before + self.clock}
            temporary = self.checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(self.checkpoint)

    def load(self) -> dict[str, Any] | None:
        """State saved by an earlier piece, or None; sets step and clock.

        Without a checkpoint, `STAGE_average.pt` with averaged weights alone starts a new stage from those.
        """
        average = self.folder / f"{self.stage}_average.pt"
        if not self.checkpoint.exists():
            if not average.exists():
                return None
            weights = torch.load(average, map_location=self.device)
            return {"live": weights, "average": weights}
        state = torch.load(self.checkpoint, map_location=self.device)
        self.step, self.before = state["step"], state["clock"]
        return state

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()
