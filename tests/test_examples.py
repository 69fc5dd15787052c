"""Every example and the README's first snippet run, and print what they should."""

from __future__ import annotations

import json
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


def test_benchmark_measures_and_writes_ratios(tmp_path):
    done = run(
        *("benchmarks/run.py", "--only", "noop-8", "--rounds", "1", "--seconds", "0.1"),
        *("--contenders", "envfleet", "bare-ray", "gymnasium-sync", "loop", "tf-agents"),
        *("--out", str(tmp_path)),
    )
    entries = json.loads((tmp_path / "results.json").read_text())["entries"]
    measured = {entry["contender"]: entry["values"] for entry in entries if not entry["error"]}
    assert set(measured) == {"envfleet", "bare-ray", "gymnasium-sync", "loop"}, entries
    assert all(len(values) == 1 and values[0] > 0 for values in measured.values())
    text = (tmp_path / "results.md").read_text()
    assert text in done.stdout
    ours, bare = measured["envfleet"][0], measured["bare-ray"][0]
    assert re.search(rf"against the bare Ray loop .* {ours / bare:.2f} .* met", text), text
    assert "failed: no --tf-python was given" in text
