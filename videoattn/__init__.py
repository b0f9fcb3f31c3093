"""Hand-written Blackwell and Hopper attention for the LTX video transformers in diffusers."""

from typing import TYPE_CHECKING, Any

from videoattn.attention import attention
from videoattn.version import __version__

if TYPE_CHECKING:
    from videoattn.processors.install import install

__all__ = ["__version__", "attention", "install"]


def __getattr__(name: str) -> Any:
    # Its compiler hooks import torch's compiler, which takes seconds that a mere import should not.
    if name == "install":
        from videoattn.processors.install import install

        return install
    raise AttributeError(f"module 'videoattn' has no attribute '{name}'")
