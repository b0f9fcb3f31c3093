"""One call of the Blackwell kernel on the simulator."""

from __future__ import annotations

import torch

from videoattn.kernels import simulated
from videoattn.ptxsim import Report, Schedule

LAUNCH_REGISTERS = 128  # of a thread, from which setmaxnreg shifts


def simulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    lse: bool = False,
    grid: int = 1,
    splits: int = 1,
    arch: int = 100,
    schedule: Schedule | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Report]:
    """Output, LSE and report of BSHD tensors; a merge's findings join those of the kernel."""
    out, sums, (report, *merges) = simulated.run(
        q,
        k,
        v,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        arch=arch,
        kv_lengths=kv_lengths,
        return_lse=lse,
        grid=grid,
        splits=splits,
        gate=gate,
        schedule=schedule,
        registers=LAUNCH_REGISTERS,
    )
    for merge in merges:
        report.findings += merge.findings
    return out, sums, report
