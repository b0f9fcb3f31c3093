"""NaN and Inf stop a render where they appear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from videoattn.render.errors import NonFinite


def require_finite(tensor: torch.Tensor, stage: str) -> None:
    """Raise NonFinite if any element is NaN or Inf; waits for the device."""
    if not bool(torch.isfinite(tensor).all()):
        what = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
        raise NonFinite(what, stage)


@contextmanager
def finite_outputs(modules: dict[str, torch.nn.Module], stage: str) -> Iterator[None]:
    """Check what each of the modules returns while the context lasts, under the name `stage (part)`."""
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, output, part=part: _check_output(output, f"{stage} ({part})")
        )
        for part, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_output(output: Any, stage: str) -> None:
    if isinstance(output, torch.Tensor):
        require_finite(output, stage)
    elif isinstance(output, (tuple, list)):
        for item in output:
            _check_output(item, stage)
