"""Every example and the README's first snippet run, and print what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, expect: int = 0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=cwd
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_demo_prints_its_table():
    done = run("examples/cartpole.py", "--steps", "60", "--num_envs", "3")
    for row in ("episodes", "mean return", "steps/s"):
        assert row in done.stdout.lower(), done.stdout


def test_remote_exception_shows_the_line_of_the_environment():
    done = run("examples/remote_exception.py", expect=1)
    assert "KeyError: 'arm'" in done.stderr
    assert "examples/envs.py" in done.stderr
    assert "raised by env 2 in step" in done.stderr


def test_demo_says_what_auto_has_chosen():
    done = run(
        "examples/cartpole.py", "--steps", "5", "--num_envs", "6", "--envs_per_actor", "auto"
    )
    assert "6 environments go into" in done.stderr


SNIPPETS = [
    pytest.param(snippet, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", ROOT / "docs" / "semantics.md")
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_of_the_documentation_runs(snippet, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    printed = run(str(script), cwd=tmp_path).stdout.strip()
    assert printed or "print(" not in snippet


def test_benchmark_prints_ratios():
    done = run("benchmarks/overhead.py", "--rounds", "1", "--steps", "5")
    assert "ratio" in done.stdout.lower()
    assert "0.87" in done.stdout
