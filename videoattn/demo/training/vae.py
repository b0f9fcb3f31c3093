"""Stage 2: the video autoencoder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

from videoattn.demo.draw import draw, draw_shapes, make_tracks
from videoattn.demo.evaluation import evaluation_set
from videoattn.demo.scenes import BACKGROUND_RGB, COLOUR_RGB, HEIGHT, NUM_FRAMES, SHAPES, WIDTH, sample_scenes
from videoattn.demo.training.geometry import build_vae
from videoattn.demo.training.optimiser import Average, Optimiser, learning_rate, load_parameters
from videoattn.demo.training.session import Session
from videoattn.demo.training.verdict import DEVELOPMENT_SEED, start_check

KL_WEIGHT = 5e-5
CROWD = 4


def crowded_scenes(
    rng: np.random.Generator, batch: int, frames: int = NUM_FRAMES
) -> tuple[torch.Tensor, ...]:
    """Arguments of `draw_shapes` for clips of four mostly small shapes that move, turn and overlap at random.

    Captioned clips are nearly all flat background; these have several times their outlines, which are what
    the autoencoder finds hard.
    """
    n = (batch, CROWD)
    time = np.linspace(0, 1, frames, dtype=np.float32)
    radius = rng.choice([14.0, 14.0, 19.5, 28.0], size=n) * rng.uniform(0.9, 1.1, n)
    growth = np.where(rng.random(n) < 0.2, rng.uniform(0.5, 2.0, n), 1.0)
    centre = rng.uniform(0.05, 0.95, (2, *n)) * np.array([WIDTH, HEIGHT])[:, None, None]
    velocity = rng.uniform(-80, 80, (2, *n)) * (rng.random(n) < 0.6)
    wobble = rng.uniform(0, 20, n) * (rng.random(n) < 0.4)
    phase = rng.uniform(0, 2 * np.pi, (2, *n))
    wave = wobble[..., None] * np.sin(phase[..., None] + 2 * np.pi * rng.integers(1, 3, n)[..., None] * time)
    x, y = centre[..., None] + velocity[..., None] * (time - 0.5) + wave
    upright = rng.random(n) < 0.5
    spin = np.where(rng.random(n) < 0.4, rng.uniform(-6, 6, n), 0.0)
    angle = np.where(upright, 0.0, rng.uniform(0, 2 * np.pi, n))[..., None] + spin[..., None] * time
    radii = radius[..., None] * (1 + (growth[..., None] - 1) * time)
    colour = rng.integers(len(COLOUR_RGB), size=n)
    shape = rng.choice(len(SHAPES), size=n, p=[0.12, 0.16, 0.16, 0.32, 0.24])
    background = rng.integers(len(BACKGROUND_RGB), size=batch)
    arrays = (BACKGROUND_RGB[background], COLOUR_RGB[colour], shape, x, y, radii, angle)
    return tuple(
        torch.from_numpy(np.asarray(a, dtype=np.int64 if a is shape else np.float32)) for a in arrays
    )


def reconstruction_loss(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Absolute error, five times as heavy within two pixels of an outline, plus half the squared error."""
    frames = target.transpose(1, 2).flatten(0, 1)
    spread = F.max_pool2d(frames, 3, stride=1, padding=1) + F.max_pool2d(-frames, 3, stride=1, padding=1)
    outline = (spread.amax(1, keepdim=True) > 0.15).to(frames.dtype)
    outline = F.max_pool2d(outline, 5, stride=1, padding=2)
    error = output.transpose(1, 2).flatten(0, 1).float() - frames
    return (error.abs() * (1 + 4 * outline)).mean() + 0.5 * (error**2).mean()


class Codec(torch.nn.Module):
    """Encoder, sampling and decoder in one function for training."""

    def __init__(self, vae: AutoencoderKLLTXVideo) -> None:
        super().__init__()
        self.vae, self.channels = vae, vae.config["latent_channels"]

    def forward(self, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the reconstruction and the KL divergence per latent element."""
        channels = self.channels
        moments = self.vae.encoder(clip)
        mean, log_variance = moments[:, :channels].float(), moments[:, channels:].float().clamp(-30, 20)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return self.vae.decoder(latent.to(clip.dtype)), divergence


def train(
    folder: Path,
    minutes: float,
    total_minutes: float,
    *,
    batch_size: int = 16,
    peak: float = 1e-3,
    muon: bool = True,
    device: str = "cuda",
    seed: int = 0,
    check: int = 64,
) -> None:
    """Train the autoencoder for `minutes` of `total_minutes`, then check its reconstructions."""
    session = Session(folder, "vae", minutes, total_minutes, device)
    cuda = session.device.type == "cuda"
    torch.manual_seed(seed)
    vae: Any = build_vae()
    vae.to(session.device)
    if cuda:
        vae.to(memory_format=torch.channels_last_3d)
    optimiser = Optimiser(
        vae.named_parameters(),
        adam_only=("bias", "norm", "conv_in", "conv_out", "scale_shift_table"),
        betas=(0.9, 0.99),
        weight_decay=1e-3,
        muon=muon,
    )
    average = Average(vae, 0.998)
    state = session.load()
    if state is not None:
        load_parameters(vae, state["live"])
        if "optimiser" in state:
            optimiser.load_state_dict(state["optimiser"])
        average.load_state_dict(state["average"], session.step)
    rng = np.random.default_rng([seed, session.rank, session.step])
    torch.manual_seed(seed + 1000 * session.rank + session.step)
    codec: Any = Codec(vae)
    paint: Any = draw_shapes
    loss_of: Any = reconstruction_loss
    if cuda:
        codec, paint, loss_of = (torch.compile(f, dynamic=False) for f in (codec, paint, loss_of))

    def make_batch(crowd_share: float) -> torch.Tensor:
        crowd = round(batch_size * crowd_share)
        parts = [crowded_scenes(rng, crowd)] if crowd else []
        if crowd < batch_size:
            scenes = sample_scenes(rng, batch_size - crowd, 0.6)
            tracks = make_tracks(rng, scenes)
            pad = np.zeros((len(scenes), CROWD - 2, NUM_FRAMES), np.float32)
            radius = np.where(scenes.present[..., None], tracks.radius, 0.0)
            numbers = [np.concatenate([a, pad], 1) for a in (tracks.x, tracks.y, radius, tracks.angle)]
            extra = np.zeros((len(scenes), CROWD - 2), np.int64)
            colour, shape = (np.concatenate([a, extra], 1) for a in (scenes.colour, scenes.shape))
            arrays = (BACKGROUND_RGB[scenes.background], COLOUR_RGB[colour], shape, *numbers)
            parts.append(
                tuple(torch.from_numpy(np.asarray(a, np.int64 if a is shape else np.float32)) for a in arrays)
            )
        joined = (
            torch.cat(group).to(session.device, non_blocking=True) for group in zip(*parts, strict=True)
        )
        return paint(*joined)

    def one_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        clip = make_batch(0.5 if session.progress < 0.75 else 0.25)
        if cuda:
            clip = clip.to(memory_format=torch.channels_last_3d)
        with torch.autocast(session.device.type, torch.bfloat16, enabled=cuda):
            output, divergence = codec(clip)
        loss = loss_of(clip, output)
        (loss + KL_WEIGHT * divergence).backward()
        rate = learning_rate(peak, session.step, 100, session.progress, 0.4)
        norm = optimiser.step(rate)
        average.update()
        return loss.detach(), divergence.detach(), norm

    one_step()
    session.start()
    saved = session.clock
    while session.tick():
        loss, divergence, norm = one_step()
        if session.step % (200 if cuda else 20) == 0:
            session.log(
                loss=round(float(loss), 5), kl=round(float(divergence), 3), norm=round(float(norm), 3)
            )
        if session.clock - saved > 60:
            saved = session.clock
            session.save(
                live=vae.state_dict(), optimiser=optimiser.state_dict(), average=average.state_dict()
            )
    session.save(live=vae.state_dict(), optimiser=optimiser.state_dict(), average=average.state_dict())
    if session.rank == 0:
        finished = finish(folder, session.device)
        session.log(**measure(finished, folder, session.step, session.device, check))
    session.close()


def finish(folder: Path, device: torch.device) -> AutoencoderKLLTXVideo:
    """Save the averaged weights of `vae.pt` with the latents' mean and deviation, read off drawn clips."""
    state = torch.load(folder / "vae.pt", map_location="cpu")
    vae: Any = build_vae()
    load_parameters(vae, state["average"])
    vae.to(device).eval()
    rng = np.random.default_rng(7)
    parts = [sample_scenes(rng, 8, 0.6) for _ in range(32 if device.type == "cuda" else 1)]
    latents = torch.cat([encode(vae, draw(part, make_tracks(rng, part), device)) for part in parts])
    deviation = latents.std(dim=(0, 2, 3, 4))
    vae.latents_mean.copy_(latents.mean(dim=(0, 2, 3, 4)))
    # A channel that carries next to nothing must not be blown up to unit variance.
    vae.latents_std.copy_(deviation.clamp(min=0.1 * float(deviation.max())))
    vae.save_pretrained(folder / "vae.tmp")
    shutil.rmtree(folder / "vae", ignore_errors=True)
    (folder / "vae.tmp").rename(folder / "vae")
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKLLTXVideo, clips: torch.Tensor) -> torch.Tensor:
    """Mean latents of clips, not normalised, fp32."""
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=clips.is_cuda):
        return vae.encoder(clips)[:, : vae.config["latent_channels"]].float()


@torch.no_grad()
def measure(
    vae: AutoencoderKLLTXVideo, folder: Path, step: int, device: torch.device, count: int
) -> dict[str, float]:
    """Reconstruct withheld clips, half with two shapes, start their check, and return mean and least PSNR."""
    scenes = evaluation_set(count // 2, count // 2, seed=DEVELOPMENT_SEED).scenes
    rng = np.random.default_rng(11)
    outputs, errors = [], []
    for rows in np.array_split(np.arange(len(scenes)), max(1, len(scenes) // 8)):
        clip = draw(scenes[rows], make_tracks(rng, scenes[rows]), device)
        output = vae.decoder(vae.encoder(clip)[:, : vae.config["latent_channels"]]).clamp(-1, 1)
        errors.append(((output - clip) ** 2).mean(dim=(1, 2, 3, 4)).cpu())
        outputs.append(output)
    psnr = -10 * torch.log10(torch.cat(errors) / 4)
    start_check(folder, "vae", step, torch.cat(outputs))
    return {"psnr": round(float(psnr.mean()), 2), "psnr_min": round(float(psnr.min()), 2)}
