"""Planted bugs in the product kernel: the simulator or the accuracy rule must catch each of them."""

import ctypes
from dataclasses import dataclass, field

import pytest
import torch

from tests.blackwell.mutants import Edit, edited_sources, keep_kernel
from tests.blackwell.simulate import simulate
from tests.blackwell.test_simulated import operands
from videoattn.kernels import abi, plan, simulated
from videoattn.kernels.accuracy import compare
from videoattn.kernels.ptxas import compile_ptx
from videoattn.ptxsim import Module, Schedule

pytestmark = pytest.mark.slow

SCHEDULES = ("early", "late", "random:1", "random:2", "slow:12")
FEED, ROWS, WORK, PLAN = (f"blackwell/{name}" for name in ("feed.cuh", "rows.cuh", "work.cuh", "plan.cpp"))


@dataclass
class Mutant:
    """Edits of csrc, and the call that shows them: batch, q_len, kv_len, heads, head_dim."""

    name: str
    edits: list[Edit]
    shape: tuple[int, int, int, int, int] = (1, 200, 300, 1, 64)
    kv_lengths: list[int] = field(default_factory=list)


MUTANTS = [
    Mutant(  # the B300 article's second bug
        "Q and K arrive as 256-byte rows under a 128-byte canonical layout",
        [
            (
                PLAN,
                "    add_map(plan, bshd_map(call, call.v,",
                "    for (auto* map = plan->maps; map < plan->maps + 2; ++map) {\n"
                "        auto swap = [](auto& a, auto& b) { auto c = a; a = b; b = c; };\n"
                "        swap(map->dims[1], map->dims[2]);\n"
                "        swap(map->byte_strides[0], map->byte_strides[1]);\n"
                "        swap(map->box[1], map->box[2]);\n"
                "    }\n"
                "    add_map(plan, bshd_map(call, call.v,",
            ),
            (FEED, "q_map, 0, work.q_row + q * kTileRows, 0,", "q_map, 0, 0, work.q_row + q * kTileRows,"),
            (
                FEED,
                "                             tile * kTileRows, 0, work.head,",
                "is_v ? tile * kTileRows : 0, is_v ? 0 : tile * kTileRows, work.head,",
            ),
        ],
        (1, 128, 128, 1, 128),
    ),
    Mutant(
        "rows of V past the length are multiplied as they are",
        [(FEED, "ptx::st_shared_v4(v + piece", "if (row < 0) ptx::st_shared_v4(v + piece")],
        (1, 64, 200, 1, 64),
        [130],
    ),
    Mutant(
        "V is cleared without a proxy fence",
        [(FEED, "                ptx::fence_proxy_async_smem();\n", "")],
        (1, 64, 200, 1, 64),
        [130],
    ),
    Mutant(
        "keys past the end are not masked",
        [(ROWS, "tile + 1 == work.tiles && work.tail() < kTileRows", "false")],
    ),
    Mutant(
        "S is overwritten while the softmax warps read it",
        [(FEED, '        ptx::mbarrier_wait(shared.scores_read, parity(kScoresRead), "scores_read");\n', "")],
    ),
    Mutant(
        "P is stored before the last PV has read it",
        [
            (
                ROWS,
                '            wait_warp(shared.output_done[q], output_parity, "output_done (softmax)", q);\n',
                "",
            )
        ],
    ),
    Mutant("messages have one place", [(ROWS, "        place ^= 1;\n", "")]),
    Mutant(
        "the last item's O is overwritten before it is stored",
        [(WORK, "ptx::mbarrier_init(p_ready[q], 2 * kWarps);", "ptx::mbarrier_init(p_ready[q], kWarps);")],
        (1, 100, 100, 3, 64),
    ),
    Mutant(
        "O's staging is reused while TMA reads it",
        [(ROWS, "        ptx::bulk_wait_group_read();  // of the store before\n", "")],
        (1, 200, 100, 1, 64),
    ),
    Mutant(
        "O goes from generic stores to TMA without a proxy fence",
        [(ROWS, "    ptx::fence_proxy_async_smem();\n    __syncwarp();\n", "    __syncwarp();\n")],
        (1, 100, 100, 1, 64),
    ),
    Mutant(
        "the clearing warp does not hold the slot back",
        [
            (
                WORK,
                "ptx::mbarrier_init(kv_empty[slot], has_lengths ? 2 : 1);",
                "ptx::mbarrier_init(kv_empty[slot], 1);",
            )
        ],
        (1, 64, 1500, 1, 64),
        [1400],
    ),
    Mutant(
        "one v_clean serves all slots",
        [
            (FEED, "shared.v_clean[ring.slot]", "shared.v_clean[0]"),
            (FEED, "shared.v_clean[v_slot], parity(kClean + v_slot)", "shared.v_clean[0], parity(kClean)"),
        ],
        (1, 128, 300, 4, 64),
        [100],
    ),
    Mutant(
        "an item without keys still takes a Q tile",
        [
            (
                FEED,
                "        if (work.tiles == 0) {\n            continue;\n        }\n#pragma unroll",
                "#pragma unroll",
            )
        ],
        (3, 64, 64, 1, 64),
        [0, 64, 64],
    ),
    Mutant(
        "the batch coordinate is lost",
        [(FEED, "tile * kTileRows, 0, work.head, work.batch,", "tile * kTileRows, 0, work.head, 0,")],
        (2, 64, 64, 1, 64),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_caught(mutant, tmp_path, monkeypatch):
    sources = edited_sources(tmp_path, mutant.edits)
    keep_kernel(sources, f"videoattn_blackwell_d{mutant.shape[-1]}_bf16")
    code = Module.from_file(compile_ptx(sources / "blackwell" / "attention.cu"))
    planner = abi.declare(ctypes.CDLL(str(plan.build(sources))))
    monkeypatch.setattr(simulated, "module", lambda source, target: code)
    monkeypatch.setattr(plan, "load", lambda: planner)
    q, k, v = operands(*mutant.shape)
    lengths = torch.tensor(mutant.kv_lengths, dtype=torch.int32) if mutant.kv_lengths else None
    for b, length in enumerate(mutant.kv_lengths):
        k[b, length:] = v[b, length:] = float("nan")
    scale = q.shape[-1] ** -0.5
    for schedule in SCHEDULES:
        named = Schedule.named(schedule)
        out, lse, report = simulate(q, k, v, kv_lengths=lengths, lse=True, schedule=named)
        if report.findings:
            print(schedule, report.findings[0])
            return
        errors = compare(out, lse, q, k, v, scale=scale, kv_lengths=lengths)
        if not errors.passed:
            print(schedule, errors)
            return
    pytest.fail(f"not caught under {', '.join(SCHEDULES)}")
