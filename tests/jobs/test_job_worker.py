import os
import time

import av
import job_renders
import psutil
import pytest

from videoattn.jobs import JobState, NewJob, Store, StoreError, Token, Worker


@pytest.fixture
def start(store):
    workers = []

    def begin(**options):
        worker = Worker(store, job_renders.behave, min_free=0, **options)
        workers.append(worker)
        worker.start()
        return worker

    yield begin
    for worker in workers:
        worker.stop(grace=2)


def ended(store, job):
    return store.get(job).state not in (JobState.PENDING, JobState.RUNNING)


def test_jobs_become_clips_and_failures_stay_their_own(store, start, wait_for):
    a, b, c, d = store.add(
        [
            NewJob({"seed": 1, "do": "chatter"}),
            NewJob({"seed": 2, "do": "fail"}),
            NewJob({"seed": 3, "do": "fail once"}, max_attempts=2),
            NewJob({"seed": 4, "do": "never"}, max_attempts=5),
        ]
    )
    worker = start()
    wait_for(lambda: all(ended(store, job) for job in (a, b, c, d)))
    assert store.get(a).state is JobState.DONE
    with av.open(str(store.path(store.get(a)))) as clip:
        assert len(list(clip.decode(video=0))) == 4
    assert store.path(store.get(a), "settings").read_text() == "1\n"
    assert store.report(a)["attempt"] == 1
    failed = store.get(b)
    assert (failed.state, failed.error) == (JobState.FAILED, "RuntimeError: the model exploded")
    assert (store.get(c).state, store.get(c).attempt, store.get(c).error) == (JobState.DONE, 2, None)
    assert (store.get(d).state, store.get(d).attempt) == (JobState.FAILED, 1)
    assert store.get(d).error == "this can never work"
    wait_for(lambda: worker.status.state == "idle")
    log = (store.state_folder / "worker-cpu.log").read_text()
    assert "this must not be taken for a message" in log
    assert "the model\nexploded" in log
    assert worker.status.restarts == 0


def test_a_worker_that_dies_is_replaced_and_its_job_fails(store, start, wait_for):
    a, b, c, d = store.add(
        [
            NewJob({"seed": 1, "do": "die"}),
            NewJob({"seed": 2, "do": "exit"}),
            NewJob({"seed": 3, "do": "die"}, max_attempts=2),
            NewJob({"seed": 4}),
        ]
    )
    worker = start()
    wait_for(lambda: ended(store, d), 120)
    assert "killed by signal 9 (SIGKILL)" in store.get(a).error
    assert "exit code 3" in store.get(b).error
    assert (store.get(c).state, store.get(c).attempt) == (JobState.FAILED, 2)
    assert store.get(d).state is JobState.DONE
    assert worker.status.restarts == 4


def test_a_result_must_name_files_of_its_own_work_folder(store, start, wait_for):
    a, b = store.add([NewJob({"do": "nothing"}), NewJob({"do": "elsewhere"})])
    start()
    wait_for(lambda: ended(store, b))
    for job in (a, b):
        assert "not a file in the work folder" in store.get(job).error
    assert [path.name for path in store.folder.iterdir()] == [".videoattn"]


def test_cancel_running_stops_within_a_step(store, start, wait_for):
    a, b = store.add([NewJob({"seed": 1, "frames": 1000, "delay": 0.5}), NewJob({"seed": 2})])
    worker = start()
    wait_for(lambda: (p := store.progress(a)) is not None and p.step >= 1)
    steps = [store.progress(a).step]
    store.cancel(a)
    wait_for(lambda: (p := store.progress(a)) is None or steps.append(p.step))
    # The step in hand may end, and one more while the word is on its way.
    assert max(steps) - steps[0] <= 2
    assert store.get(a).state is JobState.CANCELLED
    assert worker.status.restarts == 0
    wait_for(lambda: ended(store, b))
    assert store.get(b).state is JobState.DONE
    names = {path.name for path in store.folder.iterdir() if path.is_file()}
    assert names == set(store.get(b).files.values())


def test_cancelling_gets_through_code_that_survives_errors(store, start, wait_for):
    (job,) = store.add(NewJob({"do": "swallow", "seed": 1}))
    start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.step >= 3)
    store.cancel(job)
    wait_for(lambda: ended(store, job))
    assert store.get(job).state is JobState.CANCELLED


def test_a_job_that_does_not_stop_is_killed_with_its_worker(store, start, wait_for):
    hang, after = store.add([NewJob({"do": "hang"}), NewJob({"seed": 2})])
    worker = start(cancel_grace=0.5)
    wait_for(lambda: (p := store.progress(hang)) is not None and p.phase == "denoise")
    store.cancel(hang)
    wait_for(lambda: ended(store, after))
    assert store.get(hang).state is JobState.CANCELLED
    assert store.get(after).state is JobState.DONE
    assert worker.status.restarts == 1


def test_progress_carries_phase_step_and_remaining_seconds(store, start, wait_for):
    (job,) = store.add(NewJob({"seed": 1, "frames": 1000, "delay": 0.05}))
    started = time.monotonic()
    start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.step >= 10)
    progress = store.progress(job)
    left = 1000 - progress.step
    assert (progress.phase, progress.of) == ("denoise", 1000)
    assert 0.04 * left < progress.remaining < (time.monotonic() - started) / progress.step * left
    writes = store._db.total_changes
    wait_for(lambda: store.progress(job).step >= 20)
    assert store._db.total_changes == writes


def test_a_model_stays_loaded_until_another_is_needed(store, start, wait_for):
    order = ["a", "a", "b", "b", "a"]
    ids = store.add([NewJob({"do": "model", "model": model, "seed": n}) for n, model in enumerate(order)])
    start()
    wait_for(lambda: ended(store, ids[-1]))
    reports = [store.report(job) for job in ids]
    loads = [report["loaded"] for report in reports]
    assert loads[0] == loads[1] != loads[2] == loads[3] != loads[4] != loads[0]
    assert len({report["pid"] for report in reports}) == 1


def test_stop_interrupts_the_running_job_or_queues_it_again(store, wait_for):
    (job,) = store.add(NewJob({"seed": 1, "frames": 1000, "delay": 0.05}))
    for requeue, state in ((True, JobState.PENDING), (False, JobState.INTERRUPTED)):
        worker = Worker(store, job_renders.behave, min_free=0)
        worker.start()
        wait_for(lambda: (p := store.progress(job)) is not None and p.step >= 2)
        pid = worker.status.pid
        worker.stop(requeue=requeue, grace=5)
        assert store.get(job).state is state
        assert not psutil.pid_exists(pid)
        assert worker.status.state == "stopped"


def test_stop_kills_what_does_not_stop(store, wait_for):
    (job,) = store.add(NewJob({"do": "hang"}))
    worker = Worker(store, job_renders.behave, min_free=0)
    worker.start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.phase == "denoise")
    began = time.monotonic()
    worker.stop(grace=0.5)
    # The render sleeps for ten minutes.
    assert time.monotonic() - began < 60
    assert store.get(job).state is JobState.INTERRUPTED


def test_pause_and_resume(store, start, wait_for):
    worker = start()
    worker.pause()
    (job,) = store.add(NewJob({"seed": 1}))
    wait_for(lambda: worker.status.state == "paused")
    assert worker.status.reason == "paused by the user"
    assert store.get(job).state is JobState.PENDING
    worker.resume()
    wait_for(lambda: ended(store, job))


def test_a_job_taken_away_from_its_worker_is_not_written_by_it(store, start, wait_for, tmp_path):
    (job,) = store.add(NewJob({"seed": 1, "gate": str(tmp_path / "gate")}))
    start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.phase == "denoise")
    fence = store.attempts(job)[0].fence
    store.interrupt(Token(job, 1, fence, store.owner), "taken away")
    (tmp_path / "gate").touch()
    (other,) = store.add(NewJob({"seed": 2}))
    wait_for(lambda: ended(store, other))
    assert store.get(job).state is JobState.INTERRUPTED
    assert store.get(job).files == {}
    names = {path.name for path in store.folder.iterdir() if path.is_file()}
    assert names == set(store.get(other).files.values())


def test_a_render_function_that_cannot_be_imported(store, wait_for, tmp_path):
    with pytest.raises(StoreError, match="cannot import"):
        Worker(store, lambda job, context: None)
    worker = Worker(store, "no_such_module:render", min_free=0)
    worker.start()
    wait_for(lambda: worker.status.state == "paused")
    assert "cannot load no_such_module:render: ModuleNotFoundError" in worker.status.reason
    worker.stop()


def test_too_little_room_holds_jobs_back(store, start, wait_for):
    (job,) = store.add(NewJob({"seed": 1}))
    worker = Worker(store, job_renders.behave, min_free=1 << 60)
    worker.start()
    wait_for(lambda: worker.status.state == "paused")
    assert "MiB are free" in worker.status.reason
    assert store.get(job).state is JobState.PENDING
    worker.stop()


def test_an_owner_that_was_replaced_stops_and_writes_nothing(tmp_path, wait_for):
    store = Store(tmp_path / "out")
    (job,) = store.add(NewJob({"seed": 1, "gate": str(tmp_path / "gate")}))
    worker = Worker(store, job_renders.behave, min_free=0)
    worker.start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.phase == "denoise")
    # A lock that does not hold (removed by hand, a file system without locks) must not suffice to do harm.
    (store.state_folder / "owner.lock").unlink()
    with Store(tmp_path / "out") as heir:
        assert heir.get(job).state is JobState.INTERRUPTED
        (tmp_path / "gate").touch()
        wait_for(lambda: worker.status.state == "stopped")
        assert "taken over" in worker.status.reason
        assert heir.get(job).state is JobState.INTERRUPTED
        assert [path.name for path in heir.folder.iterdir()] == [".videoattn"]
    worker.stop()
    store.close()


def test_two_workers_share_the_queue(store, start, wait_for, tmp_path):
    ids = store.add([NewJob({"seed": seed, "gate": str(tmp_path / "gate")}) for seed in range(12)])
    start(name="one"), start(name="two")
    wait_for(lambda: store.counts()[JobState.RUNNING] == 2)
    (tmp_path / "gate").touch()
    wait_for(lambda: all(ended(store, job) for job in ids))
    assert {store.get(job).state for job in ids} == {JobState.DONE}
    assert {store.get(job).worker for job in ids} == {"one", "two"}
    assert all(store.get(job).attempt == 1 for job in ids)


def test_the_child_ignores_the_keyboard(store, start, wait_for):
    (job,) = store.add(NewJob({"seed": 1, "frames": 20, "delay": 0.03}))
    worker = start()
    wait_for(lambda: (p := store.progress(job)) is not None and p.step >= 2)
    assert os.getpgid(worker.status.pid) != os.getpgid(0)
    wait_for(lambda: ended(store, job))
    assert store.get(job).state is JobState.DONE
