"""A minute of chaos; and that its checker sees what it is there for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import chaos
import pytest


@pytest.mark.parametrize("case", chaos.RIGHT_CASES.values(), ids=chaos.RIGHT_CASES)
def test_checker_accepts_what_is_right(case):
    assert chaos.complaints(case) == []


@pytest.mark.parametrize("case", chaos.CHECKER_CASES.values(), ids=chaos.CHECKER_CASES)
def test_checker_reports_what_is_wrong(case):
    assert chaos.complaints(case)


def run_chaos(*options: str) -> tuple[int, str]:
    """In a process of its own, with a Ray of its own: what is left at the end is counted there.

    Gives how many failures it saw, and what it said.
    """
    done = subprocess.run(
        [sys.executable, str(Path(chaos.__file__)), *options],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^bad transitions +0$", done.stdout, re.M), done.stdout
    (failures,) = re.findall(r"^failures seen +(\d+)$", done.stdout, re.M)
    return int(failures), done.stdout


@pytest.mark.parametrize("transport", ["rpc", "shared_memory"])
def test_no_transition_is_lost_doubled_or_mixed_under_chaos(transport):
    failures, said = run_chaos("--minutes", "0.9", "--transport", transport)
    assert failures > 20, said


@pytest.mark.parametrize(
    ("mode", "max_restarts"), [("first-ready", 50), ("mixed", 1), ("first-ready", 0)]
)
def test_nor_where_environments_only_raise(mode, max_restarts):
    """Quick, without processes: many more faults, restarts that are used up, errors that come."""
    options = f"--backend local --envs 7 --minutes 0.08 --faults 5 --mode {mode}"
    failures, said = run_chaos(*options.split(), "--max-restarts", str(max_restarts))
    assert failures > 5, said
