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


def test_no_transition_is_lost_doubled_or_mixed_under_chaos():
    """In a process of its own, with a Ray of its own: what is left at the end is counted there."""
    done = subprocess.run(
        [sys.executable, str(Path(chaos.__file__)), "--minutes", "0.9"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^bad transitions +0$", done.stdout, re.M), done.stdout
    (failures,) = re.findall(r"^failures seen +(\d+)$", done.stdout, re.M)
    assert int(failures) > 20, done.stdout
