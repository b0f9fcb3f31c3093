"""The fixed prompts by which the demo model is judged, and the tables of results."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch

from videoattn.demo.captions import caption
from videoattn.demo.checker import ATTRIBUTES, compare, look
from videoattn.demo.scenes import Scenes, sample_scenes

ONE_SHAPE, TWO_SHAPES = 192, 64


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts with the scene each asks for and the seed it is rendered with."""

    prompts: list[str]
    seeds: list[int]
    scenes: Scenes

    def __len__(self) -> int:
        return len(self.prompts)


def evaluation_set(
    one_shape: int = ONE_SHAPE, two_shapes: int = TWO_SHAPES, seed: int = 2024
) -> EvaluationSet:
    """Prompts of withheld combinations: `one_shape` with one shape, then `two_shapes` with two.

    Without arguments, the 256 prompts and seeds that the published table is about.
    """
    rng, words_rng = np.random.default_rng(seed), random.Random(seed)
    two = np.arange(one_shape + two_shapes) >= one_shape
    scenes = sample_scenes(rng, len(two), two, held_out=True)
    prompts = [caption(words_rng, scenes, k, drop=False).text for k in range(len(two))]
    return EvaluationSet(prompts, [10_000 + k for k in range(len(two))], scenes)


def _check_one(job: tuple[np.ndarray, Scenes, int]) -> dict[str, bool]:
    clip, scenes, index = job
    pixels = torch.from_numpy(clip).float() / 255
    return compare(look(pixels, int(scenes.present[index].sum())), scenes, index)


def check_clips(clips: torch.Tensor, scenes: Scenes, pool: Executor | None = None) -> list[dict[str, bool]]:
    """Check uint8 clips `(batch, frames, 3, height, width)` against their scenes, one job of `pool` each."""
    jobs = [(clip, scenes, index) for index, clip in enumerate(clips.numpy())]
    return list(pool.map(_check_one, jobs) if pool is not None else map(_check_one, jobs))


def check_pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Processes for `check_clips`: one a core, 16 at most, unless `workers` says how many."""
    return ProcessPoolExecutor(
        workers or min(16, os.cpu_count() or 1),
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )


def tally(results: Sequence[dict[str, bool]], scenes: Scenes) -> dict[str, dict[str, float]]:
    """Percentages right by attribute, and of all attributes at once, for scenes of one and of two shapes."""
    two = scenes.present[: len(results), 1]
    table: dict[str, dict[str, float]] = {}
    for group, rows in (("one", ~two), ("two", two)):
        chosen = [r for r, wanted in zip(results, rows, strict=True) if wanted]
        table[group] = {
            a: round(100 * sum(r[a] for r in chosen) / max(len(chosen), 1), 1) for a in ATTRIBUTES
        }
        table[group]["all"] = round(100 * sum(all(r.values()) for r in chosen) / max(len(chosen), 1), 1)
        table[group]["clips"] = len(chosen)
    return table


def format_table(table: dict[str, dict[str, float]]) -> str:
    """The table as Markdown."""
    columns = [*ATTRIBUTES, "all"]
    lines = ["| prompts | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for group, row in table.items():
        name = f"{group} shape{'s' if group == 'two' else ''} ({row['clips']:.0f})"
        lines.append(f"| {name} | " + " | ".join(f"{row[c]:.1f}" for c in columns) + " |")
    return "\n".join(lines)
