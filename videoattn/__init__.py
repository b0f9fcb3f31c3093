"""Hand-written Blackwell and Hopper attention for the LTX video transformers in diffusers."""

from videoattn.attention import attention
from videoattn.processors.install import install
from videoattn.version import __version__

__all__ = ["__version__", "attention", "install"]
