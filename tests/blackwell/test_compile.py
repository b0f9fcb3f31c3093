"""The product kernel compiles for both Blackwells without spills or local memory."""

import pytest

from videoattn.kernels import library
from videoattn.kernels.ptxas import compile_ptx, compile_report

SOURCE = library.SOURCES / "blackwell" / "attention.cu"
KERNELS = {f"videoattn_blackwell_d{d}_{t}" for d in (64, 128) for t in ("bf16", "fp16")}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_no_spills_and_no_local_memory(arch):
    reports = compile_report(SOURCE, arch)
    assert set(reports) == KERNELS
    for name, resources in reports.items():
        assert not resources.spills, name
        assert resources.stack == 0, name
        assert resources.registers * 512 == 65536, name
    assert ".local" not in compile_ptx(SOURCE, arch).read_text()


def test_merging_needs_no_local_memory():
    reports = compile_report(library.SOURCES / "common" / "merge.cu")
    assert set(reports) == {name.replace("blackwell", "merge") for name in KERNELS}
    for name, resources in reports.items():
        assert not resources.spills, name
        assert resources.stack == 0, name


def test_software_exponentials_are_for_b200_only():
    """B300 has twice the MUFU rate; there the polynomial would cost more than it saves."""
    counts = {
        arch: compile_ptx(SOURCE, arch).read_text().count("add.rm.ftz.f32x2")
        for arch in ("sm_100a", "sm_103a")
    }
    assert counts["sm_100a"] > 0
    assert counts["sm_103a"] == 0


@pytest.mark.slow
def test_the_debug_build_names_its_barriers():
    """With bounded waits every wait can trap, and says which barrier it was."""
    ptx = compile_ptx(SOURCE, "sm_100a", ("VIDEOATTN_BOUNDED_WAITS=10000000",)).read_text()
    assert "trap;" in ptx
    for name in ("p_ready", "scores_done", "kv_empty", "message_ready"):
        assert ", ".join(str(b) for b in name.encode()) in ptx, name
