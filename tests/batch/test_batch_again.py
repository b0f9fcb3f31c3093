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


def test_a_second_run_counts_what_is_its_own(batch, tmp_path):
    """One history of runs, as each takes seconds to start.

    A changed or repeated job has no failed attempts behind it; every run has its own retries.
    """

    def outcomes():
        with StoreReader(tmp_path / "out") as store:
            return [each.outcome for each in store.attempts(store.by_name("broken").id)]

    (tmp_path / "style.safetensors").write_bytes(b"these are no weights")
    rows = [
        {"prompt": "a red ball", "name": "ball"},
        {"prompt": "a square", "name": "square"},
        {"prompt": "a red ball", "name": "broken", "lora": str(tmp_path / "style.safetensors")},
    ]
    said, counted = batch(rows, code=1)
    assert len(said) == 3
    assert "row 3) after 2 attempts: " in said[2]
    assert counted == {"ball": 1, "square": 1, "broken": 2}
    assert outcomes() == ["failed"] * 2

    rows[1]["prompt"] = "a green square"
    said, counted = batch(rows, "--retries", "2", code=1)
    done, failed = sorted(said)
    assert re.match(r"done square, [\d.]+ s(, [^,]+ left)?$", done), done
    assert "row 3) after 5 attempts: " in failed
    assert counted == {"ball": 1, "square": 1, "broken": 5}
    assert outcomes() == ["failed"] * 5

    (failed,), counted = batch(rows, "--retries", "0", code=1)
    assert "row 3) after 6 attempts: " in failed
    assert counted == {"ball": 1, "square": 1, "broken": 6}
    assert outcomes() == ["failed"] * 6

    said, counted = batch(rows[:2], "--no-resume")
    assert len(said) == 2
    assert not any("attempts" in line for line in said), said
    assert counted == {"ball": 1, "square": 1}
