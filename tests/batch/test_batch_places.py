"""Job files and places that the real command can't use: one line each, and status 2."""

import pytest

from tests.cli.command import complaint, run

pytestmark = pytest.mark.slow


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path):
    (tmp_path / "latin1.csv").write_bytes("prompt,seed\na red ball,1\nun carré,2\n".encode("latin-1"))
    result = run("batch", "latin1.csv", cwd=tmp_path)
    assert result.returncode == 2
    assert "cannot read latin1.csv: line 3 is not UTF-8: save it as 'CSV UTF-8'" in complaint(result)
