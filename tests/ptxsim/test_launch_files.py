"""Launch files and ladder tables of another shape: one line that names the file, or a run."""

from __future__ import annotations

import json
import math

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
    for what in (".roles.leader = 7", ".args.0.tensor_map.dims.0 = '7'", ".buffers.out.fill = '7'"):
        assert said[what]
    assert said[".grid = 7"] is None
    assert said[".buffers.out.fill = nan"] is None
    assert said[".buffers.b.seed = -1"]
    assert said[".buffers.out.fill = True"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": []}, "buffers is a list: input should be an object"),
        ({"buffers": {"a": {"file": 7}}}, "buffers.a.file is 7: input should be a valid string"),
        ({"buffers": {"a": {"dtype": "f32", "shape": [1], "size": 1}}}, "buffers.a.size is not known here"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1], "fill": -1}}}, "u8 cannot hold the fill -1"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1], "fill": 1.5}}}, "u8 cannot hold the fill 1.5"),
        ({"buffers": {"a": {"dtype": "f16", "shape": [1], "fill": 1e5}}}, "f16 cannot hold the fill 1"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [2**62, 2**62]}}}, "array is too big"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [2**60]}}}, "no memory for the shape (115292150"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [-1, -1]}}}, "is not a list of positive sizes"),
        ({"args": [{"bytes": "xy"}]}, 'argument bytes "xy" is not hexadecimal'),
        ({"args": [{"tensor_map": {**MAP, "dims": ["64", 128]}}]}, 'dims.0 is "64": input should be'),
        ({"args": [{"tensor_map": {"buffer": "a"}}]}, "argument tensor_map: dtype is missing"),
        ({"args": [{"tensor_map": {**MAP, "swizle": "64B"}}]}, "tensor_map: swizle is not known here"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1], "fill": math.nan}}}, "u8 cannot hold the fill nan"),
        ({"buffers": {"a": {"dtype": "f32", "shape": [1], "fill": 1e39}}}, "f32 cannot hold the fill 1e+39"),
        ({"buffers": {"a": {"dtype": "u8", "shape": [1] * 70}}}, "buffer a: maximum supported dimension"),
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


COPY = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 from, .param .u64 to, .param .f32 more) {
.reg .b64 %p, %q; .reg .b32 %x, %y;
ld.param.u64 %p, [from]; ld.param.u64 %q, [to]; ld.param.b32 %y, [more];
ld.global.b32 %x, [%p]; st.global.b32 [%q], %x; st.global.b32 [%q+4], %y;
ret;
}
"""


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4028235e38, -3.4028235e38, 1.5])
def test_fills_and_arguments_that_are_no_finite_numbers(tmp_path, value):
    """FLT_MAX is customarily written a little larger than it is."""
    launch = {
        "args": [{"buffer": "a"}, {"buffer": "out"}, value],
        "buffers": {
            "a": {"dtype": "f32", "shape": [1], "fill": value},
            "out": {"dtype": "f32", "shape": [2], "save": "out.npy"},
        },
    }
    (tmp_path / "launch.json").write_text(json.dumps(launch))
    (tmp_path / "copy.ptx").write_text(COPY)
    assert command.run(tmp_path / "copy.ptx", tmp_path / "launch.json") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.float32([value] * 2))


def damaged(path, how):
    np.save(path, np.zeros((3, 5), np.float32))
    content = path.read_bytes()
    shape = b"'shape': (3, 5), "
    huge = {
        "of four terabytes": b"'shape': (1099511627776,), ",
        "beyond all sizes": b"'shape': (%d,), " % 10**21,
        "a header cut off": b"'shape': (3,",
        "no shape": b"'shape': 'x', ",
    }
    if how in huge:
        header = content[10:128].replace(shape, huge[how])[:118].ljust(118)
        content = content[:10] + header + content[128:]
    elif how == "an archive":
        content = b"PK\x03\x04" + content[4:]
    elif how == "cut off":
        content = content[:-4]
    else:
        content = b""
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "of four terabytes",
        "beyond all sizes",
        "a header cut off",
        "no shape",
        "an archive",
        "cut off",
        "empty",
    ],
)
def test_damaged_arrays(place, how):
    damaged(place / "a.npy", how)
    (place / "launch.json").write_text(json.dumps(LAUNCH))
    with pytest.raises(LaunchError, match=r"launch.json: buffer a: .*a.npy is no .npy file"):
        command.run(place / "gemm.ptx", place / "launch.json")


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
    sizes = (f".steps.0.{name} = 0" for name in ("q_rows_per_cta", "kv_rows_per_tile", "block"))
    for what in (".steps.0.arch = []", *sizes, ".steps.0.maps.q_map.tensor = 'text'"):
        assert said[what]
