"""The functions behind `videoattn sim`: run one PTX file, or the ladder's kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from videoattn.typed_json import EXACT, fit, parse, shown

from .errors import LaunchError
from .ladder import LADDER, Outcome, compile_step, find_step, load_steps, run_step
from .launch import Device, Module, Report, triple
from .memory import Buffer
from .schedule import Schedule
from .tensormap import TensorMap

_ARRAY_TYPES = {
    "bf16": np.uint16,
    "f16": np.float16,
    "f32": np.float32,
    "u8": np.uint8,
    "u32": np.uint32,
    "s32": np.int32,
}


@dataclass(slots=True)
class BufferSpec:
    """A buffer of a launch file: a .npy file, or a type and a shape with what fills it."""

    dtype: str | None = None
    shape: tuple[int, ...] = ()
    fill: Any = 0
    seed: int = 0
    file: str | None = None
    save: str | None = None


@dataclass(slots=True)
class MapSpec:
    """A tensor map of a launch file: its buffer, and what TensorMap takes."""

    __pydantic_config__ = EXACT

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    l2_promotion: str = "none"
    oob: str = "zero"
    element_strides: tuple[int, ...] | None = None


@dataclass(slots=True)
class LaunchFile:
    """A launch file; sizes and arguments are checked where they are used, which says more."""

    __pydantic_config__ = EXACT

    entry: str | None = None
    grid: Any = 1
    block: Any = 1
    cluster: Any = 1
    dynamic_smem: int = 0
    arch: str | None = None
    registers: int | None = None
    roles: dict[str, tuple[int, ...]] | None = None
    args: list[Any] = field(default_factory=list)
    buffers: dict[str, BufferSpec] = field(default_factory=dict)


def _schedule(text: str) -> Schedule:
    try:
        return Schedule.named(text)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _slows_somebody(schedule: Schedule, threads: int) -> None:
    """Refuse slow warps beyond a CTA's: the launch would pass without having tried anything."""
    warps = -(-threads // 32)
    if schedule.mode == "slow" and schedule.warps[0] >= warps:
        raise LaunchError(f"schedule {schedule} slows nobody: a CTA has warps 0 to {warps - 1} here")


def _finish(report: Report, trace: bool, timeline: Path | None) -> None:
    if report.trace is not None and trace:
        for line in report.trace.lines():
            print(line)
    if report.trace is not None and timeline is not None:
        with _written(timeline):
            report.trace.write(timeline)
        print(f"timeline: {timeline} (open in Perfetto or chrome://tracing)")


def ladder(step: str | None = None, schedule: str = "early", shape: str = "1x256x256", folder: Path = LADDER,
           trace: bool = False, timeline: Path | None = None) -> int:  # fmt: skip
    """Run kernels of the ladder on the simulator and compare them with fp32 attention.

    step: number or name, all by default. schedule: comma-separated early, late, random[:SEED],
    slow:WARP[-WARP]. shape: HEADSxQ_LENxKV_LEN. trace: print the events. timeline: write a Chrome trace, of
    several runs one each, with step and schedule in its name.
    Returns the exit status: 1 when a step has findings or is wrong. Raises LaunchError with one line when a
    step cannot run.
    """
    try:
        heads, q_len, kv_len = (int(x) for x in shape.split("x"))
    except ValueError:
        raise LaunchError(f"shape {shape!r} is not HEADSxQ_LENxKV_LEN, such as 1x256x1024") from None
    schedules = list({str(s): s for s in map(_schedule, schedule.split(","))}.values())
    steps = load_steps(folder)
    chosen = [find_step(steps, step)] if step else steps
    places = {(one.name, s): timeline for one in chosen for s in schedules}
    if timeline is not None and len(places) > 1:
        places = {(name, s): _own_name(timeline, name, s) for name, s in places}
    for place in places.values():
        _require_place(place)
    for s in schedules:
        _slows_somebody(s, max(one.block for one in chosen))
    failed = 0
    numbers = f"{'max error':>9} {'bound':>8} {'L2':>8} {'instr':>8} {'seconds':>7}"
    head = f"{'step':28} {'schedule':9} {numbers}  verdict\n"
    for one in chosen:
        module = compile_step(one)
        for s in schedules:
            outcome = run_step(one, module, heads=heads, q_len=q_len, kv_len=kv_len, schedule=s,
                               trace=trace or timeline is not None)  # fmt: skip
            # A step that cannot be compiled or run is refused in one line, not below an empty table.
            print(f"{head}{_row(outcome)}")
            head = ""
            for finding in outcome.report.findings:
                print("   ", finding)
            failed += not outcome.passed
            _finish(outcome.report, trace, places[one.name, s])
    return int(failed > 0)


def _own_name(timeline: Path, step: str, schedule: Schedule) -> Path:
    return timeline.with_name(f"{timeline.stem}.{step}.{schedule}".replace(":", "-") + timeline.suffix)


def _row(o: Outcome) -> str:
    verdict = (
        "clean" if o.passed else f"{len(o.report.findings)} findings" if o.report.findings else "wrong values"
    )
    r = o.report
    errors = f"{o.max_error:9.5f} {o.bound:8.5f} {o.errors.relative_l2:8.1e}"
    numbers = f"{errors} {r.instructions:8} {r.seconds:7.2f}"
    return f"{o.step.name:28} {r.schedule!s:9} {numbers}  {verdict}"


def run(
    file: Path, launch: Path, schedule: str = "early", trace: bool = False, timeline: Path | None = None
) -> int:
    """Run one kernel of a PTX file as launch.json says.

    launch.json holds `entry`, `grid`, `block`, optionally `cluster`, `dynamic_smem`, `arch`, `registers`,
    `roles`, and `args`: a number, {"bytes": HEX}, {"buffer": NAME} or {"tensor_map": {"buffer": NAME,
    …TensorMap fields}}; `buffers` maps a name to {"dtype", "shape", "fill": number | "normal" | "poison",
    "seed"} or {"file": .npy path, "save": .npy path to write afterwards}. Returns the exit status: 1 when
    there are findings. Raises LaunchError with one line.
    """
    config = _load(launch)
    _require_place(timeline)
    for spec in config.buffers.values():
        _require_place(None if spec.save is None else launch.parent / spec.save)
    module = Module.from_ptx(_text(file))
    order = _schedule(schedule)
    with _named(launch):
        device = Device(_device_for(module.target) if config.arch is None else config.arch)
        buffers = {n: _buffer(device, n, b, launch.parent) for n, b in config.buffers.items()}
        args = [_argument(a, buffers) for a in config.args]
        _slows_somebody(order, math.prod(triple(config.block, "block")))
        report = device.launch(
            module.entry(config.entry or next(iter(module.entries), "")),
            grid=config.grid,
            block=config.block,
            cluster=config.cluster,
            dynamic_smem=config.dynamic_smem,
            args=args,
            schedule=order,
            registers=config.registers,
            roles=config.roles,
            trace=trace or timeline is not None,
        )
    print(report)
    for role, counts in report.counts.items():
        top = ", ".join(f"{opcode} {n}" for opcode, n in counts.most_common(8))
        print(f"{role}: {sum(counts.values())} instructions; {top}")
    for name, spec in config.buffers.items():
        if spec.save is not None:
            with _written(place := launch.parent / spec.save):
                np.save(place, buffers[name].download())
    _finish(report, trace, timeline)
    return int(bool(report.findings))


@contextmanager
def _named(launch: Path) -> Iterator[None]:
    try:
        yield
    except LaunchError as error:
        raise LaunchError(f"{launch}: {error}") from None


def _existing(path: Path) -> Path:
    try:
        there = path.exists()
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None
    if not there:
        raise LaunchError(f"{path} does not exist")
    if not path.is_file():
        raise LaunchError(f"{path} is no file")
    return path


def _text(path: Path) -> str:
    try:
        return _existing(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LaunchError(f"{path} is no text: it holds bytes that are not UTF-8") from None
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None


def _require_place(path: Path | None) -> None:
    """Before a run of minutes, whose result would be lost."""
    if path is None:
        return
    with _written(path):
        if path.is_dir() or not path.parent.is_dir():
            raise LaunchError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}"
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise LaunchError(f"cannot write {path}: permission denied")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(f"cannot write {str(path)!r}: {error}") from None


def _load(path: Path) -> LaunchFile:
    try:
        data = parse(_text(path), finite=False)
    except ValueError as error:
        raise LaunchError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise LaunchError(f"{path} holds no object")
    known = sorted(LaunchFile.__dataclass_fields__)
    if extra := sorted(data.keys() - set(known)):
        raise LaunchError(f"{path}: unknown key {extra[0]!r}; known are {', '.join(known)}")
    try:
        return fit(LaunchFile, data)
    except ValueError as error:
        raise LaunchError(f"{path}: {error}") from None


def _device_for(target: str) -> str:
    return (
        target if target in ("sm_90a", "sm_100a", "sm_103a") else "sm_90a" if target < "sm_100" else "sm_100a"
    )


def _buffer(device: Device, name: str, spec: BufferSpec, folder: Path) -> Buffer:
    if spec.file is not None:
        path = _existing(folder / spec.file)
        try:
            values = np.load(path, allow_pickle=False)
        except Exception:
            # Of a damaged header anything comes: numpy reads it as an archive, as Python, as sizes.
            values = None
        if not isinstance(values, np.ndarray):
            raise LaunchError(f"buffer {name}: {path} is no .npy file of one array of numbers")
        return device.upload(values, name)
    if spec.dtype not in _ARRAY_TYPES:
        raise LaunchError(f"buffer {name}: dtype {spec.dtype!r} is not one of {', '.join(_ARRAY_TYPES)}")
    if not spec.shape or min(spec.shape) < 1:
        raise LaunchError(f"buffer {name}: shape {spec.shape} is not a list of positive sizes")
    if spec.seed < 0:
        raise LaunchError(f"buffer {name}: seed {spec.seed} is below 0")
    try:
        values = _filled(name, spec, spec.dtype)
    except MemoryError:
        raise LaunchError(f"buffer {name}: no memory for the shape {spec.shape}") from None
    except ValueError as error:
        raise LaunchError(f"buffer {name}: {error}") from None
    return device.upload(values, name)


def _filled(name: str, spec: BufferSpec, kind: str) -> np.ndarray:
    dtype, shape, fill = _ARRAY_TYPES[kind], spec.shape, spec.fill
    if fill == "poison":
        return np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0x7F, np.uint8).view(dtype).reshape(shape)
    real = kind in ("bf16", "f16", "f32")
    if fill == "normal":
        values = np.random.default_rng(spec.seed).standard_normal(shape).astype(np.float32)
    elif isinstance(fill, bool) or not isinstance(fill, (int, float)):
        raise LaunchError(f"buffer {name}: fill {shown(fill)} is not a number, normal or poison")
    elif not _holds(kind, fill):
        raise LaunchError(f"buffer {name}: {kind} cannot hold the fill {fill}")
    else:
        values = np.full(shape, fill, np.float32 if real else dtype)
    if kind == "bf16":
        from .scalar import f32_to_bf16

        return f32_to_bf16(values)
    return values.astype(dtype)


def _holds(kind: str, value: int | float) -> bool:
    if kind in ("bf16", "f16", "f32"):
        with np.errstate(over="ignore"):
            stored = np.float16(value) if kind == "f16" else np.float32(value)
        return bool(np.isfinite(stored)) or not math.isfinite(value)
    limits = np.iinfo(_ARRAY_TYPES[kind])
    return limits.min <= value <= limits.max and float(value).is_integer()


def _argument(spec: Any, buffers: dict[str, Buffer]):
    if isinstance(spec, (int, float)):
        return spec
    if not isinstance(spec, dict) or len(spec) != 1:
        raise LaunchError(f"argument {shown(spec)} is not a number, bytes, buffer or tensor_map")
    ((kind, value),) = spec.items()
    if kind == "bytes" and isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise LaunchError(f"argument bytes {shown(value)} is not hexadecimal") from None
    if kind == "buffer" and isinstance(value, str):
        return _known(value, buffers)
    if kind != "tensor_map":
        raise LaunchError(f"argument {kind!r}: {shown(value)} is not a number, bytes, buffer or tensor_map")
    try:
        given = fit(MapSpec, value)
    except ValueError as error:
        raise LaunchError(f"argument tensor_map: {error}") from None
    fields = {name: part for name, part in asdict(given).items() if name != "buffer"}
    return TensorMap(_known(given.buffer, buffers), **fields)


def _known(name: str, buffers: dict[str, Buffer]) -> Buffer:
    if name not in buffers:
        raise LaunchError(f"argument: no buffer {name!r}; there are {', '.join(buffers) or 'none'}")
    return buffers[name]
