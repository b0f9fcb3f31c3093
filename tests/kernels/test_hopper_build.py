"""What the compiler makes of the Hopper kernel: registers, spills, local memory, serialised wgmma."""

from __future__ import annotations

import re

import pytest

from videoattn.kernels import library
from videoattn.kernels.ptxas import compile_ptx, ptxas_output

pytestmark = pytest.mark.slow

SOURCE = library.SOURCES / "hopper" / "attention.cu"
CONFIGS = ("d128_n128", "d128_n128_short", "d64_n112", "d64_n96", "d64_n96_short", "d64_n64_short")
KERNELS = {f"videoattn_hopper_{config}_{dtype}" for config in CONFIGS for dtype in ("bf16", "fp16")}


@pytest.fixture(scope="module")
def report():
    """ptxas's report of the product build."""
    return ptxas_output(SOURCE, "sm_90a")


def test_no_spills_and_no_stack(report):
    properties = re.findall(
        r"Function properties for (\w+)\s+(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        report,
    )
    assert {name for name, *_ in properties} == KERNELS
    for name, *sizes in properties:
        assert sizes == ["0", "0", "0"], name


def test_launch_registers_cover_the_pools(report):
    """setmaxnreg moves registers between warpgroups; the launch must have brought them."""
    config = (library.SOURCES / "hopper" / "config.h").read_text()
    assert "kProducerRegisters = C::kConsumers > 2 ? 32 : 24;" in config
    assert "kConsumerRegisters = C::kConsumers > 2 ? 160 : 240;" in config
    used = dict(re.findall(r"Compiling entry function '(\w+)'[\s\S]*?Used (\d+) registers", report))
    for name, registers in used.items():
        warpgroups = 4 if "d64" in name else 3
        pool = 24 + 2 * 240 if warpgroups == 3 else 32 + 3 * 160
        assert pool <= warpgroups * int(registers) <= 512, name


def test_wgmma_is_not_serialised(report):
    assert "serialized" not in report
    assert "C7508" not in report, "setmaxnreg was ignored"


def test_no_local_memory():
    assert not re.search(r"\b(ld|st)\.local\b|\.local\b", compile_ptx(SOURCE, "sm_90a").read_text())
