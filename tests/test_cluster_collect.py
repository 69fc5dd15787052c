"""Collecting over several nodes into one dataset, with a node and the caller killed on the way."""

from __future__ import annotations

import signal

import pytest
import ray
from nodes import Nodes, connected

pytest.importorskip("pyarrow", reason="needs envfleet[collect], see `make test-cluster`")

from datasets import check_sound, command, expected_episode, rows_by_episode, shards_of, until

from envfleet.collect import load
from envfleet.collect.shards import read

pytestmark = pytest.mark.cluster

ASKED = 3000


@pytest.fixture
def nodes():
    nodes = Nodes(workers=2, num_cpus=2, head={"num_cpus": 2})
    try:
        with connected(nodes):
            yield nodes
    finally:
        nodes.stop()


def collecting(directory):
    """The command: three workers with two environments each; it goes on with what is there."""
    return command(
        directory,
        f"collect.max_episodes = {ASKED}",
        resume=True,
        **{"Collector.num_actors": 3, "Collector.step_timeout": 2.0, "Collector.max_restarts": 50},
    )


def homes(directory):
    """On how many nodes the workers are."""
    live = ray._private.state.actors().values()
    return {
        actor["Address"]["NodeID"]
        for actor in live
        if actor["ActorClassName"] == "RayEnvActor" and actor["State"] == "ALIVE"
    }


def more_shards(directory, running, number):
    before = len(shards_of(directory))
    until(lambda: len(shards_of(directory)) >= before + number, running)


def test_dataset_over_three_nodes_survives_the_loss_of_one_and_of_its_caller(nodes, tmp_path):
    directory = tmp_path / "set"
    with collecting(directory) as running:
        until(lambda: len(shards_of(directory)) >= 6, running)
        assert homes(directory) == {node.node_id for node in (nodes.head, *nodes.workers)}
        nodes.kill(nodes.workers[0])
        more_shards(directory, running, 4)
        check_sound(directory)
        running.send_signal(signal.SIGKILL)
        running.wait()
    check_sound(directory)
    with collecting(directory) as running:
        more_shards(directory, running, 4)
        nodes.kill(nodes.workers[0])  # the last one: what is left is the head
        output, _ = running.communicate(timeout=180)
        assert running.returncode == 0, output
    dataset = load(directory)
    found, others = rows_by_episode(dataset), dataset.episodes().attempts
    assert sorted(found) == [*range(ASKED)]
    assert {k: rows for k, rows in found.items() if k not in others} == {
        k: expected_episode(k) for k in found if k not in others
    }
    assert len(others) < 20
    assert len({read(path).node for path in shards_of(directory)}) >= 1
    assert not (directory / "_staging").exists()
