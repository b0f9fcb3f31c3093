"""`videoattn timing FILE` as a plain function: tables, JSON, and one line for what can't be read."""

import json

import pytest
import torch

import videoattn
from videoattn.attention import attend
from videoattn.render.errors import RenderError, UsageError
from videoattn.timing.command import timing


@pytest.fixture
def record(tmp_path):
    """Writes the log of a small render and gives its path and recording."""

    def write(name, compare="", kinds=("video_self", "video_text")):
        q = torch.randn(1, 32, 2, 64)
        with videoattn.record_timing(tmp_path / name, compare=compare) as recording:
            recording.enter(clip="a.mp4", stage="denoise", layers=dict.fromkeys(kinds, 1))
            for step in range(3):
                recording.step = step
                for kind in kinds:
                    attend(q, q, q, kind=kind)
        return tmp_path / name, recording

    return write


def test_the_tables_of_a_saved_log_are_those_of_the_run(record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    path, recording = record("t.jsonl", "sdpa")
    timing(path)
    assert capsys.readouterr().out.rstrip().split() == str(recording.summary()).split()


def test_json(record, capsys):
    path, recording = record("t.jsonl")
    timing(path, json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(recording.summary().to_json())
    assert printed["total"]["calls"] == 6


def test_seconds_come_from_the_run_without_arms(record, capsys):
    (compared, recording), (plain, whole) = record("c.jsonl", "sdpa"), record("p.jsonl")
    timing(compared, whole=plain, json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(recording.summary(whole.log).to_json())
    assert printed["clip_seconds"] == {"a.mp4": whole.log.stages[0].seconds}


def test_a_log_without_calls(tmp_path, capsys):
    with videoattn.record_timing(tmp_path / "t.jsonl"):
        pass
    timing(tmp_path / "t.jsonl")
    assert "all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "no such timing log: .*t.jsonl"),
        (b"\xff\xfe", RenderError, "t.jsonl, line 1: not a line of a timing log"),
        (b"", RenderError, "is empty: not a timing log"),
        (b'{"job": 1}\n', RenderError, "line 1: not a line of a timing log"),
    ],
)
def test_what_is_no_log_is_named_in_one_line(tmp_path, content, error, message):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        timing(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(RenderError, match=r"cannot read .*: Is a directory"):
        timing(tmp_path)


def test_a_whole_run_of_another_render_is_refused(record):
    (compared, _), (other, _) = record("c.jsonl", "sdpa"), record("o.jsonl", kinds=("video_self",))
    with pytest.raises(UsageError, match=r"o.jsonl does not go with .*c.jsonl: .*another render"):
        timing(compared, whole=other)
