"""The summary of a timing log against numbers worked out by hand."""

import json
from io import StringIO

import pytest
from rich.console import Console

from videoattn.timing.log import ArmTime, CallRow, ForwardTime, StageTime, TimingLog
from videoattn.timing.report import summarise


def row(kind="video_self", stage="denoise", milliseconds=2.0, mark=None, kernel="hopper", **arms):
    call = CallRow(
        clip="a",
        stage=stage,
        step=0,
        forward=0,
        layer=0,
        kind=kind,
        batch=1,
        heads=32,
        q_len=1000,
        kv_len=1000,
        head_dim=128,
        dtype="bfloat16",
        kernel=kernel,
        mask="none",
        kv_tokens=1000,
        milliseconds=milliseconds,
        tflops=None,
        mark=mark,
    )
    if milliseconds and mark is None:
        call.tflops = call.flops / milliseconds / 1e9
    for name, (time, difference) in arms.items():
        ratio = None if mark else time / milliseconds
        call.arms[name] = ArmTime(time, ratio, difference)
    return call


def log(rows, stages, compare=(), forwards=()):
    return TimingLog("NVIDIA H200", "0", "2.13", compare, list(rows), list(stages), list(forwards))


def test_shares_ceilings_and_rates():
    rows = [
        row(),
        row(milliseconds=4.0),
        row("video_text", milliseconds=1.0),
        row(stage="denoise_full", milliseconds=3.0),
    ]
    stages = [
        StageTime("a", "denoise", 0.012),
        StageTime("a", "denoise_full", 0.006),
        StageTime("a", "decode", 0.002),
    ]
    report = summarise(log(rows, stages))
    first, text, full = report.lines
    assert [(line.stage, line.kind) for line in report.lines] == [
        ("denoise", "video_self"),
        ("denoise", "video_text"),
        ("denoise_full", "video_self"),
    ]
    assert (first.calls, first.total_ms, first.share) == (2, 6.0, pytest.approx(6 / 20))
    assert first.ceiling == pytest.approx(20 / 14)
    assert first.tflops == pytest.approx(2 * 4 * 32 * 1000 * 1000 * 128 / 6e-3 / 1e12)
    assert (text.share, full.share) == (pytest.approx(1 / 20), pytest.approx(3 / 20))
    assert report.total.share == pytest.approx(0.5)
    assert report.total.ceiling == pytest.approx(2.0)
    assert report.clip_seconds == {"a": pytest.approx(0.020)}
    assert report.stage_seconds == {"denoise": 0.012, "denoise_full": 0.006, "decode": 0.002}
    assert not report.share_is_estimate
    assert "0.02 s: denoise 0.01, denoise_full 0.01, decode 0.00" in str(report)


def test_marked_calls_stay_out_of_rates_and_ratios():
    rows = [
        row(flash4=(3.0, 0.01)),
        row(milliseconds=9000.0, mark="launch gap", flash4=(8000.0, 0.02)),
    ]
    report = summarise(log(rows, [StageTime("a", "denoise", 20.0, 8.0)], ("flash4",)))
    (line,) = report.lines
    assert (line.calls, line.marked, line.total_ms) == (2, 1, 9002.0)
    assert line.tflops == pytest.approx(rows[0].tflops)
    arm = line.arms["flash4"]
    assert (arm.calls, arm.ratio, arm.max_abs_diff) == (1, 1.5, 0.02)
    assert "1 of 2 calls were too short" in " ".join(str(report).split())


def test_arms_give_no_seconds_and_a_predicted_whole_clip():
    rows = [
        row(milliseconds=6.0, flash4=(9.0, 0.01), sdpa=(3.0, 0.0)),
        row("video_text", milliseconds=2.0, flash4=(2.0, 0.0), sdpa=(4.0, 0.0)),
    ]
    report = summarise(log(rows, [StageTime("a", "denoise", 0.030, 0.010)], ("flash4", "sdpa")))
    assert report.clip_seconds is None
    assert report.stage_seconds is None
    assert report.share_is_estimate
    assert "no clip seconds" in str(report)
    video, text = report.lines
    # 20 ms of render: flash4 adds 3 ms to one kind, sdpa takes 3 ms from it and adds 2 to the other.
    assert video.share == pytest.approx(6 / 20)
    assert video.arms["flash4"].whole_clip == pytest.approx(23 / 20)
    assert text.arms["sdpa"].whole_clip == pytest.approx(22 / 20)
    assert report.total.arms["flash4"].whole_clip == pytest.approx(23 / 20)
    assert report.total.arms["sdpa"].whole_clip == pytest.approx(19 / 20)
    assert report.total.arms["flash4"].ratio == pytest.approx(11 / 8)


def test_an_arm_that_skips_calls_replaces_only_the_others():
    rows = [row(flash4=(4.0, 0.0)), row()]
    rows[1].arms["flash4"] = ArmTime(reason="it takes no dense mask")
    report = summarise(log(rows, [StageTime("a", "denoise", 0.008)], ("flash4",)))
    arm = report.lines[0].arms["flash4"]
    assert arm.refused == {"it takes no dense mask": 1}
    # 4 of 8 ms is attention, half of it served by the arm at twice the time.
    assert arm.whole_clip == pytest.approx(10 / 8)
    assert "flash4 did not run on 1 of 2 calls: it takes no dense mask." in report.notes


def test_whole_clip_seconds_come_from_the_run_without_arms():
    alone = log([row(milliseconds=1.0)], [StageTime("a", "denoise", 0.004)])
    beside = log(
        [row(milliseconds=1.2, flash4=(2.4, 0.0))], [StageTime("a", "denoise", 0.040, 0.030)], ("flash4",)
    )
    report = summarise(beside, whole=alone)
    assert report.clip_seconds == {"a": 0.004}
    assert report.total.share == pytest.approx(0.25)
    assert report.total.total_ms == 1.0
    assert report.lines[0].arms["flash4"].ratio == pytest.approx(2.0)
    assert report.lines[0].arms["flash4"].whole_clip == pytest.approx(1.25)
    assert not report.share_is_estimate
    with pytest.raises(ValueError, match="has shadow arms itself"):
        summarise(beside, whole=beside)
    other = log([row(), row()], [StageTime("a", "denoise", 0.004)])
    with pytest.raises(ValueError, match="another render: it has 2 video_self, this one 1 video_self"):
        summarise(beside, whole=other)


def test_captured_calls_point_to_forward_times():
    rows = [row(milliseconds=None, mark="graph capture")]
    report = summarise(log(rows, [StageTime("a", "denoise", 1.0)]))
    assert report.lines[0].tflops is None
    assert "Wrap each forward in recording.forward()" in report.notes[0]
    timed = [ForwardTime("a", "denoise", step, 5.0 + step) for step in range(3)]
    report = summarise(log(rows, [StageTime("a", "denoise", 1.0)], forwards=timed))
    assert "3 forwards were timed whole, median 6.00 ms" in report.notes[0]


def test_the_report_is_json_and_survives_an_empty_log():
    report = summarise(log([row(flash4=(3.0, 0.01))], [StageTime("a", "denoise", 0.030)], ("flash4",)))
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    assert report.to_dict()["lines"][0]["arms"]["flash4"]["ratio"] == 1.5
    empty = summarise(log([], []))
    assert empty.total.calls == 0
    assert empty.total.share is None
    assert "all" in str(empty)


def test_several_kernels_in_one_line_are_counted():
    rows = [row(), row(), row(kernel="sdpa")]
    report = summarise(log(rows, [StageTime("a", "denoise", 1.0)]))
    assert report.lines[0].kernels == {"hopper": 2, "sdpa": 1}
    assert "hopper ×2" in str(report)
    assert "sdpa ×1" in str(report)


def test_the_tables_fit_a_terminal_of_80_columns():
    kinds = ("video_self", "audio_to_video", "video_connector")
    rows = [row(kind, "denoise_half", 234.5, kernel="blackwell", flash4=(3.0, 0.01)) for kind in kinds] * 400
    report = summarise(log(rows, [StageTime("a", "denoise_half", 300.0)], ("flash4",)))
    console = Console(width=80, record=True, file=StringIO())
    console.print(report)
    text = console.export_text()
    assert "…" not in text
    for kind in kinds:
        assert text.count(f"  {kind} ") == 2
