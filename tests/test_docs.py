"""What docs/semantics.md says is backed by a test of that name."""

from __future__ import annotations

import re
from pathlib import Path

from envfleet import testing

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_semantics_name_exists():
    named = set(re.findall(r"`([a-z0-9_]+)`", semantics()))
    tests = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        tests |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    checks = {check.__name__ for check in testing.BATCH_CHECKS}
    assert {name for name in named if name.startswith("test_")} <= tests
    assert checks <= named, "a rule of the contract that the semantics do not name"


def test_every_row_of_a_table_of_behaviour_names_its_test():
    for line in semantics().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and not set(line) <= set("|-"):
            assert cells[2] == "test" or cells[2].startswith("`"), line


def semantics() -> str:
    return (ROOT / "docs" / "semantics.md").read_text()


def test_numbers_of_the_readme_are_rows_of_the_benchmark():
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| ") and " >= " in line]
    assert len(rows) >= 5
    assert set(rows) <= set(results)
