"""Hand-written Blackwell and Hopper attention for the LTX video transformers in diffusers."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from videoattn.version import __version__

if TYPE_CHECKING:
    from videoattn.attention import attention
    from videoattn.processors.install import install, uninstall
    from videoattn.processors.regions import compile_blocks, cuda_graphs
    from videoattn.timing import record_timing

__all__ = [
    "__version__",
    "attention",
    "compile_blocks",
    "cuda_graphs",
    "install",
    "record_timing",
    "uninstall",
]

# Imported when first asked for, so that the command answers --help and reads a clip without loading torch.
_HOMES = {
    "attention": "videoattn.attention",
    "compile_blocks": "videoattn.processors.regions",
    "cuda_graphs": "videoattn.processors.regions",
    "install": "videoattn.processors.install",
    "record_timing": "videoattn.timing",
    "uninstall": "videoattn.processors.install",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'videoattn' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the submodule binds its name here; `videoattn.attention` stays the function.
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
