"""The word-level tokenizer of the demo model's T5 encoder."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from videoattn.demo.captions import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
MAX_LENGTH = 128


@functools.cache
def word_ids() -> dict[str, int]:
    """Token id of every word."""
    return {word: index for index, word in enumerate([PAD, EOS, UNKNOWN, *vocabulary()])}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: lower case, words and punctuation apart, `</s>` last, unknown words `<unk>`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = word_ids()
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex("[-_]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"$A {EOS}", special_tokens=[(EOS, ids[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        padding_side="right",
    )


def known_words() -> list[str]:
    """The words that the demo model knows, sorted; punctuation is left out."""
    return sorted(word for word in vocabulary() if word.isalpha())


def unknown_words(prompt: str) -> list[str]:
    """The words of a prompt that the demo model doesn't know, in order, each once."""
    words = re.findall(r"\w+", prompt.lower().replace("_", " "))
    return list(dict.fromkeys(word for word in words if word not in word_ids()))
