"""Long runs: what the caller's process uses of anything levels off."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import gc, json, os, resource
from pathlib import Path
import numpy as np
import ray
from dm_env import specs
import envfleet
from envfleet.testing import FaultyEnv, ProbeEnv

def fail():
    raise KeyError("arm")

class Large(ProbeEnv):
    # Above 32 KiB a reply travels through Ray's object store.
    def _observation(self, action):
        return {**super()._observation(action), "image": np.zeros((100, 100), np.float32)}

    def observation_spec(self):
        return {**super().observation_spec(), "image": specs.Array((100, 100), np.float32)}

def family():
    # This process and all that descend from it, those of Ray among them.
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found

def usage():
    gc.collect()
    core_worker = ray._private.worker.global_worker.core_worker
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of memory": pages * resource.getpagesize(),
        "objects of Python": len(gc.get_objects()),
        "objects of Ray": len(core_worker.get_all_reference_counts()),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(family()),
    }

def repeat(times, once):
    used = []
    for i in range(times):
        once()
        if i + 1 in (times * 4 // 10, times):
            used.append(usage())
    return used

def steps(times, make):
    with envfleet.ParallelPyEnvironment(make, num_envs=2, envs_per_actor=2) as batch:
        batch.reset()
        return repeat(times, lambda: batch.step(np.zeros(2, int)))

def cycle():
    with envfleet.ParallelPyEnvironment([lambda: FaultyEnv(fail, after=1)]) as batch:
        batch.reset()
        batch.step([0])
        try:
            batch.step([0])
        except KeyError:
            batch.reset()

ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR",
         object_store_memory=100_000_000, log_to_driver=False)
print(json.dumps({
    "steps": steps(10_000, ProbeEnv),
    "large steps": steps(2_000, Large),
    "cycles": repeat(50, cycle),
}))
"""

GROWTH = {
    # A kilobyte that each of the last 60 % of the steps keeps is 6 MB.
    "bytes of memory": 2_000_000,
    "objects of Python": 300,
    # Three tenths of what one that every cycle keeps would come to: what ends may take a moment.
    "objects of Ray": 10,
    "open files": 10,
    "threads": 10,
    "processes": 10,
}
"""What each may have grown by since 40 % of a run."""


@pytest.fixture(scope="module")
def used() -> dict[str, list[dict[str, int]]]:
    """By run, what was in use at 40 % and at the end; in a process that does nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", GROWTH)
@pytest.mark.parametrize("run", ["steps", "large steps", "cycles"])
def test_use_levels_off(run: str, what: str, used: Any):
    before, after = (usage[what] for usage in used[run])
    assert after - before < GROWTH[what], f"{what}: {before} at 40 %, {after} at the end"
