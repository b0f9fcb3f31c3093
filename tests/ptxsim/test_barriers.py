"""mbarriers against a tiny reference model, over random programs of several warps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from videoattn.ptxsim import Device, Module, Schedule
from videoattn.ptxsim.hb import Columns
from videoattn.ptxsim.mbarrier import Mbarrier


class Reference:
    """PTX ISA 9.7.13.15 in a dozen lines."""

    def __init__(self, count: int):
        self.expected = self.pending = count
        self.tx = self.phase = 0

    def step(self, action: str, n: int) -> None:
        if action == "arrive":
            self.pending -= n
        elif action == "expect":
            self.tx += n
            return
        else:
            self.tx -= n
        if not self.pending and not self.tx:
            self.phase += 1
            self.pending = self.expected


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["arrive", "expect", "complete"]), st.integers(1, 5))),
)
def test_the_barrier_follows_the_reference(count, program):
    columns = Columns(8)
    bar, ref = Mbarrier("b", count, columns, columns.new("b")), Reference(count)
    for action, n in program:
        if action == "arrive":
            if n > ref.pending:
                assert not bar.arrive(n)
                continue
            assert bar.arrive(n)
            bar.complete()
        elif action == "expect":
            bar.tx += n
        else:
            bar.tx -= n
            bar.complete()
        ref.step(action, n)
        assert (bar.phase, bar.pending, bar.tx) == (ref.phase, ref.pending, ref.tx)
        for parity in (0, 1):
            assert bar.parity_passes(parity) == ((ref.phase - 1) % 2 == parity)


def ring(stages: int, items: int, consumers: int) -> str:
    """Warp 0 hands `items` numbers through a ring of slots to `consumers` warps, which add them up."""
    full = "\n".join(f"mbarrier.init.shared::cta.b64 [full+{8 * s}], 32;" for s in range(stages))
    empty = "\n".join(
        f"mbarrier.init.shared::cta.b64 [empty+{8 * s}], {32 * consumers};" for s in range(stages)
    )
    advance = (
        f"add.u32 %slot, %slot, 1; setp.eq.u32 %p, %slot, {stages}; selp.u32 %x, 1, 0, %p;\n"
        "xor.b32 %par, %par, %x;\n"
        "selp.u32 %slot, 0, %slot, %p;"
    )
    place = (
        "shl.b32 %o, %slot, 3; mov.u32 %f, full; add.u32 %f, %f, %o; mov.u32 %e, empty; add.u32 %e, %e, %o;\n"
        "shl.b32 %o, %slot, 7; mov.u32 %d, data; add.u32 %d, %d, %o; shl.b32 %x, %lane, 2;\n"
        "add.u32 %d, %d, %x;"
    )
    return f""".version 8.3
.target sm_90a
.address_size 64
.visible .entry ring(.param .u64 out)
{{
.reg .pred %p, %q, %lead; .reg .b32 %t, %w, %lane, %i, %slot, %par, %x, %o, %f, %e, %d, %sum;
.reg .b64 %out, %off;
.shared .align 8 .b8 full[{8 * stages}]; .shared .align 8 .b8 empty[{8 * stages}];
.shared .align 4 .b8 data[{128 * stages}];
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %lane, %t, 31; ld.param.u64 %out, [out];
setp.ne.u32 %lead, %t, 0; @%lead bra READY;
{full}
{empty}
READY: bar.sync 0;
mov.u32 %i, 0; mov.u32 %slot, 0; mov.u32 %sum, 0; mov.u32 %par, 0;
setp.ne.u32 %q, %w, 0; @%q bra CONSUME;
mov.u32 %par, 1;
PRODUCE:
{place}
W1: mbarrier.try_wait.parity.shared::cta.b64 %p, [%e], %par; @!%p bra W1;
mad.lo.u32 %x, %i, 100, %lane; st.shared.u32 [%d], %x;
mbarrier.arrive.shared::cta.b64 _, [%f];
{advance}
add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {items}; @%p bra PRODUCE;
bra END;
CONSUME:
{place}
W2: mbarrier.try_wait.parity.shared::cta.b64 %p, [%f], %par; @!%p bra W2;
ld.shared.u32 %x, [%d]; add.u32 %sum, %sum, %x;
mbarrier.arrive.shared::cta.b64 _, [%e];
{advance}
add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {items}; @%p bra CONSUME;
END: mul.wide.u32 %off, %t, 4; add.u64 %off, %out, %off; st.global.u32 [%off], %sum;
ret;
}}
"""


def run_ring(ptx: str, consumers: int, schedule: Schedule):
    device = Device("sm_90a")
    out = device.upload(np.zeros(32 * (consumers + 1), np.uint32))
    report = device.launch(
        Module.from_ptx(ptx).entry("ring"), block=32 * (consumers + 1), args=[out], schedule=schedule
    )
    return report, out.download().reshape(-1, 32)


@pytest.mark.parametrize("seed", range(8))
def test_rings_of_any_shape_hand_over_every_item(seed):
    rng = random.Random(seed)
    stages, items, consumers = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 3)
    for schedule in (Schedule.early(), Schedule.late(), Schedule.random(seed)):
        report, out = run_ring(ring(stages, items, consumers), consumers, schedule)
        assert not report.findings, str(report)
        want = sum(100 * i for i in range(items)) + items * np.arange(32)
        assert (out[1:] == want).all()


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("@!%p bra W1;", "", {"race", "deadlock"}),  # overruns a slot, or its own phase
        ("@!%p bra W2;", "", {"race", "deadlock"}),
        ("mov.u32 %par, 1;", "", {"deadlock"}),
        ("mbarrier.arrive.shared::cta.b64 _, [%f];", "", {"deadlock"}),
        ("[full+0], 32;", "[full+0], 31;", {"barrier misuse"}),
        ("[full+0], 32;", "[full+0], 33;", {"deadlock"}),
        ("bar.sync 0;", "", {"barrier misuse", "missing synchronisation"}),
        (
            "st.shared.u32 [%d], %x;\nmbarrier",
            "mbarrier.arrive.shared::cta.b64 _, [%f]; st.shared.u32 [%d], %x;\n//",
            {"race"},
        ),
    ],
)
def test_a_broken_ring_is_noticed(old, new, kinds):
    ptx = ring(2, 6, 2)
    assert old in ptx
    found = set()
    for schedule in (Schedule.early(), Schedule.late(), Schedule.random(1), Schedule.random(2)):
        report, _ = run_ring(ptx.replace(old, new), 2, schedule)
        found |= {f.kind for f in report.errors}
    assert found & kinds, found
