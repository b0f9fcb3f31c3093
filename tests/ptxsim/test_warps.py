"""Divergence, roles, register pools, clusters: what warps and CTAs do together."""

from __future__ import annotations

import numpy as np
import pytest

from videoattn.ptxsim import Device, Module, Schedule

SCHEDULES = [Schedule.early(), Schedule.late(), Schedule.random(2)]


def run(
    body: str,
    *,
    block=32,
    grid=1,
    cluster=1,
    n=64,
    schedule=None,
    shared="",
    arch="sm_90a",
    registers=None,
    directives="",
):
    """Run a body that may write 32-bit results through %o (its thread's cell) and %out (the buffer)."""
    ptx = f""".version 8.6
.target {arch}
.address_size 64
{shared}
.visible .entry k(.param .u64 out) {directives}
{{
.reg .b32 %t, %g, %c, %w, %l, %a, %b, %d, %x<8>; .reg .b64 %out, %o, %f; .reg .pred %p, %q, %r;
ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %g, %ntid.x;
mad.lo.u32 %g, %c, %g, %t;
mul.wide.u32 %f, %g, 4; add.u64 %o, %out, %f; shr.u32 %w, %t, 5; and.b32 %l, %t, 31;
{body}
ret;
}}
"""
    device = Device(arch)
    out = device.upload(np.zeros(n, np.uint32))
    report = device.launch(
        Module.from_ptx(ptx).entry("k"),
        grid=grid,
        block=block,
        cluster=cluster,
        args=[out],
        schedule=schedule,
        registers=registers,
        limit=100_000,
    )
    return report, out.download()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_loops_of_uneven_length_meet_again(schedule):
    body = """mov.u32 %a, 0; mov.u32 %b, 0;
LOOP: setp.ge.u32 %p, %b, %l; @%p bra DONE; add.u32 %b, %b, 1; add.u32 %a, %a, %b;
and.b32 %d, %b, 1; setp.eq.u32 %q, %d, 1; @%q bra LOOP; add.u32 %a, %a, 100; bra LOOP;
DONE: bar.sync 0; st.global.u32 [%o], %a;"""
    report, out = run(body, schedule=schedule, n=32)
    assert not report.findings, str(report)
    assert out.tolist() == [k * (k + 1) // 2 + 100 * (k // 2) for k in range(32)]


def test_one_lane_may_wait_for_another_branch_of_its_warp():
    """Forward progress: lane 0 spins on a flag that lane 1 sets on the other side of the branch."""
    body = """setp.eq.u32 %p, %l, 0; mov.u32 %a, 0;
@!%p bra OTHER;
SPIN: ld.volatile.global.u32 %a, [%out]; setp.eq.u32 %q, %a, 0; @%q bra SPIN; bra JOIN;
OTHER: mov.u32 %b, 9; setp.eq.u32 %q, %l, 1; @!%q bra JOIN; st.volatile.global.u32 [%out], %b;
JOIN: add.u32 %a, %a, 1; setp.ne.u32 %q, %l, 1; @%q st.global.u32 [%o+128], %a;"""
    report, out = run(body)
    assert not report.findings, str(report)
    assert out[32] == 10


def test_lanes_that_never_come_are_a_deadlock():
    report, _ = run(
        "setp.lt.u32 %p, %l, 16; @%p bra END; bar.warp.sync 0xFFFFFFFF; END: bar.warp.sync 1; L: bra L;"
    )
    assert report.errors


def test_a_barrier_for_part_of_the_block():
    body = """setp.lt.u32 %p, %w, 2; @!%p bra END; bar.sync 3, 64; END: st.global.u32 [%o], %w;"""
    report, out = run(body, block=128, n=128)
    assert not report.findings
    assert out.tolist() == [w for w in range(4) for _ in range(32)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_lanes_may_reach_an_unaligned_barrier_on_both_sides_of_a_branch(schedule):
    body = """setp.lt.u32 %p, %l, 5; mov.u32 %a, cell; shl.b32 %b, %t, 2; add.u32 %b, %b, %a; mov.u32 %d, 127;
sub.u32 %d, %d, %t; shl.b32 %d, %d, 2; add.u32 %a, %a, %d; st.shared.u32 [%b], %t; @%p bra FEW;
barrier.sync 2; ld.shared.u32 %x0, [%a]; bra DONE; FEW: barrier.sync 2; ld.shared.u32 %x0, [%a];
DONE: st.global.u32 [%o], %x0;"""
    shared = ".shared .align 16 .b8 cell[512];"
    report, out = run(body, block=128, n=128, shared=shared, schedule=schedule)
    assert not report.findings, str(report)
    assert out.tolist() == list(range(127, -1, -1))
    report, _ = run(body.replace("FEW: barrier.sync 2;", "FEW:"), block=128, n=128, shared=shared)
    assert any("108 of 128 threads are there" in f.message for f in report.errors)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("setp.lt.u32 %p, %w, 1; @%p bar.sync 3, 64;", "32 of 64 threads are there (warps 0)"),
        ("setp.lt.u32 %p, %w, 3; @%p bar.sync 3, 128;", "96 of 128 threads are there (warps 0, 1, 2)"),
    ],
)
def test_a_barrier_that_stays_short_of_threads_is_a_deadlock(body, words):
    report, _ = run(body, block=128, n=128)
    assert report.errors[0].kind == "deadlock"
    assert words in report.errors[0].message


def test_counts_of_one_barrier_must_agree():
    body = "setp.lt.u32 %p, %w, 1; @%p bar.arrive 3, 96; @!%p bar.sync 3, 64;"
    report, _ = run(body, block=96, n=96)
    assert any(f.kind == "barrier misuse" and "is used with 64 threads while others use 96" in f.message
               for f in report.errors)  # fmt: skip


REGISTERS = """setp.lt.u32 %p, %w, 4; @!%p bra INC;
setmaxnreg.dec.sync.aligned.u32 {dec}; bra DONE;
INC: setmaxnreg.inc.sync.aligned.u32 {inc};
DONE: st.global.u32 [%o], %w;"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_registers_move_between_warpgroups(schedule):
    body = REGISTERS.format(dec=40, inc=216)
    report, _ = run(body, block=256, n=256, registers=128, schedule=schedule)
    assert not report.findings, str(report)


@pytest.mark.parametrize("block", [512, 256])
def test_a_launch_with_fewer_threads_has_the_registers_it_was_compiled_for(block):
    """128 a thread of 512: 256 threads bring no more."""
    for inc, wrong in ((216, False), (224, True)):
        body = REGISTERS.format(dec=40, inc=inc)
        if block == 512:  # the last two warpgroups give nothing and want nothing
            body = "setp.gt.u32 %p, %w, 7; @%p bra DONE;\n" + body
        report, _ = run(body, block=block, n=block, directives=".maxntid 512")
        assert bool(report.findings) == wrong, str(report)


def test_registers_that_can_never_be_granted_are_a_deadlock():
    report, _ = run(REGISTERS.format(dec=40, inc=224), block=256, n=256, registers=128)
    assert report.errors[0].kind == "deadlock"
    assert "setmaxnreg.inc 224; the CTA's pool holds" in report.errors[0].message


def test_a_decrease_that_increases_is_named():
    report, _ = run("setmaxnreg.dec.sync.aligned.u32 200;", block=128, n=128, registers=128)
    assert any(
        f.kind == "setmaxnreg" and "dec to 200 while the warp has 128" in f.message for f in report.errors
    )


CLUSTER = """mov.u32 %x0, %cluster_ctarank; xor.b32 %x1, %x0, 1;
mov.u32 %a, cell; mapa.shared::cluster.u32 %b, %a, %x1; mov.u32 %d, bar;
mapa.shared::cluster.u32 %x2, %d, %x1;
setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [bar], 32;
@%p fence.mbarrier_init.release.cluster;
{first}
shl.b32 %x3, %l, 2; add.u32 %b, %b, %x3; mad.lo.u32 %x4, %x0, 1000, %l;
st.shared::cluster.u32 [%b], %x4;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%x2];
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [bar], 0; @!%q bra W;
add.u32 %a, %a, %x3; ld.shared.u32 %x5, [%a]; st.global.u32 [%o], %x5;
{last}"""
SHARED = ".shared .align 8 .b64 bar; .shared .align 16 .b8 cell[128];"
ARRIVE_RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
BOTH = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_pair_exchanges_through_distributed_shared_memory(schedule):
    body = CLUSTER.format(first=ARRIVE_RELAXED, last=BOTH)
    report, out = run(body, grid=2, cluster=2, shared=SHARED, schedule=schedule)
    assert not report.findings, str(report)
    assert out.tolist() == [1000 + k for k in range(32)] + list(range(32))


def test_a_cluster_that_does_not_wait_for_initialisation_is_caught():
    kinds = set()
    for schedule in SCHEDULES:
        report, _ = run(
            CLUSTER.format(first="", last=BOTH), grid=2, cluster=2, shared=SHARED, schedule=schedule
        )
        kinds |= {f.kind for f in report.errors}
    assert kinds & {"barrier misuse", "missing synchronisation"}


def test_a_cta_that_leaves_while_its_peer_still_writes_is_caught():
    body = """mov.u32 %x0, %cluster_ctarank; setp.eq.u32 %p, %x0, 1; @%p bra END;
mov.u32 %a, cell; mapa.shared::cluster.u32 %b, %a, 1; st.shared::cluster.u32 [%b], %t; END:"""
    kinds = set()
    for seed in range(6):
        report, _ = run(body, grid=2, cluster=2, shared=SHARED, schedule=Schedule.random(seed))
        kinds |= {f.kind for f in report.errors}
    assert "exited CTA" in kinds


def test_a_race_between_warps_is_named_and_a_barrier_removes_it():
    body = """mov.u32 %a, cell; setp.eq.u32 %p, %w, 0; @%p st.shared.u32 [%a], %w; {sync}
@!%p ld.shared.u32 %b, [%a]; @!%p st.global.u32 [%o], %b;"""
    racy, _ = run(body.format(sync=""), block=64, shared=SHARED)
    assert any(f.kind == "race" and "the write by warp 0" in f.message for f in racy.errors)
    clean, _ = run(body.format(sync="bar.sync 0;"), block=64, shared=SHARED)
    assert not clean.findings


def test_local_memory_is_each_thread_s_own():
    body = """.local .align 16 .b8 depot[64]; .reg .b64 %sp; mov.u64 %sp, depot; cvta.local.u64 %sp, %sp;
add.u32 %a, %t, 5; st.u32 [%sp+8], %a; ld.local.u32 %b, [depot+8]; st.global.u32 [%o], %b;"""
    report, out = run(body, n=32)
    assert not report.findings
    assert out.tolist() == [t + 5 for t in range(32)]


def test_atomics_add_every_lane():
    report, out = run("atom.global.add.u32 %a, [%out], 3; red.global.max.u32 [%out+4], %t;", block=64)
    assert not report.findings
    assert out[:2].tolist() == [192, 63]


def test_two_ctas_that_write_one_place_are_a_race():
    report, _ = run("st.global.u32 [%out], %c;", grid=2)
    assert any("two CTAs write the same place" in f.message for f in report.errors)


def test_lanes_that_write_one_place_are_a_race():
    body = "and.b32 %a, %l, 15; mul.wide.u32 %f, %a, 4; add.u64 %o, %out, %f; st.global.u32 [%o], %l;"
    report, _ = run(body)
    assert any("lanes of one st.global" in f.message for f in report.errors)


def test_a_global_hand_over_between_warps_needs_a_barrier():
    body = """setp.eq.u32 %p, %w, 0; @%p st.global.u32 [%out], %l; {sync}
@!%p ld.global.u32 %a, [%out]; @!%p st.global.u32 [%o], %a;"""
    body = body.replace("st.global.u32 [%out], %l;", "st.global.u32 [%out], %w;")
    racy, _ = run(body.format(sync=""), block=64)
    assert any(f.kind == "race" for f in racy.errors)
    clean, _ = run(body.format(sync="bar.sync 0;"), block=64)
    assert not clean.findings


@pytest.mark.parametrize("synchronised", [True, False])
def test_a_lane_that_arrives_for_its_warp_needs_a_warp_synchronisation(synchronised):
    body = """setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0;
shl.b32 %x3, %l, 2; mov.u32 %a, cell; add.u32 %a, %a, %x3; setp.eq.u32 %q, %w, 0; @!%q bra READ;
st.shared.u32 [%a], %l; {sync}
@%p mbarrier.arrive.shared::cta.b64 _, [bar]; bra END;
READ: W: mbarrier.try_wait.parity.shared::cta.b64 %r, [bar], 0; @!%r bra W;
ld.shared.u32 %b, [%a]; st.global.u32 [%o], %b; END:"""
    report, _ = run(body.format(sync="bar.warp.sync -1;" if synchronised else ""), block=64, shared=SHARED)
    kinds = [(f.kind, f.severity) for f in report.findings]
    assert kinds == ([] if synchronised else [("missing warp synchronisation", "strict")])
