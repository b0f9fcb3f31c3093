"""Bulk copies beside tiles: reductions into global memory, copies between the CTAs of a pair, multicast."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernel import BULK, CLUSTER, INIT, WAIT, launch

from videoattn.ptxsim import Schedule

SCHEDULES = [Schedule.early(), Schedule.late(), Schedule.random(3)]
STORE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
RANK = "mov.u32 %b, %cluster_ctarank; setp.eq.u32 %q, %b, 0;"
# each CTA writes two words that it took from `tile` to its own place: words 2 rank and 2 rank + 1
TAKE = "@!%lead bra DONE; mul.wide.u32 %q1, %b, 8; add.u64 %q1, %out, %q1; "
TAKE += f"ld.shared.v2.b32 {{%x0, %x1}}, [tile+8]; st.global.v2.b32 [%q1], {{%x0, %x1}}; DONE: {CLUSTER}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_bulk_reduction_adds_to_what_is_there(schedule):
    body = f"""cvt.rn.f32.u32 %b, %t; st.shared.b32 [%cell], %b; fence.proxy.async; bar.sync 0;
@!%lead bra END; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [cells], 64; {STORE}"""
    report, out = launch(body, schedule, dtype="f32")
    assert not report.findings, str(report)
    assert out.tolist() == [k * 2 if k < 16 else k for k in range(256)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("kind", "expected"), [("add", np.add), ("min", np.minimum), ("max", np.maximum)])
def test_a_tile_reduction_stays_inside_its_box(schedule, kind, expected):
    body = f"""cvt.rn.f32.u32 %b, %t; mov.u32 %c, tile; shl.b32 %a, %t, 2; add.u32 %c, %c, %a;
st.shared.b32 [%c], %b; fence.proxy.async; bar.sync 0; @!%lead bra END; mov.u32 %b, 1;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.{kind}.tile.bulk_group [%map, {{0, %b}}], [tile]; {STORE}"""
    report, out = launch(body, schedule, dtype="f32")
    assert not report.findings, str(report)
    want = np.arange(256, dtype=np.float32)
    want[8:40] = expected(want[8:40], np.arange(32))
    assert np.array_equal(out, want)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_pair_copies_into_each_other_s_shared_memory(schedule):
    body = f"""{INIT.format(n=1)} {RANK} mad.lo.u32 %c, %b, 1000, %t;
st.shared.b32 [%cell], %c; fence.proxy.async; {CLUSTER} xor.b32 %c, %b, 1;
@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;
mov.u32 %a, tile; mapa.shared::cluster.u32 %a, %a, %c; mov.u32 %d, bar; mapa.shared::cluster.u32 %d, %d, %c;
@%lead cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%a], [cells], 64, [%d];
{WAIT.format(n=0, parity=0)} {TAKE}"""
    report, out = launch(body, schedule, cluster=2)
    assert not report.findings, str(report)
    assert out[:5].tolist() == [1002, 1003, 2, 3, 4]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_multicast_lands_in_every_cta_of_its_mask(schedule):
    copy = BULK.replace("::bytes", "::bytes.multicast::cluster").replace("[bar]", "[bar], 3")
    body = f"""{INIT.format(n=1)} {CLUSTER} @%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;
{RANK} @!%q bra S; @%lead {copy.replace("[%out]", "[%out+64]")} S: {WAIT.format(n=0, parity=0)} {TAKE}"""
    report, out = launch(body, schedule, cluster=2)
    assert not report.findings, str(report)
    assert out[:5].tolist() == [18, 19, 18, 19, 4]
