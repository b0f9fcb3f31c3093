"""What a run makes of a folder that has seen other runs: the missing and the changed, in the plan's order."""

import json

import pytest

from videoattn.batch.plan import plan
from videoattn.batch.run import Options, synchronise
from videoattn.jobs import JobState, NewJob, Result, Store, outputs


@pytest.fixture
def jobs(tmp_path, ltx_folder):
    def make(*rows):
        path = tmp_path / "jobs.json"
        defaults = {"model": str(ltx_folder), "width": 64, "height": 64, "num_frames": 9}
        path.write_text(json.dumps({"defaults": defaults, "jobs": list(rows)}))
        return plan(path)

    return make


def finish_next(store, *, timing=False):
    job, token = store.claim("cpu")
    work = store.work_folder(token)
    (work / "clip.mp4").write_bytes(b"clip")
    files = {"clip": "clip.mp4"}
    if timing:
        (work / "timing.jsonl").write_bytes(b"log")
        files["timing"] = "timing.jsonl"
    outputs.write_manifest(work, Result(files))
    store.finish(token)
    return job.id


def names(store, ids):
    return [store.get(job).name for job in ids]


def queued(store):
    return [job.name for job in store.queue() if job.state is JobState.PENDING]


def test_a_new_folder_gets_everything_in_the_plans_order(tmp_path, jobs):
    planned = jobs(
        {"prompt": "a", "name": "x"}, {"prompt": "b", "name": "y", "width": 96}, {"prompt": "c", "name": "z"}
    )
    with Store(tmp_path / "out") as store:
        ids, todo = synchronise(store, planned, Options(retries=2), print)
        assert names(store, ids) == names(store, todo) == queued(store) == ["x", "z", "y"]
        assert store.get(ids[0]).max_attempts == 3


def test_only_what_is_missing_changed_or_failed_is_done_again(tmp_path, jobs):
    rows = [{"prompt": name, "name": name} for name in "abcdef"]
    with Store(tmp_path / "out") as store:
        synchronise(store, jobs(*rows), Options(), print)
        a, b = finish_next(store), finish_next(store)
        _, token = store.claim("cpu")
        store.fail(token, "no", retry=False)
        _, token = store.claim("cpu")
        store.interrupt(token, "stopped")
        rows[1]["prompt"] = "changed"
        new = {"prompt": "g", "name": "g"}
        ids, todo = synchronise(store, jobs(new, *rows[::-1]), Options(), print)
        assert names(store, ids) == ["g", "f", "e", "d", "c", "b", "a"]
        assert names(store, todo) == queued(store) == ["g", "f", "e", "d", "c", "b"]
        assert store.get(a).state is JobState.DONE
        assert store.get(b).payload["job"]["prompt"] == "changed"
        assert (tmp_path / "out" / "b.mp4").exists()


def test_no_resume_renders_all_again(tmp_path, jobs):
    planned = jobs({"prompt": "a", "name": "a"}, {"prompt": "b", "name": "b"})
    with Store(tmp_path / "out") as store:
        synchronise(store, planned, Options(), print)
        finish_next(store)
        assert len(synchronise(store, planned, Options(), print)[1]) == 1
        assert len(synchronise(store, planned, Options(resume=False), print)[1]) == 2


def test_clips_that_lack_a_measurement_are_counted_and_rendered_again_on_demand(tmp_path, jobs):
    planned = jobs(*({"prompt": name, "name": name} for name in "abcd"))

    def said(**options):
        lines = []
        _, todo = synchronise(store, planned, Options(**options), lines.append)
        return len(todo), lines

    with Store(tmp_path / "out") as store:
        said(timing=True, compare=("sdpa",))
        finish_next(store, timing=True)
        said()
        finish_next(store)
        finish_next(store)
        again = "--no-resume renders them again"
        assert said() == (1, [])
        assert said(timing=True) == (1, [f"2 clips that were done before have no timing log: {again}"])
        assert said(compare=("sdpa",)) == (
            1,
            [f"2 clips that were done before have no comparison with sdpa: {again}"],
        )
        assert said(timing=True, compare=("flash4", "sdpa")) == (
            1,
            [
                f"2 clips that were done before have no timing log: {again}",
                f"3 clips that were done before have no comparison with flash4, sdpa: {again}",
            ],
        )
        assert said(timing=True, compare=("sdpa",), resume=False) == (4, [])
        finish_next(store)
        planned = planned[:1]
        todo, lines = said(timing=True)
        assert todo == 0
        assert lines[0] == "1 clip that was done before has no timing log: --no-resume renders it again"


def test_jobs_of_another_file_are_set_aside_and_taken_up_by_theirs(tmp_path, jobs):
    with Store(tmp_path / "out") as store:
        store.add(NewJob({"job": {}}, name="stranger"))
        mine = jobs({"prompt": "a", "name": "a"}, {"prompt": "b", "name": "b"})
        synchronise(store, mine, Options(), print)
        said = []
        other = jobs({"prompt": "c", "name": "c"})
        synchronise(store, other, Options(), said.append)
        assert queued(store) == ["c"]
        assert "2 pending jobs of other job files" in said[0]
        synchronise(store, mine, Options(), said.append)
        assert queued(store) == ["a", "b"]


def test_a_job_that_was_tried_too_often_is_left_and_said(tmp_path, jobs):
    planned = jobs({"prompt": "a", "name": "a"})
    with Store(tmp_path / "out", attempt_limit=1) as store:
        synchronise(store, planned, Options(), print)
        _, token = store.claim("cpu")
        store.fail(token, "no")
        said = []
        ids, todo = synchronise(store, planned, Options(), said.append)
        assert (len(ids), todo) == (1, [])
        assert said == ["a was tried 1 times and is left as it is"]


def test_a_run_begins_with_retries_of_its_own_and_no_more(tmp_path, jobs):
    planned = jobs(*({"prompt": name, "name": name} for name in "abc"))

    def fail_until_none_is_left(store):
        failed = []
        while (claimed := store.claim("cpu")) is not None:
            failed.append(claimed[0].name)
            store.fail(claimed[1], "no")
        return "".join(failed)

    with Store(tmp_path / "out") as store:
        synchronise(store, planned, Options(retries=1), print)
        _, token = store.claim("cpu")
        store.fail(token, "no")
        _, token = store.claim("cpu")
        store.interrupt(token, "Ctrl-C", requeue=True)
        store.claim("cpu")
    # As after kill -9: `a` has failed once and was running.
    with Store(tmp_path / "out") as store:
        assert [store.get(job).state for job in (1, 2)] == [JobState.INTERRUPTED, JobState.PENDING]
        synchronise(store, planned, Options(retries=2), print)
        assert fail_until_none_is_left(store) == "aaabbbccc"
        assert [store.get(job).tries for job in (1, 2, 3)] == [4, 3, 3]
        synchronise(store, planned, Options(retries=0), print)
        assert fail_until_none_is_left(store) == "abc"


def test_what_the_hash_leaves_out_is_taken_up_by_jobs_that_are_not_done(tmp_path, jobs):
    rows = [{"prompt": name, "name": name} for name in "abc"]
    with Store(tmp_path / "out") as store:
        synchronise(store, jobs(*rows), Options(), print)
        done = finish_next(store)
        _, token = store.claim("cpu")
        store.fail(token, "no", retry=False)
        ids, todo = synchronise(store, jobs(*rows), Options(timing=True), print)
        assert [store.get(job).payload["timing"] for job in ids] == [False, True, True]
        assert todo == [job for job in ids if job != done]
        allowed = [{**row, "allow_offload": True} for row in rows]
        ids, _ = synchronise(store, jobs(*allowed), Options(timing=True), print)
        assert [store.get(job).payload["allow_offload"] for job in ids] == [False, True, True]
