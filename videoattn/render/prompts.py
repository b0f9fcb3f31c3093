"""Prompts, encoded before anything else so that the text encoder may leave the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from videoattn.render.errors import RenderError
from videoattn.render.guard import require_finite
from videoattn.render.job import RenderJob
from videoattn.render.models import Loaded
from videoattn.render.settings import is_guided
from videoattn.render.sources import first_line

MAX_TOKENS = {"ltx": 128, "ltx2": 1024}
KEPT = 64


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A prompt's embeddings on the CPU: `(1, tokens, channels)` and its mask `(1, tokens)`."""

    embeds: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device) -> Embeddings:
        """A copy on the device."""
        return Embeddings(self.embeds.to(device), self.mask.to(device))


class PromptCache:
    """Embeddings of the latest prompts of one model, each encoded alone so that batches change nothing."""

    def __init__(self, loaded: Loaded, warn: Callable[[str], None]) -> None:
        self._loaded = loaded
        self._warn = warn
        self._known: dict[str, Embeddings] = {}

    def needed(self, jobs: Iterable[RenderJob]) -> list[str]:
        """The prompts of resolved jobs that were not encoded yet, in order, each once."""
        texts: dict[str, None] = {}
        for job in jobs:
            texts[job.prompt] = None
            if is_guided(job):
                texts[job.negative_prompt] = None
        return [text for text in texts if text not in self._known]

    def encode(self, texts: list[str], on_done: Callable[[int], None] = lambda done: None) -> None:
        """Encode prompts; the text encoder is on the device only meanwhile, unless offload hooks move it."""
        if not texts:
            return
        loaded = self._loaded
        encoder = loaded.pipe.text_encoder
        if loaded.resident:
            encoder.to(loaded.device)
        try:
            for index, text in enumerate(texts):
                self._known[text] = self._encode(text)
                on_done(index + 1)
        finally:
            if loaded.resident:
                encoder.to("cpu")
                torch.cuda.empty_cache()

    def get(self, text: str) -> Embeddings:
        """The embeddings of an encoded prompt, on the device."""
        found = self._known.pop(text)
        self._known[text] = found
        return found.to(self._loaded.device)

    def trim(self) -> None:
        """Forget the prompts used least recently beyond the newest few."""
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]

    @torch.no_grad()
    def _encode(self, text: str) -> Embeddings:
        pipe: Any = self._loaded.pipe
        limit = MAX_TOKENS[self._loaded.info.family]
        length = len(pipe.tokenizer(text.strip()).input_ids)
        if length > limit:
            self._warn(f"the prompt has {length} tokens, the model reads the first {limit}")
        try:
            embeds, mask, _, _ = pipe.encode_prompt(
                text,
                do_classifier_free_guidance=False,
                max_sequence_length=limit,
                device=self._loaded.device,
            )
        except ValueError as error:
            # A tokenizer that lacks one of its files says so only now.
            raise RenderError(f"the model cannot encode the prompt: {first_line(error)}") from None
        require_finite(embeds, "encode_prompt")
        return Embeddings(embeds.cpu(), mask.cpu())
