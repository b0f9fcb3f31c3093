"""Checks clips of the development set in a process of its own, beside the training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from videoattn.demo.evaluation import check_clips, check_pool, evaluation_set, tally

# Not the seed of the published prompts: nothing is chosen by those.
DEVELOPMENT_SEED = 5


def start_check(folder: Path, stage: str, step: int, clips: torch.Tensor) -> subprocess.Popen[bytes]:
    """Check clips `(count, 3, frames, height, width)` in [-1, 1]: half ask for one shape, half for two.

    The process appends its table to the folder's log.
    """
    path = folder / f"{stage}_{step}.npy"
    pixels = ((clips.clamp(-1, 1) + 1) * 127.5).round().byte().transpose(1, 2).cpu()
    np.save(path, pixels.numpy())
    return subprocess.Popen([sys.executable, "-m", __name__, str(path)])


def main() -> None:
    path = Path(sys.argv[1])
    clips = torch.from_numpy(np.load(path))
    path.unlink()
    wanted = evaluation_set(len(clips) // 2, len(clips) // 2, seed=DEVELOPMENT_SEED)
    with check_pool(8) as pool:
        table = tally(check_clips(clips, wanted.scenes, pool), wanted.scenes)
    line = json.dumps({"check": path.stem, **table})
    print(line, flush=True)
    with open(path.parent / "log.jsonl", "a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
