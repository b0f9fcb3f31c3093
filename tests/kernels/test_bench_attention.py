"""The benchmark's arithmetic and command line, which need no GPU."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_attention as bench


def test_bootstrap_brackets_the_median():
    generator = random.Random(1)
    ratios = [generator.gauss(1.05, 0.02) for _ in range(40)]
    median, low, high = bench.bootstrap(ratios)
    assert low < median < high
    assert abs(median - 1.05) < 0.015
    assert high - low < 0.03
    assert bench.bootstrap([2.0] * 5) == (2.0, 2.0, 2.0)


def test_flops_are_the_matrix_products():
    assert bench.Shape(2, 3, 5, 7, 64).flops == 2 * (2 * 2 * 3 * 5 * 7 * 64)


def test_shape_names_are_unique():
    names = [shape.name for group in bench.GROUPS.values() for shape in group]
    assert len(names) == len(set(names))


def test_unknown_groups_are_named(capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shapes", "long", "tiny"])
    assert "unknown shape groups tiny: choose from paper, long" in capsys.readouterr().err


def test_power_between_samples():
    log = bench.PowerLog()
    log.stop()
    log.samples = [(1.0, 1600.0, 690.0), (2.0, 1640.0, 700.0), (9.0, 300.0, 80.0)]
    assert log.between(0.5, 3.0) == (1620.0, 695.0)
