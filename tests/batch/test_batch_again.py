"""What a second run of the real command makes of a first one: attempts, retries, changed settings."""

import csv
import json
import re

import pytest

from tests.batch.batch_process import SMALL
from tests.cli.command import run
from videoattn.jobs import StoreReader

pytestmark = pytest.mark.slow


@pytest.fixture
def batch(tmp_path, ltx_folder):
    """Run these rows; returns what was said about each job that ended, and the attempts in report.csv."""

    def render(rows, *options, code=0):
        defaults = {"model": str(ltx_folder), **SMALL}
        (tmp_path / "jobs.json").write_text(json.dumps({"defaults": defaults, "jobs": rows}))
        result = run("batch", "jobs.json", "-o", "out", *options, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        with open(tmp_path / "out" / "report.csv", newline="") as sheet:
            counted = {row["name"]: int(row["attempts"]) for row in csv.DictReader(sheet)}
        return re.findall(r"^\[\d+/\d+\] (.*)$", result.stderr, re.MULTILINE), counted

    return render


def test_a_changed_or_repeated_job_has_no_failed_attempts_behind_it(batch):
    rows = [{"prompt": "a red ball", "name": "ball"}, {"prompt": "a square", "name": "square"}]
    batch(rows)
    rows[1]["prompt"] = "a green square"
    (said,), counted = batch(rows)
    assert re.match(r"done square, [\d.]+ s$", said), said
    assert counted == {"ball": 1, "square": 1}
    said, counted = batch(rows, "--no-resume")
    assert len(said) == 2
    assert not any("attempts" in line for line in said), said
    assert counted == {"ball": 1, "square": 1}


def test_every_run_has_its_own_retries(batch, tmp_path):
    (tmp_path / "style.safetensors").write_bytes(b"these are no weights")
    rows = [{"prompt": "a red ball", "name": "ball", "lora": str(tmp_path / "style.safetensors")}]
    for options, attempts in ((), 2), (("--retries", "2"), 5), (("--retries", "0"), 6):
        (said,), counted = batch(rows, *options, code=1)
        assert f"row 1) after {attempts} attempts: " in said
        assert counted == {"ball": attempts}
        with StoreReader(tmp_path / "out") as store:
            assert [each.outcome for each in store.attempts(1)] == ["failed"] * attempts
