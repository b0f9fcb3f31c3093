"""Hand-written Blackwell and Hopper attention for the LTX video transformers in diffusers."""

from videoattn.attention import attention
from videoattn.timing import record_timing
from videoattn.version import __version__

__all__ = ["__version__", "attention", "record_timing"]
