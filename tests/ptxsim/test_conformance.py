"""The simulator against an NVIDIA GPU: every micro-kernel must write what the hardware wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance_cases import Case, Map, all_cases

from videoattn.ptxsim import Device, Module, Schedule, TensorMap
from videoattn.ptxsim.tensormap import ELEMENT_BYTES

GOLDEN = Path(__file__).with_name("golden") / "conformance.npz"
CASES = {c.name: c for c in all_cases()}


def simulate(case: Case, schedule: Schedule) -> list[np.ndarray]:
    """Run a case; the outputs in the order of case.outputs."""
    device = Device("sm_90a")
    buffers = [device.upload(b) for b in case.buffers]
    args = []
    for a in case.args:
        if isinstance(a, Map):
            args.append(
                TensorMap(
                    buffers[a.buffer],
                    dtype=a.dtype,
                    dims=a.dims,
                    strides=a.strides,
                    box=a.box,
                    swizzle=a.swizzle,
                    oob=a.oob,
                    element_strides=a.element_strides,
                )
            )
        else:
            args.append(buffers[a] if isinstance(a, int) else a[1])
    kernel = Module.from_ptx(case.ptx).entry(case.kernel)
    report = device.launch(kernel, block=case.block, dynamic_smem=case.smem, args=args, schedule=schedule)
    assert not report.findings, str(report)
    return [buffers[i].download() for i in case.outputs]


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of f32 bit patterns in representable values; NaNs are equal to each other."""
    x, y = (v.astype(np.int64) for v in (a & 0xFFFFFFFF, b & 0xFFFFFFFF))
    order = [np.where(v & 0x80000000, -(v & 0x7FFFFFFF), v) for v in (x, y)]
    nan = [((v & 0x7FFFFFFF) > 0x7F800000) for v in (x, y)]
    return np.where(nan[0] & nan[1], 0, np.where(nan[0] | nan[1], 1 << 32, abs(order[0] - order[1])))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as data:
        return dict(data)


@pytest.mark.parametrize("name", CASES)
def test_matches_hardware(name: str, golden):
    case = CASES[name]
    if f"{name}/error" in golden:
        why = "error: "
        if isinstance(tile_map := case.args[0], Map):
            at = case.args[2][1]
            if at * ELEMENT_BYTES[tile_map.dtype] % 16:
                why = f"inner coordinate {at} of .* no multiple of 16"
        with pytest.raises(AssertionError, match=why):
            simulate(case, Schedule.early())
        return
    for i, out in zip(case.outputs, simulate(case, Schedule.early()), strict=True):
        want = golden[f"{name}/{i}"]
        if case.ulp is not None:
            distance = ulp_distance(out, want)
            values = [x.astype(np.uint32).view(np.float32) for x in (out, want)]
            with np.errstate(invalid="ignore"):
                distance[abs(values[0] - values[1]) <= case.absolute] = 0
            worst = distance.max()
            assert worst <= case.ulp, f"{worst} ulp"
            continue
        assert out.dtype == want.dtype
        raw, ref = out.view(np.uint8), want.view(np.uint8)
        assert (raw == ref).all(), f"{np.count_nonzero(raw != ref)} of {raw.size} bytes differ"


def asynchronous() -> list[str]:
    """Cases with engines of their own that the hardware accepts."""
    refused = {name.split("/")[0] for name in np.load(GOLDEN).files if name.endswith("/error")}
    return [n for n in CASES if n.startswith(("tma", "mbarrier", "wgmma")) and n not in refused]


@pytest.mark.parametrize("name", asynchronous())
def test_late_schedule_gives_the_same(name: str, golden):
    case = CASES[name]
    for i, out in zip(case.outputs, simulate(case, Schedule.late()), strict=True):
        assert (out.view(np.uint8) == golden[f"{name}/{i}"].view(np.uint8)).all()
