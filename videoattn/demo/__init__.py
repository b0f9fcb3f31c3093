"""A small LTX-Video model that ships with the package, trained on clips drawn from captions."""

from videoattn.demo.model import DEFAULTS, load_pipeline, warn_of_unknown_words, weights_path
from videoattn.demo.tokenizer import known_words, unknown_words

__all__ = [
    "DEFAULTS",
    "known_words",
    "load_pipeline",
    "unknown_words",
    "warn_of_unknown_words",
    "weights_path",
]
