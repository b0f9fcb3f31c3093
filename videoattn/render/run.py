"""From a job to a clip on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videoattn.processors.parallel.degrees import Degrees
from videoattn.processors.regions import compile_blocks, cuda_graphs
from videoattn.render import clip as clips
from videoattn.render import metadata, models, recipes
from videoattn.render.checks import Prepared, check, check_places, expected_bytes
from videoattn.render.devices import current, device_name, pick_device, pick_dtype, require_kernels
from videoattn.render.errors import RenderError
from videoattn.render.fast import NOTHING, Fast, fast
from videoattn.render.files import StagedFiles, require_space, unused_name, write_failed
from videoattn.render.job import RenderJob
from videoattn.render.progress import Listener, Silent
from videoattn.render.prompts import PromptCache
from videoattn.render.settings import is_guided, perturbs

LOAD_FIELDS = (
    "model",
    "revision",
    "components",
    "recipe",
    "upsampler",
    "lora",
    "dtype",
    "offload",
    "vae_tiling",
    "compile",
    "fast",
    "attention",
)


@dataclass(frozen=True, slots=True)
class RenderResult:
    """A clip on disk and what is known about it.

    `stage_seconds` are wall-clock seconds by stage, `total_seconds` their sum without loading the model; both
    are None when shadow arms ran, because those change clock and power. `log` and `report` are the
    timing's rows and summary.
    """

    path: Path
    job: RenderJob
    metadata: dict[str, Any]
    receipt: Any
    stage_seconds: dict[str, float] | None
    total_seconds: float | None
    load_seconds: float
    layers: dict[str, int]
    report: Any = None
    log: Any = None


@dataclass(slots=True)
class _Ready:
    key: tuple[Any, ...]
    loaded: models.Loaded
    prompts: PromptCache
    handle: Any = None
    fast: Fast | None = None
    graphs: Any = None
    around: str = ""


class Renderer:
    """Renders jobs one after another and keeps the latest model loaded between them.

    `device` is a torch device's name, by default the first CUDA device or the CPU. `warn` receives one line
    for whatever a user should know and that is no error. With `parallel` this process is one of the ranks
    that share every clip, in an initialised torch.distributed: the first calls `render`, the others `follow`.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        local_files_only: bool = False,
        warn: Callable[[str], None] = lambda text: None,
        parallel: Degrees | None = None,
    ) -> None:
        self.device = pick_device(device)
        self.parallel = parallel
        self.local_files_only = local_files_only
        self._warn = warn
        self._ready: _Ready | None = None

    def check(self, job: RenderJob) -> Prepared:
        """`checks.check` with this renderer's settings, dtype made explicit."""
        return self._with_dtype(check(job, local_files_only=self.local_files_only, warn=self._warn))

    def _with_dtype(self, prepared: Prepared) -> Prepared:
        dtype = pick_dtype(prepared.job.dtype, self.device)
        return replace(prepared, job=prepared.job.model_copy(update={"dtype": dtype}))

    def prepare(self, jobs: Iterable[Prepared], progress: Listener | None = None) -> None:
        """Load the first job's model and encode the prompts of all jobs that share it."""
        jobs = [self._with_dtype(each) for each in jobs]
        if jobs:
            listener = progress or Silent()
            with current(self.device):
                ready = self._load(jobs[0], listener)
                self._encode(ready, [each.job for each in jobs if _key(each.job) == ready.key], listener)

    def render(
        self,
        job: RenderJob | Prepared,
        *,
        output: Path | None = None,
        poster: Path | None = None,
        preview: Path | None = None,
        timing: Path | None = None,
        compare: tuple[str, ...] = (),
        progress: Listener | None = None,
    ) -> RenderResult:
        """Render one job into an mp4, with a poster, a preview and a timing log where asked.

        All files appear together at the end, or none does. Raises UsageError or RenderError, one line
        each, and whatever `progress` raises.
        """
        listener = progress or Silent()
        prepared = self.check(job) if isinstance(job, RenderJob) else self._with_dtype(job)
        job = prepared.job
        assert job.width is not None
        assert job.height is not None
        assert job.num_frames is not None
        output = output or unused_name(job.prompt, job.seed)
        check_places(output, poster=poster, preview=preview, timing=timing)

        with StagedFiles() as files, current(self.device), _memory(self.device, lambda: clock.stage):
            clock = _Clock(listener)
            staged = {
                place: files.stage(place) for place in (poster, preview, timing, output) if place is not None
            }
            require_space(output, expected_bytes(job.width, job.height, job.num_frames))
            require_kernels(prepared, self.device, compare)
            started = time.monotonic()
            ready = self._load(prepared, clock)
            load_seconds = time.monotonic() - started
            clock.restart()
            with _recording(compare, bool(timing or compare)) as recording:
                clock.record(recording, output.name, ready)
                self._encode(ready, [job], clock)
                made_clip = _to_clip(self._run(ready, prepared, clock), job)
                clock.phase("encode", job.num_frames)
                description = metadata.describe(
                    job,
                    device=device_name(self.device),
                    receipt=ready.handle.receipt.to_dict(),
                    image_sha256=prepared.image_sha256,
                    context_parallel=None if self.parallel is None else str(self.parallel),
                    fast=None if ready.fast is None else ready.fast.says,
                )
                clips.write_mp4(
                    staged[output],
                    made_clip,
                    place=output,
                    crf=job.crf,
                    metadata=metadata.tags(description),
                    on_frame=_Counter(clock),
                )
                if poster is not None:
                    clips.write_poster(staged[poster], made_clip, place=poster)
                if preview is not None:
                    clips.write_preview(staged[preview], made_clip, place=preview)
            clock.stop()
            if timing is not None:
                _write_log(recording, staged[timing], timing)
            files.commit()
        ready.prompts.trim()
        return RenderResult(
            output,
            job,
            description,
            ready.handle.receipt,
            None if compare else clock.seconds,
            None if compare else sum(clock.seconds.values()),
            load_seconds,
            dict(ready.handle.layers),
            None if recording is None else recording.summary(),
            None if recording is None else recording.log,
        )

    def follow(self, job: RenderJob) -> None:
        """Take part in a clip that the first of the parallel ranks renders and writes."""
        prepared = self.check(job)
        clock = _Clock(Silent())
        with current(self.device), _memory(self.device, lambda: clock.stage):
            require_kernels(prepared, self.device, ())
            ready = self._load(prepared, clock)
            self._encode(ready, [prepared.job], clock)
            self._run(ready, prepared, clock, decode=False)

    def close(self) -> None:
        """Drop the loaded model."""
        if self._ready is not None:
            if self._ready.graphs is not None:
                self._ready.graphs.release()
            if self._ready.handle is not None:
                self._ready.handle.uninstall()
            models.release(self._ready.loaded)
            self._ready = None

    def _load(self, prepared: Prepared, listener: Listener) -> _Ready:
        key = _key(prepared.job)
        if self._ready is not None and self._ready.key == key:
            return self._ready
        self.close()
        listener.phase("load_model", None)
        loaded = models.load(
            prepared.source,
            prepared.info,
            prepared.job,
            self.device,
            local_files_only=self.local_files_only,
        )
        self._ready = _Ready(key, loaded, PromptCache(loaded, self._warn))
        if not loaded.resident:
            models.place(loaded)
        return self._ready

    def _encode(self, ready: _Ready, jobs: list[RenderJob], listener: Listener) -> None:
        texts = ready.prompts.needed(jobs)
        if texts:
            listener.phase("encode_prompt", len(texts))
            ready.prompts.encode(texts, listener.step)
        if ready.handle is not None:
            return
        # The other parts come to the device once the text encoder has left it, and kernels are chosen there.
        if ready.loaded.resident:
            models.place(ready.loaded)
        job = jobs[0]
        ready.fast = fast(job, self.device, shared=self.parallel is not None)
        if ready.fast is not None and not ready.fast.anything:
            self._warn(ready.fast.says)
        setup = NOTHING if ready.fast is None else ready.fast.setup
        ready.handle = _install(
            ready.loaded, job, self.parallel, level=setup.level, under_compile=setup.under_compile
        )
        if job.compile or setup.compile:
            # What casts or fetches weights around a layer's forward cannot be traced.
            whole = not perturbs(job) and job.dtype != "fp8" and job.offload != "group"
            compile_blocks(ready.loaded.pipe, fullgraph=whole)
        if setup.graph_tokens:
            ready.graphs = cuda_graphs(ready.loaded.pipe, max_tokens=setup.graph_tokens)
        regions = replace(setup, compile=job.compile or setup.compile).regions
        ready.around = "; ".join(filter(None, [ready.handle.around, *regions]))

    def _run(self, ready: _Ready, prepared: Prepared, clock: _Clock, *, decode: bool = True) -> recipes.Made:
        job = prepared.job
        inputs = recipes.Inputs(
            job,
            ready.prompts.get(job.prompt),
            ready.prompts.get(job.negative_prompt) if is_guided(job) else None,
            prepared.image,
            decode,
        )
        return recipes.run(ready.loaded, inputs, recipes.Watch(clock.phase, clock.step))


def render(
    job: RenderJob,
    *,
    output: Path | None = None,
    progress: Listener | None = None,
    device: str | None = None,
    local_files_only: bool = False,
    **outputs: Any,
) -> RenderResult:
    """Render one job with a model loaded for it alone; `outputs` as in `Renderer.render`."""
    renderer = Renderer(device=device, local_files_only=local_files_only)
    try:
        return renderer.render(job, output=output, progress=progress, **outputs)
    finally:
        renderer.close()


def _key(job: RenderJob) -> tuple[Any, ...]:
    fields = tuple(getattr(job, name) for name in LOAD_FIELDS)
    # A compiled graph is bound to whether guidance perturbs it.
    return (*fields, perturbs(job) if job.compile or job.fast else None)


def _install(loaded: models.Loaded, job: RenderJob, parallel: Degrees | None, **options: Any) -> Any:
    from videoattn import install
    from videoattn.dispatch import KernelUnavailable

    try:
        handle = install(loaded.pipe, kernels=job.kernels, **options)
        if parallel is not None:
            models.share_out(loaded, parallel)
            # A kernel asked for by name must serve the calls of one rank too, which may want an LSE.
            _ = handle.receipt
    except KernelUnavailable as error:
        raise RenderError(str(error)) from None
    return handle


def _to_clip(made: recipes.Made, job: RenderJob) -> clips.Clip:
    assert job.frame_rate is not None
    pixels = np.empty((made.frames.shape[0], *made.frames.shape[2:], 3), dtype=np.uint8)
    for index, frame in enumerate(made.frames):
        pixels[index] = (frame.float() * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    audio = None if made.audio is None else made.audio.float().cpu().numpy()
    return clips.Clip(pixels, job.frame_rate, audio, made.sample_rate)


def _recording(compare: tuple[str, ...], wanted: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    from videoattn import record_timing

    return record_timing(compare=compare)


def _write_log(recording: Any, path: Path, place: Path) -> None:
    try:
        recording.write(path)
    except OSError as error:
        raise write_failed(error, place) from None


@contextmanager
def _memory(device: torch.device, stage: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise RenderError(
            f"out of GPU memory in stage {stage()}: try --offload model or group, --vae-tiling, a smaller "
            "size or fewer frames"
        ) from None
    except (MemoryError, RuntimeError) as error:
        # torch's CPU allocator has no exception of its own.
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        tiled = "--vae-tiling, " if device.type == "cpu" else ""
        raise RenderError(
            f"out of memory in stage {stage()}: try {tiled}a smaller size or fewer frames"
        ) from None


class _Counter:
    """Reports frames as they are written."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._done = listener, 0

    def __call__(self) -> None:
        self._done += 1
        self._listener.step(self._done)


class _Clock:
    """Passes progress on, adds up the seconds of each stage and tells a timing recording where it is."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._recording: Any = None
        self.seconds: dict[str, float] = {}
        self.stage = "start"
        self._since = time.monotonic()

    def record(self, recording: Any, clip: str, ready: _Ready) -> None:
        self._recording, self._clip, self._ready = recording, clip, ready

    def phase(self, name: str, total: int | None) -> None:
        self.stop()
        self.stage = name
        self._listener.phase(name, total)
        if self._recording is not None:
            handle = self._ready.handle
            layers, around = ({}, None) if handle is None else (handle.layers, self._ready.around)
            self._recording.enter(clip=self._clip, stage=name, layers=layers, around=around)

    def step(self, done: int) -> None:
        if self._recording is not None:
            self._recording.step = done
        self._listener.step(done)

    def stop(self) -> None:
        now = time.monotonic()
        if self.stage not in {"start", "load_model"}:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._since
        self._since = now

    def restart(self) -> None:
        self._since = time.monotonic()
        self.stage = "start"
