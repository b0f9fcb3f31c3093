"""Whether a module does what its class says and no more: its weights can then be read without calling it."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

_LINEAR_FORWARD = torch.nn.Linear.forward


def linear_is_patched() -> bool:
    """Whether somebody exchanged the forward of all linear layers, as some quantisers do."""
    return torch.nn.Linear.forward is not _LINEAR_FORWARD


def plain_linear(linear: Any, x: torch.Tensor) -> bool:
    """Whether a product with `linear.weight` is all that calling it on `x` would be: no adapter, no quantised
    or cast weight, no hook."""
    return (
        type(linear) is torch.nn.Linear
        and type(linear.weight) is torch.nn.Parameter
        and linear.weight.dtype == x.dtype
        and untouched(linear)
        and not linear_is_patched()
    )


def untouched(module: torch.nn.Module) -> bool:
    """Whether calling the module runs its class's forward and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    of_all = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return not (hooks or of_all or hooked(module)) and has_no_forward_but(module, (type(module),))


def has_no_forward_but(module: Any, classes: Iterable[type]) -> bool:
    """Whether the module has no `forward` of its own, or one of these classes', which removed hooks leave."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    return (
        type(forward) is MethodType
        and forward.__self__ is module
        and any(forward.__func__ is each.forward for each in classes)
    )


def hooked(module: torch.nn.Module) -> bool:
    """Whether diffusers or accelerate wrap the forward: offloading, casting, caches, layer skipping."""
    # Attributes are slow to ask a module for where it has none.
    return wrapped(module.__dict__)


def wrapped(own: dict[str, Any]) -> bool:
    """`hooked`, by a module's own attributes."""
    registry = own.get("_diffusers_hook")
    # diffusers' cache_context leaves empty registries behind.
    return "_hf_hook" in own or (registry is not None and bool(registry.hooks))
