"""The timing log on a GPU: event times, launch gaps, graphs, streams, shadow arms, and its cost."""

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest
import torch

import videoattn
from videoattn.attention import attend
from videoattn.dispatch import AttentionCall, device_capability
from videoattn.kernels import flash4
from videoattn.timing import load

DEVICE = torch.device("cuda")
LONG = (1, 6144, 32, 128)
TEXT_QUERY, TEXT_KEY = (1, 12288, 32, 128), (1, 1024, 32, 128)


def needs_flash4():
    call = AttentionCall(
        1, 32, 4096, 4096, 128, torch.bfloat16, "cuda", device_capability(torch.device("cuda", 0))
    )
    reason = flash4.supports(call)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def random(*shape):
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def busy(milliseconds):
    """Occupy the current stream; the clock rate only has to be of the right order."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def event_median(run, count=20):
    """Milliseconds of `run` between events, the device kept busy so that launches don't show."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy(1)
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def test_times_agree_with_events_around_the_same_call():
    q = random(*LONG)
    # The first call of a kind looks up which kernel serves it; a device that ran dry meanwhile waits for the
    # launch inside the event pair, and that call is rightly marked.
    attend(q, q, q, kind="video_self")
    alone = event_median(lambda: attend(q, q, q, kind="video_self"))
    with videoattn.record_timing() as recording:
        recording.enter(clip="a", stage="denoise", layers={"video_self": 4})
        busy(5)
        for _ in range(20):
            busy(1)
            attend(q, q, q, kind="video_self")
    rows = recording.rows
    assert [row.mark for row in rows] == [None] * 20
    assert statistics.median(row.milliseconds for row in rows) == pytest.approx(alone, rel=0.1)
    flops = 4 * 32 * 6144 * 6144 * 128
    assert all(row.tflops == pytest.approx(flops / row.milliseconds / 1e9) for row in rows)
    assert recording.log.device == torch.cuda.get_device_name()


def test_a_call_that_waited_for_its_launch_is_marked_and_the_same_call_behind_work_is_not():
    # Some tens of microseconds on an H200: long enough to time, short beside the host's part of a launch.
    q, k = random(1, 2048, 32, 128), random(*TEXT_KEY)
    attend(q, k, k, kind="video_text")
    torch.cuda.synchronize()
    with videoattn.record_timing() as recording:
        for _ in range(10):
            torch.cuda.synchronize()
            attend(q, k, k, kind="video_text")
        recording.enter(stage="behind work")
        busy(20)
        for _ in range(10):
            attend(q, k, k, kind="video_text")
    idle = [row for row in recording.rows if row.stage is None]
    queued = [row for row in recording.rows if row.stage == "behind work"]
    assert {row.mark for row in queued} == {None}
    assert "launch gap" in {row.mark for row in idle}
    assert all((row.tflops is None) == (row.mark is not None) for row in recording.rows)


def test_a_call_as_short_as_an_event_pair_is_marked_even_behind_work():
    q = random(1, 64, 32, 64)
    attend(q, q, q)
    with videoattn.record_timing() as recording:
        busy(20)
        for _ in range(10):
            attend(q, q, q, kind="audio_self")
    assert {row.mark for row in recording.rows} == {"launch gap"}
    assert {row.tflops for row in recording.rows} == {None}


@pytest.mark.parametrize("compare", ["", "sdpa", "flash4,sdpa"])
def test_no_call_synchronises(compare):
    if "flash4" in compare:
        needs_flash4()
    q, k = random(*TEXT_QUERY), random(*TEXT_KEY)
    with videoattn.record_timing(compare=compare):
        attend(q, k, k, kind="video_text")
    with videoattn.record_timing(compare=compare) as recording:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                attend(q, k, k, kind="video_text")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(recording.rows) == 4


def test_calls_on_another_stream_are_timed_there():
    q = random(*LONG)
    attend(q, q, q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with videoattn.record_timing() as recording, torch.cuda.stream(stream):
        busy(5)
        attend(q, q, q, kind="video_self")
    (row,) = recording.rows
    assert row.mark is None
    assert 50 < row.tflops < 3000


def test_key_lengths_count_only_the_keys_that_matter():
    q, k = random(2, 4096, 32, 64), random(2, 128, 32, 64)
    lengths = torch.tensor([20, 100], dtype=torch.int32, device=DEVICE)
    with videoattn.record_timing() as recording:
        attend(q, k, k, kind="video_text", kv_lengths=lengths)
    assert recording.rows[0].kv_tokens == 120


def test_flash4_beside_each_kind_of_call(tmp_path):
    needs_flash4()
    path = tmp_path / "timing.jsonl"
    lengths = {
        "video_self": (12288, 12288, 128),
        "video_text": (12288, 1024, 128),
        "audio_self": (259, 259, 64),
        "audio_to_video": (12288, 259, 64),
        "video_to_audio": (259, 12288, 64),
    }
    calls = {
        kind: [random(1, n, 32, dim) for n in (q_len, kv_len, kv_len)]
        for kind, (q_len, kv_len, dim) in lengths.items()
    }
    alone = {kind: attend(*qkv, kind=kind)[0] for kind, qkv in calls.items()}
    with videoattn.record_timing(path, compare="flash4") as recording:
        recording.enter(clip="a", stage="denoise", layers=dict.fromkeys(calls, 4))
        for _ in range(8):
            for kind, qkv in calls.items():
                assert torch.equal(attend(*qkv, kind=kind)[0], alone[kind])
    for row in recording.rows:
        arm = row.arms["flash4"]
        assert arm.reason is None
        assert arm.finite
        # Both round to bf16 what differs in the last bits of fp32: an ulp of an output below 1 is up to 2^-8.
        assert 0 <= arm.max_abs_diff <= 2**-7
    report = recording.summary()
    assert report.clip_seconds is None
    by_kind = {line.kind: line for line in report.lines}
    assert 0.3 < by_kind["video_self"].arms["flash4"].ratio < 3
    assert load(path) == recording.log
    print(report)


def test_a_cuda_graph_has_no_times_of_calls_but_of_forwards():
    q = random(*LONG)
    attend(q, q, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with videoattn.record_timing(compare="sdpa") as recording:
        recording.enter(clip="a", stage="denoise", layers={"video_self": 2})
        with torch.cuda.graph(graph):
            out = attend(attend(q, q, q, kind="video_self")[0], q, q, kind="video_self")[0]
        for step in range(3):
            recording.step = step
            with recording.forward():
                graph.replay()
    want = attend(attend(q, q, q)[0], q, q)[0]
    assert torch.equal(out, want)
    assert [row.mark for row in recording.rows] == ["graph capture"] * 2
    assert {row.milliseconds for row in recording.rows} == {None}
    assert {row.arms["sdpa"].reason for row in recording.rows} == {"captured into a CUDA graph"}
    assert [forward.step for forward in recording.log.forwards] == [0, 1, 2]
    one = event_median(lambda: attend(q, q, q), 5)
    assert statistics.median(f.milliseconds for f in recording.log.forwards) == pytest.approx(
        2 * one, rel=0.3
    )
    assert "2 calls were captured into a CUDA graph" in " ".join(str(recording.summary()).split())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_forwards_are_recorded_or_said_to_be_captured(mode):
    q = random(1, 2048, 8, 128)

    @torch.compile(fullgraph=True, mode=mode)
    def block(x):
        return attend(x * 2, x, x, kind="video_self")[0] + 1

    want = attend(q * 2, q, q)[0] + 1
    if mode == "default":
        block(q)
    with videoattn.record_timing(compare="sdpa") as recording:
        for _ in range(4):
            out = block(q).clone()
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    marks = [row.mark for row in recording.rows]
    if mode == "default":
        assert len(marks) == 4
        assert "graph capture" not in marks
    else:
        assert "graph capture" in marks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one():
    q = random(*LONG).to("cuda:1")
    with torch.cuda.device(1):
        attend(q, q, q)
        torch.cuda.synchronize()
    with videoattn.record_timing() as recording:
        attend(q, q, q, kind="video_self")
    assert 50 < recording.rows[0].tflops < 3000


def test_the_log_costs_a_forward_less_than_a_hundredth(tmp_path, monkeypatch, capsys):
    """A few layers of LTX-2.3 at full width; `scripts/measure_log_overhead.py` prints the table."""
    needs_flash4()
    script = Path(__file__).parents[2] / "scripts" / "measure_log_overhead.py"
    specification = importlib.util.spec_from_file_location("measure_log_overhead", script)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    arguments = ["--layers", "3", "--sizes", "768x512", "--pairs", "15", "--compare", "flash4"]
    arguments += ["--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    failed = module.main()
    print(capsys.readouterr().out)
    assert not failed
    log = load(tmp_path / "768x512.jsonl")
    assert len(log.rows) == 6 * 3 * 6
    assert {row.layer for row in log.rows} == {0, 1, 2}
    assert {row.forward for row in log.rows} == set(range(6))
    by_kind = {row.kind: row for row in log.rows}
    assert (by_kind["video_self"].q_len, by_kind["video_self"].head_dim) == (12288, 128)
    assert (by_kind["video_to_audio"].q_len, by_kind["video_to_audio"].kv_len) == (259, 12288)
    assert all(row.mask == "none" for row in log.rows)
    assert all(row.arms["flash4"].reason is None for row in log.rows)
