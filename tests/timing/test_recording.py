"""Recording attention calls: rows, places, arms, errors, files."""

import json
import threading

import pytest
import torch
from diffusers import FirstBlockCacheConfig

import videoattn
from tests.pipelines import ltx_inputs, ltx_transformer
from videoattn.attention import attend
from videoattn.dispatch import AttentionCall, KernelUnavailable, choose
from videoattn.kernels import flash3, sdpa
from videoattn.timing import load, recorder
from videoattn.timing.compare import Slots, max_abs_difference


def tensors(q_len=48, kv_len=32, batch=1, heads=2, head_dim=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, n, heads, head_dim) for n in (q_len, kv_len, kv_len)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def test_a_row_says_what_was_called(tmp_path):
    q, k, v = tensors(batch=2, dtype=torch.bfloat16)
    lengths = torch.tensor([20, 40], dtype=torch.int32)
    with videoattn.record_timing() as recording:
        recording.enter(clip="clip.mp4", stage="denoise", layers={"video_text": 3})
        recording.step = 4
        attend(q, k, v, kind="video_text", kv_lengths=lengths)
        attend(q, k, v, kind="video_text", mask=torch.zeros(48, 32, dtype=torch.bfloat16))
        videoattn.attention(q, k, v)
    ragged, dense, plain = recording.rows
    assert (ragged.clip, ragged.stage, ragged.step) == ("clip.mp4", "denoise", 4)
    assert (ragged.forward, ragged.layer, ragged.kind) == (0, 0, "video_text")
    assert (ragged.batch, ragged.heads, ragged.q_len, ragged.kv_len, ragged.head_dim) == (2, 2, 48, 32, 64)
    assert (ragged.dtype, ragged.kernel, ragged.mask) == ("bfloat16", "sdpa", "kv_lengths")
    assert ragged.milliseconds is not None
    assert ragged.milliseconds > 0
    # Lengths past the end count no further than the end.
    assert ragged.kv_tokens == 20 + 32
    flops = 4 * 2 * 48 * 64 * (20 + 32)
    assert ragged.tflops == pytest.approx(flops / (ragged.milliseconds * 1e-3) / 1e12)
    assert (dense.mask, dense.layer, dense.kv_tokens) == ("dense", 1, 64)
    assert (plain.kind, plain.layer, plain.forward, plain.step) == (None, None, None, 4)


def test_outside_a_recording_nothing_is_recorded():
    assert recorder.active() is None
    with videoattn.record_timing() as recording:
        assert recorder.active() is recording
    assert recorder.active() is None
    videoattn.attention(*tensors())
    assert recording.rows == []


@pytest.mark.parametrize("compare", ["", "sdpa"])
def test_a_cache_that_skips_blocks_shifts_no_later_steps_rows(compare):
    model, call = ltx_transformer(layers=3), ltx_inputs((20,))
    handle = videoattn.install(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with torch.no_grad(), videoattn.record_timing(compare=compare) as recording:
        for clip in "ab":
            recording.enter(clip=clip, stage="denoise", layers=handle.layers)
            model._reset_stateful_cache()
            for step in range(3):
                recording.step = step
                with model.cache_context("cond"):
                    model(**call)
    assert [(row.step, row.forward, row.layer) for row in recording.rows if row.kind == "video_self"] == [
        *((0, 0, layer) for layer in range(3)), (1, 1, 0), (2, 2, 0),
    ] * 2  # fmt: skip


def test_stages_and_clips_follow_each_other():
    q, k, v = tensors()
    layers = {"video_self": 2}
    with videoattn.record_timing() as recording:
        for clip in ("a", "b"):
            recording.enter(clip=clip, stage="denoise", layers=layers)
            for step in range(2):
                recording.step = step
                for _ in range(2):
                    attend(q, k, v, kind="video_self")
            recording.enter(stage="decode")
        recording.leave()
    assert [(r.clip, r.stage, r.step, r.forward, r.layer) for r in recording.rows] == [
        (clip, "denoise", step, step, layer) for clip in "ab" for step in range(2) for layer in range(2)
    ]
    assert [(s.clip, s.stage) for s in recording.log.stages] == [
        (clip, stage) for clip in "ab" for stage in ("denoise", "decode")
    ]


def test_a_new_stage_starts_at_step_zero_and_connectors_have_none():
    q, k, v = tensors()
    with videoattn.record_timing() as recording:
        recording.enter(clip="a", stage="denoise")
        attend(q, k, v, kind="video_connector")
        attend(q, k, v, kind="video_self")
        recording.step = 7
        recording.enter(stage="denoise_full")
        attend(q, k, v, kind="video_self")
    assert [row.step for row in recording.rows] == [None, 0, 0]


def test_shadow_arms_leave_the_output_alone():
    q, k, v = tensors()
    alone = videoattn.attention(q, k, v)
    with videoattn.record_timing(compare="sdpa") as recording:
        beside = [videoattn.attention(q, k, v) for _ in range(4)]
        out, lse = videoattn.attention(q, k, v, return_lse=True)
    assert all(torch.equal(out, alone) for out in [*beside, out])
    assert lse.shape == (1, 2, 48)
    assert len(recording.rows) == 5
    for row in recording.rows:
        arm = row.arms["sdpa"]
        assert arm.reason is None
        assert arm.max_abs_diff == 0.0
        assert arm.milliseconds is not None
        assert arm.ratio == pytest.approx(arm.milliseconds / row.milliseconds)


@pytest.fixture
def skewed(monkeypatch):
    """A second kernel whose output is the first's plus 0.25, and the order in which the two ran."""
    order = []
    real = sdpa.run

    def run(q, k, v, **options):
        order.append("flash3")
        out, lse = real(q, k, v, **options)
        return out + 0.25, lse

    def run_sdpa(q, k, v, **options):
        order.append("sdpa")
        return real(q, k, v, **options)

    def supports(call):
        return "it takes no dense mask" if call.mask == "dense" else None

    monkeypatch.setattr(flash3, "run", run)
    monkeypatch.setattr(flash3, "supports", supports)
    monkeypatch.setattr(sdpa, "run", run_sdpa)
    choose.cache_clear()
    yield order
    choose.cache_clear()


def test_a_difference_is_measured_and_a_refusal_gives_its_reason(skewed):
    q, k, v = tensors()
    with videoattn.record_timing(compare=["flash3"]) as recording:
        attend(q, k, v, kind="video_self")
        attend(q, k, v, kind="video_text", mask=torch.zeros(48, 32))
    free, masked = recording.rows
    assert free.arms["flash3"].max_abs_diff == pytest.approx(0.25, abs=1e-6)
    assert masked.arms["flash3"].reason == "it takes no dense mask"
    assert masked.arms["flash3"].milliseconds is None
    assert masked.milliseconds is not None


@pytest.mark.parametrize("layers", [{"video_self": 2}, {"video_self": 3}, {}])
def test_the_order_of_the_arms_turns(skewed, layers):
    q, k, v = tensors()
    firsts = []
    with videoattn.record_timing(compare=["flash3"]) as recording:
        recording.enter(clip="a", stage="denoise", layers=layers)
        for _ in range(6):
            skewed.clear()
            attend(q, k, v, kind="video_self")
            assert sorted(skewed) == ["flash3", "sdpa"]
            firsts.append(skewed[0])
    assert firsts.count("flash3") == 3
    if layers:
        by_layer = {row.layer: set() for row in recording.rows}
        for row, first in zip(recording.rows, firsts, strict=True):
            by_layer[row.layer].add(first)
        assert all(len(seen) == 2 for seen in by_layer.values())


def test_a_failing_arm_is_reported_and_does_not_end_the_render(monkeypatch, skewed):
    runs = []

    def run(*_, **__):
        runs.append(1)
        raise RuntimeError("no code object\nand a long trace")

    monkeypatch.setattr(flash3, "run", run)
    q, k, v = tensors()
    with videoattn.record_timing(compare=["flash3"]) as recording:
        for _ in range(3):
            attend(q, k, v, kind="video_self")
    assert len(runs) == 1
    assert {row.arms["flash3"].reason for row in recording.rows} == {
        "it failed: RuntimeError: no code object"
    }
    assert "flash3 did not run on 3 of 3 calls: it failed: RuntimeError: no code object" in " ".join(
        str(recording.summary()).split()
    )


def test_a_difference_that_is_not_finite_shows(monkeypatch, skewed, tmp_path):
    monkeypatch.setattr(flash3, "run", lambda q, k, v, **_: (torch.full_like(q, torch.nan), None))
    with videoattn.record_timing(tmp_path / "t.jsonl", compare=["flash3"]) as recording:
        attend(*tensors(), kind="video_self")
    arm = recording.rows[0].arms["flash3"]
    assert arm.max_abs_diff is None
    assert not arm.finite
    assert "not finite" in str(recording.summary())
    assert load(tmp_path / "t.jsonl") == recording.log


def test_max_abs_difference_in_pieces(monkeypatch):
    a, b, _ = tensors(q_len=32)
    b = b.clone()
    b[0, 17, 1, 5] = a[0, 17, 1, 5] - 40
    whole = max_abs_difference(a, b)
    monkeypatch.setattr("videoattn.timing.compare.DIFFERENCE_CHUNK", 5 * 2 * 64)
    assert max_abs_difference(a, b) == whole == pytest.approx(40)
    b[0, 31, 0, 0] = torch.nan
    assert max_abs_difference(a, b).isnan()


def test_slots_grow_and_are_written_in_and_out_of_inference_mode(monkeypatch):
    monkeypatch.setattr("videoattn.timing.compare.SLOTS", 3)
    with torch.inference_mode():
        slots = Slots(torch.device("cpu"))
        numbers = [slots.put(torch.tensor(float(i))) for i in range(5)]
    numbers += [slots.put(torch.tensor(float(i))) for i in range(5, 8)]
    assert [slots.read(number) for number in numbers] == [float(i) for i in range(8)]


def test_unknown_and_useless_arms_are_refused_before_the_run():
    with pytest.raises(ValueError, match="unknown attention kernel 'flash9' to compare with: choose from"):
        videoattn.record_timing(compare="sdpa,flash9")
    with pytest.raises(ValueError, match="stands twice"):
        videoattn.record_timing(compare=("sdpa", "sdpa"))
    calls = [AttentionCall(1, 4, 64, 64, 64, torch.float32, "cpu", kind="video_self")]
    with pytest.raises(KernelUnavailable, match=r"'flash4'.*none of the model's calls: it needs an NV"):
        videoattn.record_timing(compare="flash4", calls=calls)
    assert videoattn.record_timing(compare=" sdpa , ", calls=calls).compare == ("sdpa",)


def test_a_second_recording_is_refused_and_harmless():
    with videoattn.record_timing() as recording:
        with (
            pytest.raises(RuntimeError, match="already running in this process"),
            videoattn.record_timing(),
        ):
            pass
        videoattn.attention(*tensors())
    assert len(recording.rows) == 1
    with pytest.raises(RuntimeError, match="runs once"), recording:
        pass
    for use in (lambda: recording.enter(stage="x"), recording.leave):
        with pytest.raises(RuntimeError, match="not running"):
            use()


def test_calls_of_a_worker_thread_are_recorded():
    q, k, v = tensors()
    with videoattn.record_timing() as recording:
        recording.enter(clip="a", stage="denoise", layers={"video_self": 4})
        workers = [
            threading.Thread(target=lambda: [attend(q, k, v, kind="video_self") for _ in range(20)])
            for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    places = sorted((row.forward, row.layer) for row in recording.rows)
    assert places == [(forward, layer) for forward in range(20) for layer in range(4)]


class Capture(threading.Thread):
    """Another thread that captures a graph for as long as a `with` block lasts, and then makes a call."""

    def __init__(self):
        super().__init__()
        self._inside, self._end = threading.Event(), threading.Event()

    def run(self):
        with recorder.unrecorded():
            self._inside.set()
            self._end.wait()
            videoattn.attention(*tensors())
        videoattn.attention(*tensors())

    def __enter__(self):
        self.start()
        self._inside.wait()

    def __exit__(self, *_):
        self._end.set()
        self.join()


def test_a_recording_that_ends_during_another_threads_capture_is_not_put_back():
    capture = Capture()
    with videoattn.record_timing() as recording:
        capture.__enter__()
    capture.__exit__()
    assert recorder.active() is None
    videoattn.attention(*tensors())
    with videoattn.record_timing():
        pass
    assert recording.rows == []


def test_a_recording_that_starts_during_another_threads_capture_goes_on_after_it():
    capture = Capture()
    capture.__enter__()
    with videoattn.record_timing() as recording:
        capture.__exit__()
        assert recorder.active() is recording
        videoattn.attention(*tensors())
    # The thread's own call after its capture, and this one.
    assert len(recording.rows) == 2


def test_a_capture_keeps_its_own_threads_calls_out_alone():
    with videoattn.record_timing() as recording:
        with Capture():
            videoattn.attention(*tensors())
            assert recorder.active() is recording
        with recorder.unrecorded():
            with recorder.unrecorded():
                videoattn.attention(*tensors())
            videoattn.attention(*tensors())
        videoattn.attention(*tensors())
    assert len(recording.rows) == 3


def test_a_failed_run_writes_nothing_and_frees_the_place(tmp_path):
    path = tmp_path / "t.jsonl"

    def fail():
        with videoattn.record_timing(path):
            videoattn.attention(*tensors())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with videoattn.record_timing(path):
        videoattn.attention(*tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_kernel_that_raises_leaves_no_row(monkeypatch):
    q, k, v = tensors()
    with videoattn.record_timing() as recording:
        with pytest.raises(KernelUnavailable):
            videoattn.attention(q, k, v, kernel="flash4")
        videoattn.attention(q, k, v)
    assert len(recording.rows) == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing/t.jsonl", "there is no folder"), ("", "it is a folder")],
)
def test_an_impossible_path_is_refused_before_the_run(tmp_path, path, message):
    with pytest.raises(OSError, match=message), videoattn.record_timing(tmp_path / path):
        pytest.fail("the block ran")
    assert recorder.active() is None


def test_the_file_reads_back(tmp_path):
    path = tmp_path / "t.jsonl"
    q, k, v = tensors()
    with videoattn.record_timing(path, compare="sdpa") as recording:
        recording.enter(clip="größe.mp4", stage="denoise", layers={"video_self": 1})
        for step in range(3):
            recording.step = step
            with recording.forward():
                attend(q, k, v, kind="video_self")
    log = load(path)
    assert log == recording.log
    assert [(f.step, f.stage) for f in log.forwards] == [(0, "denoise"), (1, "denoise"), (2, "denoise")]
    assert all(f.milliseconds > row.milliseconds for f, row in zip(log.forwards, log.rows, strict=True))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["type"] for line in lines] == ["run", "stage", *["forward"] * 3, *["call"] * 3]
    assert lines[-1]["arms"]["sdpa"]["max_abs_diff"] == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{}\n", "line 1: not a line of a timing log"),
        ("nonsense\n", "line 1"),
        ('{"type": "call"}\n', "first line must have the type 'run'"),
        ('{"type":"run","device":"","version":"","torch":"","compare":[]}\n{"type":"x"}\n', "line 2"),
    ],
)
def test_another_file_is_not_a_timing_log(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_compiled_calls_are_recorded(mode):
    q, k, v = tensors()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(x):
        return attend(x * 2, k, v, kind="video_self")[0] + 1

    with getattr(torch, mode)():
        block(q)
        with videoattn.record_timing(compare="sdpa") as recording:
            for _ in range(3):
                out = block(q)
    assert len(recording.rows) == 3
    assert all(row.arms["sdpa"].max_abs_diff == 0 for row in recording.rows)
    torch.testing.assert_close(out, attend(q * 2, k, v)[0] + 1)
