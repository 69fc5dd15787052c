"""A cluster that grows by Ray's autoscaler, whose machines do not come."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_table import kill, marked
from ray.autoscaler._private.util import prepare_config

pytestmark = pytest.mark.cluster

# Workers of a network that is for documentation: nobody answers there.
CONFIG = {
    "cluster_name": "growing",
    "provider": {"type": "local", "head_ip": "127.0.0.1", "worker_ips": ["192.0.2.250"]},
    "auth": {"ssh_user": "nobody"},
    "head_start_ray_commands": ["true"],
    "worker_start_ray_commands": ["true"],
}

PROGRAM = """
import logging, sys
import ray
import envfleet
from envfleet.testing import ProbeEnv

logging.basicConfig(format="%(message)s")
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
try:
    envfleet.ParallelPyEnvironment(
        [ProbeEnv] * 3, actor_options={"num_cpus": 1}, start_timeout=12.0)
except envfleet.FleetStartError as error:
    print(error)
"""


@contextlib.contextmanager
def head(version: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The head of a new cluster with an autoscaler: its address, and the environment it has."""
    directory = Path(tempfile.mkdtemp(prefix="scale-"))  # short, for the names of Ray's sockets
    mark = f"growing-{os.getpid()}-{version}"
    environment = {
        **os.environ,
        "RAY_enable_autoscaler_v2": version,
        "RAY_TMPDIR": str(directory),
        "HOME": str(directory),
        "MARK_OF_THE_TEST": mark,
    }
    if version == "1":  # as `ray up` has it
        environment["RAY_NODE_TYPE_NAME"] = "local.cluster.node"
    config = directory / "config.yaml"
    config.write_text(json.dumps(prepare_config(CONFIG)))  # which is YAML, too
    ray = Path(sys.executable).parent / "ray"
    command = [str(ray), "start", "--head", "--port=0", "--num-cpus=1", "--block"]
    command += ["--include-dashboard=false", f"--autoscaling-config={config}"]
    command += [f"--temp-dir={directory}"]
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = ""
    try:
        for line in iter(started.stdout.readline, ""):
            said += line
            if "--address='" in line:
                yield line.split("'")[1], environment
                return
        pytest.fail(said)
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(20)
        kill(marked(mark))
        started.kill()
        started.wait()
        started.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("version", ["0", "1"])
def test_who_does_not_fit_waits_for_the_autoscaler_as_long_as_a_start_may_take(version):
    with head(version) as (address, environment):
        # At once: the autoscaler has not reported yet.
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, address],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )
    assert "2 of 3 actors will wait for the autoscaler, up to 12 s" in done.stderr, done
    assert "\n1 of 3 actors started in 12.0 s" in f"\n{done.stdout}", done
