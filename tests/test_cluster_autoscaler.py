"""A cluster that grows: Ray's own autoscaler, whose nodes are processes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from nodes import descendants, until

from envfleet import FleetStartError, ParallelPyEnvironment
from envfleet.testing import ProbeEnv

pytestmark = pytest.mark.cluster

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # the provider's name for it
CONFIG = {
    "cluster_name": "growing",
    "max_workers": 2,
    "provider": {"type": "fake_multinode", "launch_multiple": True, "head_node_id": HEAD_ID},
    "available_node_types": {
        "head": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 2},
    },
    "head_node_type": "head",
    "idle_timeout_minutes": 10,
    "upscaling_speed": 10.0,
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(params=["1", "0"], ids=["v2", "v1"])
def autoscaler(request):
    """The version of the autoscaler of a cluster that this process is connected to."""
    directory = Path(tempfile.mkdtemp(prefix="grow-"))
    (directory / "config.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={address.split(':')[1]}", "--num-cpus=1"),
        *(f"--ray-client-server-port={free_port()}", "--include-dashboard=false"),
        *(f"--autoscaling-config={directory}/config.yaml", f"--temp-dir={directory}"),
        "--object-store-memory=100000000",
    ]
    growing = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": request.param,
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_TMPDIR": str(directory),
    }
    with open(directory / "said", "w") as said:
        head = subprocess.Popen(
            command, env={**os.environ, **growing}, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: "Ray runtime started." in (directory / "said").read_text())
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        yield request.param
    finally:
        ray.shutdown()
        for pid in (*descendants(head.pid), head.pid):
            os.kill(pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(directory, ignore_errors=True)


def test_batch_waits_for_the_autoscaler_and_says_so(autoscaler, caplog):
    with ParallelPyEnvironment([ProbeEnv] * 3, actor_options={"num_cpus": 1}) as batch:
        assert batch.reset().step_type.tolist() == [0] * 3
        assert len({actor.node for actor in batch.actors}) == 2
    (said,) = [one for one in caplog.messages if "will wait" in one]
    assert "2 of 3 actors will wait for the autoscaler, up to 120 s (start_timeout)" in said
    if autoscaler == "1":  # it tells where it ends
        with pytest.raises(FleetStartError, match="autoscaler ends at 5 CPU: it can never"):
            ParallelPyEnvironment([ProbeEnv] * 6, actor_options={"num_cpus": 1})
