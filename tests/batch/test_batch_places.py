"""Job files and places that the real command can't use: one line each, and status 2."""

import pytest

from tests.cli.command import complaint, run

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
