"""Planted bugs in the ladder: the simulator or the accuracy rule must catch each of them."""

from dataclasses import dataclass, field

import pytest

from tests.blackwell.mutants import plant
from tests.ladder.test_simulated import hard_operands
from videoattn.kernels import library
from videoattn.ptxsim import Schedule
from videoattn.ptxsim.ladder import load_steps, run_step

pytestmark = pytest.mark.slow

STEPS = {step.name: step for step in load_steps()}
SCHEDULES = ("early", "late", "random:1", "random:2", "random:3")


@dataclass
class Mutant:
    """One edit of a step and the launch that shows it. `caught_by`: part of a finding, "" for anything."""

    name: str
    step: str
    file: str
    text: str
    replacement: str
    caught_by: str
    shape: dict = field(default_factory=dict)


MUTANTS = [
    Mutant(  # the B300 article's first bug
        "every warp reads the TMEM lanes of warp 0",
        "03_swizzle",
        "ladder/ladder.cuh",
        "return address + ((threadIdx.x / 32 % 4) << 21);",
        "return address;",
        "lane",
    ),
    Mutant(
        "P is handed over before its stores are complete",
        "04_warp_specialisation",
        "ladder/04_warp_specialisation.cu",
        "        ptx::tcgen05_wait_st();\n",
        "",
        "race",
    ),
    Mutant(
        "P goes from generic stores to the MMA without a proxy fence",
        "01_baseline",
        "ladder/01_baseline.cu",
        "        ptx::fence_proxy_async_smem();\n        ptx::tcgen05_fence_before_thread_sync();",
        "        ptx::tcgen05_fence_before_thread_sync();",
        "proxy",
    ),
    Mutant(
        "the MMA thread takes P without the fence after its wait",
        "04_warp_specialisation",
        "ladder/04_warp_specialisation.cu",
        "wait_thread(bar.p_ready, parity);\n        ptx::tcgen05_fence_after_thread_sync();",
        "wait_thread(bar.p_ready, parity);",
        "fence",
    ),
    Mutant(
        "the load thread does not wait for the slot",
        "06_load_pipeline",
        "ladder/06_load_pipeline.cu",
        "        wait_thread(bar.kv_empty[ring.slot], ring.parity[ring.slot] ^ 1);\n",
        "",
        "",
        {"kv_len": 512},
    ),
    Mutant(
        "K is released after the first Q tile's product",
        "06_load_pipeline",
        "ladder/06_load_pipeline.cu",
        "        }\n        ptx::tcgen05_commit(bar.kv_empty[ring.slot]);\n        ring.advance();\n\n",
        "            if (i == 0) ptx::tcgen05_commit(bar.kv_empty[ring.slot]);\n"
        "        }\n        ring.advance();\n\n",
        "",
        {"kv_len": 640},
    ),
    Mutant(
        "QK of the next tile overwrites P before PV has read it",
        "07_compute_pipeline",
        "ladder/07_compute_pipeline.cu",
        "                wait_thread(bar.output_done[i], parity);\n",
        "",
        "",
    ),
    Mutant(
        "PV does not wait for the correction warps",
        "12_correction_warps",
        "ladder/12_correction_warps.cu",
        "bar.p_ready[q], kRowWarps + kCorrectionWarps",
        "bar.p_ready[q], kRowWarps",
        "",
    ),
    Mutant(
        "inverse_sum is overwritten before it is read",
        "14_persistent",
        "ladder/14_persistent.cu",
        "        wait_warp(bar.sum_free[i], work.parity ^ 1);\n",
        "",
        "",
        {"heads": 4, "kv_len": 128, "ctas": 1},
    ),
    Mutant(
        "V's leading and stride offsets are exchanged",
        "03_swizzle",
        "ladder/03_swizzle.cu",
        "layouts::smem_descriptor(v, kBoxBytes, kAtomBytes,",
        "layouts::smem_descriptor(v, kAtomBytes, kBoxBytes,",
        "",
    ),
    Mutant(
        "the barrier expects K's bytes but not V's",
        "04_warp_specialisation",
        "ladder/04_warp_specialisation.cu",
        "ptx::mbarrier_arrive_expect_tx(bar.kv_full, 2 * kTileBytes);",
        "ptx::mbarrier_arrive_expect_tx(bar.kv_full, kTileBytes);",
        "",
    ),
    Mutant(
        "the ring's parity does not turn",
        "17_phase_bits",
        "ladder/17_phase_bits.cu",
        "        parities ^= 1u << slot;\n",
        "",
        "",
        {"kv_len": 512},
    ),
    Mutant(
        "tensor memory is not given back",
        "02_p_in_tmem",
        "ladder/ladder.cuh",
        "        ptx::tcgen05_dealloc<kColumns>(tmem);\n",
        "",
        "",
    ),
    Mutant(
        "the row sum forgets the old basis",
        "11_skip_rescale",
        "ladder/11_skip_rescale.cu",
        "row_sum = row_sum * factor + ",
        "row_sum = row_sum + ",
        "",
        {"kv_len": 256, "operands": "outliers"},
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_caught(mutant, tmp_path):
    step = STEPS[mutant.step]
    source = str(step.source.relative_to(library.SOURCES))
    module = plant(tmp_path, source, [(mutant.file, mutant.text, mutant.replacement)])
    shape = {"heads": 1, "q_len": step.q_rows_per_cta, "kv_len": 384, **mutant.shape}
    if "operands" in shape:
        shape["operands"] = hard_operands(shape["operands"], step.dtype, shape["q_len"], shape["kv_len"])
    for schedule in SCHEDULES:
        outcome = run_step(step, module, schedule=Schedule.named(schedule), **shape)
        text = " ".join(map(str, outcome.report.findings)).lower()
        if outcome.report.findings and mutant.caught_by in text:
            print(schedule, outcome.report.findings[0])
            return
        if not mutant.caught_by and not outcome.errors.passed:
            print(schedule, "wrong result", outcome.errors)
            return
    pytest.fail(f"not caught under {', '.join(SCHEDULES)}")
