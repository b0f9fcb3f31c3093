"""The functions behind `videoattn sim`: run one PTX file, or the ladder's kernels."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .errors import LaunchError
from .ladder import LADDER, Outcome, compile_step, find_step, load_steps, run_step
from .launch import Device, Module, Report
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
    for spec in config.get("buffers", {}).values():
        _require_place(launch.parent / spec["save"] if "save" in spec else None)
    module = Module.from_ptx(_text(file))
    device = Device(config.get("arch", _device_for(module.target)))
    buffers = {n: _buffer(device, n, b, launch.parent) for n, b in config.get("buffers", {}).items()}
    args = [_argument(a, buffers) for a in config.get("args", [])]
    names = config.get("entry") or next(iter(module.entries), "")
    order = _schedule(schedule)
    _slows_somebody(order, int(np.prod(config.get("block", 1))))
    report = device.launch(
        module.entry(names),
        grid=config.get("grid", 1),
        block=config.get("block", 1),
        cluster=config.get("cluster", 1),
        dynamic_smem=config.get("dynamic_smem", 0),
        args=args,
        schedule=order,
        registers=config.get("registers"),
        roles=config.get("roles"),
        trace=trace or timeline is not None,
    )
    print(report)
    for role, counts in report.counts.items():
        top = ", ".join(f"{opcode} {n}" for opcode, n in counts.most_common(8))
        print(f"{role}: {sum(counts.values())} instructions; {top}")
    for name, spec in config.get("buffers", {}).items():
        if "save" in spec:
            with _written(place := launch.parent / spec["save"]):
                np.save(place, buffers[name].download())
    _finish(report, trace, timeline)
    return int(bool(report.findings))


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


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise LaunchError(f"{path} is not JSON: line {error.lineno}: {error.msg}") from None
    if not isinstance(data, dict):
        raise LaunchError(f"{path} holds no object")
    known = {
        "entry",
        "grid",
        "block",
        "cluster",
        "dynamic_smem",
        "arch",
        "registers",
        "roles",
        "args",
        "buffers",
    }
    if extra := set(data) - known:
        raise LaunchError(f"{path}: unknown key {sorted(extra)[0]!r}; known are {', '.join(sorted(known))}")
    return data


def _device_for(target: str) -> str:
    return (
        target if target in ("sm_90a", "sm_100a", "sm_103a") else "sm_90a" if target < "sm_100" else "sm_100a"
    )


def _buffer(device: Device, name: str, spec: dict, folder: Path) -> Buffer:
    if "file" in spec:
        path = _existing(folder / spec["file"])
        try:
            values = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, OSError):
            values = None
        if not isinstance(values, np.ndarray):
            raise LaunchError(f"buffer {name}: {path} is no .npy file of one array of numbers")
        return device.upload(values, name)
    if spec.get("dtype") not in _ARRAY_TYPES:
        raise LaunchError(
            f"buffer {name}: dtype {spec.get('dtype')!r} is not one of {', '.join(_ARRAY_TYPES)}"
        )
    dtype, shape, fill = _ARRAY_TYPES[spec["dtype"]], tuple(spec.get("shape", ())), spec.get("fill", 0)
    if not shape or math.prod(shape) < 1:
        raise LaunchError(f"buffer {name}: shape {shape} is not a list of positive sizes")
    if fill == "poison":
        return device.upload(
            np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0x7F, np.uint8).view(dtype).reshape(shape),
            name,
        )
    if fill == "normal":
        values = np.random.default_rng(spec.get("seed", 0)).standard_normal(shape).astype(np.float32)
    else:
        values = np.full(shape, fill, np.float32 if spec["dtype"] in ("bf16", "f16", "f32") else dtype)
    if spec["dtype"] == "bf16":
        from .scalar import f32_to_bf16

        return device.upload(f32_to_bf16(values), name)
    return device.upload(values.astype(dtype), name)


def _argument(spec: Any, buffers: dict[str, Buffer]):
    if isinstance(spec, (int, float)):
        return spec
    if not isinstance(spec, dict) or len(spec) != 1:
        raise LaunchError(f"argument {spec!r} is not a number, bytes, buffer or tensor_map")
    ((kind, value),) = spec.items()
    if kind == "bytes":
        return bytes.fromhex(value)
    name = value if kind == "buffer" else value.get("buffer") if kind == "tensor_map" else None
    if name not in buffers:
        raise LaunchError(f"argument {spec!r}: no buffer {name!r}; there are {', '.join(buffers) or 'none'}")
    if kind == "buffer":
        return buffers[name]
    fields = {k: v for k, v in value.items() if k != "buffer"}
    try:
        return TensorMap(buffers[name], **fields)
    except TypeError as error:
        raise LaunchError(
            f"tensor_map of {name}: {str(error).replace('TensorMap.__init__() ', '')}"
        ) from None
