"""Schedules: their names, and how far a slow warp falls behind."""

from __future__ import annotations

import pytest
from small_kernel import INIT, launch

from videoattn.ptxsim import Schedule

# Warp 1 completes two phases of a barrier of one arrival; warp 0 waits for the first of them, by parity.
AHEAD = f"""{INIT.format(n=1)}
@%w0 bra WAIT; setp.eq.u32 %p, %l, 0; @!%p bra END;
mbarrier.arrive.shared::cta.b64 _, [bar]; AGAIN: mbarrier.arrive.shared::cta.b64 _, [bar]; bra END;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra WAIT;"""
# Warp 1 polls a flag that warp 0 sets.
POLL = """@!%w0 bra SPIN; st.volatile.global.u32 [%out], 77; bra END;
SPIN: ld.volatile.global.u32 %a, [%out]; setp.ne.u32 %p, %a, 77; @%p bra SPIN;"""


@pytest.mark.parametrize("name", ["early", "late", "random:0", "random:17", "slow:3", "slow:8-11"])
def test_names_are_read_as_they_are_written(name):
    assert str(Schedule.named(name)) == name
    assert Schedule.named(str(Schedule.named(name))) == Schedule.named(name)


@pytest.mark.parametrize(
    "name", ["", "fast", "early:1", "random:x", "random:", "random:-1", "slow", "slow:", "slow:3-1", "slow:a"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"is not early, late, random, random:SEED, slow:WARP or slow:FIRST"):
        Schedule.named(name)


def test_a_slow_warp_is_left_behind():
    report, _ = launch(AHEAD, Schedule.slow(0))
    assert [f.kind for f in report.findings] == ["deadlock"]
    assert "warp 0" in report.findings[0].message
    assert not launch(AHEAD, Schedule.slow(1))[0].findings


def test_who_polls_for_a_slow_warp_gets_its_answer():
    report, cells = launch(POLL, Schedule.slow(0), limit=100_000)
    assert not report.findings, str(report)
    assert cells[0] == 77
