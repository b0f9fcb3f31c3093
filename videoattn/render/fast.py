"""`--fast`: what measured best on a machine like this one. The table below is the only place that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from videoattn.dispatch import device_capability
from videoattn.processors.levels import CALL, Level
from videoattn.render.devices import device_name
from videoattn.render.job import RenderJob


@dataclass(frozen=True, slots=True)
class Setup:
    """What a render turns on.

    `graph_tokens` bounds the forwards that replay a CUDA graph, batch times sequence; 0 for none. `because`
    is the measurement that says so.
    """

    because: str
    compile: bool = False
    level: Level = CALL
    under_compile: Any = "triton"
    graph_tokens: int = 0

    @property
    def regions(self) -> list[str]:
        """One phrase for each way in which launches are saved."""
        compiled = ["compiled blocks"] if self.compile else []
        return compiled + ([f"CUDA graphs up to {self.graph_tokens} tokens"] if self.graph_tokens else [])

    @property
    def parts(self) -> list[str]:
        """One phrase for each thing that is on."""
        return ([] if self.level == CALL else [f"fused work at level {self.level}"]) + self.regions


# By GPU family, the major number of its compute capability. An entry is a measurement, by bench_denoise.py or
# what it prints; a family without one renders as usual.
MEASURED: dict[int, Setup] = {
    9: Setup(
        "on one H200, 2026-12-01, a forward of LTX-2.3 took 2.09 s in place of 2.92 s at 28160 tokens and "
        "0.39 s in place of 0.58 s at 7040; compiled blocks 2.42 and 0.43 s",
        level="block",
        graph_tokens=49152,
    ),
}
NOTHING = Setup("")


@dataclass(frozen=True, slots=True)
class Fast:
    """What `--fast` comes to for a job on a device; `says` tells it in one line."""

    setup: Setup
    says: str

    @property
    def anything(self) -> bool:
        """Whether something is on that would not be without `--fast`."""
        return bool(self.setup.parts)


def fast(job: RenderJob, device: torch.device, *, shared: bool = False) -> Fast | None:
    """What `--fast` turns on for that job there; None for a job without it. `shared`: by several ranks."""
    if not job.fast:
        return None
    capability = device_capability(device)
    if capability is None:
        return Fast(NOTHING, f"--fast: nothing faster is known on {device.type}, rendering as usual")
    name = device_name(device)
    setup = MEASURED.get(capability[0])
    if setup is None:
        return Fast(NOTHING, f"--fast: nothing was measured on {name} or its family, rendering as usual")
    if shared:
        return Fast(NOTHING, "--fast: nothing was measured with several ranks, rendering as usual")
    if job.offload != "none" or job.dtype == "fp8":
        return Fast(NOTHING, "--fast: nothing was measured with offloaded or fp8 weights, rendering as usual")
    return Fast(setup, f"--fast on {name}: {', '.join(setup.parts)} ({setup.because})")
