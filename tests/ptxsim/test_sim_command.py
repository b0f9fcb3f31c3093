"""The functions behind `videoattn sim`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_gemm

from videoattn import cli
from videoattn.kernels.library import Compiler, find_compiler
from videoattn.ptxsim import LaunchError, Module, command, launch
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
        ({"buffers": {"a": {"file": "gemm.ptx"}}}, "gemm.ptx is no .npy file of one array"),
        ({"buffers": {"a": {"file": "."}}}, "is no file"),
        ({"buffers": {"a": {"file": "a.npy", "save": "no/a.npy"}}}, "a.npy: no such folder"),
        ({"grid": "x"}, "grid 'x' is not up to three positive sizes"),
        ({"grid": [1, 2, 3, 4]}, "grid [1, 2, 3, 4] is not"),
        ({"block": 1.5}, "block 1.5 is not"),
        ({"block": 0}, "block 0 is not"),
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


def test_warps_that_a_launch_does_not_have_cannot_be_slow(tmp_path):
    ptx, launch = files(tmp_path)
    assert command.run(ptx, launch, schedule="slow:3-9") == 0
    for block in (128, [64, 2]):
        ptx, launch = files(tmp_path, block=block)
        with pytest.raises(LaunchError, match="schedule slow:4 slows nobody: a CTA has warps 0 to 3 here"):
            command.run(ptx, launch, schedule="slow:4")
    with pytest.raises(LaunchError, match="schedule slow:99 slows nobody"):
        command.ladder("1", schedule="early,slow:99")


def test_what_cannot_be_read_or_written(tmp_path):
    ptx, launch = files(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    for arguments, message in (
        ((tmp_path / "binary", launch), "binary is no text"),
        ((ptx, tmp_path / "binary"), "binary is no text"),
        ((tmp_path, launch), "is no file"),
        ((ptx, tmp_path), "is no file"),
    ):
        with pytest.raises(LaunchError, match=message):
            command.run(*arguments)
    long = "n" * 300
    for arguments in ((tmp_path / long, launch), (ptx, tmp_path / long)):
        with pytest.raises(LaunchError, match=r"^cannot read .*n: File name too long$"):
            command.run(*arguments)
    for place, message in (
        ("no/t.json", "no such folder"),
        (".", "it is a folder"),
        (long, "File name too long"),
        (f"{long}/t.json", "File name too long"),
    ):
        for run in (command.run, lambda *_, **options: command.ladder("1", **options)):
            with pytest.raises(LaunchError, match=f"cannot write .*: {message}"):
                run(ptx, launch, timeline=tmp_path / place)


def test_the_documented_launch_file_runs(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    documented = json.loads(page.split("```json\n")[1].split("```")[0])
    ptx, launch = files(tmp_path)
    needed = json.loads(launch.read_text())
    assert documented["buffers"].items() <= needed["buffers"].items()
    assert documented["args"][0] == needed["args"][0]
    launch.write_text(json.dumps(documented | {"args": needed["args"], "buffers": needed["buffers"]}))
    assert cli.main(["sim", "run", str(ptx), "--launch", str(launch)]) == 0
    assert "clean" in capsys.readouterr().out


def test_the_ladder_from_the_shell(capsys):
    assert cli.main(["sim", "ladder", "--step", "1", "--schedule", "late", "--shape", "1x128x128"]) == 0
    assert "01_baseline" in capsys.readouterr().out
    assert cli.main(["sim", "ladder", "2", "--shape", "1x100x128"]) == 2
    printed = capsys.readouterr()
    assert "needs q_len % 128 == 0" in printed.err
    assert printed.out == ""


def test_each_run_of_the_ladder_has_a_timeline_of_its_own(tmp_path, capsys):
    def timelines(schedule: str) -> set[str]:
        folder = tmp_path / schedule
        folder.mkdir()
        arguments = [
            "1",
            "--shape",
            "1x128x128",
            "--schedule",
            schedule,
            "--timeline",
            str(folder / "a.b.json"),
        ]
        assert cli.main(["sim", "ladder", *arguments]) == 0
        said = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "timeline: " in line]
        for place in said:
            assert json.loads(Path(place).read_text())["traceEvents"]
        assert sorted(said) == sorted(str(place) for place in folder.iterdir())
        return {place.name for place in folder.iterdir()}

    assert timelines("late") == {"a.b.json"}
    assert timelines("early,late,slow:0-1") == {
        "a.b.01_baseline.early.json",
        "a.b.01_baseline.late.json",
        "a.b.01_baseline.slow-0-1.json",
    }
    # The same one twice is one run.
    assert timelines("random,random:0") == {"a.b.json"}
    (tmp_path / "t.01_baseline.late.json").mkdir()
    with pytest.raises(LaunchError, match=r"cannot write .*t\.01_baseline\.late\.json: it is a folder"):
        command.ladder("1", schedule="early,late", timeline=tmp_path / "t.json")


def test_the_ladder_is_compiled_by_whatever_compiler_the_library_is_built_with(tmp_path, monkeypatch, capsys):
    nvcc = find_compiler().path
    aside = tmp_path / "an-nvcc"
    aside.write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\nexec {nvcc} "$@"\n')
    aside.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("VIDEOATTN_NVCC", str(aside))
    assert cli.main(["sim", "ladder", "1", "--shape", "1x128x128"]) == 0
    assert "01_baseline" in capsys.readouterr().out
    assert (tmp_path / "ran").exists()
    monkeypatch.setenv("VIDEOATTN_NVCC", str(tmp_path / "none"))
    assert cli.main(["sim", "ladder", "1", "--shape", "1x128x128"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"videoattn: VIDEOATTN_NVCC names {tmp_path / 'none'}, which is no file\n"


def test_a_compiler_needs_its_own_flags(tmp_path, monkeypatch):
    """As an nvcc out of the packages does; what it complains about is one plain line."""
    monkeypatch.setattr(launch, "find_compiler", lambda: Compiler(find_compiler().path, "13", ("-DFOUND",)))
    source = tmp_path / "kernel.cu"
    source.write_text("#ifndef FOUND\n#error not found\n#endif\n__global__ void k(int* p) { *p = 1; }\n")
    assert len(Module.from_cuda(source).entries) == 1
    source.write_text("#error no such thing\n")
    with pytest.raises(LaunchError, match=r"^nvcc failed on .*kernel\.cu: .*kernel\.cu.*no such thing"):
        Module.from_cuda(source)


@pytest.mark.parametrize(("text", "message"), [("hello", "unexpected 'hello'"), (None, "does not exist")])
def test_the_shell_prints_one_line_for_a_bad_file(tmp_path, capsys, text, message):
    ptx, launch = files(tmp_path)
    ptx.write_text(text) if text else ptx.unlink()
    assert cli.main(["sim", "run", str(ptx), "--launch", str(launch)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_findings_name_the_source_line_where_the_ptx_has_it(tmp_path, capsys):
    located = small_gemm.PTX.replace("[loaded], 24576;", "[loaded], 24592;")
    located = located.replace("mbarrier.arrive", ".loc 1 42 3\nmbarrier.arrive", 1)
    located = located.replace(".visible", '.file 1 "/somewhere/gemm.cu"\n.visible', 1)
    ptx, launch = files(tmp_path)
    ptx.write_text(located)
    assert command.run(ptx, launch) == 1
    assert "gemm.cu:42" in capsys.readouterr().out
