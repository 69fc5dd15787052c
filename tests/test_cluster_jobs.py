"""Real jobs, submitted to a cluster of three nodes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import Nodes

pytest.importorskip("aiohttp", reason="needs ray[default], see `make test-cluster`")
pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dashboard():
    """Where to submit to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": port}
    with pytest.MonkeyPatch.context() as patch:
        # "python" on the nodes is the one that has the packages, as in a cluster's image.
        patch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
        nodes = Nodes(workers=2, num_cpus=2, head=head)
    yield f"http://127.0.0.1:{port}"
    nodes.stop()


@pytest.fixture
def working_dir(tmp_path):
    """What a user has: a directory with a program, its modules and its configuration."""
    shutil.copytree(ROOT / "examples", tmp_path / "work" / "examples")
    return tmp_path / "work"


def submit(dashboard, working_dir, *command):
    ray = str(Path(sys.executable).with_name("ray"))
    return subprocess.run(
        [ray, "job", "submit", "--address", dashboard, "--working-dir", ".", "--", *command],
        cwd=working_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


JOB = ("python", "examples/cluster_job.py", "--gin_file=examples/cluster_job.gin")


def test_job_runs_on_every_node_and_its_log_says_so(dashboard, working_dir):
    done = submit(dashboard, working_dir, *JOB, "--gin_bindings=run.num_steps=60")
    assert done.returncode == 0, done.stdout
    # The steps are gin's; environments are of the script, of a module beside it, and lambdas.
    assert "60 steps of 6 environments on 3 nodes" in done.stdout
    table = re.findall(r"^\S+ ([0-9a-f]{8})  +(\d)  +[0-9a-f]{12}  +\d+  +rpc$", done.stdout, re.M)
    assert len({node for node, _ in table}) == 3
    assert sorted(int(env) for _, env in table) == [0, 1, 2, 3, 4, 5]
    assert "succeeded" in done.stdout


def test_job_whose_environment_raises_fails_with_its_traceback(dashboard, working_dir):
    bindings = ("ParallelPyEnvironment.on_failure='raise'", "run.breaks_at=3")
    done = submit(dashboard, working_dir, *JOB, *(f"--gin_bindings={one}" for one in bindings))
    assert done.returncode == 1
    assert "RuntimeError: the ice breaks at 3" in done.stdout
    assert "examples/envs.py" in done.stdout  # the environment's own line
    assert re.search("raised by env [25] in step", done.stdout)


def test_job_collects_a_dataset_as_the_documentation_says(dashboard, working_dir, tmp_path):
    """docs/collection.md, "On a cluster": the files beside each other, in the working directory."""
    pytest.importorskip("pyarrow")
    from envfleet.collect import load

    command = [
        "envfleet-collect",
        "--gin_file=collect_cartpole.gin",
        f"--output_dir={tmp_path}/set",
    ]
    command += [
        "--gin_bindings=collect.max_episodes = 40",
        "--gin_bindings=Collector.num_actors = 3",
    ]
    done = submit(dashboard, working_dir / "examples", *command)
    assert done.returncode == 0, done.stdout
    assert len(load(tmp_path / "set")) == 40
