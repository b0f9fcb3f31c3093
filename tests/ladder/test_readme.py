"""The README's table says what ptxas says today."""

import json

import pytest

from videoattn.kernels import library
from videoattn.kernels.ptxas import compile_report

LADDER = library.SOURCES / "ladder"
TABLE = json.loads((LADDER / "steps.json").read_text())
README = (LADDER / "README.md").read_text()


@pytest.mark.parametrize("entry", TABLE["steps"] + TABLE["branches"], ids=lambda entry: entry["name"])
def test_row_quotes_ptxas(entry):
    """`python scripts/ladder_table.py --write` renews the rows."""
    row = next(
        line for line in README.splitlines() if line.startswith(f"| [{entry['name']}]({entry['source']})")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    resources = compile_report(LADDER / entry["source"], entry["arch"][0])
    found = resources[entry["kernel"]]
    spills = f"{found.spill_stores}/{found.spill_loads}"
    assert cells[6:9] == [str(found.registers), spills, str(found.stack)]


def test_figures_of_the_articles_are_labelled():
    assert "The articles' figures are theirs" in README
