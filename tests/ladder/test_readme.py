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
    reports = [compile_report(LADDER / entry["source"], arch)[entry["kernel"]] for arch in entry["arch"]]
    found = reports[0]
    spills = [f"{report.spill_stores}/{report.spill_loads}" for report in reports]
    others = [
        f", {arch} {said}" for arch, said in zip(entry["arch"], spills, strict=True) if said != spills[0]
    ]
    assert cells[6:9] == [str(found.registers), spills[0] + "".join(others), str(found.stack)]


def test_figures_of_the_articles_are_labelled():
    assert "The articles' figures are theirs" in README
