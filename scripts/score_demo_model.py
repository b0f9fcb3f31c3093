"""Score the demo model on the fixed prompts whose attribute combinations were withheld from its training.

Renders through diffusers' own pipelines and prints the checker's table, one row for prompts of one shape and
one for two; with two shapes both must be right on an attribute for a clip to count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from concurrent.futures import Executor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from videoattn.demo.draw import draw, make_tracks
from videoattn.demo.evaluation import (
    ONE_SHAPE,
    TWO_SHAPES,
    EvaluationSet,
    check_clips,
    check_pool,
    evaluation_set,
    format_table,
    tally,
)
from videoattn.demo.model import DEFAULTS, load_pipeline
from videoattn.demo.scenes import Scenes

# Settings are chosen by these prompts, never by the fixed ones.
DEVELOPMENT_SEED = 77


def first_frames(scenes: Scenes, seed: int) -> list[Image.Image]:
    """Drawn first frames of scenes, as `--image` would give them."""
    clips = draw(scenes, make_tracks(np.random.default_rng(seed), scenes))
    frames = ((clips[:, :, 0] + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(frame) for frame in frames]


def render(pipe: Any, wanted: EvaluationSet, rows: np.ndarray, settings: dict, image: bool) -> torch.Tensor:
    """Render some of the prompts: uint8 `(batch, frames, 3, height, width)`."""
    extra = {"image": first_frames(wanted.scenes[rows], int(rows[0]))} if image else {}
    output = pipe(
        prompt=[wanted.prompts[row] for row in rows],
        generator=[torch.Generator().manual_seed(wanted.seeds[row]) for row in rows],
        width=DEFAULTS["width"],
        height=DEFAULTS["height"],
        num_frames=DEFAULTS["num_frames"],
        frame_rate=DEFAULTS["frame_rate"],
        output_type="pt",
        **settings,
        **extra,
    )
    return (output.frames.float() * 255).round().byte().cpu()


def score(
    pipe: Any,
    wanted: EvaluationSet,
    chosen: np.ndarray,
    settings: dict,
    *,
    image: bool,
    batch: int,
    pool: Executor | None,
    output: Path | None,
) -> None:
    """Render and check the chosen prompts at one setting and print the table."""
    seconds, results = 0.0, []
    for rows in np.array_split(chosen, -(-len(chosen) // batch)):
        started = time.monotonic()
        clips = render(pipe, wanted, rows, settings, image)
        seconds += time.monotonic() - started
        verdicts = check_clips(clips, wanted.scenes[rows], pool)
        results += verdicts
        if output is not None:
            with open(output, "a") as file:
                for row, verdict in zip(rows, verdicts, strict=True):
                    setting = {**settings, "shift": pipe.scheduler.shift}
                    file.write(json.dumps({**setting, "prompt": wanted.prompts[row], **verdict}) + "\n")
    given = ", first frame given" if image else ""
    steps, guidance = settings["num_inference_steps"], settings["guidance_scale"]
    shift = pipe.scheduler.shift
    print(f"\n{steps} steps, guidance {guidance:g}, shift {shift:g}{given}; {seconds:.1f} s to render\n")
    print(format_table(tally(results, wanted.scenes[chosen])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="another folder than the shipped one")
    parser.add_argument(
        "--num-inference-steps", type=int, nargs="+", default=[DEFAULTS["num_inference_steps"]]
    )
    parser.add_argument("--guidance-scale", type=float, nargs="+", default=[DEFAULTS["guidance_scale"]])
    parser.add_argument(
        "--shift", type=float, nargs="+", help="of the scheduler's noise levels (default: the shipped one)"
    )
    parser.add_argument("--image", action="store_true", help="give the first frame of a drawn clip as well")
    parser.add_argument(
        "--development",
        type=int,
        nargs="?",
        const=1,
        metavar="SETS",
        help="other prompts, to choose settings by: so many times 256",
    )
    parser.add_argument("--limit", type=int, help="only this many prompts of each kind")
    parser.add_argument("--batch-size", type=int, help="prompts at once (default: 64 on a GPU, 4 on a CPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--workers", type=int, help="processes that check (default: one a core; 0: none)")
    parser.add_argument("--output", type=Path, help="also write every clip's verdict as JSON lines")
    arguments = parser.parse_args()

    sets = arguments.development
    if sets is None:
        wanted = evaluation_set()
    else:
        wanted = evaluation_set(ONE_SHAPE * sets, TWO_SHAPES * sets, seed=DEVELOPMENT_SEED)
    two = wanted.scenes.present[:, 1]
    chosen = np.concatenate([np.nonzero(~two)[0][: arguments.limit], np.nonzero(two)[0][: arguments.limit]])
    pipe: Any = load_pipeline(
        getattr(torch, arguments.dtype), image=arguments.image, weights=arguments.weights
    )
    pipe.to(arguments.device)
    pipe.set_progress_bar_config(disable=True)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    kind = "fixed" if sets is None else "development"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, {arguments.dtype}")
    print(f"{len(chosen)} of the {kind} prompts")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(check_pool(arguments.workers)) if arguments.workers != 0 else None
        for shift, steps, guidance in product(
            arguments.shift or [pipe.scheduler.shift], arguments.num_inference_steps, arguments.guidance_scale
        ):
            pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=shift)
            score(
                pipe,
                wanted,
                chosen,
                {"num_inference_steps": steps, "guidance_scale": guidance},
                image=arguments.image,
                batch=arguments.batch_size or (64 if arguments.device == "cuda" else 4),
                pool=pool,
                output=arguments.output,
            )


if __name__ == "__main__":
    main()
