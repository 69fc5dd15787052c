"""Two nodes in network namespaces of their own, and the link between them cut."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def may_make_networks():
    """Whether this machine lets us."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ef{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not may_make_networks(), reason="needs root, ip, network namespaces"),
]

HEAD, WORKER = "10.213.77.1", "10.213.77.2"

PROGRAM = """
import functools, json, os, subprocess, sys, time
import numpy as np
from envfleet import ParallelPyEnvironment
from envfleet.testing import ProbeEnv

link, timeout = sys.argv[1], float(sys.argv[2])
long = functools.partial(ProbeEnv, episode_length=1000)
with ParallelPyEnvironment([long] * 4, on_failure="restart", step_timeout=timeout) as batch:
    batch.reset()
    actions = np.zeros(4, np.int64)
    for _ in range(5):
        batch.step(actions)
    homes = [actor.node.split()[0] for actor in batch.actors]
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    began = time.monotonic()
    steps = [batch.step(actions)]
    seconds = time.monotonic() - began
    steps += [batch.step(actions) for _ in range(3)]
    print(json.dumps({
        "homes": homes,
        "seconds": seconds,
        "step_type": [step.step_type.tolist() for step in steps],
        "count": [step.observation["step"].tolist() for step in steps],
        "failures": [failure.type_name for failure in batch.failures],
        "after": [actor.node.split()[0] for actor in batch.actors],
    }))
"""


@pytest.fixture
def link():
    """Two namespaces with Ray in each; the name of the head's end of what joins them."""
    tag = f"ef{os.getpid()}"
    head, worker, ends = f"{tag}h", f"{tag}w", (f"{tag}a", f"{tag}b")
    directory = tempfile.mkdtemp(prefix="net-")
    with contextlib.ExitStack() as made:
        made.callback(shutil.rmtree, directory, ignore_errors=True)
        for space in (head, worker):
            ip("netns", "add", space)
            made.callback(ip, "netns", "del", space)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip((head, worker), ends, (HEAD, WORKER), strict=True):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
        options = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={directory}"]
        made.enter_context(ray_start(head, directory, HEAD, *options))
        made.enter_context(ray_start(worker, directory, WORKER, f"--address={HEAD}:6379"))
        yield head, ends[0]


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def inside(space, directory, *command, **more):
    env = {**os.environ, "RAY_TMPDIR": directory}
    env.pop("RAY_ADDRESS", None)
    return subprocess.Popen(["ip", "netns", "exec", space, *command], env=env, **more)


@contextlib.contextmanager
def ray_start(space, directory, address, *options):
    """A node, until its whole process group is ended."""
    ray = str(Path(sys.executable).with_name("ray"))
    said = Path(directory) / f"{space}.log"
    command = [ray, "start", f"--node-ip-address={address}", "--num-cpus=2", "--block", *options]
    command += ["--object-store-memory=100000000"]
    with open(said, "w") as log:
        node = inside(
            space, directory, *command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while "Ray runtime started." not in said.read_text():
            assert node.poll() is None, said.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(0.2)
        yield
    finally:
        for pid in subprocess.run(
            ["ip", "netns", "pids", space], capture_output=True, text=True
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        node.wait()


def test_cut_link_costs_each_environment_behind_it_one_episode(link, tmp_path):
    space, end = link
    (tmp_path / "program.py").write_text(PROGRAM)
    timeout = 4.0
    program = inside(
        space,
        str(tmp_path),
        *("env", f"RAY_ADDRESS={HEAD}:6379"),
        *(sys.executable, str(tmp_path / "program.py"), end, str(timeout)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = program.communicate(timeout=120)
    finally:
        program.kill()
    assert program.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    behind = [i for i, home in enumerate(told["homes"]) if home == WORKER]
    assert len(behind) == 2
    assert told["seconds"] < 2 * timeout
    kinds = [
        [2 if i in behind else 1 for i in range(4)],
        [0 if i in behind else 1 for i in range(4)],
    ]
    assert told["step_type"] == [*kinds, [1] * 4, [1] * 4]
    assert told["count"] == [
        [5 if i in behind else 6 + n for i in range(4)]
        if n == 0
        else [n - 1 if i in behind else 6 + n for i in range(4)]
        for n in range(4)
    ]
    assert told["failures"] == ["envfleet.errors.EnvTimeout"] * 2
    assert told["after"] == [HEAD] * 4
