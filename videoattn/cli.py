"""The command `videoattn`: verbs only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts import ValidationError as CycloptsValidationError
from pydantic import ValidationError
from rich.console import Console

from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob, explain
from videoattn.version import __version__

USAGE, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143

DEFAULT_JOB = RenderJob()

app = App(
    name="videoattn",
    version=__version__,
    help="Render video with LTX transformers and hand-written attention kernels.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command
def render(
    prompt: str | None = None,
    /,
    *,
    settings: Annotated[RenderJob, Parameter(name="*")] = DEFAULT_JOB,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    poster: Path | None = None,
    preview: Path | None = None,
    timing: Path | None = None,
    compare: str = "",
    device: str | None = None,
    context_parallel: str | None = None,
    local_files_only: bool = False,
) -> None:
    """Render a prompt into an mp4.

    Parameters
    ----------
    prompt
        What the clip shows; --prompt is the same.
    output
        The clip to write; by default a name made from prompt and seed.
    from_
        A clip whose settings are used where nothing else is given.
    poster
        Also write the middle frame as PNG.
    preview
        Also write an animated preview, .gif or .webp.
    timing
        Also write one JSON row for every attention call, and print a table.
    compare
        Kernels to run beside the chosen one on the same inputs, comma-separated: flash4,sdpa.
    device
        cpu, cuda or cuda:N; by default the first GPU, or the CPU.
    context_parallel
        Share the clip out to several GPUs: ulysses:N, ring:N or ulysses:A,ring:B.
    local_files_only
        Never ask the hub.
    """
    from videoattn.render.launch import launch, parse_degrees, pick_kind
    from videoattn.render.rank import Rank, Request, take_part

    # Of the ranks that torchrun started only the first speaks.
    rank = None if context_parallel is None else Rank.of(os.environ)
    silent = rank is not None and not rank.first
    job = _job(prompt, settings, from_)
    arms = tuple(arm.strip() for arm in compare.split(",") if arm.strip())
    _check_arms(arms)

    from videoattn.render.checks import check, check_device, check_places
    from videoattn.render.files import StagedFiles, unused_name
    from videoattn.render.settings import work

    if device is not None:
        check_device(device)
    with _names_the_clip(from_, job, settings):
        prepared = check(job, local_files_only=local_files_only, warn=_ignore if silent else _warn)
    degrees = None if context_parallel is None else parse_degrees(context_parallel, prepared.info)
    if from_ is not None and not silent:
        _warn_of_another_image(from_, prepared.image_sha256)
    resolved = prepared.job
    place = output or unused_name(resolved.prompt, resolved.seed)
    check_places(place, poster=poster, preview=preview, timing=timing)
    with StagedFiles() as trial:
        for each in (place, poster, preview, timing):
            if each is not None:
                trial.stage(each)
    if not silent:
        err.print(
            f"{prepared.info.name}, {resolved.recipe}: {resolved.width}x{resolved.height}, "
            f"{resolved.num_frames} frames, {work(resolved)}, seed {resolved.seed}",
            markup=False,
        )

    if degrees is not None:
        device = pick_kind(device, degrees)
    elif device is not None:
        from videoattn.render.devices import pick_device

        pick_device(device)
    if arms or job.attention != "auto":
        from videoattn.render.devices import pick_device, require_kernels

        require_kernels(prepared, pick_device(device), arms)
    if job.fast:
        from videoattn.render.devices import pick_device
        from videoattn.render.fast import fast

        chosen = fast(resolved, pick_device(device), shared=degrees is not None)
        if chosen is not None and chosen.anything:
            err.print(chosen.says, markup=False)

    files: dict[str, Any] = {"output": place, "poster": poster, "preview": preview, "timing": timing}
    if degrees is not None:
        request = Request(
            job=resolved,
            degrees=str(degrees),
            compare=arms,
            device=device or "cpu",
            local_files_only=local_files_only,
            **files,
        )
        if rank is None:
            launch(request)
        else:
            take_part(request, rank, out=out, err=err)
        return

    from videoattn.render import models
    from videoattn.render.printing import print_result
    from videoattn.render.progress import Terminal
    from videoattn.render.run import Renderer

    models.quiet()
    renderer = Renderer(device=device, local_files_only=local_files_only, warn=_warn)
    with Terminal(err) as progress:
        result = renderer.render(prepared, compare=arms, progress=progress, **files)
    print_result(result, (poster, preview, timing), out=out, err=err)


@app.command
def show(clip: Path, /, *, json: bool = False) -> None:
    """Print the settings that a clip was rendered with.

    Parameters
    ----------
    clip
        A clip made by videoattn.
    json
        Print everything as JSON.
    """
    from videoattn.render.metadata import read

    description = read(clip)
    if json:
        import json as json_module

        sys.stdout.write(json_module.dumps(description, indent=2, ensure_ascii=False) + "\n")
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    from rich.text import Text

    for name, value in description["job"].items():
        if value is not None and value not in ("", []):
            table.add_row(name, Text(", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    for name in ("context_parallel", "fast", "device"):
        if description.get(name):
            table.add_row(name, Text(str(description[name])))
    table.add_row("versions", Text(", ".join(f"{k} {v}" for k, v in description.get("versions", {}).items())))
    for kind, choice in (description.get("receipt") or {}).items():
        table.add_row(kind, Text(choice["kernel"]))
    out.print(table)


@app.command
def doctor(*, verify: bool = False) -> int:
    """Say what this machine can do: device, versions, kernels, codecs, disk.

    Parameters
    ----------
    verify
        First run our own kernels' self-check on each GPU, in a process of its own; `auto` trusts what passes.
    """
    from videoattn.doctor import examine, verify_kernels

    return (verify_kernels(out) if verify else 0) or examine(out)


app.command(
    "videoattn.batch.command:batch", name="batch", help="Render every job of a CSV, JSON Lines or YAML file."
)
app.command("videoattn.timing.command:timing", name="timing", help="Print the tables of a timing log.")
app.command("videoattn.web.command:ui", name="ui", help="Serve the web page.")

sim = App(name="sim", help="Run Hopper and Blackwell kernels' PTX on this CPU.", help_format="plaintext")
app.command(sim)


@sim.command(name="ladder")
def sim_ladder(
    step: str | None = None,
    *,
    schedule: str = "early",
    shape: str = "1x256x256",
    trace: bool = False,
    timeline: Path | None = None,
) -> int:
    """Run kernels of the ladder and compare them with fp32 attention; 1 if one has findings or is wrong.

    Parameters
    ----------
    step
        A step's number or name; all by default.
    schedule
        early, late, random, random:SEED or slow:WARPS; several, comma-separated.
    shape
        HEADSxQ_LENxKV_LEN.
    trace
        Print every warp's and engine's events.
    timeline
        Write a trace for Perfetto or chrome://tracing; of several runs one each, as FILE.STEP.SCHEDULE.json.
    """
    with _simulator() as command:
        return command.ladder(step, schedule=schedule, shape=shape, trace=trace, timeline=timeline)


@sim.command(name="run")
def sim_run(
    file: Path,
    /,
    *,
    launch: Path,
    schedule: str = "early",
    trace: bool = False,
    timeline: Path | None = None,
) -> int:
    """Run one kernel of a PTX file; 1 if there are findings.

    Parameters
    ----------
    file
        The PTX file.
    launch
        JSON: entry, grid, block, dynamic_smem, args and buffers, as docs/simulator.md describes.
    schedule
        early, late, random, random:SEED or slow:WARPS.
    trace
        Print every warp's and engine's events.
    timeline
        Write a trace for Perfetto or chrome://tracing.
    """
    with _simulator() as command:
        return command.run(file, launch, schedule=schedule, trace=trace, timeline=timeline)


@contextmanager
def _simulator() -> Iterator[Any]:
    from videoattn.ptxsim import command
    from videoattn.ptxsim.errors import PtxSimError

    try:
        yield command
    except PtxSimError as error:
        raise UsageError(str(error)) from None


def _job(prompt: str | None, settings: RenderJob, source: Path | None) -> RenderJob:
    given = settings.model_dump(include=settings.model_fields_set)
    if prompt is not None:
        if "prompt" in given and given["prompt"] != prompt.strip():
            raise UsageError("the prompt was given twice, as an argument and by --prompt")
        given["prompt"] = prompt
    if source is None:
        return RenderJob.parse(given)
    from videoattn.render.metadata import read_job
    from videoattn.render.sources import unused

    earlier = read_job(source).model_dump(exclude_unset=False)
    if "model" in given and given["model"] != earlier["model"]:
        # Sizes and guidance of one model mean little to another; what determines the content stays.
        keep = ("prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "seed", "image")
        earlier = {name: earlier[name] for name in keep}
    for name in _undone(given, earlier):
        earlier.pop(name, None)
    job = RenderJob.parse({name: value for name, value in earlier.items() if value is not None} | given)
    # Earlier versions wrote them into clips.
    idle = set(unused(job.model, job.recipe)) - given.keys()
    return job.model_copy(update=dict.fromkeys(idle))


def _undone(given: dict[str, Any], earlier: dict[str, Any]) -> tuple[str, ...]:
    """What a clip says of settings that those given now decide: its values are explicit, even defaults."""
    from videoattn.render.settings import KNOBS

    guidance = (*KNOBS, "spatio_temporal_guidance_blocks")
    if given.get("recipe", earlier.get("recipe")) != earlier.get("recipe"):
        return ("num_inference_steps", *guidance)
    scale = given.get("guidance_scale")
    return guidance if scale is not None and scale <= 1 else ()


def _warn_of_another_image(clip: Path, sha256: str | None) -> None:
    from videoattn.render.metadata import read

    before = read(clip).get("image_sha256")
    if before is not None and sha256 is not None and before != sha256:
        _warn(f"the image is not the one that {clip} was rendered from")


@contextmanager
def _names_the_clip(clip: Path | None, job: RenderJob, settings: RenderJob) -> Iterator[None]:
    """Say of a file or model that is not there that the clip, and not the user, named it."""
    from videoattn.render.metadata import PLACES

    try:
        yield
    except UsageError as error:
        for name in PLACES:
            value = getattr(job, name)
            if clip and value and value in str(error) and name not in settings.model_fields_set:
                raise UsageError(
                    f"{error} (the {name} that {clip} names; give another by --{name})"
                ) from None
        raise


def _check_arms(arms: tuple[str, ...]) -> None:
    from videoattn.kernels import NAMES

    for arm in arms:
        if arm not in NAMES:
            raise UsageError(f"unknown attention kernel '{arm}' in --compare: choose from {', '.join(NAMES)}")


def _ignore(text: str) -> None:
    """Another rank says it."""


def _warn(text: str) -> None:
    err.print(f"warning: {text}", style="yellow", markup=False)


def _complain(name: str, text: str) -> None:
    line = " ".join(text.split())
    err.print(f"{name}: {line}", style="red", markup=False)


def _usage_message(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        words = " ".join(error.unused_tokens)
        return f"unexpected '{words}': text of several words, such as a prompt, goes in quotes"
    if isinstance(error, UnknownOptionError):
        text = error.token.keyword or error.token.value
        if " " in text:
            return f"unknown option '{text}': a prompt that begins with a dash goes in as --prompt=\"{text}\""
    cause = error.__cause__
    if isinstance(error, CycloptsValidationError) and isinstance(cause, ValidationError):
        return explain(cause)
    return str(error)


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _on_terminate(number: int, frame: Any) -> None:
    raise _Terminated


def guarded(command: App, tokens: list[str], name: str) -> int:
    """Run a cyclopts app whose failures become one line each, after `name`.

    Returns 0, 1 for a failure, 2 for bad usage, 130 after Ctrl-C, 143 after SIGTERM.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # With another busy process beside it, OpenMP's spinning threads make a CPU render several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    previous = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        returned = command(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except CycloptsError as error:
        _complain(name, _usage_message(error))
        return USAGE
    except (UsageError, RenderError) as error:
        _complain(name, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain(name, "interrupted, nothing unfinished is left")
        return INTERRUPTED
    except _Terminated:
        _complain(name, "terminated, nothing unfinished is left")
        return TERMINATED
    except OSError as error:
        if error.filename is not None:
            _complain(name, f"cannot open {error.filename}: {error.strerror or error}")
            return FAILURE
        # What the interpreter flushes at its end must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _complain(name, f"cannot write the output: {error.strerror or error}")
        return FAILURE
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status, as `guarded` says."""
    return guarded(app, sys.argv[1:] if arguments is None else arguments, "videoattn")
