"""Kernels with one planted bug: a copy of csrc, one edit, PTX."""

from __future__ import annotations

import shutil
from pathlib import Path

from videoattn.kernels import library
from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Module

Edit = tuple[str, str, str]


def edited_sources(folder: Path, edits: list[Edit]) -> Path:
    """A copy of csrc with `edits`, each (file, text, replacement); each text must occur."""
    copy = folder / "csrc"
    shutil.copytree(library.SOURCES, copy)
    for file, text, replacement in edits:
        path = copy / file
        original = path.read_text()
        assert text in original, f"{file} no longer contains {text!r}"
        path.write_text(original.replace(text, replacement))
    return copy


def plant(folder: Path, source: str, edits: list[Edit], arch: str = "sm_100a") -> Module:
    """Compile csrc/`source` with `edits`."""
    return Module.from_file(compile_ptx(edited_sources(folder, edits) / source, arch))
