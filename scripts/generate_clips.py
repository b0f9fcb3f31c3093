"""Render a file of prompts with every attention call timed beside FlashAttention-4, and print one table.

    python scripts/generate_clips.py                           # the demo model, on any machine
    python scripts/generate_clips.py --model LTX-2.3-FOLDER    # distilled, 1536x1024, 249 frames

Every clip is rendered twice: with the shadow arms, for the ratios, and without, for the seconds and shares,
which shadow arms would disturb. The number and the shapes of the attention calls are checked against what the
model's config implies; a difference ends the run with status 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.text import Text

from videoattn.cli import guarded
from videoattn.render.checks import Prepared, check
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob

# The two-stage capstone: 10.4 s of 1536x1024 at 24 frames a second.
CAPSTONE = {"recipe": "distilled", "width": 1536, "height": 1024, "num_frames": 249, "frame_rate": 24}
DEMO_PROMPTS = (
    "a large red star circling on a blue background",
    "a green square moving right on a black background",
    "a small yellow circle bouncing on a gray background",
    "a purple triangle rotating on a white background",
)
PROMPTS = (
    "A slow aerial shot over a rocky coast at dawn: long waves roll in and break into white foam, gulls "
    "cross the frame, the low sun lays a warm path on the water. Wind and surf.",
    "Close-up of a potter's hands shaping wet clay on a turning wheel in a bright workshop; water runs down "
    "the walls of the bowl as it grows wider. The hum of the wheel.",
    "A red tram drives towards the camera along a rainy city street at night, its lights reflected on the "
    "wet paving, people with umbrellas step aside. A bell rings twice.",
    "A fox trots through fresh snow in a birch forest, stops, lifts its head and looks into the camera while "
    "snowflakes drift past. Quiet, with soft steps.",
)
app = App(
    help="Render a file of prompts with every attention call timed beside FlashAttention-4.",
    help_format="plaintext",
    version_flags=[],
    suppress_keyboard_interrupt=False,
)
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Tally:
    """What all clips together measured."""

    arms: Any = None
    whole: Any = None
    wrong: list[str] = field(default_factory=list)
    clips: list[dict[str, Any]] = field(default_factory=list)


@app.default
def generate(
    prompts: Path | None = None,
    /,
    *,
    model: str = "demo",
    output: Path = Path("clips"),
    recipe: str | None = None,
    width: int | None = None,
    height: int | None = None,
    num_frames: int | None = None,
    seed: int = 0,
    attention: str = "auto",
    compare: str | None = None,
    seconds: bool = True,
    device: str | None = None,
    offload: str = "none",
    local_files_only: bool = False,
) -> int:
    """Render prompts and print the table.

    Parameters
    ----------
    prompts
        A text file with one prompt a line; empty lines and lines that start with # are skipped.
    output
        The folder for clips, logs, table.txt and summary.json.
    compare
        Shadow arms, comma-separated; by default flash4 where it can run.
    seconds
        Render each clip a second time without shadow arms, for its seconds.
    """
    asked = {
        "model": model,
        "recipe": recipe,
        "width": width,
        "height": height,
        "num_frames": num_frames,
        "attention": attention,
        "offload": offload,
    }
    jobs = _jobs(
        prompts, {name: value for name, value in asked.items() if value is not None}, seed, local_files_only
    )

    from videoattn.render import models
    from videoattn.render.devices import pick_device
    from videoattn.render.progress import Terminal
    from videoattn.render.run import Renderer

    models.quiet()
    renderer = Renderer(
        device=device, local_files_only=local_files_only, warn=lambda text: console.print(text)
    )
    prepared = [renderer.check(job) for job in jobs]
    arms = _arms(compare, prepared[0], pick_device(device))
    tally = Tally()
    with Terminal(Console(stderr=True, highlight=False)) as progress:
        renderer.prepare(prepared, progress)
        for number, each in enumerate(prepared, 1):
            stem = output / f"clip-{number:02d}"
            console.print(Text(f"{stem}.mp4: {each.job.prompt}"))
            _render(renderer, each, stem, arms, seconds, progress, tally)
    renderer.close()
    return _conclude(tally, output)


def _jobs(prompts: Path | None, given: dict[str, Any], seed: int, local_files_only: bool) -> list[RenderJob]:
    """One job a prompt, seeds counted up; an LTX-2.x model renders the capstone unless told otherwise."""
    probe = check(
        RenderJob.parse({"prompt": "x", "model": given["model"]}), local_files_only=local_files_only
    )
    defaults = CAPSTONE if probe.info.family == "ltx2" else {}
    if given.get("recipe", "distilled") != "distilled":
        defaults = {name: value for name, value in CAPSTONE.items() if name != "recipe"} if defaults else {}
    if prompts is None:
        texts: list[str] = list(DEMO_PROMPTS if given["model"] == "demo" else PROMPTS)
    else:
        if not prompts.is_file():
            raise UsageError(f"no such prompts file: {prompts}")
        lines = prompts.read_text(encoding="utf-8").splitlines()
        texts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not texts:
            raise UsageError(f"{prompts} holds no prompt")
    return [
        RenderJob.parse({**defaults, **given, "prompt": text, "seed": seed + index})
        for index, text in enumerate(texts)
    ]


def _arms(compare: str | None, prepared: Prepared, device: Any) -> tuple[str, ...]:
    """The shadow arms: as asked, or flash4 where it can serve this model, said either way."""
    from videoattn.render.devices import require_kernels

    if compare is not None:
        arms = tuple(arm.strip() for arm in compare.split(",") if arm.strip())
        require_kernels(prepared, device, arms)
        return arms
    try:
        require_kernels(prepared, device, ("flash4",))
    except RenderError as error:
        console.print(Text(f"no shadow arm: {str(error).removeprefix('--compare: ')}"))
        return ()
    return ("flash4",)


def _render(
    renderer: Any,
    prepared: Prepared,
    stem: Path,
    arms: tuple[str, ...],
    seconds: bool,
    progress: Any,
    tally: Tally,
) -> None:
    from videoattn.render.expected import counted_calls, differences, expected_calls

    runs = {"whole": (), "arms": arms} if arms and seconds else {"arms": arms} if arms else {"whole": ()}
    clip: dict[str, Any] = {
        "clip": f"{stem.name}.mp4",
        "prompt": prepared.job.prompt,
        "seed": prepared.job.seed,
    }
    for name, compared in runs.items():
        result = renderer.render(
            prepared,
            output=stem.with_suffix(".mp4"),
            timing=stem.with_suffix(f".{name}.jsonl"),
            compare=compared,
            progress=progress,
        )
        found = differences(expected_calls(prepared), counted_calls(result.log.rows))
        tally.wrong += [f"{stem.name}.mp4: {line}" for line in found]
        log = getattr(tally, name)
        if log is None:
            setattr(tally, name, result.log)
        else:
            log.rows += result.log.rows
            log.stages += result.log.stages
        clip |= {"calls": len(result.log.rows), "job": prepared.job.model_dump(mode="json")}
        if not compared:
            clip |= {"seconds": result.total_seconds, "stage_seconds": result.stage_seconds}
    tally.clips.append(clip)


def _conclude(tally: Tally, output: Path) -> int:
    from videoattn.timing.report import summarise

    first = tally.arms if tally.arms is not None else tally.whole
    report = summarise(first, whole=tally.whole if tally.arms is not None else None)
    command = "python scripts/generate_clips.py " + " ".join(sys.argv[1:])
    text = f"{date.today()}, {report.device}\n{command.strip()}\n\n{report}\n"
    (output / "table.txt").write_text(text, encoding="utf-8")
    summary = {"report": report.to_dict(), "clips": tally.clips, "unexpected_calls": tally.wrong}
    (output / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False), encoding="utf-8")
    console.print(report)
    calls = sum(clip["calls"] for clip in tally.clips)
    if tally.wrong:
        for line in tally.wrong:
            console.print(Text(line, style="red"))
        console.print(
            Text("the attention calls differ from what the model's config implies", style="bold red")
        )
        return RenderError.exit_code
    console.print(f"{calls} attention calls, number and shapes as the model's config implies")
    return 0


def main() -> int:
    """Run the script; 1 for a failure, 2 for bad usage, 130 after Ctrl-C."""
    return guarded(app, sys.argv[1:], "generate_clips")


if __name__ == "__main__":
    sys.exit(main())
