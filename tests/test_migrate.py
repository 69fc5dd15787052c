"""What docs/migrate.md says to write runs, where the packages that it is about are installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
AFTER = [
    pytest.param(snippet, id=f"{section.splitlines()[0]}-{number}")
    for section in SECTIONS
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", section, re.S))
    if "envfleet.interop" in snippet
]


@pytest.mark.parametrize("snippet", AFTER)
def test_what_is_to_be_written_runs(snippet, tmp_path):
    for package in re.findall(r"^(?:from|import) (\w+)", snippet, re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-interop")
    if "import tf_agents" in snippet and importlib.util.find_spec("tf_agents") is None:
        pytest.skip("tf_agents is not installed: make test-interop")
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_every_ecosystem_has_a_section():
    named = {section.splitlines()[0] for section in SECTIONS}
    assert named >= {"Gymnasium", "Stable-Baselines3", "TF-Agents", "dm_env"}
    assert len(AFTER) >= 5
