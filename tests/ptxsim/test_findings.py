"""Each kind of bug, planted in a clean kernel, is named."""

from __future__ import annotations

import numpy as np
import pytest
import small_gemm

from videoattn.ptxsim import Schedule

SCHEDULES = [Schedule.early(), Schedule.late(), Schedule.random(3), Schedule.random(4)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_clean_kernel_is_clean_and_right(schedule):
    report, out = small_gemm.run(schedule=schedule)
    assert not report.findings, str(report)
    assert np.array_equal(out, small_gemm.expected())


FENCE_AFTER_WAIT = "@!%done bra COMPUTING;\ntcgen05.fence::after_thread_sync;"
BUGS = [
    # (name, text to replace, replacement, kind, severity)
    ("no wait for the copy", "@!%done bra LOADING;", "", "race", "error"),
    ("no wait for the MMA", "@!%done bra COMPUTING;", "", "race", "error"),
    (
        "MMA never committed",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [computed];",
        "",
        "deadlock",
        "error",
    ),
    ("too many bytes expected", "[loaded], 24576;", "[loaded], 24592;", "deadlock", "error"),
    ("too few bytes expected", "[loaded], 24576;", "[loaded], 24560;", "deadlock", "error"),
    ("barrier wants two arrivals", "[computed], 1;", "[computed], 2;", "deadlock", "error"),
    (
        "barrier initialised twice",
        "mbarrier.init.shared::cta.b64 [computed], 1;",
        "mbarrier.init.shared::cta.b64 [computed], 1;\nmbarrier.init.shared::cta.b64 [computed], 1;",
        "barrier misuse",
        "error",
    ),
    (
        "no barrier initialisation",
        "mbarrier.init.shared::cta.b64 [computed], 1;",
        "",
        "barrier misuse",
        "error",
    ),
    (
        "inverted parity",
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [computed], %par;",
        "xor.b32 %x, %par, 1; mbarrier.try_wait.parity.shared::cta.b64 %done, [computed], %x;",
        "race",
        "error",
    ),
    ("no fence after mbarrier.init", "fence.mbarrier_init.release.cluster;", "", "missing fence", "strict"),
    (
        "no CTA synchronisation after the set-up",
        "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\nld.shared",
        "ld.shared",
        "uninitialised shared memory",
        "error",
    ),
    (
        "no tcgen05 fence after the wait",
        FENCE_AFTER_WAIT,
        "@!%done bra COMPUTING;",
        "missing tcgen05 fence",
        "strict",
    ),
    ("loads not waited for", "tcgen05.wait::ld.sync.aligned;", "", "use before wait", "strict"),
    ("stores not waited for", "tcgen05.wait::st.sync.aligned;", "", "race", "error"),
    (
        "no synchronisation before the next MMA",
        "bar.sync 0;\ntcgen05.fence::after_thread_sync;\nadd.u32 %i",
        "add.u32 %i",
        "race",
        "error",
    ),
    ("wrong lane window", "shl.b32 %lane, %w, 21;", "shl.b32 %lane, %w, 20;", "wrong lane window", "error"),
    (
        "column outside the allocation",
        "tcgen05.st.sync.aligned.32x32b.x4.b32 [%x]",
        "tcgen05.st.sync.aligned.32x32b.x4.b32 [%x+64]",
        "unallocated tmem",
        "error",
    ),
    (
        "tensor memory never freed",
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 64;",
        "",
        "tmem leak",
        "error",
    ),
    ("freed size differs", "b32 %tm, 64;", "b32 %tm, 32;", "tmem allocation", "error"),
    ("48 columns", "[slot], 64;", "[slot], 48;", "tmem allocation", "error"),
    (
        "allocation after relinquish",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;",
        "tmem allocation",
        "error",
    ),
    (
        "accumulating onto nothing",
        "setp.ne.u32 %acc, %i, 0;",
        "setp.eq.u32 %acc, 0, 0;",
        "uninitialised tmem",
        "error",
    ),
    (
        "swizzle code 3",
        "or.b64 %da, %da, 0x4000404000010000;",
        "or.b64 %da, %da, 0x6000404000010000;",
        "illegal descriptor",
        "error",
    ),
    (
        "descriptor version bits",
        "or.b64 %da, %da, 0x4000404000010000;",
        "or.b64 %da, %da, 0x4000004000010000;",
        "illegal descriptor",
        "error",
    ),
    (
        "instruction descriptor with M = 96",
        "0x08100490, %acc;\nsetp",
        "0x06100490, %acc;\nsetp",
        "illegal descriptor",
        "error",
    ),
    (
        "operand past shared memory",
        "or.b64 %da, %da, 0x4000404000010000;",
        "or.b64 %da, %da, 0x4000404000013000;",
        "out of bounds",
        "error",
    ),
    ("misaligned tile", "[tile_a], [%a", "[tile_a+16], [%a", "misaligned", "error"),
    (
        "store past the buffer",
        "mad.lo.u32 %d1, %t, 64, %d0;",
        "mad.lo.u32 %d1, %t, 68, %d0;",
        "out of bounds",
        "error",
    ),
    (
        "misaligned store",
        "add.u64 %off, %off, %out;",
        "add.u64 %off, %off, %out; add.u64 %off, %off, 4;",
        "misaligned",
        "error",
    ),
    (
        "register read before it is written",
        "add.u32 %x, %lane, %d0;",
        "add.u32 %x, %lane, %d7;",
        "uninitialised register",
        "error",
    ),
    (
        "divergent aligned load",
        "add.u32 %x, %lane, %d0;\n",
        "add.u32 %x, %lane, %d0;\n@%leader bra SKIP;\n",
        "divergent aligned instruction",
        "error",
    ),
    (
        "generic store under the MMA",
        "setp.ne.u32 %acc, %i, 0;",
        "st.shared.u32 [tile_a], %i; setp.ne.u32 %acc, %i, 0;",
        "missing fence",
        "error",
    ),
    (
        "overwriting what is being read",
        "setp.eq.u32 %acc, 0, 0;",
        "setp.eq.u32 %acc, 0, 0; st.shared.u32 [tile_a], %i;",
        "race",
        "error",
    ),
    (
        "barrier id 16",
        "bar.sync 0;\ntcgen05.fence::after_thread_sync;\nadd.u32 %i",
        "bar.sync 16;\ntcgen05.fence::after_thread_sync;\nadd.u32 %i",
        "barrier misuse",
        "error",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "kind", "severity"), BUGS, ids=[b[0] for b in BUGS])
def test_a_planted_bug_is_named(name, old, new, kind, severity):
    assert old in small_gemm.PTX
    ptx = small_gemm.PTX.replace(old, new)
    if "SKIP" in new:
        ptx = ptx.replace("tcgen05.wait::ld.sync.aligned;", "SKIP: tcgen05.wait::ld.sync.aligned;")
    reports = [small_gemm.run(ptx, schedule)[0] for schedule in (Schedule.early(), Schedule.late())]
    found = {(f.kind, f.severity) for r in reports for f in r.findings}
    assert (kind, severity) in found, "\n".join(map(str, reports))
    if severity == "strict":
        assert not any(r.errors for r in reports)


def test_a_hang_names_who_waits_and_what_is_missing():
    ptx = small_gemm.PTX.replace("[loaded], 24576;", "[loaded], 24592;")
    report, _ = small_gemm.run(ptx, Schedule.late())
    (hang,) = [f for f in report.findings if f.kind == "deadlock"]
    assert "warp 0 (lanes 0) waits on loaded for parity 0" in hang.message
    assert "16 of 24592 expected bytes missing" in hang.message
    assert "warps 1-3 (all lanes) wait on computed for parity 0" in hang.message


def test_a_finding_names_line_warp_and_the_other_access():
    ptx = small_gemm.PTX.replace("@!%done bra LOADING;", "")
    report, _ = small_gemm.run(ptx, Schedule.late())
    text = str(report.errors[0])
    assert "tcgen05.mma B reads tile_b" in text or "tcgen05.mma A reads tile_a" in text
    assert "the copy onto loaded at PTX line" in text
    assert "CTA 0 warp 0, PTX line" in text
