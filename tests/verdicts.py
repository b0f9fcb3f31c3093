"""A cache that holds the compiled library and no self-check's verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from videoattn.kernels import library, verify


def forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` that cache, for this process and its children, until `monkeypatch` ends; returns it."""
    (folder / "library").symlink_to(library.build().parents[1])
    monkeypatch.setenv("VIDEOATTN_CACHE", str(folder))
    monkeypatch.setattr(verify, "_known", {})
    return folder
