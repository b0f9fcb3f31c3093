"""What a batch shows, on a terminal and in a pipe."""

import io
import os
import re
import sys

import pytest
from rich.console import Console

from tests.batch.batch_process import CLI, on_a_terminal
from videoattn.batch.view import Lines, LiveTable, cost, duration, view_for
from videoattn.jobs import NewJob, Progress, Result, Store, Worker, WorkerStatus, outputs
from videoattn.jobs.rendering import render_job
from videoattn.render.job import RenderJob
from videoattn.render.progress import LABELS


def job(seed, **settings):
    resolved = RenderJob(
        prompt="a",
        seed=seed,
        width=64,
        height=64,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1,
        **settings,
    )
    return NewJob({"job": resolved.model_dump(mode="json")}, origin={"file": "jobs.csv", "row": seed})


def test_durations_read_naturally():
    assert [duration(seconds) for seconds in (0.2, 59, 61, 3599, 3600, 7500)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "59 min 59 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_cost_follows_pixels_steps_and_guidance():
    base = RenderJob(width=64, height=64, num_frames=9, num_inference_steps=2, guidance_scale=1)
    twice = [
        base.model_copy(update={"width": 128}),
        base.model_copy(update={"num_inference_steps": 4}),
        base.model_copy(update={"guidance_scale": 3.0}),
    ]
    assert [cost(each) / cost(base) for each in twice] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("terminal", [False, True])
def test_remaining_time_leaves_loading_out(tmp_path, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, legacy_windows=False)
    view = view_for(console)
    assert isinstance(view, LiveTable if terminal else Lines)
    with Store(tmp_path) as store, view:
        ids = store.add([job(1), job(2), job(3), job(4)])
        view.begin(store, ids, 2)
        _, token = store.claim("cpu")
        work = store.work_folder(token)
        (work / "clip.mp4").write_bytes(b"clip")
        outputs.write_manifest(work, Result({"clip": "clip.mp4"}, {"load_seconds": 100.0}))
        store.finish(token)
        store._db.execute("UPDATE jobs SET started = finished - 110 WHERE id = ?", (ids[0],))
        view.ended(store.get(ids[0]))
        assert view._totals.remaining == pytest.approx(30.0)
        _, token = store.claim("cpu")
        view.ended(store.fail(token, "no kernel [bold]fits[/bold]", retry=False))
        assert view._totals.failed == 1
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "failed 000002" in shown
    assert "(jobs.csv row 2): no kernel [bold]fits[/bold]" in shown
    if not terminal:
        assert re.search(r"\[1/4\] done 000001-\w{8}, 110\.0 s, 30 s left", text.getvalue())


@pytest.mark.parametrize(("phase", "shown"), LABELS.items())
def test_the_live_table_names_the_phase_and_counts_steps(tmp_path, phase, shown):
    text = io.StringIO()
    view = LiveTable(Console(file=text, force_terminal=True, width=120, legacy_windows=False))
    with Store(tmp_path) as store:
        ids = store.add([job(1), job(2)])
        worker = Worker(store, render_job, name="gpu 0")
        view.begin(store, ids, 0)
        view.refresh([worker])
        _, token = store.claim("gpu 0")
        worker._set(WorkerStatus("busy", job=ids[0]))
        store.set_progress(token, Progress(phase, 3, 8))
        with view:
            pass
    row = next(line for line in text.getvalue().splitlines() if "gpu 0" in line)
    assert re.search(rf"gpu 0\s+000001-\w{{8}}\s+{shown}\s.*3/8", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", row))


@pytest.mark.slow
def test_the_live_table_on_a_real_terminal(tmp_path, ltx_folder):
    settings = "width: 64, height: 64, num_frames: 9, num_inference_steps: 2, guidance_scale: 1"
    (tmp_path / "jobs.yaml").write_text(
        f"defaults: {{model: {ltx_folder}, {settings}}}\njobs: [{{prompt: a red ball, seeds: 1..4}}]\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TERM": "xterm-256color",
        "COLUMNS": "120",
    }
    result = on_a_terminal(
        [sys.executable, str(CLI), str(tmp_path / "jobs.yaml"), "-o", str(tmp_path / "out")],
        timeout=300,
        env=environment,
    )
    assert result.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr)
    assert "starting" in text
    assert "4 left" in text
    # Which of its phases are drawn depends on how fast they pass.
    assert re.search(rf"a-red-ball-seed\d-\w{{8}}\s+({'|'.join(['starting', *LABELS.values()])})", text)
    assert "4 rendered" in text
    assert result.stdout.split() == [str(tmp_path / "out" / name) for name in ("report.html", "report.csv")]
