import math
import random
import threading

import pytest

from videoattn.jobs import (
    BadFolder,
    JobState,
    NewJob,
    Progress,
    Result,
    RetryLimit,
    StaleToken,
    Store,
    StoreBusy,
    StoreError,
    StoreReader,
    UnknownJob,
    WrongState,
    job_hash,
    outputs,
)


def jobs(number, start=0):
    return [NewJob({"prompt": "a red ball", "seed": start + seed}) for seed in range(number)]


def pending(store):
    return [job.id for job in store.queue(limit=10_000)]


def complete(store, token, content=b"clip"):
    work = store.work_folder(token)
    (work / "out.mp4").write_bytes(content)
    (work / "poster.png").write_bytes(b"poster")
    files = {"clip": work / "out.mp4", "poster": work / "poster.png"}
    outputs.write_manifest(work, Result(files=files, report={"seconds": {"denoise": 1.5}}))


def claim(store):
    claimed = store.claim("cpu")
    assert claimed is not None
    return claimed


def done(store, number=1):
    store.add(jobs(number))
    for _ in range(number):
        _, token = claim(store)
        complete(store, token)
        store.finish(token)


def test_the_hash_ignores_key_order_and_refuses_nan():
    assert job_hash({"a": 1, "b": [1, 2]}) == job_hash({"b": [1, 2], "a": 1})
    assert job_hash({"a": 1}) != job_hash({"a": 2})
    with pytest.raises(ValueError, match="JSON"):
        job_hash({"a": math.nan})


def test_a_finished_job_has_its_files_report_and_attempt(store):
    store.add(NewJob({"seed": 1}, origin={"file": "jobs.csv", "row": 3}))
    job, token = claim(store)
    assert (job.state, job.attempt, job.worker) == (JobState.RUNNING, 1, "cpu")
    complete(store, token)
    job = store.finish(token)
    assert job.state is JobState.DONE
    assert job.origin == {"file": "jobs.csv", "row": 3}
    assert store.path(job).read_bytes() == b"clip"
    assert store.path(job, "poster").name == f"{job.name}.poster.png"
    assert store.path(job, "timing") is None
    assert store.report(job.id) == {"seconds": {"denoise": 1.5}}
    (attempt,) = store.attempts(job.id)
    assert (attempt.attempt, attempt.outcome, attempt.worker) == (1, "done", "cpu")
    assert list((store.state_folder / "work").iterdir()) == []


def test_nothing_is_published_before_the_attempt_is_complete(store):
    store.add(jobs(1))
    job, token = claim(store)
    work = store.work_folder(token)
    (work / "out.mp4").write_bytes(b"half")
    with pytest.raises(StoreError, match="not finished"):
        store.finish(token)
    assert store.get(job.id).state is JobState.RUNNING
    assert [path.name for path in store.folder.iterdir()] == [".videoattn"]


def test_generated_names_are_unique_and_given_ones_are_checked(store):
    first = store.add([NewJob({"seed": 1}), NewJob({"seed": 1})])
    names = {store.get(job).name for job in first}
    assert len(names) == 2
    store.add(NewJob({"seed": 2}, name="shot one"))
    with pytest.raises(StoreError, match="'shot one' is taken"):
        store.add([NewJob({"seed": 9}), NewJob({"seed": 3}, name="shot one")])
    assert store.counts()[JobState.PENDING] == 3
    for bad in ("../up", "a/b", ".hidden", "", "x" * 181, "a.poster", "nul\0", "end "):
        with pytest.raises(StoreError, match="cannot name an output"):
            store.add(NewJob({"seed": 4}, name=bad or " "))


def test_ids_are_not_used_again(store):
    done(store, 2)
    store.delete(2)
    assert store.add(jobs(1)) == [3]


def test_moves(store):
    a, b, c, d = store.add(jobs(4))
    store.move(d, before=b)
    assert pending(store) == [a, d, b, c]
    store.move(a, after=c)
    assert pending(store) == [d, b, c, a]
    store.move(d)
    assert pending(store) == [b, c, a, d]
    store.move_first(a)
    assert pending(store) == [a, b, c, d]
    store.move(b, before=b)
    store.reorder([d, b, 99, d])
    assert pending(store) == [a, d, c, b]
    claim(store)
    with pytest.raises(WrongState, match="only pending"):
        store.move(a, before=d)
    with pytest.raises(UnknownJob):
        store.move(99)


def test_moving_into_one_gap_for_ever_keeps_the_order(store):
    ids = store.add(jobs(40))
    model = list(ids)
    rng = random.Random(7)
    for _ in range(300):
        job, other = rng.sample(ids[:6], 2)
        store.move(job, before=other)
        model.remove(job)
        model.insert(model.index(other), job)
    assert pending(store) == model


def test_a_retried_job_that_shares_a_position_can_be_moved_around(store):
    a, b, c = store.add(jobs(3))
    _, token = claim(store)
    store.reorder([c, b])
    store.move(b, before=c)
    store._db.execute(
        "UPDATE jobs SET position = (SELECT position FROM jobs WHERE id = ?) WHERE id = ?", (b, a)
    )
    store.interrupt(token, "stopped", requeue=True)
    assert pending(store) == [a, b, c]
    store.move(c, before=b)
    assert pending(store) == [a, c, b]


def test_jobs_are_taken_in_order_and_once(store):
    ids = store.add(jobs(60))
    store.reorder(ids[::-1])
    taken, lock = [], threading.Lock()

    def take():
        while (claimed := store.claim("cpu")) is not None:
            with lock:
                taken.append(claimed[0].id)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == ids


def test_readers_never_see_a_queue_that_lacks_or_doubles_a_job(store):
    ids = store.add(jobs(40))
    wrong, stop = [], threading.Event()

    def read():
        with StoreReader(store.folder) as reader:
            while not stop.is_set():
                seen = [job.id for job in reader.queue(limit=100)]
                if sorted(seen) != ids:
                    wrong.append(seen)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    rng = random.Random(3)
    for step in range(60):
        waiting = [job.id for job in store.queue(limit=100) if job.state is JobState.PENDING]
        rng.shuffle(waiting)
        store.reorder(waiting)
        store.move(waiting[0], after=waiting[-1])
        if step % 3 == 0:
            _, token = claim(store)
            store.interrupt(token, "again", requeue=True)
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_cancel(store):
    a, b, c = store.add(jobs(3))
    assert store.cancel(b) is JobState.CANCELLED
    heard = []
    undo = store.on_cancel(heard.append)
    _, token = claim(store)
    assert store.cancel(a) is JobState.RUNNING
    assert heard == [a]
    undo()
    assert store.get(a).cancel_requested
    store.cancelled(token)
    assert store.get(a).state is JobState.CANCELLED
    assert store.attempts(a)[0].outcome == "cancelled"
    with pytest.raises(WrongState, match="has ended"):
        store.cancel(a)
    assert store.cancel_pending() == 1
    assert store.get(c).state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["finish", "fail", "interrupt"])
def test_a_cancelled_job_never_ends_otherwise(store, how):
    store.add(NewJob({"seed": 1}, max_attempts=5))
    job, token = claim(store)
    complete(store, token)
    store.cancel(job.id)
    if how == "finish":
        store.finish(token)
    elif how == "fail":
        store.fail(token, "trouble")
    else:
        store.interrupt(token, "stopped", requeue=True)
    assert store.get(job.id).state is JobState.CANCELLED
    assert [path.name for path in store.folder.iterdir()] == [".videoattn"]


def test_failed_attempts_are_repeated_up_to_the_limit(store):
    (job,) = store.add(NewJob({"seed": 1}, max_attempts=3))
    for attempt in (1, 2, 3):
        claimed, token = claim(store)
        assert (claimed.id, claimed.attempt) == (job, attempt)
        ended = store.fail(token, f"trouble {attempt}")
    assert (ended.state, ended.error, ended.failures) == (JobState.FAILED, "trouble 3", 3)
    assert store.claim("cpu") is None
    assert [one.error for one in store.attempts(job)] == ["trouble 1", "trouble 2", "trouble 3"]
    store.retry(job)
    _, token = claim(store)
    assert token.attempt == 4
    assert store.fail(token, "trouble 4").state is JobState.FAILED


def test_an_interruption_is_no_failure(store):
    (job,) = store.add(jobs(1))
    for _ in range(3):
        _, token = claim(store)
        assert store.interrupt(token, "node lost", requeue=True).state is JobState.PENDING
    assert store.get(job).failures == 0
    _, token = claim(store)
    assert store.interrupt(token, "node lost").state is JobState.INTERRUPTED
    assert store.retry_all() == 1


def test_retry_limit_and_states(tmp_path):
    with Store(tmp_path, attempt_limit=2) as store:
        a, b = store.add(jobs(2))
        _, token = claim(store)
        store.fail(token, "no")
        store.retry(a, first=True)
        assert pending(store) == [a, b]
        _, token = claim(store)
        store.fail(token, "no")
        with pytest.raises(RetryLimit, match="tried 2 times"):
            store.retry(a)
        with pytest.raises(WrongState, match="only failed"):
            store.retry(b)
        with pytest.raises(WrongState):
            store.retry_all(JobState.DONE)


def test_a_token_that_lost_its_job_can_write_nothing(store):
    (job,) = store.add(jobs(1))
    _, old = claim(store)
    complete(store, old, b"zombie")
    work = store._work(old.fence)
    kept = {path.name: path.read_bytes() for path in work.iterdir()}
    store.interrupt(old, "taken away", requeue=True)
    _, new = claim(store)
    assert new.fence > old.fence
    work.mkdir()
    for name, content in kept.items():
        (work / name).write_bytes(content)
    for write in (
        store.finish,
        store.cancelled,
        lambda t: store.fail(t, "x"),
        lambda t: store.interrupt(t, "x"),
    ):
        with pytest.raises(StaleToken):
            write(old)
    complete(store, new, b"right")
    assert store.path(store.finish(new)).read_bytes() == b"right"
    with pytest.raises(StaleToken):
        store.cancelled(new)
    assert store.get(job).attempt == 2


def test_fences_grow_over_reopenings(tmp_path):
    fences, owners = [], []
    for _ in range(3):
        with Store(tmp_path) as store:
            store.add(jobs(1))
            store.retry_all()
            _, token = claim(store)
            fences.append(token.fence)
            owners.append(token.owner)
    assert fences == sorted(set(fences))
    assert owners == [1, 2, 3]


def test_one_owner_also_within_a_process(store):
    with pytest.raises(StoreBusy, match=r"in use by process \d+ on .+ since"):
        Store(store.folder)
    with StoreReader(store.folder) as reader:
        assert reader.counts()[JobState.PENDING] == 0


def test_delete_and_clear_remove_files_and_rows(store):
    done(store, 3)
    store.add(jobs(1, start=50))
    with pytest.raises(WrongState, match="cancel it before"):
        store.delete([1, 4])
    assert store.get(1).state is JobState.DONE
    clip = store.path(store.get(1))
    store.delete(1)
    assert not clip.exists()
    with pytest.raises(UnknownJob):
        store.get(1)
    with pytest.raises(WrongState):
        store.clear(JobState.PENDING)
    assert store.clear([JobState.DONE, JobState.FAILED]) == 2
    assert [path.name for path in store.folder.iterdir()] == [".videoattn"]


def test_pages_of_ended_jobs(store):
    done(store, 7)
    store.add(jobs(2, start=20))
    store.cancel_pending()
    assert [job.id for job in store.ended(JobState.DONE, limit=3)] == [7, 6, 5]
    first = store.ended(JobState.DONE, limit=3)
    done(store, 1)
    assert [job.id for job in store.ended(JobState.DONE, limit=3, before=first[-1])] == [4, 3, 2]
    assert [job.id for job in store.ended(JobState.DONE, limit=2, offset=6)] == [2, 1]
    assert {job.id for job in store.ended(limit=100)} == set(range(1, 11))
    assert store.counts() == dict.fromkeys(JobState, 0) | {JobState.DONE: 8, JobState.CANCELLED: 2}


def test_queue_pages_run_over_from_running_to_pending(store):
    ids = store.add(jobs(6))
    claim(store), claim(store)
    assert [job.id for job in store.queue(limit=3)] == ids[:3]
    assert [job.id for job in store.queue(limit=3, offset=1)] == ids[1:4]
    assert [job.id for job in store.queue(limit=3, offset=3)] == ids[3:6]


def test_progress_is_live_and_writes_nothing(store):
    store.add(jobs(1))
    job, token = claim(store)
    before = store._db.total_changes
    seen = store.revision
    for step in range(100):
        store.set_progress(token, Progress("denoise", step, 100))
    assert store.progress(job.id).step == 99
    assert store.revision == seen + 100
    assert store._db.total_changes == before
    store.cancelled(token)
    assert store.progress(job.id) is None


def test_waiting_wakes_on_a_change(store):
    seen = store.revision
    assert store.wait(seen, 0.01) == seen
    threading.Timer(0.05, lambda: store.add(jobs(1))).start()
    assert store.wait(seen, 10) != seen


def test_lookups_by_hash_and_name(store):
    store.add([NewJob({"seed": 1}), NewJob({"seed": 2}, name="two"), NewJob({"seed": 1})])
    assert [job.id for job in store.by_hash(job_hash({"seed": 1}))] == [1, 3]
    assert store.by_name("two").id == 2
    assert store.by_name("three") is None
    assert [job.id for job in store.all(JobState.PENDING)] == [1, 2, 3]


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="holds no job store"):
        StoreReader(tmp_path)
    (tmp_path / ".videoattn").mkdir()
    (tmp_path / ".videoattn" / "jobs.sqlite3").write_text("this is no database, it is a text file\n" * 50)
    with pytest.raises(StoreError, match="is not a job store"):
        Store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFolder, match=r"cannot write .*/file: not a directory$"):
        Store(tmp_path / "file")


def test_a_store_of_another_format_is_refused(tmp_path):
    with Store(tmp_path) as store:
        store._db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="has format 99"):
        Store(tmp_path)


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.add(jobs(1))
    with pytest.raises(StoreError, match="is closed"):
        store.counts()
    Store(tmp_path).close()


def test_a_replaced_job_keeps_its_clip_until_the_new_one_is_there(store):
    store.add(NewJob({"seed": 1}, name="shot"))
    job, token = claim(store)
    complete(store, token, b"old")
    store.finish(token)
    poster = store.folder / "shot.poster.png"
    store.replace(job.id, NewJob({"seed": 2}, max_attempts=2))
    waiting = store.get(job.id)
    assert (waiting.state, waiting.payload, waiting.name) == (JobState.PENDING, {"seed": 2}, "shot")
    assert (store.folder / "shot.mp4").read_bytes() == b"old"
    _, token = claim(store)
    with pytest.raises(WrongState, match="is running"):
        store.replace(job.id, NewJob({"seed": 3}))
    work = store.work_folder(token)
    (work / "new.mp4").write_bytes(b"new")
    outputs.write_manifest(work, Result({"clip": "new.mp4"}))
    assert poster.exists()
    assert store.finish(token).files == {"clip": "shot.mp4"}
    assert (store.folder / "shot.mp4").read_bytes() == b"new"
    assert not poster.exists()
    assert store.recovered.unclaimed == []


def test_tries_are_those_of_the_present_work(store):
    (job,) = store.add(NewJob({"seed": 1}, max_attempts=3))
    _, token = claim(store)
    assert store.fail(token, "trouble").tries == 1
    _, token = claim(store)
    assert store.interrupt(token, "stopped", requeue=True).tries == 1
    _, token = claim(store)
    complete(store, token)
    assert (store.finish(token).tries, store.get(job).attempt) == (2, 3)
    store.replace(job, NewJob({"seed": 2}))
    assert store.get(job).tries == 0
    _, token = claim(store)
    complete(store, token)
    assert (store.finish(token).tries, store.get(job).attempt) == (1, 4)


def test_a_clip_that_has_disappeared_is_made_anew_without_the_failures_of_the_first(tmp_path):
    with Store(tmp_path) as store:
        store.add(NewJob({"seed": 1}, name="shot", max_attempts=2))
        _, token = claim(store)
        store.fail(token, "trouble")
        _, token = claim(store)
        complete(store, token)
        assert store.finish(token).tries == 2
    (tmp_path / "shot.mp4").unlink()
    with Store(tmp_path) as store:
        store.retry(1)
        _, token = claim(store)
        complete(store, token)
        assert store.finish(token).tries == 1
