"""The rooms of ARCHITECTURE.md, and who may enter: read from the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "envfleet"

# From the top down: a module imports only from rows below its own.
ROWS = [
    ["testing"],
    ["interop.dm_env", "interop.gymnasium", "interop.stable_baselines3", "interop.tf_agents"],
    ["interop.members"],
    ["interop"],
    ["collect.__main__"],
    ["collect.command"],
    ["collect"],
    ["collect.plan"],
    ["collect.driver"],
    ["collect.directory"],
    ["collect.run", "collect.minari", "collect.summary"],
    ["collect.collector", "collect.ledger", "collect.dataset"],
    ["collect.crew", "collect.report", "collect.progress"],
    ["collect.worker"],
    ["collect.recorder"],
    ["collect.rollout", "collect.shards"],
    ["collect.policies", "collect.columns"],
    ["collect.episodes", "collect.identity"],
    ["parallel"],
    ["single", "tuning"],
    ["fleet"],
    ["counters", "stepping"],
    ["mending"],
    ["building", "flights", "restarts", "time_steps", "timings"],
    ["actors"],
    ["channels.shared_memory"],
    ["channels.local", "channels.remote"],
    ["channels.metrics"],
    ["channels"],
    ["channels.importing", "channels.lane", "channels.placement", "channels.processes"],
    ["channels.pulse"],
    ["actor"],
    ["environments"],
    ["environments.gymnasium_member"],
    ["environments.dm_control", "environments.gymnasium", "environments.tf_agents"],
    ["environments.dm_env"],
    ["environments.wrappers", "environments.registrations"],
    ["layout", "seeding", "gin_state"],
    ["specs"],
    ["errors", "version"],
]
RANK = {module: rank for rank, row in enumerate(ROWS) for module in row}
# `channels` and `environments` pick one of their own when they are called, not when imported.
LATE = {("channels", f"channels.{name}") for name in ("local", "remote", "shared_memory")}
LATE |= {
    ("environments", f"environments.{name}") for name in ("gymnasium", "tf_agents", "dm_control")
}

ONLY = {
    "ray": {f"channels.{name}" for name in ("remote", "shared_memory", "placement", "metrics")},
    "tree": {"layout"},
    "gin": {"gin_state"},
}
OPTIONAL = {
    "gymnasium": {
        "environments.gymnasium",
        "environments.gymnasium_member",
        "environments.registrations",
        "interop.gymnasium",
        "interop.members",
        "interop.stable_baselines3",
    },
    "dm_control": {"environments.dm_control"},
    "stable_baselines3": {"interop.stable_baselines3"},
    "tf_agents": {"interop.tf_agents"},
    "tensorflow": {"interop.tf_agents"},
    "pyarrow": {"collect.columns", "collect.shards", "collect.dataset"},
    "minari": {"collect.minari"},
    "rich": {"collect.progress"},
    "absl": {"collect.command"},
}

FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
    if path != SOURCE / "__init__.py"
}


def imports(module: str) -> list[tuple[str, bool]]:
    """What a module imports, and whether it does so when it is itself imported."""
    syntax = ast.parse(FILES[module].read_text())
    top = set(syntax.body)
    found = []
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in inner if name.removeprefix("envfleet.") in FILES]
            found += [(name, node in top) for name in known or [str(node.module)]]
    return found


def test_every_module_has_a_row():
    assert set(FILES) == set(RANK)


@pytest.mark.parametrize("module", FILES)
def test_imports_run_downward_only(module):
    for name, at_top in imports(module):
        if not name.startswith("envfleet"):
            continue
        target = name.removeprefix("envfleet.")
        allowed = RANK[target] > RANK[module] or (not at_top and (module, target) in LATE)
        assert allowed, f"{module} imports {target}"


@pytest.mark.parametrize("module", FILES)
def test_big_and_optional_packages_are_imported_in_one_place(module):
    for name, _ in imports(module):
        package = name.partition(".")[0]
        for table in (ONLY, OPTIONAL):
            assert package not in table or module in table[package], f"{module} imports {name}"


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("envfleet", set()),
        ("envfleet.interop", set()),
        ("envfleet.collect", set()),
        ("envfleet.interop.dm_env", set()),
        ("envfleet.interop.gymnasium", {"gymnasium"}),
    ],
)
def test_other_ecosystems_are_imported_by_their_faces_only(module, needs):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[0] for name in done.stdout.split()}
    assert found & OPTIONAL.keys() == needs
