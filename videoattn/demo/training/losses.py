"""Where the transformer's loss lies: by noise level, motion and shape, and in tokens that a shape passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from videoattn.demo.model import load_pipeline
from videoattn.demo.scenes import MOTIONS, SHAPES, Scenes
from videoattn.demo.training.dit import predict
from videoattn.demo.training.latents import LatentPool
from videoattn.demo.training.text import embed

SIGMAS = (0.1, 0.3, 0.5, 0.8, 0.95)
KINDS_AT = 0.8
# Mean distance of a token from the clip's median token, that is from the background, over its channels.
PASSED = 0.35


class _Recorded(LatentPool):
    """A pool that keeps the scenes it draws, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.drawn: list[Scenes] = []
        super().__init__(*arguments, **options)

    def _scenes(self) -> Scenes:
        self.drawn.append(super()._scenes())
        return self.drawn[-1]


@torch.no_grad()
def losses(
    weights: Path | None = None, clips: int = 640, device: str = "cpu", seed: int = 0, chunk: int = 64
) -> str:
    """Tables of the rectified-flow loss on drawn clips of one shape, for the pipeline in `weights`.

    One line a noise level: the loss, and its share in tokens that a shape passes. Then the loss by motion and
    shape at noise level 0.8.
    """
    torch.manual_seed(seed)
    pipe: Any = load_pipeline(torch.float32, weights=weights)
    pipe.to(device)
    pool = _Recorded(pipe.vae, clips, torch.device(device), [seed], chunk=chunk, two_shapes=0.0)
    # The pool draws once for the sizes of its buffers.
    scenes = Scenes.concatenate(pool.drawn[1:])
    clean, batch = pool.tokens.float(), pool.text
    distance = (clean - clean.median(1, keepdim=True).values).abs().mean(2)
    passed = distance > PASSED
    text = embed(pipe.text_encoder, batch.ids.long())
    lines = [
        f"shapes pass {passed.float().mean().item():.1%} of the tokens",
        "",
        "noise level  loss  share there",
    ]
    parts = list(zip(clean.split(chunk), text.split(chunk), batch.mask.split(chunk), strict=True))
    errors = {sigma: torch.cat([_error(pipe, sigma, *part) for part in parts]) for sigma in SIGMAS}
    for sigma, error in errors.items():
        share = (error[passed].sum() / error.sum()).item()
        lines.append(f"{sigma:11.2f}  {error.mean().item():.4f}  {share:.1%}")
    by_clip = errors[KINDS_AT].mean(1).cpu().numpy()
    lines += ["", f"{f'noise {KINDS_AT}':10}" + "".join(f"{name:>10}" for name in SHAPES)]
    for motion, name in enumerate(MOTIONS):
        rows = [
            (scenes.motion[:, 0] == motion) & (scenes.shape[:, 0] == shape) for shape in range(len(SHAPES))
        ]
        cells = [f"{by_clip[row].mean():10.4f}" if row.any() else f"{'–':>10}" for row in rows]
        lines.append(f"{name:10}" + "".join(cells))
    return "\n".join(lines)


def _error(
    pipe: Any, sigma: float, clean: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Squared error of the velocity, mean over channels: `(batch, tokens)`."""
    noise = torch.randn_like(clean)
    timestep = clean.new_full((len(clean),), 1000 * sigma)
    output = predict(pipe.transformer, torch.lerp(clean, noise, sigma), text, mask, timestep)
    return (output - (noise - clean)).square().mean(2)
