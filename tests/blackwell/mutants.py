"""Kernels with one planted bug: a copy of csrc, one edit, PTX."""

from __future__ import annotations

import re
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


def keep_kernel(sources: Path, name: str) -> None:
    """Leave only one of the kernels in the sources of its family; the others cost as much to compile."""
    path = sources / name.split("_")[1] / "attention.cu"
    text = path.read_text()
    lines = re.sub(r" *VIDEOATTN_ENTRY\(\w+\),", "", text).splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("VIDEOATTN_") or f"({name}," in line]
    assert len(kept) < len(lines)
    path.write_text("".join(kept).replace("kernels[] = {", f"kernels[] = {{VIDEOATTN_ENTRY({name})"))


def plant(folder: Path, source: str, edits: list[Edit], arch: str = "sm_100a") -> Module:
    """Compile csrc/`source` with `edits`."""
    return Module.from_file(compile_ptx(edited_sources(folder, edits) / source, arch))
