"""Launch files and ladder tables of another shape: one line that names the file, or a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_gemm

from tests.wrong_shapes import outcomes
from videoattn import cli
from videoattn.ptxsim import Device, LaunchError, Module, command
from videoattn.ptxsim.ladder import LADDER, encode, load_steps

MAP = {
    "buffer": "a",
    "dtype": "bf16",
    "dims": [64, 128],
    "strides": [128],
    "box": [64, 128],
    "swizzle": "128B",
}
LAUNCH = {
    "entry": "gemm",
    "grid": [1, 1],
    "block": 128,
    "cluster": 1,
    "dynamic_smem": 0,
    "arch": "sm_100a",
    "registers": 32,
    "roles": {"leader": [0]},
    "args": [
        {"tensor_map": MAP},
        {"tensor_map": {**MAP, "buffer": "b", "dims": [64, 64], "box": [64, 64]}},
        {"buffer": "out"},
    ],
    "buffers": {
        "a": {"file": "a.npy"},
        "b": {"dtype": "bf16", "shape": [64, 64], "fill": "normal", "seed": 1},
        "out": {"dtype": "f32", "shape": [128, 64], "fill": 0.5, "save": "out.npy"},
    },
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    np.save(tmp_path / "a.npy", encode(small_gemm.operands()[0], "bf16"))
    (tmp_path / "gemm.ptx").write_text(small_gemm.PTX)
    return tmp_path


def test_launch_files(place):
    path = place / "launch.json"

    def read(text: str) -> None:
        path.write_text(text)
        command.run(place / "gemm.ptx", path)

    # A place that cannot be written, or a file that is none, is named itself.
    said = outcomes(LAUNCH, read, (LaunchError,), str(place))
    elsewhere = ("cannot write", "is no file", "does not exist")
    for message in filter(None, said.values()):
        assert "launch.json" in message or any(words in message for words in elsewhere), message
    for what in (
        ".roles.leader = 7",
        ".args.0.tensor_map.dims.0 = '7'",
        ".buffers.out.fill = '7'",
        ".grid = 7",
    ):
        assert said[what] or what == ".grid = 7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": []}, "buffers is a list: input should be an object"),
        ({"buffers": {"a": {"file": 7}}}, "buffers.a.file is 7: input should be a valid string"),
        ({"buffers": {"a": {"dtype": "f32", "shape": [1], "size": 1}}}, "buffers.a.size is not known here"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1], "fill": -1}}}, "u8 cannot hold the fill -1"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1], "fill": 1.5}}}, "u8 cannot hold the fill 1.5"),
        ({"buffers": {"a": {"dtype": "f16", "shape": [1], "fill": 1e5}}}, "f16 cannot hold the fill 1"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [2**62, 2**62]}}}, "no memory for the shape"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [-1, -1]}}}, "is not a list of positive sizes"),
        ({"args": [{"bytes": "xy"}]}, 'argument bytes "xy" is not hexadecimal'),
        ({"args": [{"tensor_map": {**MAP, "dims": ["64", 128]}}]}, 'dims.0 is "64": input should be'),
        ({"args": [{"tensor_map": {"buffer": "a"}}]}, "argument tensor_map: dtype is missing"),
        ({"grid": 2**31}, "is larger than (2147483647, 65535, 65535)"),
        ({"dynamic_smem": -1}, "-1 bytes of dynamic shared memory"),
        ({"dynamic_smem": "1"}, 'dynamic_smem is "1": input should be a valid integer'),
        ({"arch": None, "entry": 7}, "entry is 7: input should be a valid string"),
    ],
)  # fmt: skip
def test_the_shell_says_what_is_wrong_with_a_launch_file(place, capsys, change, message):
    path = place / "launch.json"
    path.write_text(json.dumps(LAUNCH | change))
    assert cli.main(["sim", "run", str(place / "gemm.ptx"), "--launch", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"videoattn: {path}: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_grid_beyond_the_limits_is_refused():
    module = Module.from_ptx(small_gemm.PTX)
    for grid in (2**31, (1, 65536), (1, 1, 65536)):
        with pytest.raises(LaunchError, match=r"^grid .* is larger than \(2147483647, 65535, 65535\)$"):
            Device().launch(module.entry("gemm"), grid=grid, block=128, args=[1, 2, 3])


def test_the_largest_grid_starts_at_once():
    endless = Module.from_ptx(
        ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k() {\nloop: bra loop;\n}\n"
    )
    report = Device().launch(endless.entry("k"), grid=2**31 - 1, limit=100)
    assert [finding.kind for finding in report.findings] == ["stopped"]


def test_tables_of_steps(tmp_path):
    path = tmp_path / "steps.json"
    table = json.loads((LADDER / "steps.json").read_text())
    step = {name: value for name, value in table["steps"][0].items() if not name.startswith("article")}

    def read(text: str) -> None:
        path.write_text(text)
        load_steps(tmp_path)

    said = outcomes({"steps": [step], "branches": []}, read, (LaunchError,), "steps.json")
    for what in (".steps.0.arch = []", ".steps.0.q_rows_per_cta = 0", ".steps.0.maps.q_map.tensor = 'text'"):
        assert said[what]
