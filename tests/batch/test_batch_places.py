"""Job files and places that the real command can't use: one line each, and status 2."""

import json

import pytest

from tests.cli.command import complaint, run
from videoattn.jobs import NewJob, Store

pytestmark = pytest.mark.slow


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path):
    (tmp_path / "latin1.csv").write_bytes("prompt,seed\na red ball,1\nun carré,2\n".encode("latin-1"))
    result = run("batch", "latin1.csv", cwd=tmp_path)
    assert result.returncode == 2
    assert "cannot read latin1.csv: line 3 is not UTF-8: save it as 'CSV UTF-8'" in complaint(result)


def test_a_misspelt_column_hides_no_other_mistake(tmp_path):
    (tmp_path / "jobs.csv").write_text(
        "promt;steps;guidance_scale;seed\na red ball;2;4,5;1\na square;2;1;-1\n"
    )
    result = run("batch", "jobs.csv", cwd=tmp_path)
    assert result.returncode == 2
    wanted = [
        "jobs.csv:1, column promt: no such column; did you mean prompt?",
        "jobs.csv:1, column steps: no such column; did you mean num_inference_steps?",
        "jobs.csv:2: row 1, column guidance_scale: '4,5': input should be a valid number",
        "jobs.csv:3: row 2, column seed: '-1': input should be greater than or equal to 0",
        "4 problems in jobs.csv: nothing was rendered",
    ]
    said = result.stderr.splitlines()
    assert len(said) == len(wanted)
    assert all(line.startswith(f"videoattn: {each}") for line, each in zip(said, wanted, strict=True))


def test_a_path_that_cannot_be_looked_at_hides_no_other_mistake(tmp_path):
    long = "n" * 300
    (tmp_path / "folder").mkdir()
    rows = [
        {"prompt": "a red ball", "model": long},
        {"prompt": "a red ball", "image": long},
        {"prompt": "a red ball", "image": "folder"},
        {"prompt": "a red ball", "image": "~nobody-here/first.png"},
        {"prompt": "a red ball", "lora": long},
        {"prompt": "a red ball", "components": long, "model": "fake.safetensors"},
        {"prompt": "a red ball", "upsampler": long, "recipe": "distilled"},
        {"prompt": "a red ball", "seed": -1},
    ]
    (tmp_path / "fake.safetensors").write_bytes(b"x")
    (tmp_path / "jobs.json").write_text(json.dumps(rows))
    result = run("batch", "jobs.json", cwd=tmp_path)
    assert result.returncode == 2
    said = result.stderr.splitlines()
    assert said[-1] == f"videoattn: {len(rows)} problems in jobs.json: nothing was rendered"
    assert len(said) == len(rows) + 1, said
    for row, (column, message) in enumerate(
        [
            ("model", "file name too long"),
            ("image", "file name too long"),
            ("image", "it is a folder"),
            ("image", "no such image"),
            ("lora", "file name too long"),
            ("components", "file name too long"),
            ("recipe", "the distilled recipe is for LTX-2.x"),
            ("seed", "input should be"),
        ],
        start=1,
    ):
        (line,) = [each for each in said if f": row {row}, " in each]
        assert f"row {row}, column {column}: " in line
        assert message in line


@pytest.fixture
def shots(tmp_path):
    """A good job file, which is no folder."""
    (tmp_path / "shots.csv").write_text("prompt,seed,num_frames,num_inference_steps\na red ball,1,9,2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("shots.csv", "not a directory"),
        ("shots.csv/below", "not a directory"),
        ("/proc/x", "no such file or directory"),
        ("x" * 300, "file name too long"),
    ],
)
def test_a_place_that_can_be_no_output_folder(shots, place, reason):
    result = run("batch", "shots.csv", "-o", place, cwd=shots)
    assert complaint(result) == f"videoattn: cannot write {place}: {reason}"
    assert result.returncode == 2
    assert [path.name for path in shots.iterdir()] == ["shots.csv"]


def test_a_dry_run_looks_at_the_place_too(shots):
    result = run("batch", "shots.csv", "-o", "shots.csv", "--dry-run", cwd=shots)
    assert complaint(result) == "videoattn: cannot write shots.csv: not a directory"
    assert result.returncode == 2


@pytest.mark.parametrize("options", [["--attention", "flash4"], ["--compare", "flash4"]])
def test_a_dry_run_asks_for_kernels_where_the_device_is_named(shots, options):
    """Without a name the render may be meant for another machine."""
    command = ["batch", "shots.csv", "-o", "out", "--dry-run", *options]
    named = run(*command, "--device", "cpu", cwd=shots)
    assert named.returncode == 2
    first, last = named.stderr.splitlines()
    assert first.startswith("videoattn: shots.csv:2: row 1")
    assert "'flash4' cannot serve" in first
    assert last.endswith("1 problem in shots.csv: nothing was rendered")
    unnamed = run(*command, cwd=shots)
    assert unnamed.returncode == 0, unnamed.stderr
    assert "1 jobs, 1 to render" in unnamed.stdout


def test_an_export_makes_its_folder_or_says_why_not(shots):
    with Store(shots / "out") as store:
        store.add(NewJob({"seed": 1}))
    result = run("batch", "-o", "out", "--export", "new/folder/jobs.jsonl", cwd=shots)
    assert result.returncode == 0, result.stderr
    assert len((shots / "new" / "folder" / "jobs.jsonl").read_text().splitlines()) == 1
    assert len(list((shots / "new" / "folder").iterdir())) == 1
    for place, reason in (
        ("shots.csv/jobs.jsonl", "not a directory"),
        ("/proc/x/jobs.jsonl", "no such file or directory"),
        ("new", "it is a folder, name a file in it"),
    ):
        result = run("batch", "-o", "out", "--export", place, cwd=shots)
        assert complaint(result) == f"videoattn: cannot write {place}: {reason}"
        assert result.returncode == 2
    assert sorted(path.name for path in shots.iterdir()) == ["new", "out", "shots.csv"]
    result = run("batch", "-o", "nowhere", "--export", "other/jobs.jsonl", cwd=shots)
    assert complaint(result) == "videoattn: nowhere holds no job store"
    assert not (shots / "other").exists()


def test_the_page_refuses_such_a_place_and_port(shots):
    result = run("ui", "--output", "shots.csv", "--port", "0", cwd=shots)
    assert complaint(result) == f"videoattn: cannot write {shots / 'shots.csv'}: not a directory"
    assert result.returncode == 2
    result = run("ui", "--port", "99999", cwd=shots)
    assert complaint(result) == "videoattn: --port 99999: give 1 to 65535, or 0 for a free one"
    assert result.returncode == 2
