"""Stage 3: the transformer, together with the text encoder."""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
from torch import nn

from videoattn.demo.evaluation import evaluation_set
from videoattn.demo.scenes import FRAME_RATE, HEIGHT, NUM_FRAMES, WIDTH, sample_scenes
from videoattn.demo.tokenizer import build_tokenizer
from videoattn.demo.training.geometry import (
    LATENT_CHANNELS,
    build_scheduler,
    build_text_encoder,
    build_transformer,
)
from videoattn.demo.training.latents import TWO_SHAPE_SHARE, LatentPool
from videoattn.demo.training.optimiser import Average, Optimiser, learning_rate, load_parameters
from videoattn.demo.training.session import Session
from videoattn.demo.training.text import IGNORE, TEXT_LENGTH, BindingHeads, TextBatch, embed, write_captions
from videoattn.demo.training.verdict import DEVELOPMENT_SEED, start_check

CAPTION_DROPOUT = 0.1
BINDING_WEIGHT = 0.1
CONDITION_EVERY = 6
LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH = (NUM_FRAMES - 1) // 4 + 1, HEIGHT // 16, WIDTH // 16
TOKENS_PER_FRAME = LATENT_HEIGHT * LATENT_WIDTH
ROPE_SCALE = (4 / FRAME_RATE, 16, 16)


class FixedRotary(nn.Module):
    """The transformer's rotary embedding, computed once: all clips of the training have one size."""

    def __init__(self, transformer: LTXVideoTransformer3DModel, device: torch.device) -> None:
        super().__init__()
        tokens = torch.empty((1, 1, 1), device=device)
        size = (LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH)
        cos, sin = transformer.rope(tokens, *size, rope_interpolation_scale=ROPE_SCALE)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, *_arguments, **_keywords) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos, self.sin  # pyright: ignore[reportReturnType]


def build(folder: Path, device: torch.device) -> nn.ModuleDict:
    """Transformer, text encoder and binding heads, the latter two as stage 1 left them."""
    both = nn.ModuleDict({"encoder": build_text_encoder(), "heads": BindingHeads()})
    load_parameters(both, torch.load(folder / "t5.pt", map_location="cpu")["model"])
    transformer = build_transformer()
    nn.init.zeros_(transformer.proj_out.weight)
    parts = nn.ModuleDict({"transformer": transformer, "encoder": both["encoder"], "heads": both["heads"]})
    return parts.to(device)


def drop_captions(batch: TextBatch, rate: float) -> TextBatch:
    """Replace a share of the captions by the empty one."""
    dropped = torch.rand(len(batch.ids), 1, device=batch.ids.device) < rate
    empty = torch.zeros_like(batch.ids)
    empty[:, 0] = 1
    values = {f.name: torch.where(dropped, IGNORE, getattr(batch, f.name)) for f in fields(batch)}
    values["ids"] = torch.where(dropped, empty, batch.ids)
    return TextBatch(**values)


def sample_sigmas(batch: int, device: torch.device) -> torch.Tensor:
    """Noise levels: sigmoid of N(0.4, 1.2), a tenth of them uniform."""
    sigma = torch.sigmoid(0.4 + 1.2 * torch.randn(batch, device=device))
    return torch.where(torch.rand(batch, device=device) < 0.1, torch.rand(batch, device=device), sigma)


def predict(
    transformer: nn.Module,
    noisy: torch.Tensor,
    text: torch.Tensor,
    mask: torch.Tensor,
    timestep: torch.Tensor,
) -> torch.Tensor:
    return transformer(
        hidden_states=noisy,
        encoder_hidden_states=text,
        timestep=timestep,
        encoder_attention_mask=mask,
        num_frames=LATENT_FRAMES,
        height=LATENT_HEIGHT,
        width=LATENT_WIDTH,
        rope_interpolation_scale=ROPE_SCALE,
        return_dict=False,
    )[0]


def flow_loss(
    parts: nn.ModuleDict, clean: torch.Tensor, batch: TextBatch, condition: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rectified-flow loss, with the first latent frame given when `condition`, and the binding losses."""
    text = embed(parts["encoder"], batch.ids)  # pyright: ignore[reportArgumentType]
    binding = parts["heads"](text, batch)
    sigma = sample_sigmas(len(clean), clean.device)
    noise = torch.randn_like(clean)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    timestep = 1000 * sigma
    target = noise - clean
    if condition:
        noisy[:, :TOKENS_PER_FRAME] = clean[:, :TOKENS_PER_FRAME]
        timestep = timestep[:, None].repeat(1, clean.shape[1])
        timestep[:, :TOKENS_PER_FRAME] = 0
    output = predict(parts["transformer"], noisy, text, batch.mask, timestep).float()
    error = (output - target) ** 2
    return (error[:, TOKENS_PER_FRAME:] if condition else error).mean(), binding


def train(
    folder: Path,
    minutes: float,
    total_minutes: float,
    *,
    batch_size: int = 256,
    peak: float = 1.5e-3,
    pool_size: int = 32768,
    device: str = "cuda",
    seed: int = 0,
    evaluate_every: float = 120.0,
    check: int = 128,
    decay_from: float = 0.55,
    until: float | None = None,
    two_shapes: float = TWO_SHAPE_SHARE,
    hard_share: float = 0.0,
) -> None:
    """Train the transformer and the text encoder for `minutes` of `total_minutes`.

    Needs `t5.pt` in the folder, and waits for `vae/` to appear once it has compiled. Writes `dit.pt`, and
    every `evaluate_every` seconds clips of a development set, which a second process checks.
    """
    session = Session(folder, "dit", minutes, total_minutes, device, until)
    cuda = session.device.type == "cuda"
    torch.manual_seed(seed)
    parts = build(folder, session.device)
    transformer: Any = parts["transformer"]
    transformer.rope = FixedRotary(transformer, session.device)  # pyright: ignore
    optimiser = Optimiser(
        parts.named_parameters(),
        adam_only=("bias", "norm", "scale_shift_table", "proj_in", "proj_out", "shared", "heads", "encoder"),
    )
    average = Average(parts, 0.9995)
    state = session.load()
    if state is not None:
        load_parameters(parts, state["live"])
        if "optimiser" in state:
            optimiser.load_state_dict(state["optimiser"])
        average.load_state_dict(state["average"], session.step)
    if cuda:
        transformer.compile_repeated_blocks(dynamic=False)  # pyright: ignore

    def losses(clean: torch.Tensor, batch: TextBatch, condition: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(session.device.type, torch.bfloat16, enabled=cuda):
            loss, binding = flow_loss(parts, clean, drop_captions(batch, CAPTION_DROPOUT), condition)
        bound = torch.stack(list(binding.values())).sum()
        (loss + BINDING_WEIGHT * bound).backward()
        return loss.detach(), bound.detach()

    blank = torch.zeros(
        (batch_size, TOKENS_PER_FRAME * LATENT_FRAMES, LATENT_CHANNELS), device=session.device
    )
    scenes = sample_scenes(np.random.default_rng(0), batch_size)
    captions = write_captions(random.Random(0), scenes).to(session.device)
    for condition in (False, True):
        losses(blank, captions, condition)
        parts.zero_grad(set_to_none=True)
    session.log(compiled=True)
    while not (folder / "vae").exists():
        time.sleep(0.5)
    vae: Any = AutoencoderKLLTXVideo.from_pretrained(folder / "vae")
    vae.to(session.device).eval()
    if cuda:
        vae.to(memory_format=torch.channels_last_3d)  # pyright: ignore
    seeds = [seed, session.rank, session.step]
    pool = LatentPool(vae, pool_size, session.device, seeds, two_shapes=two_shapes, hard_share=hard_share)
    torch.manual_seed(seed + 1000 * session.rank + session.step + 1)

    def one_step(condition: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values = losses(*pool.batch(batch_size), condition)
        optimiser.step(learning_rate(peak, session.step, 300, session.progress, decay_from))
        average.update()
        return values

    def save() -> None:
        live = dict(parts.state_dict())
        session.save(live=live, optimiser=optimiser.state_dict(), average=average.state_dict())

    session.start()
    saved = evaluated = session.clock
    mean_loss, mean_bound = one_step(False)
    while session.tick():
        condition = session.step % CONDITION_EVERY == 0
        loss, bound = one_step(condition)
        if not condition:
            mean_loss = torch.lerp(loss, mean_loss, 0.99)
            mean_bound = torch.lerp(bound, mean_bound, 0.99)
        if session.step % 16 == 0:
            pool.renew()
        if session.step % (250 if cuda else 10) == 0:
            session.log(loss=round(float(mean_loss), 4), binding=round(float(mean_bound), 4))
        if session.clock - saved > 45:
            saved = session.clock
            save()
        if session.clock - evaluated > evaluate_every:
            evaluated = session.clock
            if session.rank == 0:
                generate_and_check(folder, session.step, average, vae, session.device, check)
    save()
    session.log(loss=round(float(mean_loss), 4), binding=round(float(mean_bound), 4))
    if session.rank == 0:
        generate_and_check(folder, session.step, average, vae, session.device, check).wait()
    session.close()


@torch.no_grad()
def sample(
    transformer: nn.Module,
    text: torch.Tensor,
    mask: torch.Tensor,
    seeds: list[int],
    steps: int = 12,
    guidance: float = 3.0,
) -> torch.Tensor:
    """Tokens of generated clips; the second half of `text` and `mask` belongs to the empty prompt."""
    shape = (1, TOKENS_PER_FRAME * LATENT_FRAMES, LATENT_CHANNELS)  # pyright: ignore
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    latents = torch.cat(noise).to(text.device)
    scheduler: Any = build_scheduler()
    scheduler.set_timesteps(sigmas=list(np.linspace(1.0, 1 / steps, steps)), device=text.device)
    for timestep in scheduler.timesteps:
        double = torch.cat([latents, latents])
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            both = predict(transformer, double, text, mask, timestep.expand(len(double)))
        with_text, without = both.float().chunk(2)
        latents = scheduler.step(
            without + guidance * (with_text - without), timestep, latents, return_dict=False
        )[0]
    return latents


@torch.no_grad()
def generate_and_check(
    folder: Path, step: int, average: Average, vae: AutoencoderKLLTXVideo, device: torch.device, count: int
) -> subprocess.Popen[bytes]:
    """Generate clips of the development set with the averaged weights and start their check."""
    wanted = evaluation_set(count // 2, count // 2, seed=DEVELOPMENT_SEED)
    parts = build(folder, device)
    load_parameters(parts, average.state_dict())
    tokenizer = build_tokenizer()
    prompts = wanted.prompts + [""] * len(wanted)
    coded = tokenizer(prompts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").to(device)
    text = embed(parts["encoder"], coded.input_ids)  # pyright: ignore
    tokens = sample(parts["transformer"], text, coded.attention_mask, wanted.seeds)
    latents = tokens.transpose(1, 2).unflatten(2, (LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH))
    latents = latents * vae.latents_std.view(1, -1, 1, 1, 1) + vae.latents_mean.view(1, -1, 1, 1, 1)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        clips = torch.cat([vae.decoder(part).float() for part in latents.split(16)])
    return start_check(folder, "dit", step, clips)
