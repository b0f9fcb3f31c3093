"""The denoise benchmark on a CPU: its table, budget and resume by a tiny model; the work of full sizes."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_denoise as bench
import denoise_models
import denoise_profile

pytestmark = pytest.mark.slow

TINY = ["--config", "tiny", "--device", "cpu", "--sizes", "128x128", "--frames", "9", "--forwards", "1"]


def test_a_tiny_run_and_its_resume(tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    arms = ["--arms", "stock", "block", "flash3"]
    assert bench.main([*TINY, *arms, "--rounds", "1", "--profile", "--json", str(first)]) == 0
    said = capsys.readouterr().out
    report = json.loads(first.read_text())
    stages = report["sizes"]["128x128 B=1"]
    assert {name: part["tokens"] for name, part in stages.items()} == {"half": 8, "full": 32}
    for part in stages.values():
        assert "needs an NVIDIA GPU" in part["arms"]["flash3"]["error"]
        for arm in ("stock", "block"):
            assert len(part["arms"][arm]["forward_s"]) == 1
            assert part["arms"][arm]["profile"]["linear"] > 0
    assert "flash3                      did not run: KernelUnavailable" in said
    assert "x vs stock" in said
    arms = ["--arms", "stock", "block"]
    assert bench.main([*TINY, *arms, "--rounds", "2", "--resume", str(first), "--json", str(second)]) == 0
    for before, after in zip(
        stages.values(), json.loads(second.read_text())["sizes"]["128x128 B=1"].values(), strict=True
    ):
        for arm in ("stock", "block"):
            old, new = (part["arms"][arm]["forward_s"] for part in (before, after))
            assert new[:1] == old
            assert len(new) == 2


def test_a_spent_budget_stops_and_says_so(capsys):
    assert bench.main([*TINY, "--arms", "stock", "--budget-seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "stopped by --budget-seconds, 0 cells have a value: go on with --resume" in said
    assert "half: 8 tokens" in said


def test_the_budget_knows_how_long_things_take():
    budget = bench.Budget(100.0)
    assert budget.allows("a")
    budget.took("a", 1000.0)
    assert budget.allows("b")
    assert not budget.allows("a")
    assert not budget.allows("b")


def test_both_families_run():
    model = denoise_models.MODELS["tiny-ltx"]
    transformer = denoise_models.build(model, torch.device("cpu"), torch.float32)
    given = denoise_models.inputs(transformer, 128, 64, 9, 2)
    with torch.no_grad():
        (out,) = transformer(**given)
    assert out.shape == (2, 16, 128)
    assert out.isfinite().all()
    assert 0.01 < out.std() < 100
    assert len(denoise_models.attention_calls(transformer, given)) == 4


def test_full_size_work():
    """LTX-2.3 at 1280×704, 249 frames: 288 calls, 28160 tokens, about 26 GFLOP of linear layers each."""
    model = denoise_models.MODELS["ltx2.3"]
    with torch.device("meta"):
        transformer = model.cls(**model.config)
    given = denoise_models._on_meta(denoise_models.inputs, transformer, 1280, 704, 249, 1)
    calls = denoise_models.attention_calls(transformer, given)
    assert len(calls) == 288
    assert {call.q_len for call in calls if call.kind == "video_self"} == {28160}
    assert {call.q_len for call in calls if call.kind == "audio_self"} == {259}
    video_self = sum(call.flops for call in calls if call.kind == "video_self")
    assert video_self == 48 * 4 * 32 * 28160**2 * 128
    flops = denoise_models.linear_flops(model, 1280, 704, 249, 1)
    assert flops / 28160 == pytest.approx(26e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("videoattn_hopper_d128_n128_bf16", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "linear"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("_norm_rotate_kernel", "element-wise"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mul_2", "element-wise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "element-wise"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "element-wise"),
    ],
)
def test_categories(name, category):
    assert denoise_profile.category(name) == category


def test_covered_time_counts_overlaps_once():
    assert denoise_profile.covered([(5, 9), (0, 4), (3, 6), (20, 21)]) == 10


def test_clip_seconds_and_arm_names():
    model = denoise_models.MODELS["ltx2.3"]
    arms = {"half": [0.2, 0.1, 0.3], "full": [1.0]}
    block = {stage: {"arms": {"stock": {"forward_s": times}}} for stage, times in arms.items()}
    assert bench.clip_seconds(block, model, "stock") == pytest.approx(8 * 0.2 + 3 * 1.0)
    assert bench.clip_seconds(block, model, "block") is None
    arm = bench.Arm("block+compile-torch+graphs")
    assert (arm.body, arm.compiled, arm.under_compile, arm.graphs) == ("block", True, "torch", True)
    assert bench.Arm("block+graphs+overlap").overlap
    for name in ("fast", "block+overlap", "stock+graphs+overlap", "block+compile+graphs+overlap"):
        with pytest.raises(SystemExit):
            bench.parse(["--arms", name])


def test_the_accuracy_check_passes_ours_and_fails_a_wrong_arm(capsys, monkeypatch):
    import check_denoise_accuracy as check

    tiny = ["--device", "cpu", "--config", "tiny", "--size", "64x64", "--frames", "9", "--seeds", "2"]
    options = [*tiny, "--reference", "sdpa", "--rival", "math", "--no-demo"]
    assert check.main([*options, "--arm", "block"]) == 0
    said = capsys.readouterr().out
    assert "block: ok" in said
    for name in ("block", "call"):
        assert re.search(rf"{name} - math: .*, 2 of 2 seeds at most 1 dB below", said)

    def wrong(self, out, logits):
        return out * 1.01

    monkeypatch.setattr("videoattn.processors.fused.Fusion.gate", wrong)
    assert check.main([*options, "--arm", "attention"]) == 1
    said = capsys.readouterr().out
    assert "attention: FAILED" in said
    assert re.search(r"attention - math: .*, 0 of 2 seeds at most 1 dB below", said)
    assert re.search(r"call - math: .*, 2 of 2 seeds", said)
    assert check.psnr(torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, 0.2]), 1.0) == pytest.approx(20.0)


def test_the_accuracy_check_decides_by_the_mean(capsys):
    import check_denoise_accuracy as check

    def passes(*behind):
        found = {"rival": [48.0] * len(behind), "arm": [48.0 + b for b in behind]}
        return check.print_rows("clips", found, "rival", "arm")

    assert passes(0.1, -0.2, 0.3, -2.2, 0.6, 0.4, 1.0, -0.1)
    said = capsys.readouterr().out
    assert "arm - rival: -0.01 dB, standard error 0.34, 7 of 8 seeds at most 1 dB below" in said
    assert not passes(*[-1.1, -0.8, -1.2, -1.1] * 2)
    assert passes(-0.9)
    assert check.print_rows("same", {"rival": [math.inf] * 8, "arm": [math.inf] * 8}, "rival", "arm")
    assert not check.print_rows("one", {"rival": [math.inf], "arm": [60.0]}, "rival", "arm")


def test_a_second_round_compiles_nothing(monkeypatch):
    from videoattn.processors import regions

    torch.compiler.reset()
    monkeypatch.setattr(
        regions, "compile_blocks", lambda model: model.compile_repeated_blocks(backend="eager", dynamic=False)
    )
    model = denoise_models.MODELS["tiny-ltx"]
    transformer = denoise_models.build(model, torch.device("cpu"), torch.float32)
    given = denoise_models.inputs(transformer, 64, 64, 9, 1)
    cells = {name: bench.new_cell() for name in ("stock+compile", "block+compile", "stock")}
    with torch.no_grad():
        for _ in range(2):
            for name, cell in cells.items():
                bench.measure(bench.Arm(name), transformer, given, 1, cell, False)
    assert [cell["graphs_compiled"] for cell in cells.values()] == [[1, 0], [1, 0], [0, 0]]
    assert not any(cell["recompiled_after_warm_up"] for cell in cells.values())
    assert all(module._compiled_call_impl is None for module in transformer.modules())
    torch.compiler.reset()
