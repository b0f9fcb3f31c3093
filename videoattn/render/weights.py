"""Safetensors files: opened by their headers, so that a broken one is named before anything loads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from videoattn.render.errors import RenderError


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file; reads the header and checks it against the file's size.

    Raises RenderError if the file is damaged or cut short.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise RenderError(
            f"cannot load {path}: the safetensors file is corrupt or incomplete ({error})"
        ) from None


def open_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, memory-mapped."""
    tensor_names(path)
    return load_file(str(path))


def require_intact(folder: Path) -> None:
    """Raise RenderError naming the first damaged safetensors file under `folder`."""
    for path in sorted(folder.rglob("*.safetensors")):
        tensor_names(path)


def require_complete(name: str, module: torch.nn.Module, folder: Path) -> None:
    """Raise RenderError if a component's files lack a tensor of the module, which would stay random."""
    files = sorted((folder / name).glob("*.safetensors"))
    if not files:
        return
    stored = {tensor for path in files for tensor in tensor_names(path)}
    missing = sorted(set(module.state_dict()) - stored)
    if missing:
        raise RenderError(
            f"cannot load {folder / name}: {len(missing)} tensors are missing, the first is {missing[0]}"
        )
