"""Optimiser, learning-rate schedule and weight averaging of the demo model's training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Replace the singular values of a batch of matrices `(n, rows, columns)` by about 1.

    Quintic Newton-Schulz iteration with the coefficients of Muon (Jordan et al., 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class Optimiser:
    """Muon for weight matrices inside the network, AdamW for all other parameters.

    Muon's update is scaled by 0.2 sqrt(max(rows, columns)), so that its size matches AdamW's and both share
    one learning rate (Liu et al., "Muon is scalable for LLM training", 2025). Convolutions count as
    matrices of output channels by everything else.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        adam_only: tuple[str, ...],
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        muon: bool = True,
    ) -> None:
        self.parameters: list[nn.Parameter] = []
        self.weight_decay, self.momentum = weight_decay, momentum
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            self.parameters.append(parameter)
            if muon and parameter.ndim >= 2 and not any(part in name for part in adam_only):
                groups[(parameter.shape[0], parameter[0].numel())].append(parameter)
            else:
                rest.append(parameter)
        self.groups = list(groups.items())
        self.buffers = [
            torch.zeros((len(members), *shape), device=members[0].device) for shape, members in self.groups
        ]
        self.adam = torch.optim.AdamW(
            rest, lr=0.0, betas=betas, weight_decay=weight_decay, fused=rest[0].is_cuda
        )

    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float = 1.0) -> torch.Tensor:
        """Average gradients over processes, clip, update and clear them; returns the gradient norm before."""
        if dist.is_initialized():
            average_over_processes([p.grad for p in self.parameters if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(self.parameters, max_norm)
        for (shape, members), buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad.reshape(shape) for p in members])  # pyright: ignore[reportOptionalMemberAccess]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = 0.2 * math.sqrt(max(shape))
            data = [p.data for p in members]
            torch._foreach_mul_(data, 1 - learning_rate * self.weight_decay)  # pyright: ignore[reportPrivateImportUsage]
            updates = [u.reshape(p.shape) for u, p in zip(update.unbind(0), members, strict=True)]
            torch._foreach_add_(data, updates, alpha=-learning_rate * scale)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def state_dict(self) -> dict:
        return {"buffers": self.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def average_over_processes(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their mean over all processes, in place, in one message."""
    flat = torch._utils._flatten_dense_tensors(tensors)  # pyright: ignore[reportAttributeAccessIssue]
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    parts = torch._utils._unflatten_dense_tensors(flat, tensors)  # pyright: ignore[reportAttributeAccessIssue]
    torch._foreach_copy_(tensors, list(parts))  # pyright: ignore[reportPrivateImportUsage]


class Average:
    """Exponential moving average of a module's parameters, with a warm-up of its decay."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.live = list(module.parameters())
        self.names = [name for name, _ in module.named_parameters()]
        self.kept = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.kept, [p.data for p in self.live], 1 - decay)  # pyright: ignore[reportPrivateImportUsage]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.kept, strict=True))

    def load_state_dict(self, state: dict[str, torch.Tensor], steps: int) -> None:
        self.steps = steps
        for name, kept in zip(self.names, self.kept, strict=True):
            kept.copy_(state[name])


def load_parameters(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy parameters named as `named_parameters` names them: a tied one once."""
    for name, parameter in module.named_parameters():
        parameter.data.copy_(state[name])


def learning_rate(peak: float, step: int, warmup: int, progress: float, decay_from: float) -> float:
    """Linear warm-up over `warmup` steps, constant, then linear to 0 from `decay_from` of the time on."""
    ramp = min(1.0, (step + 1) / warmup)
    fall = 1.0 if progress < decay_from else max(0.0, (1.0 - progress) / (1.0 - decay_from))
    return peak * ramp * fall
