"""Stage 4: averaged weights become a `from_pretrained` folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline

from videoattn.demo.tokenizer import build_tokenizer
from videoattn.demo.training.dit import build
from videoattn.demo.training.geometry import build_scheduler
from videoattn.demo.training.optimiser import load_parameters

MAX_BYTES = 20_000_000


def export(run: Path, weights: Path) -> None:
    """Write the pipeline of a run folder to `weights` in fp16.

    Takes the averaged weights of `dit.pt`, or of `dit_average.pt` (fp16, what a finished run keeps) without
    it. Raises ValueError when the folder would be larger than 20 MB.
    """
    parts = build(run, torch.device("cpu"))
    small = run / "dit_average.pt"
    if (run / "dit.pt").exists():
        average = torch.load(run / "dit.pt", map_location="cpu")["average"]
    else:
        average = torch.load(small, map_location="cpu")
    load_parameters(parts, average)
    vae = AutoencoderKLLTXVideo.from_pretrained(run / "vae")
    # save_pretrained would write down where the weights came from.
    vae.register_to_config(_name_or_path="")
    pipeline = LTXPipeline(
        scheduler=build_scheduler(),
        vae=vae.half(),
        text_encoder=parts["encoder"].half(),  # pyright: ignore[reportArgumentType]
        tokenizer=build_tokenizer(),  # pyright: ignore[reportArgumentType]
        transformer=parts["transformer"].half(),  # pyright: ignore[reportArgumentType]
    )
    temporary = weights.with_name(weights.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipeline.save_pretrained(temporary)
    size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"the demo model takes {size} bytes; {MAX_BYTES} are allowed")
    shutil.rmtree(weights, ignore_errors=True)
    temporary.rename(weights)
    torch.save({name: value.half() for name, value in average.items()}, small)
    print(f"{weights}: {size} bytes")
