"""A minute of chaos on three nodes, which are killed, frozen, thawed and added."""

from __future__ import annotations

import re

import pytest
from test_chaos import run_chaos


@pytest.mark.cluster
def test_no_transition_is_lost_doubled_or_mixed_when_nodes_go_and_come():
    failures, said = run_chaos("--minutes", "1", "--nodes", "3", "--transport", "shared_memory")
    assert failures > 20, said
    killed, frozen = map(int, re.findall(r"^nodes (?:killed|frozen) +(\d+)$", said, re.M))
    assert killed + frozen > 1, said
