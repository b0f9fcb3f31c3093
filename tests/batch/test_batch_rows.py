"""The dry run's table: the same for a pipe as rich's, cut to a terminal, and quick for very many jobs."""

import io
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.batch.batch_process import on_a_terminal
from tests.cli.command import environment, run
from videoattn.batch.rows import print_rows

COLUMNS = ("row", "name", "state", "disk")
LEFT = {"name", "state"}
ROWS = [
    ("1", "a-red-ball-seed1-0123456789", "new", "36 KiB"),
    ("12", "[b]é 紅い球 シーン", "changed", "1.0 GiB"),
    ("123", "x", "done", "?"),
]


def printed(rows, **options):
    console = Console(file=io.StringIO(), highlight=False, soft_wrap=True, legacy_windows=False, **options)
    print_rows(console, COLUMNS, rows, left=LEFT, cut=("name",))
    return console.file.getvalue().splitlines()


def test_a_pipe_gets_everything_in_the_columns_that_rich_would_make():
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
    for row in ROWS:
        table.add_row(*map(Text, row))
    file = io.StringIO()
    Console(file=file, width=1000).print(table)
    assert printed(ROWS) == [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [28, 36])
def test_a_terminal_gets_lines_that_fit(width):
    lines = printed(ROWS, force_terminal=True, color_system=None, width=width)
    assert max(map(cell_len, lines)) == width
    assert all("…" in line for line in lines[1:3])
    assert lines[2].endswith("1.0 GiB")


def test_very_many_rows_are_quick():
    rows = [(str(number), f"a-large-red-circle-seed{number}", "new", "36 KiB") for number in range(50_000)]
    began = time.process_time()
    assert len(printed(rows)) == 50_001
    assert time.process_time() - began < 10


@pytest.fixture
def shots(tmp_path):
    (tmp_path / "shots.csv").write_text(
        "prompt,seeds,num_frames,num_inference_steps\na red ball,1..2000,9,2\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_reader_who_has_seen_enough_is_no_error(shots):
    command = f"{sys.executable} -m videoattn batch shots.csv --dry-run | head -1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=shots,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.split()[:2] == ["row", "name"]
    assert result.stderr == ""
    assert "2000 to render" in run("batch", "shots.csv", "--dry-run", cwd=shots).stdout


@pytest.mark.slow
def test_a_terminal_says_what_is_going_on_while_jobs_are_checked(shots):
    variables = {name: value for name, value in environment().items() if name != "NO_COLOR"}
    result = on_a_terminal(
        [sys.executable, "-m", "videoattn", "batch", "shots.csv", "--dry-run"],
        timeout=120,
        cwd=shots,
        env=variables | {"TERM": "xterm-256color"},
    )
    assert result.returncode == 0
    assert "checking shots.csv" in result.stderr
