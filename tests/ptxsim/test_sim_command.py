"""The functions behind `videoattn sim`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_gemm

from videoattn.ptxsim import LaunchError, command
from videoattn.ptxsim.ladder import encode


def files(tmp_path, **change):
    a, b = small_gemm.operands()
    np.save(tmp_path / "a.npy", encode(a, "bf16"))
    np.save(tmp_path / "b.npy", encode(b, "bf16"))
    (tmp_path / "gemm.ptx").write_text(small_gemm.PTX)

    def tensor(name: str, rows: int) -> dict:
        return {
            "tensor_map": {
                "buffer": name,
                "dtype": "bf16",
                "dims": [64, rows],
                "strides": [128],
                "box": [64, rows],
                "swizzle": "128B",
            }
        }

    launch = {
        "entry": "gemm", "block": 128, "roles": {"leader": [0], "others": [1, 2, 3]},
        "args": [tensor("a", 128), tensor("b", 64), {"buffer": "out"}],
        "buffers": {"a": {"file": "a.npy"}, "b": {"file": "b.npy"},
                    "out": {"dtype": "f32", "shape": [128, 64], "fill": "poison", "save": "out.npy"}},
    }  # fmt: skip
    (tmp_path / "launch.json").write_text(json.dumps(launch | change))
    return tmp_path / "gemm.ptx", tmp_path / "launch.json"


def test_run_launches_saves_and_traces(tmp_path, capsys):
    ptx, launch = files(tmp_path)
    timeline = tmp_path / "timeline.json"
    assert command.run(ptx, launch, schedule="late", trace=True, timeline=timeline) == 0
    printed = capsys.readouterr().out
    assert "schedule late: clean" in printed
    assert "leader: " in printed
    assert "waits on loaded for parity 0" in printed or "passes loaded, phase 0 done" in printed
    assert np.array_equal(np.load(tmp_path / "out.npy"), small_gemm.expected())
    events = json.loads(timeline.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp 0", "warp 3", "copy engine", "MMA pipe"} <= tracks
    assert all(e["dur"] >= 1 for e in events if e["ph"] == "X")


def test_run_returns_one_when_there_are_findings(tmp_path, capsys):
    ptx, launch = files(tmp_path)
    ptx.write_text(small_gemm.PTX.replace("[loaded], 24576;", "[loaded], 24592;"))
    assert command.run(ptx, launch) == 1
    assert "deadlock" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entyr": "gemm"}, "unknown key 'entyr'"),
        ({"args": [{"buffer": "nope"}]}, "no buffer 'nope'"),
        ({"args": [1, 2, 3]}, "cannot hold the integer 1; give bytes"),
        ({"buffers": {"a": {"dtype": "f13", "shape": [1]}}}, "dtype 'f13' is not one of"),
    ],
)
def test_a_bad_launch_file_gives_one_line(tmp_path, change, message):
    ptx, launch = files(tmp_path, **change)
    with pytest.raises(LaunchError) as error:
        command.run(ptx, launch)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_or_not_json(tmp_path):
    ptx, launch = files(tmp_path)
    with pytest.raises(LaunchError, match="does not exist"):
        command.run(tmp_path / "no.ptx", launch)
    launch.write_text("{")
    with pytest.raises(LaunchError, match="is not JSON: line 1"):
        command.run(ptx, launch)
    with pytest.raises(LaunchError, match="schedule 'sometimes' is not"):
        command.ladder("1", schedule="sometimes")
    with pytest.raises(LaunchError, match="is not HEADSxQ_LENxKV_LEN"):
        command.ladder("1", shape="12")
