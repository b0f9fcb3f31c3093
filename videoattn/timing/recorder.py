"""Times attention calls at the one place where kernels run."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from videoattn.dispatch import AttentionCall, Choice, Kind
from videoattn.timing.clock import Clock, CudaClock, Span, clock_for
from videoattn.timing.compare import Slots, arm_names, max_abs_difference, refusal, refuse_idle_arms
from videoattn.timing.log import CallRow, TimingLog
from videoattn.timing.pending import Arm, PendingCall, Stage
from videoattn.timing.place import Place
from videoattn.version import __version__

if TYPE_CHECKING:
    from videoattn.timing.report import Report

Result = tuple[torch.Tensor, torch.Tensor | None]
Launch = Callable[[str], Result]


class CallRecorder(Protocol):
    """What the op hands its calls to while a recording is on; `compare` names arms that run beside them."""

    compare: tuple[str, ...]

    def record(
        self,
        call: AttentionCall,
        choice: Choice,
        launch: Launch,
        *,
        device: torch.device,
        kv_lengths: torch.Tensor | None = None,
    ) -> Result:
        """Run `launch(choice.kernel)`, time it and return its result; `launch(name)` runs another arm."""
        ...


_active: Recording | None = None
_activation = threading.Lock()


class CallCount:
    """Runs calls and only counts them."""

    compare = ()

    def __init__(self) -> None:
        self.calls = 0

    def record(
        self,
        call: AttentionCall,
        choice: Choice,
        launch: Launch,
        *,
        device: torch.device,
        kv_lengths: torch.Tensor | None = None,
    ) -> Result:
        """Run `launch(choice.kernel)` and return its result."""
        self.calls += 1
        return launch(choice.kernel)


class _Thread(threading.local):
    count: CallCount | None = None


_thread = _Thread()


def active() -> CallRecorder | None:
    """What this thread's calls go to: the recording in progress, None outside one."""
    count = _thread.count
    return _active if count is None else count


@contextmanager
def unrecorded() -> Iterator[CallCount]:
    """Keep this thread's calls out of the recording: a capture launches nothing that could be timed."""
    before, _thread.count = _thread.count, CallCount()
    try:
        yield _thread.count
    finally:
        _thread.count = before


class Recording:
    """One timing recording, made by `record_timing`; attention calls of the whole process go through it.

    `step` is the denoising step that calls from now on belong to: `enter` sets it to 0, a step-end callback
    to the next step's number. `rows` and `log` are complete once the `with` block is left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        compare: str | Sequence[str] = (),
        calls: Iterable[AttentionCall] = (),
    ) -> None:
        self.path = None if path is None else Path(path)
        self.compare = arm_names(compare)
        if self.compare:
            refuse_idle_arms(self.compare, calls)
        self.step: int | None = None
        self.log = TimingLog("", __version__, torch.__version__, self.compare)
        self._lock = threading.Lock()
        self._clocks: dict[torch.device, Clock] = {}
        self._refused: dict[tuple[AttentionCall, str], str | None] = {}
        self._stage: Stage | None = None
        self._used = False

    @property
    def rows(self) -> list[CallRow]:
        """The calls of the stages that have ended, in order."""
        return self.log.rows

    def __enter__(self) -> Recording:
        global _active
        if self.path is not None:
            _check_writable(self.path)
        with _activation:
            if _active is not None:
                raise RuntimeError(
                    "a timing recording is already running in this process: end it before starting another"
                )
            if self._used:
                raise RuntimeError("a timing recording runs once: call record_timing() again")
            self._used = True
            self._switch(Stage(None, None, {}))
            _active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _active
        with _activation:
            _active = None
        # After an error the device may refuse every further question; the log of a failed run is not written.
        if kind is not None:
            self._stage = None
            return
        self._switch(None)
        named = [stage for stage in self.log.stages if (stage.clip, stage.stage) != (None, None)]
        if named:
            self.log.stages = named
        self.log.device = _device_names(self._clocks)
        if self.path is not None:
            self.write()

    def enter(
        self,
        *,
        clip: str | None = None,
        stage: str | None = None,
        layers: Mapping[Kind, int] | None = None,
        around: str | None = None,
    ) -> None:
        """Start a stage; the one before ends here.

        Waits for the device, so that a stage's seconds are its own: call it between stages, not in a forward.

        Args:
            clip: the clip's name; by default the clip of the stage before.
            stage: the stage's name, for example `denoise`.
            layers: calls of each kind in one forward, as an install handle gives them; without it layer and
                forward stay unknown. By default those of the stage before. Blocks left out whole shift the
                layers and forwards of later calls of their step.
            around: what runs otherwise than in diffusers besides the calls, for the log's head.
        """
        before = self._running()
        if around is not None:
            self.log.around = around
        self._switch(
            Stage(
                before.clip if clip is None else clip,
                stage,
                before.layers if layers is None else dict(layers),
            )
        )

    def leave(self) -> None:
        """End the stage; the time until the next `enter` belongs to no clip."""
        self._running()
        self._switch(Stage(None, None, {}))

    @contextmanager
    def forward(self, device: torch.device | str | None = None, *, replayed_calls: int = 0) -> Iterator[None]:
        """Time one whole forward; `log.forwards` holds the results.

        `replayed_calls` says how many attention calls a CUDA graph replays in it, which have no rows.
        """
        stage = self._running()
        clock = self._clock(_default_device() if device is None else _with_index(torch.device(device)))
        span = clock.start()
        yield
        clock.stop(span)
        stage.forwards.append((self.step, clock, span, replayed_calls))

    def record(
        self,
        call: AttentionCall,
        choice: Choice,
        launch: Launch,
        *,
        device: torch.device,
        kv_lengths: torch.Tensor | None = None,
    ) -> Result:
        """Run `launch(choice.kernel)`, time it and return its result; shadow arms run beside it."""
        stage = self._stage or self._running()
        clock = self._clocks.get(device) or self._clock(device)
        if clock.capturing():
            return self._record_capture(stage, call, choice, launch, clock)
        if self.compare:
            return self._record_arms(stage, call, choice, launch, device, kv_lengths, clock)
        span = clock.start()
        result = launch(choice.kernel)
        clock.stop(span)
        stage.pending.append(PendingCall(self.step, call, choice.kernel, kv_lengths, clock, span))
        return result

    def _record_capture(
        self, stage: Stage, call: AttentionCall, choice: Choice, launch: Launch, clock: Clock
    ) -> Result:
        # An event of a capture has no time, a shadow arm would be replayed with the graph, and the graph's
        # memory must not be held.
        place = self._place(stage, call) if self.compare else None
        result = launch(choice.kernel)
        arms = {name: Arm(reason="captured into a CUDA graph") for name in self.compare}
        stage.pending.append(PendingCall(self.step, call, choice.kernel, None, clock, None, place, arms))
        return result

    def _record_arms(
        self,
        stage: Stage,
        call: AttentionCall,
        choice: Choice,
        launch: Launch,
        device: torch.device,
        kv_lengths: torch.Tensor | None,
        clock: Clock,
    ) -> Result:
        place = self._place(stage, call)
        whole = clock.start()
        span: Span | None = None
        arms: dict[str, Arm] = {}
        outputs: dict[str, torch.Tensor] = {}
        result: Result | None = None
        # Whoever runs first meets colder caches, so the order turns from layer to layer and, in one layer,
        # from forward to forward.
        order = ("", *self.compare)
        turn = place.index if place.layer is None or place.forward is None else place.layer + place.forward
        for position in range(len(order)):
            name = order[(position + turn) % len(order)]
            if name == "":
                span = clock.start()
                result = launch(choice.kernel)
                clock.stop(span)
                continue
            arm = arms[name] = Arm(reason=self._refusal(call, name))
            if arm.reason is None:
                arm.span = clock.start()
                try:
                    outputs[name] = launch(name)[0]
                except Exception as error:
                    # A shadow must not end the render it looks at; the row and the report name the failure.
                    arm.reason = f"it failed: {_first_line(error)}"
                    arm.span = None
                    self._refused[call, name] = arm.reason
                    continue
                clock.stop(arm.span)
        assert result is not None
        for name, output in outputs.items():
            slots = self._slots(stage, device)
            arms[name].difference = slots, slots.put(max_abs_difference(result[0], output))
        clock.stop(whole)
        stage.pending.append(
            PendingCall(self.step, call, choice.kernel, kv_lengths, clock, span, place, arms, whole)
        )
        return result

    def _place(self, stage: Stage, call: AttentionCall) -> Place:
        with self._lock:
            return stage.places.next(call.kind, self.step)

    def _slots(self, stage: Stage, device: torch.device) -> Slots:
        slots = stage.slots.get(device)
        if slots is None:
            with self._lock:
                slots = stage.slots.setdefault(device, Slots(device))
        return slots

    def _refusal(self, call: AttentionCall, name: str) -> str | None:
        key = (call, name)
        if key not in self._refused:
            self._refused[key] = refusal(call, name)
        return self._refused[key]

    def write(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the log as JSON Lines to `path`, by default the recording's own; whole or not at all."""
        target = self.path if path is None else path
        if target is None:
            raise ValueError("this recording has no path: give one to write()")
        self.log.write(target)

    def summary(self, whole: TimingLog | None = None) -> Report:
        """The table per stage and kind; `whole` is the log of the same render without shadow arms."""
        from videoattn.timing.report import summarise

        return summarise(self.log, whole=whole)

    def _running(self) -> Stage:
        if self._stage is None:
            raise RuntimeError("this timing recording is not running: use it inside its `with` block")
        return self._stage

    def _clock(self, device: torch.device) -> Clock:
        clock = self._clocks.get(device)
        if clock is None:
            with self._lock:
                clock = self._clocks.setdefault(device, clock_for(device))
        return clock

    def _switch(self, following: Stage | None) -> None:
        """End the running stage and start `following`, whose clock runs from here on."""
        self._wait()
        now = perf_counter()
        before, self._stage = self._stage, following
        self.step = 0 if following is not None and following.name is not None else None
        if before is not None:
            before.seconds = now - before.began
            before.resolve(self.log)
        if following is not None:
            for device in {*self._clocks, _default_device()}:
                if self.compare:
                    self._slots(following, device)
                # Not self._clock(): whether any call runs on the default device is not known yet.
                (self._clocks.get(device) or clock_for(device)).reserve(following.expected_calls)
            following.began = perf_counter()

    def _wait(self) -> None:
        for clock in list(self._clocks.values()):
            clock.wait()
        if not self._clocks and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def record_timing(
    path: str | os.PathLike[str] | None = None,
    *,
    compare: str | Sequence[str] = (),
    calls: Iterable[AttentionCall] = (),
) -> Recording:
    """Time every attention call inside the `with` block; the block's value is a `Recording`.

    On CUDA an event pair on the current stream encloses each call and is read at the end of its stage;
    elsewhere `perf_counter` does. Nothing inside a call waits for the device.

    Args:
        path: JSON Lines file, written when the block ends without an error.
        compare: names of kernels to run on the same inputs as shadow arms, as a sequence or joined by commas.
            Their outputs are compared and dropped.
        calls: the model's calls, to refuse an arm that serves none of them before the run.

    Raises:
        ValueError: a name in `compare` is no kernel's.
        KernelUnavailable: an arm can serve none of the model's calls; the message says why.
        OSError: `path` can't be written (when the block is entered).
        RuntimeError: another recording is running in this process (likewise).
    """
    return Recording(path, compare=compare, calls=calls)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _default_device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_names(clocks: Mapping[torch.device, Clock]) -> str:
    names = [
        torch.cuda.get_device_name(clock.device) for clock in clocks.values() if isinstance(clock, CudaClock)
    ]
    if not names:
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    return ", ".join(
        f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"cannot write the timing log to {path}: it is a folder, give a file name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write the timing log to {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"cannot write the timing log to {path}: the folder {path.parent} is not writable"
        )
