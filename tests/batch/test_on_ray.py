"""Batches on a real cluster of two nodes: one node dies, the driver dies, an actor falls silent."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

import psutil
import pytest

from tests.batch.batch_cli import app
from tests.batch.batch_process import SMALL, clips, run, start
from tests.batch.ray_cluster import HEAD, SECOND, TwoNodes, gone, wait_until
from tests.jobs import job_renders
from videoattn.batch.on_ray import Ray
from videoattn.jobs import JobState, NewJob, Store, StoreError, StoreReader, Worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with TwoNodes() as nodes:
        yield nodes


def attempts(folder):
    # The store may not be there yet, or not whole.
    with suppress(StoreError), StoreReader(folder) as store:
        return [attempt for job in store.all() for attempt in store.attempts(job.id)]
    return []


def count(folder, ip, outcome):
    return sum(each.outcome == outcome and ip in each.worker for each in attempts(folder))


def renderers(folder):
    """The render processes that work for a folder, on any node."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "videoattn.jobs.child" in (process.info["cmdline"] or []) and not gone(process):
            with open(f"/proc/{process.pid}/fd/2") as log:
                if str(folder) in os.path.realpath(f"/proc/self/fd/{log.fileno()}"):
                    found.append(process)
    return found


def test_a_node_and_the_driver_die_and_nothing_is_lost_or_doubled(cluster, tmp_path, ltx_folder, monkeypatch):
    # As Ray sets it for an actor with one CPU: more threads add up in another order.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster.start_second()
    jobs = tmp_path / "jobs.json"
    rows = [{"prompt": ["a red ball", "a blue square"], "seeds": "1..15"}]
    jobs.write_text(json.dumps({"defaults": {"model": str(ltx_folder), **SMALL}, "jobs": rows}))
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = (jobs, "-o", out, "--engine", "ray", "--address", cluster.address, "--actors", 2)

    first = start(*command)
    wait_until(lambda: count(out, HEAD, "done") and count(out, SECOND, None), "work on both nodes")
    assert len(renderers(out)) == 2
    cluster.kill_second()
    wait_until(lambda: any((each.error or "").startswith("lost: ") for each in attempts(out)), "the loss")
    before = count(out, HEAD, "done")
    wait_until(lambda: count(out, HEAD, "done") > before, "a further clip of the node that is left")
    first.send_signal(signal.SIGINT)
    text, _ = first.communicate(timeout=120)
    assert first.returncode == 130, text
    assert f"renders on {HEAD} and writes into {out}" in text
    assert "lost ray-" in text
    # The report's paths are all there is on standard output; what Ray says is in its log.
    assert "(raylet)" not in text
    assert "Traceback" not in text
    wait_until(lambda: not renderers(out), "the end of the actors after Ctrl-C")

    second = start(*command)
    wait_until(lambda: any(each.outcome is None for each in attempts(out)), "a job of the second run")
    second.kill()
    second.communicate()
    wait_until(lambda: not renderers(out), "the end of the actors after the driver's")

    text = run(*command)
    assert "done before" in text
    run(jobs, "-o", whole)
    assert len(clips(whole)) == 30
    assert clips(out) == clips(whole)
    with Store(out) as store:
        assert not store.recovered
        assert store.counts() == dict.fromkeys(JobState, 0) | {JobState.DONE: 30}
        outcomes = [[each.outcome for each in store.attempts(job.id)] for job in store.all()]
        assert all(each.count("done") == 1 and each[-1] == "done" for each in outcomes)
        assert all(set(each) <= {"done", "interrupted"} for each in outcomes)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_silent_actor_is_fenced_off_and_its_clip_never_taken(cluster, tmp_path, monkeypatch, streamed):
    """The actor is stopped, not dead: when it goes on, its job belongs to another node."""
    cluster.start_second()
    monkeypatch.chdir(tmp_path)
    # An actor's /proc/self/cwd is another folder than the driver's: to it, the output folder is not there.
    folder = "/proc/self/cwd/out" if streamed else tmp_path / "out"
    said = []
    engine = Ray(cluster.address, actors=1, lease=6.0)
    with Store(folder) as store:
        (job,) = store.add(NewJob({"job": {}, "seed": 3, "frames": 16, "delay": 0.25}))
        (slot,) = engine.slots(store, [job], said.append)
        worker = Worker(store, job_renders.behave, name=slot.name, launch=slot.launch, min_free=0)
        stopped = []
        try:
            worker.start()
            wait_until(lambda: (at := store.progress(job)) and at.step >= 2, "progress")
            child = psutil.Process(worker.status.pid)
            stopped = [child.parent(), child]
            silent = worker.status.where
            for process in stopped:
                process.suspend()
            wait_until(lambda: len(store.attempts(job)) == 2, "an attempt elsewhere")
            for process in stopped:
                process.resume()
            wait_until(lambda: store.get(job).state is JobState.DONE, "the clip")
            wait_until(lambda: all(map(gone, stopped)), "the end of the fenced-off actor")
        finally:
            for process in stopped:
                if not gone(process):
                    process.resume()
            worker.stop()
            engine.close()
        first, *between, last = store.attempts(job)
        assert first.error == f"lost: ray-1 on {silent}: no answer for 6 s"
        assert {each.outcome for each in (first, *between)} == {"interrupted"}
        assert last.outcome == "done"
        assert {first.worker, last.worker} == {f"ray-1 on {ip}" for ip in (HEAD, SECOND)}
        assert store.get(job).failures == 0
        job_renders.write_mp4(tmp_path / "expected.mp4", 3, 16)
        assert store.path(store.get(job)).read_bytes() == (tmp_path / "expected.mp4").read_bytes()
        assert {path.name for path in store.folder.iterdir() if path.is_file()} == set(
            store.get(job).files.values()
        )
        how = "streams its clips back" if streamed else "writes into"
        assert sum(how in line for line in said) >= 2
        assert list((store.state_folder / "work").iterdir()) == []


def test_failures_are_those_of_a_local_worker_and_losses_have_a_limit(cluster, tmp_path):
    engine = Ray(cluster.address, actors=1)
    with Store(tmp_path / "out") as store:
        a, b, c, d = ids = store.add(
            [
                NewJob({"job": {}, "seed": 1, "do": "fail once"}, max_attempts=2),
                NewJob({"job": {}, "seed": 2, "do": "die"}),
                NewJob({"job": {}, "seed": 3, "do": "never"}, max_attempts=5),
                NewJob({"job": {}, "seed": 4, "do": "kill parent"}),
            ]
        )
        (slot,) = engine.slots(store, ids, print)
        worker = Worker(store, job_renders.behave, name=slot.name, launch=slot.launch, min_free=0)
        try:
            worker.start()
            wait_until(lambda: not store.open_ids(), "the end of all jobs")
        finally:
            worker.stop()
            engine.close()
        assert (store.get(a).state, store.get(a).attempt) == (JobState.DONE, 2)
        assert "killed by signal 9 (SIGKILL)" in store.get(b).error
        assert (store.get(c).error, store.get(c).attempt) == ("this can never work", 1)
        # Each time an actor was lost, no fault of the job's; three times is no chance any more.
        assert (store.get(d).attempt, store.get(d).failures) == (3, 1)
        assert "its worker process has died; 3 processes were lost" in store.get(d).error


def test_a_node_without_the_jobs_files_takes_no_job(cluster, tmp_path):
    engine = Ray(cluster.address, actors=1)
    with Store(tmp_path / "out") as store:
        (tmp_path / "picture.png").write_bytes(b"")
        (job,) = store.add(NewJob({"job": {"prompt": "a", "image": str(tmp_path / "picture.png")}}))
        (slot,) = engine.slots(store, [job], print)
        (tmp_path / "picture.png").unlink()
        worker = Worker(store, job_renders.behave, name=slot.name, launch=slot.launch, min_free=0)
        try:
            worker.start()
            wait_until(lambda: worker.status.state == "paused", "the refusal")
            assert f"does not see {tmp_path / 'picture.png'}" in worker.status.reason
            assert store.get(job).state is JobState.PENDING
        finally:
            worker.stop()
            engine.close()


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def complaint(capsys, *arguments, code):
    assert app([*map(str, arguments)], result_action="return_value") == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_what_can_not_work_is_one_line_before_anything_is_made(tmp_path, capsys, monkeypatch, closed_port):
    (tmp_path / "jobs.yaml").write_text("- {prompt: a red ball}\n")
    job_file = (tmp_path / "jobs.yaml", "-o", tmp_path / "out")
    ray = (*job_file, "--engine", "ray")
    line = complaint(capsys, *ray, "--address", f"127.0.0.1:{closed_port}", code=1)
    assert "cannot reach a Ray cluster at 127.0.0.1" in line
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    assert "cannot reach" in complaint(capsys, *ray, code=1)
    for address in ("ray://127.0.0.1:10001", "somewhere"):
        assert "give HOST:PORT" in complaint(capsys, *ray, "--address", address, code=2)
    assert "give cuda or cpu" in complaint(capsys, *ray, "--device", "cuda:1", code=2)
    assert "give 1 or more" in complaint(capsys, *ray, "--actors", 0, code=2)
    assert "belongs to --engine ray" in complaint(capsys, *job_file, "--address", "a:1", code=2)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "videoattn.batch.on_ray")
    assert "pip install 'videoattn[cluster]'" in complaint(capsys, *ray, code=2)
    assert not (tmp_path / "out").exists()
