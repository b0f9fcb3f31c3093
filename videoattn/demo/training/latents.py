"""A pool of encoded, captioned clips on the device, renewed bit by bit while the transformer trains."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

from videoattn.demo.draw import draw_shapes, make_tracks
from videoattn.demo.scenes import BACKGROUND_RGB, COLOUR_RGB, MOTIONS, SHAPES, Scenes, sample_scenes
from videoattn.demo.training.text import TextBatch, write_captions
from videoattn.demo.training.vae import encode

TWO_SHAPE_SHARE = 0.55
# Of a shape without points that moves straight, the loss is 1.
MOTION_LOSS = np.array(
    [{"circling": 3.5, "rotating": 3.5, "bouncing": 2.0, "growing": 1.5}.get(m, 1.0) for m in MOTIONS]
)
POINTED_LOSS = 2.0


def normalise(vae: AutoencoderKLLTXVideo, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the transformer sees them: `(batch, frames * height * width, channels)`."""
    mean = vae.latents_mean.view(1, -1, 1, 1, 1)
    deviation = vae.latents_std.view(1, -1, 1, 1, 1)
    return ((latents - mean) / deviation).flatten(2).transpose(1, 2)


def difficulty(scenes: Scenes) -> np.ndarray:
    """How hard scenes are to draw, from 1/7 to 1: `(batch,)`, of two shapes the harder one's.

    In proportion to the loss by motion and shape that docs/measured/demo_model.md lists.
    """
    pointed = np.isin(scenes.shape, (SHAPES.index("star"), SHAPES.index("cross")))
    turning = scenes.motion == MOTIONS.index("rotating")
    loss = MOTION_LOSS[scenes.motion] * np.where(pointed & ~turning, POINTED_LOSS, 1.0)
    return (loss * scenes.present).max(1) / (MOTION_LOSS.max() * POINTED_LOSS)


class LatentPool:
    """`size` clips drawn at random, as bfloat16 tokens with their captions.

    `two_shapes` is the share of clips with two; in a share `hard_share`, scenes are as frequent as difficult.
    """

    def __init__(
        self,
        vae: AutoencoderKLLTXVideo,
        size: int,
        device: torch.device,
        seed: list[int],
        chunk: int = 128,
        two_shapes: float = TWO_SHAPE_SHARE,
        hard_share: float = 0.0,
    ) -> None:
        self.vae, self.device, self.chunk = vae, device, min(chunk, size)
        self.two_shapes, self.hard_share = two_shapes, hard_share
        self.rng, self.words_rng = np.random.default_rng(seed), random.Random(str(seed))
        self.paint, self.encode = draw_shapes, encode
        if device.type == "cuda":
            self.paint = torch.compile(draw_shapes, dynamic=False)
        first, text = self._make()
        self.tokens = torch.empty((size, *first.shape[1:]), dtype=torch.bfloat16, device=device)
        self.text = TextBatch(
            *(getattr(text, f.name).new_empty((size, text.ids.shape[1])).to(device) for f in fields(text))
        )
        self.cursor = 0
        for _ in range(-(-size // self.chunk)):
            self.renew()

    def _scenes(self) -> Scenes:
        chosen = round(self.hard_share * self.chunk)
        parts = [sample_scenes(self.rng, self.chunk - chosen, self.two_shapes)]
        while chosen > 0:
            drawn = sample_scenes(self.rng, self.chunk, self.two_shapes)
            kept = self.rng.random(self.chunk) < difficulty(drawn)
            parts.append(drawn[np.nonzero(kept)[0][:chosen]])
            chosen -= len(parts[-1])
        return Scenes.concatenate(parts)

    def _make(self) -> tuple[torch.Tensor, TextBatch]:
        scenes = self._scenes()
        tracks = make_tracks(self.rng, scenes)
        radius = np.where(scenes.present[..., None], tracks.radius, 0.0).astype(np.float32)
        arrays = (
            BACKGROUND_RGB[scenes.background],
            COLOUR_RGB[scenes.colour],
            scenes.shape,
            tracks.x,
            tracks.y,
        )
        arguments = [torch.from_numpy(a).to(self.device) for a in (*arrays, radius, tracks.angle)]
        with torch.no_grad():
            clips = self.paint(*arguments)
            if clips.is_cuda:
                clips = clips.to(memory_format=torch.channels_last_3d)
            tokens = torch.cat([normalise(self.vae, self.encode(self.vae, part)) for part in clips.split(64)])
        return tokens, write_captions(self.words_rng, scenes)

    def renew(self) -> None:
        """Replace the oldest clips by new ones."""
        tokens, text = self._make()
        start = min(self.cursor, len(self.tokens) - self.chunk)
        self.tokens[start : start + self.chunk] = tokens
        for f in fields(TextBatch):
            getattr(self.text, f.name)[start : start + self.chunk] = getattr(text, f.name).to(self.device)
        self.cursor = (start + self.chunk) % len(self.tokens)

    def batch(self, size: int) -> tuple[torch.Tensor, TextBatch]:
        """Random clips: tokens fp32 and captions."""
        rows = torch.randint(len(self.tokens), (size,), device=self.device)
        return self.tokens[rows].float(), self.text[rows].to(self.device)
