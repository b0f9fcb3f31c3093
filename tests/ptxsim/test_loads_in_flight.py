"""A load from shared memory whose bytes a copy overwrites before anything has waited for its data."""

from __future__ import annotations

import pytest
from small_kernel import BULK, CLUSTER, INIT, WAIT, launch

from videoattn.ptxsim import Schedule

SCHEDULES = [Schedule.early(), Schedule.late(), *(Schedule.random(seed) for seed in range(8))]
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;"
LOAD = "ld.shared.b32 %b, [tile+12];"
STORE = "st.global.b32 [%o], %b;"
USE = "xor.b32 %c, %b, 5;"
FENCE = "fence.proxy.async.shared::cta;"
ARRIVE = """bar.warp.sync -1; setp.eq.u32 %q, %l, 0;
@%q mbarrier.arrive.shared::cta.b64 _, [other];"""
OTHER = WAIT.format(n=0, parity=0).replace("[bar]", "[other]")
MATRIX = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%b}, [%x0];"


def take_over(reader: str, writer: str = f"{EXPECT} {BULK}", rest: str = "", kernel: str = "") -> str:
    """A copy brings words 0 to 7 of the buffer; warp 1 reads them and arrives; then thread 0 does `writer`.

    By default that is the copy of words 128 to 135; `rest` follows it.
    """
    return f"""@%lead mbarrier.init.shared::cta.b64 [other], 1; {INIT.format(n=1)}
@%lead {EXPECT} @%lead {BULK} {WAIT.format(n=1, parity=0)}
mov.u32 %x0, tile; {kernel} add.u64 %out, %out, 512;
@%w0 bra WRITER; {reader} bra END;
WRITER: @!%lead bra END; {OTHER} {writer} {rest}"""


AGAIN = WAIT.format(n=2, parity=1)


def findings(body: str, **options) -> list:
    return [f for s in SCHEDULES for f in launch(body, s, arch="sm_90a", **options)[0].findings]


WRONG = {
    "used after the arrival": LOAD + ARRIVE + STORE,
    "used and fenced after the arrival": LOAD + ARRIVE + USE + FENCE + STORE,
    "a move is no use": LOAD + "mov.b32 %c, %b;" + ARRIVE + STORE.replace("%b", "%c"),
    "the other load is used": LOAD + "ld.shared.b32 %a, [tile+12]; xor.b32 %a, %a, 5;" + ARRIVE + STORE,
    "half the warp": f"@%low {LOAD}" + ARRIVE + "@%low " + STORE,
    "a vector": "ld.shared.v2.b32 {%b, %c}, [tile+8];" + ARRIVE + STORE,
    "a byte, widened": "ld.shared.s8 %b, [tile+12];" + ARRIVE + STORE,
    "a generic address": "cvt.u64.u32 %q0, %x0; cvta.shared.u64 %q0, %q0; ld.b32 %b, [%q0+12];"
    + ARRIVE
    + STORE,
    "a fence for global memory": LOAD + "fence.proxy.async.global;" + ARRIVE + STORE,
}
RIGHT = {
    "used before the arrival": LOAD + USE + ARRIVE + STORE,
    "used under a guard": LOAD + "@%low " + USE + ARRIVE + STORE,
    "stored": LOAD + STORE + ARRIVE,
    "fence.proxy.async": LOAD + FENCE + ARRIVE + STORE,
    "membar": LOAD + "fence.acq_rel.cta;" + ARRIVE + STORE,
    "one register of a vector": "ld.shared.v2.b32 {%a, %b}, [tile+8]; xor.b32 %a, %a, 5;" + ARRIVE + STORE,
    "a copy by mov": LOAD + "mov.b32 %c, %b; xor.b32 %c, %c, 5;" + ARRIVE + STORE,
    "the value is never used": LOAD + ARRIVE,
    "overwritten": LOAD + ARRIVE + "mov.b32 %b, 3;" + STORE,
    "half the warp": f"mov.b32 %b, 3; @%low {LOAD}" + USE + ARRIVE + STORE,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_load_that_nothing_waited_for_is_named(name):
    for schedule in SCHEDULES:
        report, _ = launch(take_over(WRONG[name]), schedule, arch="sm_90a")
        (found,) = report.findings
        assert (found.kind, found.severity) == ("load in flight", "strict"), str(report)
        assert found.where.warp == 1
        assert found.where.opcode.startswith("ld")
        assert "when the cp.async.bulk at PTX line" in found.message
        assert "the warp goes on to release at PTX line" in found.message


@pytest.mark.parametrize("name", RIGHT)
def test_a_load_that_has_its_data_is_clean(name):
    for schedule in SCHEDULES:
        report, out = launch(take_over(RIGHT[name], rest=AGAIN), schedule, arch="sm_90a")
        assert not report.findings, str(report)
        if STORE in RIGHT[name]:
            assert (out[32:64] == 3).all(), schedule


def test_ldmatrix():
    """Its rows are 16 bytes; the registers are lane by lane, two 16-bit halves."""
    rows = "and.b32 %x1, %l, 1; shl.b32 %x1, %x1, 4; add.u32 %x0, %x0, %x1;"
    wrong, right = MATRIX + ARRIVE + STORE, MATRIX + USE + ARRIVE + STORE
    assert {f.kind for f in findings(take_over(wrong, kernel=rows))} == {"load in flight"}
    assert not findings(take_over(right, kernel=rows))


def test_the_wrong_values_are_seen():
    """Where warps take turns, a load takes its bytes when they are needed."""
    other_work = "mov.b32 %d, 0; L: add.u32 %d, %d, 1; setp.lt.u32 %p, %d, 60; @%p bra L;"
    for use, values in (("", {3, 131}), (USE, {3})):
        body = take_over(LOAD + use + ARRIVE + other_work + STORE)
        assert {int(launch(body, s, arch="sm_90a")[1][32]) for s in SCHEDULES} == values


def test_generic_writes_and_other_bytes_are_ordered_by_the_arrival():
    reader = LOAD + ARRIVE + STORE
    far = f"{EXPECT} {BULK.replace('[tile]', '[tile+32]')}"
    for writer in ("st.shared.b32 [tile+12], %w;", "atom.shared.exch.b32 %c, [tile+12], 9;", far):
        for schedule in SCHEDULES:
            report, out = launch(take_over(reader, writer), schedule, arch="sm_90a")
            assert not report.findings, str(report)
            assert (out[32:64] == 3).all()


@pytest.mark.parametrize("between", ["", "bar.warp.sync -1;", "bar.sync 1, 32;"])
def test_the_copys_own_warp(between):
    """Program order does not order a load before the copy either."""
    body = f"""{INIT.format(n=1)} @!%w0 bra END; @%lead {EXPECT} @%lead {BULK} {WAIT.format(n=0, parity=0)}
{{load}} {between} @%lead {EXPECT} @%lead {BULK} {WAIT.format(n=1, parity=1)} {STORE}"""
    found = findings(body.format(load=LOAD))
    assert {f.kind for f in found} == {"load in flight"}
    assert len(found) == len(SCHEDULES)
    assert not findings(body.format(load=LOAD + USE))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_copy_of_another_cta(ranks):
    """A multicast that reaches the reader's CTA, or leaves it out."""
    copy = BULK.replace("::bytes", "::bytes.multicast::cluster").replace("[bar]", f"[bar], {ranks}")
    body = f"""{INIT.format(n=1)} {CLUSTER} @%lead {EXPECT} @%lead {BULK} {WAIT.format(n=0, parity=0)}
mov.u32 %b, %cluster_ctarank; setp.ne.u32 %q, %b, 0; {LOAD} {{use}}
@%lead {EXPECT} {CLUSTER}
@%q bra READER; {USE} {FENCE} @%lead {copy}
{WAIT.format(n=1, parity=1)} bra LEAVE; READER: {STORE} LEAVE: {CLUSTER}"""
    reads = findings(body.format(use=""), block=32, cluster=2)
    assert {f.kind for f in reads} == ({"load in flight"} if ranks == 3 else set())
    assert not findings(body.format(use=USE), block=32, cluster=2)


def test_a_loop_of_loads_keeps_nothing(monkeypatch):
    """Loads of earlier turns give way to those of later ones."""
    from videoattn.ptxsim import memory

    seen = []
    original = memory.SharedMemory.__init__

    def note(self, *args):
        original(self, *args)
        seen.append(self)

    monkeypatch.setattr(memory.SharedMemory, "__init__", note)
    body = f"""st.shared.b32 [%cell], %t; mov.u32 %d, 0;
LOOP: ld.shared.b32 %b, [%cell]; bar.sync 0; {USE} add.u32 %d, %d, 1; setp.lt.u32 %p, %d, 40; @%p bra LOOP;"""
    for schedule in SCHEDULES[:3]:
        assert not launch(body, schedule)[0].findings
        (smem,) = seen
        seen.clear()
        assert len(smem.escaped) == 2  # one for each warp
        assert not smem.unread
