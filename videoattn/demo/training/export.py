"""Averaged weights become a `from_pretrained` folder, and such a folder a new run to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from torch import nn

from videoattn.demo.tokenizer import build_tokenizer
from videoattn.demo.training.dit import build
from videoattn.demo.training.geometry import build_scheduler, build_text_encoder, build_transformer
from videoattn.demo.training.optimiser import load_parameters
from videoattn.demo.training.text import BindingHeads

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


def unpack(weights: Path, run: Path) -> None:
    """Make a run folder whose stages start from the weights of a `from_pretrained` folder.

    The binding heads aren't shipped: they start anew.
    """
    run.mkdir(parents=True, exist_ok=True)
    parts: Any = nn.ModuleDict(
        {"transformer": build_transformer(), "encoder": build_text_encoder(), "heads": BindingHeads()}
    )
    stored: Any = LTXPipeline.from_pretrained(weights, local_files_only=True)
    load_parameters(parts["transformer"], dict(stored.transformer.named_parameters()))
    load_parameters(parts["encoder"], dict(stored.text_encoder.named_parameters()))
    torch.save(
        {name: value.detach().half() for name, value in parts.named_parameters()}, run / "dit_average.pt"
    )
    text = nn.ModuleDict({"encoder": parts["encoder"], "heads": parts["heads"]})
    torch.save({"model": {name: value.detach() for name, value in text.named_parameters()}}, run / "t5.pt")
    vae = {name: value.detach().half() for name, value in stored.vae.named_parameters()}
    torch.save(vae, run / "vae_average.pt")
    stored.vae.register_to_config(_name_or_path="")
    stored.vae.float().save_pretrained(run / "vae")
