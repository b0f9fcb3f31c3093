"""The Hopper kernel's scripts: variants, what they read out of other tools' output, the profile."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_attention as bench
import ncu_hopper
import sanitize_hopper
import sass_hopper
import tune_hopper

from tests import hopper_inputs
from videoattn.kernels import accuracy, library, native, plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_ncu_values_of_the_longest_kernel():
    text = (
        "==PROF== Connected to process 1\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","fill","gpu__time_duration.sum","ns","2,000"\n'
        '"1","videoattn","gpu__time_duration.sum","ns","1,250,000"\n'
        '"1","videoattn","smsp__issue_active.avg.pct_of_peak_sustained_active","%","41.5"\n'
        '"1","videoattn","lts__t_sector_hit_rate.pct","%","n/a"\n'
    )
    assert ncu_hopper.parse(text) == {
        "gpu__time_duration.sum": 1_250_000.0,
        "smsp__issue_active.avg.pct_of_peak_sustained_active": 41.5,
    }


def test_ncu_without_permission_says_so():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        ncu_hopper.parse("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= x\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
        ("Segmentation fault\n", None),
    ],
)
def test_sanitizer_summaries(text, reports):
    found, line = sanitize_hopper.summary(text)
    assert found == reports
    assert line
    assert "=====" not in line


def test_the_inner_loop_leaves_out_what_branches_skip():
    rare = [("code", "FADD R1, R1, -R2")] * (sass_hopper.RARE + 1)
    lines = [
        ("label", ".L_x_1"),
        ("code", "FMUL R0, R0, R0"),
        ("label", ".L_x_2"),
        ("code", "HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR8], RZ, !UPT"),
        ("code", "@!P2 BRA `(.L_x_3)"),
        *rare,
        ("label", ".L_x_3"),
        ("code", "@!P0 MUFU.EX2 R88, R88"),
        ("code", "@P0 BRA `(.L_x_2)"),
        ("code", "@P1 BRA `(.L_x_1)"),
    ]
    assert sass_hopper.count(sass_hopper.inner_loop(lines)) == {"HGMMA": 1, "BRA": 2, "MUFU": 1}
    with pytest.raises(ValueError, match="no loop"):
        sass_hopper.inner_loop(lines[:2])


def test_goals_follow_the_groups():
    assert bench.goal("self 6144") == 1.04
    assert bench.goal("audio self 259") == 1.30
    assert bench.goal("1,2,3,4,64") is None
    assert set(bench.GOALS) == set(bench.GROUPS)


def test_every_variant_names_choices_that_exist(tmp_path):
    for name, variant in tune_hopper.VARIANTS.items():
        root = variant.write(tmp_path / name)
        source = (root / "hopper" / "attention.cu").read_text()
        assert f"({variant.kernel}_bf16, {variant.config}, " in source


def test_an_unknown_choice_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no choice kStage"):
        tune_hopper.d128("a slip", kStage=3).write(tmp_path)


def test_another_version_is_an_arm_by_its_name():
    built = library.build()
    name, loaded = tune_hopper.other(f"before={built}")
    assert name == "before"
    assert loaded.videoattn_attention.argtypes
    for text in (str(built), "=x", "before=", f"before={built}x", f"before={__file__}"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=FILE"):
            tune_hopper.other(text)


def test_a_tile_of_the_product_is_an_arm():
    assert tune_hopper.tile("128x2") == ("128x2", {"rows": 128, "splits": 2})
    for text in ("128", "x2", "128x", "128x2x1", "-1x2"):
        with pytest.raises(argparse.ArgumentTypeError, match="ROWSxPARTS"):
            tune_hopper.tile(text)


@pytest.mark.parametrize("head_dim", [128, 64], ids=["all consumers", "two of three"])
def test_the_profile_tells_the_order_of_a_step(head_dim, tmp_path):
    """The script as a user runs it, in the simulator; on the second CTA too."""
    target = tmp_path / "trace.json"
    shape = f"1,2,128,300,{head_dim}"
    command = [sys.executable, "scripts/profile_hopper.py", "--simulate", "--shape", shape]
    done = subprocess.run(
        [*command, "--output", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.search(r"consumer 1 +softmax +[\d.]+% +6 ", done.stdout), done.stdout
    spans = [event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = {"issue": 3, "wait for scores": 3, "softmax": 3, "pack P": 3, "epilogue": 1}
    for cta, consumer in itertools.product((0, 1), (1, 2)):
        own = [span for span in spans if span["tid"] == consumer and span["pid"] == cta]
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in itertools.pairwise(own))
        names = [span["name"] for span in own]
        assert {name: names.count(name) for name in steps} == steps
        order = ["wait for keys", "wait for the turn", "issue", "wait for scores", "softmax"]
        assert names[:5] == order
        assert names[names.index("pack P") + 1 :][:5] == order
    spans = [span for span in spans if span["pid"] == 0]
    turns = sorted((span["ts"], span["tid"]) for span in spans if span["name"] == "issue")
    assert [consumer for _, consumer in turns] == [1, 2] * 3, "the consumers take turns"
    assert {span["name"] for span in spans if span["tid"] == 0} >= {"load", "wait for a key buffer"}


def test_the_sanitizer_launches_every_kernel():
    """In both dtypes, with scores that leap on each tile; what it judges results by holds for right ones."""
    planned: dict[bool, set[str]] = {False: set(), True: set()}
    for name, (q, k, v), options in sanitize_hopper.calls():
        call = native.fill_call(q, k, v, torch.empty_like(q), arch=90, num_sms=132, **options)
        planned["leap" in name].add(plan.plan(call).kernel.decode())
    tiles = {f"videoattn_hopper_{tile}" for tile in hopper_inputs.TILES}
    assert planned[False] == {f"{tile}_{kind}" for tile in tiles for kind in ("bf16", "fp16")}
    assert planned[True] == {f"{tile}_bf16" for tile in tiles}
    # As the kernels give it: exact, and rounded to the dtype.
    for name, (q, k, v), options in sanitize_hopper.calls():
        if "leap" not in name:
            continue
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * options["scale"]
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).to(q.dtype)
        lse = scores.logsumexp(-1).float()
        assert accuracy.compare(out, lse, q, k, v, scale=options["scale"]).passed
