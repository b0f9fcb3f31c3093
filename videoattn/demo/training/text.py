"""Stage 1: the text encoder learns to bind attributes to shapes, before any picture is involved."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5EncoderModel

from videoattn.demo.captions import FIRST, SECOND, caption
from videoattn.demo.scenes import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, Scenes, sample_scenes
from videoattn.demo.tokenizer import MAX_LENGTH, build_tokenizer, word_ids
from videoattn.demo.training.geometry import TEXT_WIDTH, build_text_encoder
from videoattn.demo.training.optimiser import Average, Optimiser, learning_rate
from videoattn.demo.training.session import Session

# Longer than any caption with its `</s>`, and a multiple of 8.
TEXT_LENGTH = 40
IGNORE = -100


@dataclass
class TextBatch:
    """Captions as int64 tensors: token ids and, for each, what it speaks of and what should be known there.

    All are `(batch, TEXT_LENGTH)`, IGNORE where a caption doesn't say. `ids` is padded with 0.
    """

    ids: torch.Tensor
    part: torch.Tensor
    colour: torch.Tensor
    shape: torch.Tensor
    size: torch.Tensor
    motion: torch.Tensor
    background: torch.Tensor
    count: torch.Tensor

    def __getitem__(self, index) -> TextBatch:
        return TextBatch(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device | str) -> TextBatch:
        return TextBatch(*(getattr(self, f.name).to(device, non_blocking=True).long() for f in fields(self)))

    @property
    def mask(self) -> torch.Tensor:
        return self.ids != 0


def write_captions(rng: random.Random, scenes: Scenes) -> TextBatch:
    """Caption every scene of a batch; tensors are int16 on the CPU."""
    ids_of = word_ids()
    batch = len(scenes)
    names = [f.name for f in fields(TextBatch)]
    out = {name: np.full((batch, TEXT_LENGTH), IGNORE, dtype=np.int16) for name in names}
    out["ids"][:] = 0
    for row in range(batch):
        written = caption(rng, scenes, row)
        length = len(written.words)
        out["ids"][row, :length] = [ids_of[word] for word in written.words]
        out["ids"][row, length] = ids_of["</s>"]
        parts = np.array(written.parts)
        out["part"][row, :length] = parts
        out["count"][row, : length + 1] = int(scenes.present[row, 1])
        if written.says_background:
            out["background"][row, : length + 1] = scenes.background[row]
        for k, speaks_of in enumerate((FIRST, SECOND)):
            where = np.nonzero(parts == speaks_of)[0]
            for name in ("colour", "shape", "size"):
                out[name][row, where] = getattr(scenes, name)[row, k]
            if written.says_motion[k]:
                out["motion"][row, where] = scenes.motion[row, k]
    return TextBatch(**{name: torch.from_numpy(value) for name, value in out.items()})


class BindingHeads(nn.Module):
    """Linear read-outs at every token: what it speaks of, and all attributes of the shape it belongs to."""

    SIZES: ClassVar[dict[str, int]] = {
        "part": 4,
        "colour": len(COLOURS),
        "shape": len(SHAPES),
        "size": len(SIZES),
        "motion": len(MOTIONS),
        "background": len(BACKGROUNDS),
        "count": 2,
    }

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(TEXT_WIDTH, n) for name, n in self.SIZES.items()})

    def forward(self, embedding: torch.Tensor, batch: TextBatch) -> dict[str, torch.Tensor]:
        """Mean cross entropy of each read-out; 0 where no caption says what it asks for."""
        losses = {}
        for name, head in self.heads.items():
            wanted = getattr(batch, name).flatten()
            summed = F.cross_entropy(
                head(embedding).flatten(0, 1).float(), wanted, ignore_index=IGNORE, reduction="sum"
            )
            losses[name] = summed / (wanted != IGNORE).sum().clamp(min=1)
        return losses


def embed(encoder: T5EncoderModel, ids: torch.Tensor) -> torch.Tensor:
    """Embed captions as LTXPipeline does, padded to 128 tokens, no mask; returns the first TEXT_LENGTH."""
    padded = F.pad(ids, (0, MAX_LENGTH - ids.shape[1]))
    return encoder(padded).last_hidden_state[:, : ids.shape[1]]


@torch.no_grad()
def swap_distance(encoder: T5EncoderModel, first: str, second: str) -> float:
    """1 - cosine similarity of a word's embeddings in two prompts of the same words, mean over the words."""
    tokenizer = build_tokenizer()
    found = []
    for prompt in (first, second):
        ids = tokenizer(prompt, padding="max_length", max_length=MAX_LENGTH, return_tensors="pt").input_ids
        hidden = encoder(ids.to(encoder.device)).last_hidden_state[0].float()
        found.append({int(token): hidden[position] for position, token in enumerate(ids[0]) if token > 2})
    return float(np.mean([1 - float(F.cosine_similarity(found[0][t], found[1][t], dim=0)) for t in found[0]]))


SWAPS = (
    (
        "a white triangle moving left on a blue background",
        "a blue triangle moving left on a white background",
    ),
    (
        "a red circle moving up and a green square moving up on a black background",
        "a green circle moving up and a red square moving up on a black background",
    ),
)


def train(folder: Path, minutes: float, batch_size: int = 128, device: str = "cpu", seed: int = 0) -> None:
    """Train the text encoder for `minutes` and write `t5.pt`; its gates are printed with the last line."""
    session = Session(folder, "t5", minutes, minutes, device)
    torch.manual_seed(seed)
    rng, words_rng = np.random.default_rng(seed), random.Random(seed)
    encoder, heads = build_text_encoder(), BindingHeads()
    both = nn.ModuleDict({"encoder": encoder, "heads": heads}).to(session.device)
    optimiser = Optimiser(both.named_parameters(), adam_only=("shared", "bias", "heads"), muon=False)
    average = Average(both, 0.99)
    session.start()
    losses: dict[str, float] = {}
    while session.tick():
        batch = write_captions(words_rng, sample_scenes(rng, batch_size, 0.7)).to(session.device)
        parts = heads(embed(encoder, batch.ids), batch)
        torch.stack(list(parts.values())).sum().backward()
        optimiser.step(learning_rate(2e-3, session.step, 20, session.progress, 0.6))
        average.update()
        for name, value in parts.items():
            value = float(value.detach())
            losses[name] = 0.95 * losses.get(name, value) + 0.05 * value
        if session.step % 50 == 0:
            session.log(**{name: round(value, 4) for name, value in losses.items()})
    swaps = [round(swap_distance(encoder, *pair), 4) for pair in SWAPS]
    session.log(**{name: round(value, 4) for name, value in losses.items()}, swap_distances=swaps)
    session.save(model=average.state_dict())
