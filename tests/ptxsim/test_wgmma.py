"""wgmma: bugs planted in a clean kernel are named; accumulators stay shut until they are waited for."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_cases import Case, all_cases

from videoattn.ptxsim import Device, Module, Schedule

CASE = next(c for c in all_cases() if c.name == "wgmma_steps")
WAIT = "wgmma.wait_group.sync.aligned 0;"


def run(case: Case, ptx: str, schedule: Schedule):
    device = Device("sm_90a")
    buffers = [device.upload(b) for b in case.buffers]
    args = [buffers[a] if isinstance(a, int) else a[1] for a in case.args]
    report = device.launch(Module.from_ptx(ptx).entry("k"), block=128, args=args, schedule=schedule)
    return report, buffers[2].download()


@pytest.mark.parametrize(
    ("old", "new", "kind", "severity"),
    [
        ("wgmma.fence.sync.aligned;", "", "missing fence", "error"),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0;", "missing fence", "error"),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "fence.proxy.async.shared::cta;", "race", "error"),
        (WAIT, "", "use before wait", "error"),
        (WAIT, "wgmma.wait_group.sync.aligned 1;", "use before wait", "error"),
        ("wgmma.commit_group.sync.aligned;", "", "use before wait", "error"),
        (WAIT, "st.shared.u32 [tile], %v; " + WAIT, "race", "error"),
    ],
)
def test_a_planted_bug_is_named(old, new, kind, severity):
    assert old in CASE.ptx
    found = set()
    for schedule in (Schedule.early(), Schedule.late()):
        report, _ = run(CASE, CASE.ptx.replace(old, new), schedule)
        found |= {(f.kind, f.severity) for f in report.findings}
    assert (kind, severity) in found


def test_every_missing_fence_counts():
    """Behind a wait too, where another wgmma had its fence."""
    start, end = CASE.ptx.index("wgmma.fence"), CASE.ptx.index(WAIT) + len(WAIT)
    once = CASE.ptx[start:end]
    twice = CASE.ptx[:end] + "\n" + once + CASE.ptx[end:]
    assert not run(CASE, twice, Schedule.late())[0].findings
    unfenced = CASE.ptx[:end] + "\n" + once.replace("wgmma.fence.sync.aligned;", "") + CASE.ptx[end:]
    report, _ = run(CASE, unfenced, Schedule.late())
    assert {(f.kind, f.severity) for f in report.findings} == {("missing fence", "strict")}


def test_schedules_do_not_change_the_product():
    outs = [run(CASE, CASE.ptx, s) for s in (Schedule.early(), Schedule.late(), Schedule.random(1))]
    assert all(not report.findings for report, _ in outs)
    assert all(np.array_equal(outs[0][1], out) for _, out in outs)


def test_a_reserved_descriptor_bit_is_named():
    case = CASE
    args = list(case.args)
    args[3] = ("u64", args[3][1] | 1 << 46)
    changed = Case(case.name, case.ptx, case.buffers, case.outputs, args, block=128)
    report, _ = run(changed, case.ptx, Schedule.early())
    assert any(f.kind == "illegal descriptor" and "reserved bits" in f.message for f in report.errors)
