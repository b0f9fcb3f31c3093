"""Death at every single step of the store's work, and files that do not match their rows."""

import os
import random
import shutil
import signal
import sqlite3
import traceback

import pytest

from videoattn.jobs import JobState, NewJob, Result, Store, StoreError, StoreReader, outputs


def render(store, token, text):
    work = store.work_folder(token)
    (work / "clip.mp4").write_text(text)
    (work / "poster.png").write_text(text)
    outputs.write_manifest(work, Result(files={"clip": work / "clip.mp4", "poster": work / "poster.png"}))


def work_off(store):
    while (claimed := store.claim("cpu")) is not None:
        job, token = claimed
        render(store, token, f"seed {job.payload['seed']}")
        store.finish(token)


def scenario(folder):
    """Everything an owner does, each job named by its fate."""
    with Store(folder) as store:
        store.retry_all()
        if store.counts()[JobState.PENDING] == 0 and store.by_name("kept") is None:
            store.add(
                [
                    NewJob({"seed": 1}, name="kept"),
                    NewJob({"seed": 2}, name="deleted"),
                    NewJob({"seed": 3}, name="failing", max_attempts=3),
                ]
            )
        while (claimed := store.claim("cpu")) is not None:
            job, token = claimed
            if job.name == "failing" and job.failures == 0:
                store.fail(token, "trouble")
                continue
            render(store, token, f"seed {job.payload['seed']}")
            store.finish(token)
        if (job := store.by_name("deleted")) is not None:
            store.delete(job.id)


def die_after(steps):
    """Kill this process before the given step: a rename, a removal, or the end of a transaction."""
    left = steps

    def step(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(call):
        def wrapper(*values, **options):
            step()
            return call(*values, **options)

        return wrapper

    os.replace, os.unlink = counted(os.replace), counted(os.unlink)
    shutil.rmtree = counted(shutil.rmtree)
    connect = sqlite3.connect

    def traced(*values, **options):
        db = connect(*values, **options)
        db.set_trace_callback(lambda statement: step() if statement.startswith("COMMIT") else None)
        return db

    sqlite3.connect = traced


def run_and_die(folder, steps):
    """Run the scenario in a process that is killed at a step; returns whether it lived to the end."""
    pid = os.fork()
    if pid == 0:
        try:
            die_after(steps)
            scenario(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def check_finished_rows(folder):
    """What any reader may rely on at any moment once the store exists."""
    try:
        reader = StoreReader(folder)
        finished = list(reader.all(JobState.DONE))
    except StoreError:
        assert not (folder / ".videoattn" / "work").exists() or not any(folder.glob("*.mp4"))
        return
    for job in finished:
        for name in job.files.values():
            assert (folder / name).read_text() == f"seed {job.payload['seed']}"
    reader.close()


def test_death_at_every_step_loses_and_doubles_nothing(tmp_path):
    steps = 0
    while True:
        steps += 1
        folder = tmp_path / str(steps)
        lived = run_and_die(folder, steps)
        check_finished_rows(folder)
        scenario(folder)
        with Store(folder) as store:
            assert not store.recovered
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
            assert names == ["failing.mp4", "failing.poster.png", "kept.mp4", "kept.poster.png"]
            assert {job.name: job.state for job in store.all()} == {
                "kept": JobState.DONE,
                "failing": JobState.DONE,
            }
            assert (folder / "kept.mp4").read_text() == "seed 1"
            for job in store.all():
                attempts = store.attempts(job.id)
                assert [one.attempt for one in attempts] == list(range(1, job.attempt + 1))
                assert [one.outcome for one in attempts].count("done") == 1
                assert all(one.finished is not None for one in attempts)
            assert list((store.state_folder / "work").iterdir()) == []
        if lived:
            break
    assert steps > 30, steps


@pytest.mark.slow
def test_repeated_deaths_at_random_steps(tmp_path):
    rng = random.Random(20)
    for _ in range(20):
        run_and_die(tmp_path, rng.randrange(1, 12))
        check_finished_rows(tmp_path)
    scenario(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "failing.mp4",
        "failing.poster.png",
        "kept.mp4",
        "kept.poster.png",
    ]


@pytest.fixture
def two_done(tmp_path):
    with Store(tmp_path) as store:
        store.add([NewJob({"seed": 1}, name="one"), NewJob({"seed": 2}, name="two")])
        work_off(store)
    return tmp_path


def test_running_jobs_are_interrupted_cancelled_or_completed(tmp_path):
    store = Store(tmp_path)
    a, b, c, d = store.add([NewJob({"seed": seed}) for seed in range(4)])
    tokens = [store.claim("cpu")[1] for _ in range(3)]
    store.cancel(b)
    render(store, tokens[2], "seed 2")
    store._db.close()
    store._lock.release()
    with Store(tmp_path) as store:
        assert (store.recovered.interrupted, store.recovered.cancelled) == ([a], [b])
        assert store.recovered.completed == [c]
        assert "stopped before it was finished" in store.get(a).error
        assert store.path(store.get(c)).read_text() == "seed 2"
        assert store.get(d).state is JobState.PENDING
        assert store.retry_all() == 1
        assert [job.id for job in store.queue()] == [a, d]


def test_a_finished_job_whose_clip_is_gone_fails_and_can_be_retried(two_done):
    (two_done / "one.mp4").unlink()
    (two_done / "two.poster.png").unlink()
    with Store(two_done) as store:
        (job,) = store.recovered.missing
        assert "one.mp4 is missing" in store.get(job).error
        assert store.by_name("two").state is JobState.DONE
        store.retry(job)
        work_off(store)
        assert (two_done / "one.mp4").read_text() == "seed 1"


def identify(path):
    text = path.read_text()
    return NewJob({"seed": int(text.removeprefix("seed "))}) if text.startswith("seed ") else None


def test_clips_without_rows_are_adopted_or_listed_never_removed(two_done):
    shutil.rmtree(two_done / ".videoattn")
    (two_done / "holiday.mp4").write_text("not ours")
    with Store(two_done) as store:
        assert store.recovered.unclaimed == ["holiday.mp4", "one.mp4", "two.mp4"]
    with Store(two_done, identify=identify) as store:
        assert len(store.recovered.adopted) == 2
        assert store.recovered.unclaimed == ["holiday.mp4"]
        assert store.by_name("two").payload == {"seed": 2}
        assert store.by_name("two").state is JobState.DONE
    with Store(two_done, identify=identify) as store:
        assert store.recovered.adopted == []


def test_a_clip_that_comes_back_completes_its_job(two_done):
    (two_done / "one.mp4").rename(two_done / "away")
    with Store(two_done) as store:
        assert store.by_name("one").state is JobState.FAILED
    (two_done / "away").rename(two_done / "one.mp4")
    (two_done / "two.mp4").rename(two_done / "away")
    with Store(two_done, identify=identify) as store:
        assert store.by_name("one").state is JobState.DONE
        assert store.by_name("two").state is JobState.FAILED
    (two_done / "two.mp4").write_text("seed 99")
    with Store(two_done, identify=identify) as store:
        assert store.by_name("two").state is JobState.FAILED
        assert store.recovered.unclaimed == ["two.mp4"]
