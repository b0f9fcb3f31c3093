"""`render --context-parallel`: ranks started by the command or by torchrun, their end and their failures."""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from tests.cli.command import TINY, complaint, run, start
from tests.render.rank_process import command
from videoattn.processors.parallel.degrees import Degrees
from videoattn.render.errors import NonFinite, RenderError, UsageError
from videoattn.render.files import Leftovers
from videoattn.render.job import RenderJob
from videoattn.render.launch import GRACE, failure, pick_kind
from videoattn.render.metadata import read
from videoattn.render.rank import TERMINATED, Rank
from videoattn.render.run import render
from videoattn.timing.log import load

pytestmark = pytest.mark.slow

# Without loss: the encoder's choices would turn a rounding of one pixel into a difference of many.
SETTINGS = {"width": 128, "height": 96, "num_frames": 17, "num_inference_steps": 2, "crf": 0}


def frames_of(clip: Path) -> np.ndarray:
    with av.open(str(clip)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def sound_of(clip: Path) -> np.ndarray:
    with av.open(str(clip)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=-1)


def psnr(ours: np.ndarray, theirs: np.ndarray) -> float:
    error = np.mean((ours.astype(float) - theirs.astype(float)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("ulysses:2", Degrees(2, 1)),
        ("ring:3", Degrees(1, 3)),
        ("ulysses:2, ring:4", Degrees(2, 4)),
        ("ring:4,ulysses:2", Degrees(2, 4)),
    ],
)
def test_degrees(text, degrees):
    assert Degrees.parse(text) == degrees
    assert Degrees.parse(str(degrees)) == degrees


@pytest.mark.parametrize(
    "text", ["", "2", "ulysses", "ulysses:", "ulysses:two", "ulysses:²", "tensor:2", "ring:-2"]
)
def test_what_names_no_degrees(text):
    with pytest.raises(ValueError, match="names no degrees: write ulysses:N, ring:N or ulysses:A,ring:B"):
        Degrees.parse(text)


@pytest.mark.parametrize("text", ["ulysses:2,ulysses:2", "ulysses:1", "ring:0", "ulysses:0,ring:4"])
def test_degrees_that_share_nothing(text):
    with pytest.raises(ValueError, match=r"names no degrees|shares nothing out"):
        Degrees.parse(text)


def test_devices():
    assert pick_kind(None, Degrees(2)) in ("cpu", "cuda")
    assert pick_kind("cpu", Degrees(64)) == "cpu"
    with pytest.raises(UsageError, match="takes 4096 GPUs, and this machine has"):
        pick_kind("cuda", Degrees(4096))
    with pytest.raises(UsageError, match="choose among GPUs by CUDA_VISIBLE_DEVICES"):
        pick_kind("cuda:1", Degrees(2))


def test_a_process_is_a_rank_when_torchrun_says_so():
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert Rank.of(said) == Rank(3, 4, 1)
    assert not Rank(3, 4, 1).first
    for name in said:
        assert Rank.of({key: value for key, value in said.items() if key != name}) is None


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """A rank's failure as torch hands it over, from the exception that the rank recorded."""

    def make(rank: int, error: Exception | None, exitcode: int = 1) -> ProcessFailure:
        file = tmp_path / f"error{rank}.json"
        if error is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            ErrorHandler().record_exception(error)
        return ProcessFailure(rank, 100 + rank, exitcode, str(file))

    return make


def test_the_cause_is_told_not_its_consequence(failed, tmp_path):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40000")
    for failures, kind, text in (
        ({0: failed(0, lost), 1: failed(1, RenderError("no memory"))}, RenderError, "rank 1: no memory"),
        ({0: failed(0, UsageError("no such model")), 1: failed(1, lost)}, UsageError, "no such model"),
        (
            {0: failed(0, NonFinite("NaN", "denoise")), 1: failed(1, NonFinite("NaN", "denoise"))},
            RenderError,
            "NaN in stage denoise: nothing was written",
        ),
        ({0: failed(0, lost), 1: failed(1, KeyError("x"))}, RenderError, "rank 1: KeyError: 'x'"),
    ):
        error = failure(failures, tmp_path)
        assert (type(error), str(error)) == (kind, text)


def test_a_rank_that_left_no_word(failed, tmp_path):
    lost = RuntimeError("Connection closed by peer")
    error = failure({0: failed(0, lost), 2: failed(2, None, -signal.SIGKILL)}, tmp_path)
    assert str(error) == "rank 2 was killed by SIGKILL: this machine may be out of memory"
    error = failure({3: failed(3, None, TERMINATED), 4: failed(4, None, TERMINATED)}, tmp_path)
    assert str(error) == "rank 3 was ended by SIGTERM"
    logs = tmp_path / "run" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("Traceback\nImportError: no numpy\n\n")
    assert (
        str(failure({1: failed(1, None, 3)}, tmp_path)) == "rank 1 ended with status 3: ImportError: no numpy"
    )


def test_a_rank_that_the_launcher_stopped_is_not_the_cause(failed, tmp_path):
    """In the same second, and before or after the failure in the order of ranks."""
    lost = RuntimeError("Connection closed by peer")
    for stopped, cause, text in (
        (
            0,
            failed(1, None, -signal.SIGKILL),
            "rank 1 was killed by SIGKILL: this machine may be out of memory",
        ),
        (0, failed(1, None, -signal.SIGSEGV), "rank 1 was killed by SIGSEGV"),
        (2, failed(1, None, 3), "rank 1 ended with status 3: it said nothing"),
        (0, failed(1, RenderError("no memory")), "rank 1: no memory"),
        (0, failed(1, lost), "rank 1: RuntimeError: Connection closed by peer"),
    ):
        for end in (TERMINATED, -signal.SIGTERM):
            other = failed(stopped, None, end)
            other.timestamp = cause.timestamp
            assert str(failure({stopped: other, 1: cause}, tmp_path)) == text
        other = failed(stopped, None, -signal.SIGKILL)
        other.timestamp = cause.timestamp + GRACE
        assert str(failure({stopped: other, 1: cause}, tmp_path)) == text


def test_what_a_killed_rank_leaves_is_removed(tmp_path):
    (tmp_path / ".clip[1].mp4.old.part").touch()
    (tmp_path / ".clip.mp4.other.part").touch()
    leftovers = Leftovers([tmp_path / "clip[1].mp4", tmp_path / "new" / "deep" / "log.jsonl"])
    (tmp_path / ".clip[1].mp4.new.part").touch()
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / ".log.jsonl.0.part").touch()
    leftovers.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".clip.mp4.other.part",
        ".clip[1].mp4.old.part",
    ]


def test_heads_that_do_not_divide_are_refused_before_anything_starts(ltx2_folder, tmp_path):
    result = run(
        "render", "x", "--model", ltx2_folder, *TINY, "--context-parallel", "ulysses:4", cwd=tmp_path
    )
    assert result.returncode == 2
    said = complaint(result)
    assert said.startswith(
        "videoattn: --context-parallel: Ulysses shares out whole heads, and 4 does not divide"
    )
    assert said.endswith("this model's 2: take a degree of 1, 2, or the ring")


def test_two_ranks_render_the_clip_of_one(ltx2_folder, tmp_path):
    """Guided LTX-2.3 with sound; the log has the shapes of the rank that writes it."""
    job = RenderJob(prompt="a red ball", model=str(ltx2_folder), seed=5, **SETTINGS)
    render(job, output=tmp_path / "one.mp4", device="cpu")
    result = run(
        "render",
        "a red ball",
        *("--model", ltx2_folder, *TINY, "--crf", "0", "--seed", "5"),
        *("--context-parallel", "ulysses:2", "--device", "cpu"),
        *("-o", "two.mp4", "--timing", "two.jsonl"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["two.jsonl", "two.mp4"]
    for phase in ("load model: ", "denoise: ", "write clip: ", "s without loading"):
        assert result.stderr.count(phase) == 1, result.stderr
    assert "Warning" not in result.stderr

    assert psnr(frames_of(tmp_path / "two.mp4"), frames_of(tmp_path / "one.mp4")) > 60
    ours, theirs = sound_of(tmp_path / "two.mp4"), sound_of(tmp_path / "one.mp4")
    assert np.abs(ours - theirs).max() < 1e-2
    assert read(tmp_path / "two.mp4")["context_parallel"] == "ulysses:2"
    assert "context_parallel" not in read(tmp_path / "one.mp4")
    rows = {row.kind: row for row in load(tmp_path / "two.jsonl").rows}
    assert (rows["video_self"].heads, rows["video_self"].q_len) == (1, 36)
    assert (rows["video_text"].heads, rows["video_text"].q_len) == (2, 18)
    assert rows["video_to_audio"].kv_len == 18


def started(folder: Path, cwd: Path):
    """A clip that would take for ever, once its first rank works; also the processes of its ranks."""
    process = start(
        *("render", "x", "--model", folder, *TINY[:-1], "1000", "--context-parallel", "ring:2"),
        *("--device", "cpu"),
        *("-o", "new/clip.mp4"),
        cwd=cwd,
    )
    said = ""
    while "encode prompt" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    ranks = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        environment = child.environ()
        if "LOCAL_RANK" in environment:
            ranks[int(environment["LOCAL_RANK"])] = child
    assert set(ranks) == {0, 1}
    return process, ranks


def finished(process, ranks):
    """What is left to say once the command and all of its ranks are gone."""
    out, err = process.communicate(timeout=300)
    _, alive = psutil.wait_procs(ranks.values(), timeout=60)
    assert not alive
    return out, err


def test_a_rank_that_dies_ends_the_render_in_one_line(ltx_folder, tmp_path):
    process, ranks = started(ltx_folder, tmp_path)
    ranks[1].kill()
    out, err = finished(process, ranks)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines() == ["videoattn: rank 1 was killed by SIGKILL: this machine may be out of memory"]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_all_ranks(ltx_folder, tmp_path):
    process, ranks = started(ltx_folder, tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = finished(process, ranks)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines() == ["videoattn: interrupted, nothing unfinished is left"]
    assert list(tmp_path.iterdir()) == []


def under_torchrun(arguments: list[str], folder: Path, ranks: int) -> list[int]:
    """Statuses of the command in processes that find torchrun's variables around them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.render.rank_process"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = context.Process(target=command, args=(arguments, environment, folder))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def test_started_by_torchrun_it_joins(ltx_folder, tmp_path):
    job = RenderJob(prompt="a red ball", model=str(ltx_folder), **SETTINGS)
    render(job, output=tmp_path / "one.mp4", device="cpu")
    arguments = ["render", "a red ball", "--model", str(ltx_folder), *TINY, "--crf", "0", "-o", "two.mp4"]
    arguments += ["--device", "cpu", "--context-parallel"]
    assert under_torchrun([*arguments, "ring:2"], tmp_path, 2) == [0, 0]
    assert psnr(frames_of(tmp_path / "two.mp4"), frames_of(tmp_path / "one.mp4")) > 60
    assert (tmp_path / "out0").read_text().split() == ["two.mp4"]
    said = (tmp_path / "err0").read_text()
    assert said.count("LTX-Video 0.9.x, one-stage") == said.count("denoise: ") == 1
    assert (tmp_path / "out1").read_text() == (tmp_path / "err1").read_text() == ""
    assert json.loads(json.dumps(read(tmp_path / "two.mp4")))["context_parallel"] == "ring:2"

    assert under_torchrun([*arguments, "ring:4"], tmp_path, 2) == [2, 2]
    assert "takes 4 ranks, and torchrun started 2" in (tmp_path / "err0").read_text()
