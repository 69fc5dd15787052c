"""What `ActorDied` says of a process that is gone."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import faults
import pytest

from envfleet import ActorDied, ParallelPyEnvironment
from envfleet.channels.processes import Watch
from envfleet.testing import ProbeEnv


def abort() -> None:
    os.abort()


def kernel_tells() -> bool:
    """Linux 6.15 or newer: an exit can be told to others than the parent."""
    child = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(5)"], stdin=-1)
    watch = Watch(child.pid)
    child.communicate(b"\n")
    return watch.words() == "exit code 5"


@pytest.mark.parametrize("phase", ["construct", "step"])
@pytest.mark.parametrize(
    ("fault", "end", "last_line"),
    [
        (faults.exit_with_last_words, "exit code 3", "simulator: no license"),
        (faults.sigkill, "killed by SIGKILL", None),
        (faults.sigsegv, "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        (abort, "killed by SIGABRT", "Fatal Python error: Aborted"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_death_is_told_with_all_that_can_be_known(phase, fault, end, last_line, on_ray):
    late = functools.partial(faults.shortly, fault)
    constructors = [ProbeEnv, faults.Constructor(late, phase, env_id=1)]
    with (  # noqa: PT012 - the phase says in which line
        pytest.raises(ActorDied) as caught,
        ParallelPyEnvironment(constructors) as batch,
    ):
        batch.reset()
        batch.step([0, 0])
    text = str(caught.value)
    (failure,) = caught.value.env_failures
    where = "its constructor" if phase == "construct" else r"step\(\) 0 steps into the episode"
    assert re.match(rf"env 1 of 2: its process died in {where} \(pid {failure.pid}, node ", text)
    if kernel_tells():
        assert end in text
    assert ("the last lines of its stderr:" in text) == (last_line is not None)
    if last_line is not None:
        assert last_line in text


HEAD = """
import gc, os, sys, time
import numpy as np, ray, envfleet
from envfleet.testing import ProbeEnv
QUIET = dict(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
"""


def run(tmp_path: Path, body: str, **environment: str) -> str:
    (tmp_path / "script.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_end_by_rays_memory_monitor_is_told(tmp_path):
    """Its threshold lies a gigabyte above what is used; the environment takes more and more."""
    out = run(
        tmp_path,
        """
class Hungry(ProbeEnv):
    def step(self, action):
        held = []
        for _ in range(80):
            held.append(np.ones(50_000_000, np.uint8))
            time.sleep(0.05)
        time.sleep(20)

info = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/meminfo")}
used = 1 - info["MemAvailable"] / info["MemTotal"] + 1e6 / info["MemTotal"]
ray.init(address="local", num_cpus=2, object_store_memory=100_000_000, **QUIET,
         _system_config={"memory_usage_threshold": used, "memory_monitor_refresh_ms": 100})
env = envfleet.ParallelPyEnvironment([ProbeEnv, Hungry])
env.reset()
try:
    env.step([0, 0])
except envfleet.ActorDied as error:
    print("told:", error)
""",
    )
    assert re.search(
        r"^told: env 1 of 2: its process died in step\(\) .*: out of memory: ", out, re.M
    )


def test_loss_of_a_node_is_told(tmp_path):
    """And before, that what a process on another node wrote is told from there."""
    out = run(
        tmp_path,
        """
from ray.cluster_utils import Cluster

class Long(ProbeEnv):
    def __init__(self):
        super().__init__(episode_length=10**9)

class Fragile(Long):
    def step(self, action):
        if action == 1:
            print("simulator: no license", file=sys.stderr, flush=True)
            os._exit(3)
        return super().step(action)

cluster = Cluster(initialize_head=True, head_node_args=dict(
    num_cpus=1, include_dashboard=False, resources={"near": 1}))
node = cluster.add_node(num_cpus=1, resources={"far": 1})
ray.init(address=cluster.address, **QUIET)
env = envfleet.ParallelPyEnvironment(
    [Long, Fragile], actor_options=[{"resources": {"near": 1}}, {"resources": {"far": 1}}],
    on_failure="restart", max_restarts=1, start_timeout=30.0)
env.reset()
print("cut:", env.step([0, 1]).step_type)
print("first:", env.step([0, 0]).step_type)
print("on:", env.step([0, 0]).step_type)
print("died:", env.failures[0].message.replace(chr(10), " / "))
cluster.remove_node(node, allow_graceful=False)
deadline = time.monotonic() + 60
while len(env.failures) < 2 and time.monotonic() < deadline:  # its processes take a moment to end
    env.step([0, 0])
print("lost:", env.failures[1].message.replace(chr(10), " / "))
env.close()
ray.shutdown()
cluster.shutdown()
""",
        RAY_TMPDIR=f"/tmp/ef{os.getpid()}",
    )
    assert re.search(r"^cut: \[1 2\]\nfirst: \[1 0\]\non: \[1 1\]$", out, re.M), out
    assert re.search(
        r"^died: env 1 .*last lines of its stderr: / simulator: no license$", out, re.M
    )
    assert re.search(r"^lost: env 1 of 2: its process died in step\(\).* node ", out, re.M), out
