"""Batches through the real command in real processes, with a tiny LTX-Video model."""

import csv
import html.parser
import json
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest

from tests.batch.batch_process import SMALL, clips, run, start
from videoattn.jobs import JobState, Store, StoreReader
from videoattn.render.metadata import read_job

pytestmark = pytest.mark.slow


@pytest.fixture
def job_file(tmp_path, ltx_folder):
    def write(jobs, name="jobs.json", **defaults):
        path = tmp_path / name
        path.write_text(
            json.dumps({"defaults": {"model": str(ltx_folder), **SMALL, **defaults}, "jobs": jobs})
        )
        return path

    return write


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.images = [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "a":
            self.links.append(values["href"])
        if tag == "img":
            self.images.append(values["src"])


def test_a_batch_with_a_failure_its_reports_export_and_resume(tmp_path, job_file):
    broken = tmp_path / "style.safetensors"
    broken.write_bytes(b"these are no weights")
    path = job_file(
        [
            {"prompt": "a red ball", "seeds": "1..2"},
            {"prompt": "<b>no & weights</b>", "lora": str(broken), "name": "broken"},
            {"prompt": "a blue square", "name": "square"},
        ]
    )
    out = tmp_path / "out"
    text = run(path, "-o", out, "--timing", "--retries", 0, code=1)
    assert "4 to render" in text
    assert "3 rendered, 1 failed" in text
    assert "broken (jobs.json row 2)" in text
    assert "style.safetensors" in text
    made = clips(out)
    assert len(made) == 3
    assert read_job(out / "square.mp4").prompt == "a blue square"
    with StoreReader(out) as store:
        report = store.report(store.by_name("square").id)
        assert report["receipt"]["video_self"]["kernel"] == "sdpa"
        assert report["timing"]["total"]["calls"] > 0
        assert store.path(store.by_name("square"), "timing").is_file()
        assert store.get(1).origin == {"file": "jobs.json", "row": 1, "line": 1}

    with open(out / "report.csv", newline="") as sheet:
        rows = list(csv.DictReader(sheet))
    assert [row["state"] for row in rows] == ["done", "done", "failed", "done"]
    assert {row["name"]: row["row"] for row in rows}["broken"] == "2"
    done = [row for row in rows if row["state"] == "done"]
    assert all(0 < float(row["attention_share"]) < 1 for row in done)
    assert all(float(row["seconds_denoise"]) > 0 for row in done)
    page = (out / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert {link for link in links.links if link.endswith(".mp4")} == set(made)
    assert len(links.images) == 3
    assert all(image.startswith("data:image/jpeg;base64,") for image in links.images)
    assert "&lt;b&gt;no &amp; weights&lt;/b&gt;" in page

    assert "4 jobs" in run("-o", out, "--export", tmp_path / "all.jsonl")
    exported = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [each["state"] for each in exported] == ["done", "done", "done", "failed"]
    assert Path(exported[0]["clip"]).is_file()

    before = {name: (out / name).stat().st_mtime_ns for name in made}
    changed = json.loads(path.read_text())
    del changed["jobs"][1]["lora"]
    changed["jobs"][2]["prompt"] = "a green square"
    path.write_text(json.dumps(changed))
    gone = next(name for name in made if name != "square.mp4")
    (out / gone).unlink()
    text = run(path, "-o", out)
    assert "1 clips have disappeared" in text
    assert "3 rendered, 1 done before" in text
    assert read_job(out / "square.mp4").prompt == "a green square"
    assert (out / gone).read_bytes() == made[gone]
    kept = [name for name in made if name not in ("square.mp4", gone)]
    assert len(kept) == 1
    assert all((out / name).stat().st_mtime_ns == before[name] for name in kept)


def test_dry_run_and_schema_render_nothing(tmp_path, job_file):
    path = job_file([{"prompt": "a", "seeds": "1..3"}])
    text = run(path, "-o", tmp_path / "out", "--dry-run", "--width", 96)
    assert text.count("64x64") == 3
    assert "3 jobs, 3 to render" in text
    assert "predicted" in text
    assert not (tmp_path / "out").exists()
    schema = json.loads(run("--schema"))
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    for broken in (
        {"jobs": [{"promt": "a"}]},
        {"jobs": []},
        [{"prompt": "a", "recipe": "x"}],
        [{"seed": -1}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_bad_files_and_options_end_with_2_and_touch_nothing(tmp_path, job_file):
    path = job_file([{"prompt": "a", "width": 100}, {"promt": "b", "seed": -1}])
    text = run(path, "-o", tmp_path / "out", code=2)
    assert "did you mean prompt?" in text
    path = job_file([{"prompt": "a", "width": 100}, {"prompt": "b", "seed": -1}])
    text = run(path, "-o", tmp_path / "out", code=2)
    assert "row 1" in text
    assert "row 2, column seed" in text
    assert "2 problems" in text
    assert "Traceback" not in text
    kernel = job_file([{"prompt": "a", "attention": "flash4"}], name="kernel.json")
    text = run(kernel, "-o", tmp_path / "out", code=2)
    assert "row 1, column attention: attention kernel 'flash4' cannot serve" in text
    for arguments in (
        [],
        [tmp_path / "none.csv"],
        [path, "--retries", 99],
        [path, "--compare", "flash9"],
        [path, "--device", "cuda:77"],
        [path, "--device", "mps"],
        [path, "--device", "cpu,meta"],
        [path, "--device", "cpu:5", "--dry-run"],
    ):
        assert "Traceback" not in run(*arguments, "-o", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def done(folder):
    with suppress(Exception), StoreReader(folder) as store:
        return store.counts()[JobState.DONE]
    return 0


def test_interrupt_second_run_and_resume(tmp_path, job_file):
    path = job_file([{"prompt": "a red ball", "seeds": "1..20", "num_inference_steps": 6}])
    out, whole = tmp_path / "out", tmp_path / "whole"
    first = start(path, "-o", out)
    wait_until(lambda: done(out) >= 3)
    # Held still meanwhile, or it might be through before the second one has even started.
    first.send_signal(signal.SIGSTOP)
    text = run(path, "-o", out, code=1)
    assert f"in use by process {first.pid}" in text
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGCONT)
    text, _ = first.communicate(timeout=240)
    assert first.returncode == 130
    assert "interrupted: the same command goes on" in text
    assert (out / "report.html").is_file()
    assert list((out / ".videoattn" / "work").iterdir()) == []
    between = done(out)
    assert 3 <= between < 20
    assert len(clips(out)) == between
    text = run(path, "-o", out)
    assert f"{20 - between} rendered, {between} done before" in text
    run(path, "-o", whole)
    assert clips(out) == clips(whole)


@pytest.mark.slow
def test_kills_at_random_moments_end_bit_equal_to_an_uninterrupted_run(tmp_path, job_file):
    prompts = ["a red ball", "a blue square moves", "a green ball rolls", "the blue ball"]
    path = job_file([{"prompt": prompts, "seeds": "1..50"}])
    out, whole = tmp_path / "out", tmp_path / "whole"
    rng = random.Random(7)
    deaths = 0
    while deaths < 20:
        process = start(path, "-o", out)
        have = done(out)
        # A third of the deaths come before the first clip of a run, the rest anywhere in the next few; all
        # of them on a machine so fast that it would be through otherwise.
        goal = have + rng.choice([0, 1, 2, 4, 6, 8]) * (have < 150)
        wait_until(lambda process=process, goal=goal: process.poll() is not None or done(out) >= goal)
        time.sleep(rng.uniform(0, 1.0))
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
        deaths += 1
    assert done(out) < 200
    run(path, "-o", out)
    run(path, "-o", whole)
    assert len(clips(whole)) == 200
    assert clips(out) == clips(whole)
    with Store(out) as store:
        assert not store.recovered
        assert store.counts() == dict.fromkeys(JobState, 0) | {JobState.DONE: 200}
        outcomes = [[one.outcome for one in store.attempts(job.id)] for job in store.all()]
        assert all(each.count("done") == 1 for each in outcomes)
        assert sum(len(each) for each in outcomes) > 200


def test_a_full_disk_stops_the_run_and_the_same_command_goes_on(tmp_path, job_file):
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        path = job_file([{"prompt": "a red ball", "seeds": "1..4"}])
        text = run(path, "-o", mount / "out", code=1)
        assert "MiB are free" in text
        assert "the same command goes on" in text
        assert "Traceback" not in text
        assert clips(mount / "out") == {}
        subprocess.run(["mount", "-o", "remount,size=400m", str(mount)], check=True)
        assert "4 rendered" in run(path, "-o", mount / "out")
        assert len(clips(mount / "out")) == 4
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
