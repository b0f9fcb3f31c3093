"""Every kind of finding, triggered by a kernel, beside one almost the same that must be clean."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_kernel import ARRIVE, BULK, CLUSTER, INIT, WAIT, launch

from videoattn.ptxsim import Schedule

DOCS = Path(__file__).parents[2] / "docs" / "simulator.md"
TMEM = """@!%w0 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {columns};
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED: bar.sync 0; ld.shared.b32 %tm, [slot]; add.u32 %a, %tm, %lane; {body}
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%w0 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, {columns};"""
TMEM_ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%a], {%t}; tcgen05.wait::st.sync.aligned;"
TMEM_LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%b}, [%a]; tcgen05.wait::ld.sync.aligned;"
# tile holds zeros for the operands of a 128 x 16 x 16 MMA whose A is in tensor memory, columns 0-7
OPERANDS = """shl.b32 %x0, %t, 4; mov.u32 %x1, tile; add.u32 %x0, %x0, %x1; mov.u32 %x2, 0;
st.shared.v4.b32 [%x0], {%x2, %x2, %x2, %x2}; st.shared.v4.b32 [%x0+2048], {%x2, %x2, %x2, %x2};
fence.proxy.async.shared::cta;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%a], {%x2, %x2, %x2, %x2, %x2, %x2, %x2, %x2};
tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
tcgen05.fence::after_thread_sync;
shr.u32 %x1, %x1, 4; cvt.u64.u32 %q0, %x1; or.b64 %q0, %q0, 0x0000400800100000;"""
MMA = "@%lead tcgen05.mma.cta_group::1.kind::f16 [%{d}], [%tm], %q0, {idesc}, 0;"
SECOND = "@%lead tcgen05.mma.cta_group::1.kind::f16 [%{d}], %q0, %q0, 0x08040490, 0;"
COMMIT = """@%lead tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
W0: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W0; tcgen05.fence::after_thread_sync;"""


AFTER = "tcgen05.fence::after_thread_sync;"


def overwritten(use: str) -> str:
    """A warp reads what a copy has brought, and starts the next copy onto the same place."""
    copy = f"@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32; @%lead {BULK}"
    return f"""{INIT.format(n=1)} @!%w0 bra END; {copy} {WAIT.format(n=0, parity=0)}
ld.shared.b32 %b, [tile]; {use} {copy} {WAIT.format(n=1, parity=1)} st.global.b32 [%o+128], %b;"""


def tile_at(inner: int) -> str:
    """The first thread loads a tile of 4-byte elements that starts at this inner coordinate."""
    return f"""{INIT.format(n=1)} mov.u32 %b, {inner};
@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
@%lead cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [tile],
[%map, {{%b, 0}}], [bar]; {WAIT.format(n=0, parity=0)}"""


def mma(columns: int = 128, idesc: str = "0x08040490", second: str = "", phase: int = 0) -> str:
    last = COMMIT.replace("[bar], 0", f"[bar], {phase}").replace("W0", f"W{phase}")
    first = "add.u32 %d, %tm, 32; " + MMA.format(d="d", idesc=idesc)
    return INIT.format(n=1) + TMEM.format(columns=columns, group=1, body=OPERANDS + first + second + last)


@dataclass
class Pair:
    """A kernel with a bug of one kind, and its neighbour without."""

    kind: str
    severity: str
    wrong: str
    right: str
    launch: dict = field(default_factory=dict)
    right_launch: dict = field(default_factory=dict)  # where the launch is what differs


def tmem(body: str, columns: int = 32, group: int = 1) -> str:
    return TMEM.format(columns=columns, group=group, body=body)


def hand_over(between: str, after: str) -> str:
    """Warp 0 writes its lanes of tensor memory, warp 4, which shares them, reads."""
    return tmem(f"@!%w0 bra S; {TMEM_ST} {between} S: bar.sync 0; setp.eq.u32 %p, %w, 4; @!%p bra R; {after} "
                f"{TMEM_LD} st.global.b32 [%o], %b; R:")  # fmt: skip


def multicast(ranks: int) -> str:
    """The first CTA of a pair copies 32 bytes to the CTAs of a mask."""
    copy = BULK.replace("::bytes", "::bytes.multicast::cluster").replace("[bar]", f"[bar], {ranks}")
    return f"""{INIT.format(n=1)} {CLUSTER} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;
mov.u32 %b, %cluster_ctarank; setp.ne.u32 %p, %b, 0; @%p bra S; @%lead {copy}
S: {WAIT.format(n=0, parity=0)} {CLUSTER}"""


PAIRS = [
    Pair("deadlock", "error", INIT.format(n=2) + ARRIVE + WAIT.format(n=0, parity=0),
         INIT.format(n=1) + ARRIVE + WAIT.format(n=0, parity=0)),
    Pair("race", "error", "@%w0 st.shared.b32 [cells], 1; @!%w0 ld.shared.b32 %b, [cells];",
         "@%w0 st.shared.b32 [cells], 1; bar.sync 0; @!%w0 ld.shared.b32 %b, [cells];"),
    Pair("missing fence", "error",
         "st.shared.b32 [%cell], %t; bar.sync 0; @!%lead bra END; "
         "cp.async.bulk.global.shared::cta.bulk_group [%out], [cells], 256; cp.async.bulk.commit_group; "
         "cp.async.bulk.wait_group 0;",
         "st.shared.b32 [%cell], %t; fence.proxy.async.shared::cta; bar.sync 0; @!%lead bra END; "
         "cp.async.bulk.global.shared::cta.bulk_group [%out], [cells], 256; cp.async.bulk.commit_group; "
         "cp.async.bulk.wait_group 0;"),
    Pair("missing fence", "strict",
         f"{INIT.format(n=1)} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32; @%lead {BULK} "
         .replace("@%lead fence.mbarrier_init.release.cluster;", "") + WAIT.format(n=0, parity=0),
         f"{INIT.format(n=1)} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32; @%lead {BULK} "
         .replace("fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta")
         + WAIT.format(n=0, parity=0)),
    Pair("missing tcgen05 fence", "strict", hand_over("tcgen05.fence::before_thread_sync;", ""),
         hand_over("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"),
         {"block": 160}),
    Pair("missing tcgen05 fence", "strict",  # the thread's own MMA, after its own commit
         mma(second=COMMIT.replace(AFTER, "bar.sync 0;") + SECOND.format(d="tm"), phase=1),
         mma(second=COMMIT + "bar.sync 0;" + SECOND.format(d="tm"), phase=1), {"block": 128}),
    Pair("missing synchronisation", "error",
         "@%lead mbarrier.init.shared::cta.b64 [bar], 1; setp.eq.u32 %p, %t, 32; "
         "@%p mbarrier.arrive.shared::cta.b64 _, [bar];",
         "@%lead mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; setp.eq.u32 %p, %t, 32; "
         "@%p mbarrier.arrive.shared::cta.b64 _, [bar];"),
    Pair("MMA order", "strict", mma(second=SECOND.format(d="tm")),
         mma(second="add.u32 %c, %tm, 64; " + SECOND.format(d="c")), {"block": 128}),
    Pair("missing warp synchronisation", "strict",
         INIT.format(n=1) + f"@!%w0 bra R; st.shared.b32 [%cell], 1; {ARRIVE} R: "
         + WAIT.format(n=0, parity=0),
         INIT.format(n=1) + f"@!%w0 bra R; st.shared.b32 [%cell], 1; bar.warp.sync -1; {ARRIVE} R: "
         + WAIT.format(n=0, parity=0)),
    Pair("use before wait", "strict",
         tmem(TMEM_ST + TMEM_LD.replace("tcgen05.wait::ld.sync.aligned;", "") + "st.global.b32 [%o], %b;"
              "tcgen05.wait::ld.sync.aligned;"),
         tmem(TMEM_ST + TMEM_LD.replace("tcgen05.wait::ld.sync.aligned;", "mov.b32 %c, %b; ") + "bar.sync 1;"
              "tcgen05.wait::ld.sync.aligned; st.global.b32 [%o], %c;")),
    Pair("load in flight", "strict", overwritten(""), overwritten("add.u32 %c, %b, 1;")),
    Pair("load in flight", "strict", overwritten("mov.b32 %c, %b; bar.warp.sync -1;"),
         overwritten("fence.proxy.async.shared::cta; bar.warp.sync -1;")),
    Pair("barrier misuse", "error", INIT.format(n=1) + "@%lead mbarrier.init.shared::cta.b64 [bar], 1;",
         INIT.format(n=1) + "@%lead mbarrier.inval.shared::cta.b64 [bar]; "
         "@%lead mbarrier.init.shared::cta.b64 [bar], 1;"),
    Pair("barrier misuse", "strict", "@%w0 bar.arrive 1, 96; @%w0 bar.sync 1, 96; @!%w0 bar.arrive 1, 96;",
         "@%w0 bar.sync 1, 64; @!%w0 bar.arrive 1, 64; bar.sync 0; @%w0 bar.arrive 1, 64; "
         "@!%w0 bar.sync 1, 64;"),
    Pair("wrong byte count", "error",
         INIT.format(n=1) + f"@%lead {BULK}" + ARRIVE + WAIT.format(n=0, parity=0),
         INIT.format(n=1) + f"@%lead {BULK} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;"
         + WAIT.format(n=0, parity=0)),
    Pair("parity two behind", "strict",
         INIT.format(n=1) + ARRIVE + WAIT.format(n=0, parity=0) + "bar.sync 0;" + ARRIVE + ARRIVE
         + "bar.sync 0;" + WAIT.format(n=1, parity=0),
         INIT.format(n=1) + ARRIVE + WAIT.format(n=0, parity=0) + "bar.sync 0;" + ARRIVE
         + WAIT.format(n=1, parity=1) + "bar.sync 0;" + ARRIVE + WAIT.format(n=2, parity=0)),
    Pair("uninitialised register", "error", "@!%low bra S; mov.u32 %b, 1; S: st.global.b32 [%o], %b;",
         "@!%low bra S; mov.u32 %b, 1; bra J; S: mov.u32 %b, 2; J: st.global.b32 [%o], %b;"),
    Pair("uninitialised shared memory", "error", "ld.shared.b32 %b, [%cell];",
         "st.shared.b32 [%cell], %t; ld.shared.b32 %b, [%cell];"),
    Pair("uninitialised tmem", "error", tmem(TMEM_LD), tmem(TMEM_ST + TMEM_LD)),
    Pair("out of bounds", "error", "ld.global.b32 %b, [%o+772];", "ld.global.b32 %b, [%o+768];"),
    Pair("out of bounds", "error",  # the copy is larger than its tile
         f"{INIT.format(n=1)} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32; @%lead {BULK} "
         .replace("[tile]", "[cells+1008]") + WAIT.format(n=0, parity=0),
         f"{INIT.format(n=1)} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32; @%lead {BULK} "
         .replace("[tile]", "[cells+992]") + WAIT.format(n=0, parity=0)),
    Pair("misaligned", "error", "st.shared.v2.b32 [cells+4], {%w, %w};".replace("st", "@%lead st", 1),
         "st.shared.v2.b32 [cells+8], {%w, %w};".replace("st", "@%lead st", 1)),
    Pair("unallocated tmem", "error", tmem("add.u32 %a, %a, 32;" + TMEM_ST),
         tmem("add.u32 %a, %a, 32;" + TMEM_ST, columns=64)),
    Pair("tmem allocation", "error", tmem("", columns=48), tmem("", columns=64)),
    Pair("tmem leak", "error", tmem("").rsplit("@%w0 ", 1)[0], tmem("")),
    Pair("wrong lane window", "error", tmem("mov.u32 %a, %tm;" + TMEM_ST), tmem(TMEM_ST)),
    Pair("illegal descriptor", "error", mma(idesc="0x06040490"), mma(idesc="0x08080490"), {"block": 128}),
    Pair("cta_group", "error", tmem("", group=2), tmem("", group=1)),
    Pair("tensor map", "error",
         "@!%lead bra END; mov.u32 %b, -1; fence.proxy.async; "
         "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {0, %b}], [tile];",
         INIT.format(n=1) + "@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128; mov.u32 %b, -1; "
         "@%lead cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [tile], "
         "[%map, {0, %b}], [bar];" + WAIT.format(n=0, parity=0)),
    Pair("tensor map", "error", tile_at(-2), tile_at(-4)),
    Pair("wgmma", "error", "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;",
         {"arch": "sm_90a", "block": 96}, {"arch": "sm_90a", "block": 256}),
    Pair("divergent aligned instruction", "error", "@%low bar.sync 0; @!%low bar.sync 0;",
         "@%w0 bar.sync 0; @!%w0 bar.sync 0;"),
    Pair("membermask", "error", "vote.sync.any.pred %p, %low, 0xFFFF;",
         "@!%low bra END; vote.sync.any.pred %p, %low, 0xFFFF;"),
    Pair("shuffle source", "error", "@!%low bra END; shfl.sync.idx.b32 %b, %t, 20, 31, 0xFFFF;",
         "@!%low bra END; shfl.sync.idx.b32 %b, %t, 5, 31, 0xFFFF;"),
    Pair("non-uniform address", "error", tmem("add.u32 %a, %a, %l;" + TMEM_ST),
         tmem("add.u32 %a, %a, %w;" + TMEM_ST)),
    Pair("setmaxnreg", "error", "setmaxnreg.dec.sync.aligned.u32 136;",
         "setmaxnreg.dec.sync.aligned.u32 128;",
         {"registers": 128, "block": 128}),
    Pair("exited CTA", "error",
         f"{CLUSTER} mov.u32 %b, %cluster_ctarank; setp.eq.u32 %p, %b, 1; @%p bra END; mov.u32 %a, cells; "
         "mapa.shared::cluster.u32 %a, %a, 1; st.shared::cluster.b32 [%a], %w;",
         f"{CLUSTER} mov.u32 %b, %cluster_ctarank; setp.eq.u32 %p, %b, 1; @%p bra LEAVE; mov.u32 %a, cells; "
         f"mapa.shared::cluster.u32 %a, %a, 1; st.shared::cluster.b32 [%a], %w; LEAVE: {CLUSTER}",
         {"block": 32, "cluster": 2}),
    Pair("multicast", "error", multicast(7), multicast(3), {"block": 32, "cluster": 2}),
    Pair("trap", "error", "setp.ge.u32 %p, %t, 63; @%p trap;", "setp.ge.u32 %p, %t, 64; @%p trap;"),
    Pair("stopped", "error", "mov.u32 %b, 0; L: add.u32 %b, %b, 0; setp.lt.u32 %p, %b, 9; @%p bra L;",
         "mov.u32 %b, 0; L: add.u32 %b, %b, 1; setp.lt.u32 %p, %b, 9; @%p bra L;"),
]  # fmt: skip


SCHEDULES = [Schedule.early(), Schedule.late(), Schedule.random(1), Schedule.random(2), Schedule.random(3)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.kind} ({p.severity})")
def test_the_bug_is_named_and_its_neighbour_is_clean(pair):
    found = {
        (f.kind, f.severity) for s in SCHEDULES for f in launch(pair.wrong, s, **pair.launch)[0].findings
    }
    assert (pair.kind, pair.severity) in found
    for schedule in SCHEDULES:
        report, _ = launch(pair.right, schedule, **(pair.launch | pair.right_launch))
        assert not report.findings, str(report)


def test_every_documented_kind_has_a_pair():
    table = DOCS.read_text().split("| kind | meaning |")[1].split("\n\n")[0]
    kinds = set()
    for row in table.splitlines()[2:]:
        cell = re.sub(r"\(strict\)", "", row.split("|")[1])
        names = [x.strip() for x in cell.split(",")]
        kinds |= {f"uninitialised {x}" if names[0].startswith("uninitialised ") and i else x
                  for i, x in enumerate(names)}  # fmt: skip
    assert kinds == {p.kind for p in PAIRS}
