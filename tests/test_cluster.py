"""Batches on several nodes: where environments go, and what the loss of a node costs."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from nodes import Nodes, connected, until
from ray.core.generated.autoscaler_pb2 import ClusterConfig
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import envfleet
from envfleet import FleetStartError, ParallelPyEnvironment
from envfleet.testing import DelayEnv, ProbeEnv

pytestmark = pytest.mark.cluster

STEP_TIMEOUT = 3.0


@pytest.fixture(scope="module")
def cluster():
    """A head and two workers with two CPUs each."""
    nodes = Nodes(workers=2, num_cpus=2, head={"num_cpus": 2})
    try:
        with connected(nodes):
            yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def nodes(cluster):
    """The same, whatever the test before has done to it."""
    cluster.restore()
    cluster.bury()
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, 120)
    until(lambda: ray.available_resources().get("CPU") == 6.0)
    return cluster


def by_node(batch):
    """By the node's id, its environments."""
    found = collections.defaultdict(list)
    for one in batch.actors:
        found[one.node.split()[1]] += one.env_ids
    return dict(found)


def short(node):
    return node.node_id[:8]


def counts(batch):
    return sorted(map(len, by_node(batch).values()))


def step(batch):
    return batch.step(np.zeros(batch.batch_size, np.int64))


# -- placement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_cpus": 1}], ids=["default", "a cpu each"])
def test_environments_spread_evenly_over_the_nodes(nodes, options, capsys):
    with ParallelPyEnvironment([ProbeEnv] * 6, actor_options=options) as batch:
        assert counts(batch) == [2, 2, 2]
        batch.describe()
        # Each process is on the node that stands in its line.
        homes = {pid: node for node in (nodes.head, *nodes.workers) for pid in nodes.pids(node)}
        ids = {one for one, actor in ray._private.state.actors().items() if is_alive(actor)}
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["node", "envs", "actor", "pid", "transport"]
    table = [line.split() for line in lines]
    assert sorted(envs for _, _, envs, _, _, _ in table) == ["0", "1", "2", "3", "4", "5"]
    assert len([*itertools.groupby(table, lambda row: row[1])]) == 3  # node by node
    for address, node, _, actor, pid, transport in table:
        home = homes[int(pid)]
        assert (address, node) == (home.node_ip_address, short(home))
        assert transport == "rpc"
        assert [one.startswith(actor) for one in ids].count(True) == 1


def is_alive(actor):
    return actor["ActorClassName"] == "RayEnvActor" and actor["State"] == "ALIVE"


def test_actors_elsewhere_are_stepped_by_remote_calls_in_the_same_batch(nodes, caplog):
    with caplog.at_level(logging.INFO, "envfleet"):
        batch = ParallelPyEnvironment([Long] * 6, transport="shared_memory", step_timeout=20.0)
    with batch:
        told = [words for words in caplog.messages if "shared memory" in words]
        assert told == ["2 of 6 actors are stepped by shared memory, 4 by remote calls"]
        here = short(nodes.head)
        for one in batch.actors:
            is_here = one.node.split()[1] == here
            assert one.transport == ("shared_memory" if is_here else "rpc")
        batch.reset()
        for n in range(3):
            assert step(batch).observation["step"].tolist() == [n + 1] * 6
        batch.send(np.zeros(6, np.int64))
        received = []
        while len(received) < 6:
            received += batch.recv(min_envs=1)[1].tolist()
        assert sorted(received) == [*range(6)]


def test_packed_environments_share_the_callers_node_while_it_has_cores(nodes):
    with ParallelPyEnvironment([ProbeEnv] * 2, placement="pack") as batch:
        assert [*by_node(batch)] == [short(nodes.head)]
    with ParallelPyEnvironment([ProbeEnv] * 4, placement="pack") as batch:
        assert counts(batch) == [2, 2]


def test_strictly_spread_actors_have_a_node_each(nodes):
    with ParallelPyEnvironment([ProbeEnv] * 6, envs_per_actor=2, placement="strict_spread") as b:
        assert counts(b) == [2, 2, 2]
    with pytest.raises(FleetStartError, match=r"1 of 4 actors .* each on a node of its own"):
        ParallelPyEnvironment([ProbeEnv] * 4, placement="strict_spread")


def test_placement_may_be_a_group_or_a_strategy_of_rays(nodes):
    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    worker = nodes.workers[1].node_id
    there = NodeAffinitySchedulingStrategy(worker, soft=False)
    try:
        with ParallelPyEnvironment([ProbeEnv] * 2, placement=group) as batch:
            assert counts(batch) == [2]
        with ParallelPyEnvironment([ProbeEnv] * 2, placement=there) as batch:
            assert [*by_node(batch)] == [worker[:8]]
            assert batch.rebalance() == []  # the user has said where they belong
        with ParallelPyEnvironment([ProbeEnv] * 2, placement="DEFAULT") as batch:
            assert counts(batch) in ([2], [1, 1])  # wherever Ray likes
        with pytest.raises(FleetStartError, match=r"4 actors of 1 CPU .* the bundles \[\{'CPU'"):
            ParallelPyEnvironment([ProbeEnv] * 4, placement=group, actor_options={"num_cpus": 1})
    finally:
        remove_placement_group(group)


def test_environments_may_have_resources_and_labels_of_their_own(nodes):
    labelled = nodes.add(resources={"simulator": 1}, labels={"kind": "fast"})
    options = [{"resources": {"simulator": 1}}, {"label_selector": {"kind": "fast"}}, {}]
    with ParallelPyEnvironment([ProbeEnv] * 3, actor_options=options) as batch:
        homes = [one.node.split()[1] for one in batch.actors]
    assert homes[:2] == [short(labelled)] * 2
    assert homes[2] != short(labelled)


class Holder:
    def hold(self):
        pass


def test_start_waits_for_room_says_so_and_how_far_it_is(nodes, caplog):
    """The caller gives back what was missing as soon as a line says that it is missing."""
    there = NodeAffinitySchedulingStrategy(nodes.workers[0].node_id, soft=False)
    holder = ray.remote(Holder).options(num_cpus=2, scheduling_strategy=there).remote()
    ray.get(holder.hold.remote())
    until(lambda: ray.available_resources().get("CPU") == 4.0)

    def give_back():
        until(lambda: "4 of 6 actors started after 5 s; waiting for" in caplog.text)
        ray.kill(holder)

    with concurrent.futures.ThreadPoolExecutor() as pool, caplog.at_level("INFO", "envfleet"):
        given_back = pool.submit(give_back)
        with ParallelPyEnvironment([ProbeEnv] * 6, actor_options={"num_cpus": 1}) as batch:
            assert counts(batch) == [2, 2, 2]
        given_back.result()
    before, *_ = caplog.messages
    assert "asked for 6 x 1 CPU; the cluster (3 nodes) has 6 CPU of which 4 free" in before
    assert "2 of 6 actors will wait for what others hold, up to 120 s (start_timeout)" in before


def test_more_than_an_autoscaler_may_bring_is_an_error_at_once(nodes):
    """Its limits as Ray keeps them. None of Ray's own autoscalers tells them, in 2.60."""

    def start(num_envs, options, start_timeout):
        ParallelPyEnvironment(
            [ProbeEnv] * num_envs, actor_options=options, start_timeout=start_timeout
        )

    limits = ClusterConfig()
    limits.node_group_configs.add(name="environments", max_count=5, resources={"CPU": 2})
    with telling(limits):
        words = r"asked for 12 x 1 CPU; .* its autoscaler ends at 10 CPU: it can never be enough"
        with pytest.raises(FleetStartError, match=words):
            start(12, {"num_cpus": 1}, 20.0)
        with pytest.raises(FleetStartError, match="ends at 0 unicorn: it can never be enough"):
            start(1, {"resources": {"unicorn": 1}}, 20.0)
        # So many it could bring, though it does not.
        with pytest.raises(FleetStartError, match=r"^[0-6] of 10 actors started in 2\.0 s"):
            start(10, {"num_cpus": 1}, 2.0)


@contextlib.contextmanager
def telling(limits):
    """Meanwhile Ray knows these limits of the cluster's autoscaler."""
    ray_knows = ray._private.worker.global_worker.gcs_client
    ray_knows.report_cluster_config(limits.SerializeToString())
    try:
        yield
    finally:
        ray_knows.report_cluster_config(ClusterConfig().SerializeToString())


def in_a_trial(bundles, *, num_envs, **arguments):
    """What a batch does in a task that holds the first bundle of a group, as a trial of Tune's."""

    def trial():
        try:
            with ParallelPyEnvironment([ProbeEnv] * num_envs, **arguments) as batch:
                return by_node(batch)
        except FleetStartError as error:
            return str(error)

    group = placement_group(bundles)
    inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    try:
        task = ray.remote(trial).options(num_cpus=1, scheduling_strategy=inside)
        return ray.get(task.remote(), timeout=120)
    finally:
        remove_placement_group(group)


def test_batch_of_a_trial_lives_in_the_placement_group_of_the_trial(nodes):
    """As Ray Tune and Ray Train start theirs."""
    found = in_a_trial([{"CPU": 1}, {"CPU": 1}], num_envs=3)
    assert sum(map(len, found.values())) == 3
    assert len(found) <= 2
    words = in_a_trial([{"CPU": 1}], num_envs=3)
    assert "3 actors of 1 CPU" in words
    assert "[{'CPU': 1.0}], of which 1 CPU are this worker's own" in words
    assert "tune.PlacementGroupFactory([{'CPU': 1}] + [{'CPU': 1}] * 3)" in words
    found = in_a_trial([{"CPU": 1}], num_envs=3, placement="spread")
    assert len(found) == 3


def test_versions_that_differ_are_named(nodes, tmp_path):
    source = Path(envfleet.__file__).parent
    shutil.copytree(source, tmp_path / "envfleet")
    (tmp_path / "envfleet" / "version.py").write_text('__version__ = "0.0.7"\n')
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    with pytest.raises(FleetStartError, match=r"env 0: envfleet is 0\.0\.7 on node .* and 0\.1"):
        ParallelPyEnvironment([ProbeEnv], actor_options=options)


PRETENDING = """
import collections, sys
import envfleet, ray
from envfleet.testing import ProbeEnv

Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
{pretends}
envfleet.ParallelPyEnvironment([ProbeEnv])
"""


@pytest.mark.parametrize(
    ("pretends", "words"),
    [
        ("ray.__version__ = '2.59.1'", ["Ray: 2.59.1", f"Ray: {ray.__version__}"]),
        ("sys.version_info = Version(3, 11, 99, 'final', 0)", ["Python: 3.11.99"]),
    ],
    ids=["ray", "python"],
)
def test_caller_of_another_version_than_the_clusters_is_told_both(nodes, pretends, words):
    done = subprocess.run(
        [sys.executable, "-c", PRETENDING.format(pretends=pretends)],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    told = done.stderr[done.stderr.rindex("RuntimeError: Version mismatch") :]
    assert all(one in told for one in words), told


PRINTING = """
import envfleet.testing

class Printing(envfleet.testing.ProbeEnv):
    def reset(self):
        print("here I am")
        return super().reset()

with envfleet.ParallelPyEnvironment([Printing] * 3, envs_per_actor=2) as batch:
    batch.reset()
    import time; time.sleep(1)  # Ray brings what was printed a little later
"""


def test_what_environments_print_says_which_they_are(nodes, tmp_path):
    (tmp_path / "program.py").write_text(PRINTING)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": nodes.address, "RAY_COLOR_PREFIX": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    for name in ("EnvActor(envs=0..1)", "EnvActor(env=2)"):
        assert re.search(re.escape(f"({name} pid=") + r"\d+.*\) here I am", printed), printed


# -- nodes that are lost ---------------------------------------------------------------------------


def steps_through(batch, lost, num_steps=12):
    """Steps a batch, some of whose environments are lost in the first step; gives its seconds.

    Each of those shows one truncated LAST and then FIRST, and nobody else notices.
    """
    before = batch.current_time_step().observation["step"].copy()
    began = time.monotonic()
    time_step = step(batch)
    seconds = time.monotonic() - began
    for i in range(batch.batch_size):
        if i in lost:
            assert (time_step.step_type[i], time_step.discount[i], time_step.reward[i]) == (2, 1, 0)
            assert time_step.observation["step"][i] == before[i]
        else:
            assert time_step.step_type[i] == 1
            assert time_step.observation["step"][i] == before[i] + 1
    assert step(batch).step_type.tolist() == [0 if i in lost else 1 for i in range(6)]
    for _ in range(num_steps):
        assert step(batch).step_type.tolist() == [1] * batch.batch_size
    failures = [0] * batch.batch_size
    for i in lost:
        failures[i] = 1
    assert batch.num_failures == failures
    return seconds


Long = functools.partial(ProbeEnv, episode_length=10**9)  # none ends while a test waits for a node


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_lost_node_costs_each_of_its_environments_one_episode_and_nothing_else(nodes, how):
    lost_node = nodes.workers[0]
    with ParallelPyEnvironment([Long] * 6, on_failure="restart", step_timeout=STEP_TIMEOUT) as b:
        b.reset()
        for _ in range(5):
            step(b)
        lost = by_node(b)[short(lost_node)]
        assert len(lost) == 2
        getattr(nodes, how)(lost_node)
        seconds = steps_through(b, lost)
        assert seconds < STEP_TIMEOUT + 3
        assert short(lost_node) not in by_node(b)
        assert counts(b) == [3, 3]


def test_node_lost_within_a_step_is_noticed_in_that_step(nodes):
    slow = functools.partial(DelayEnv, 2.0)
    with ParallelPyEnvironment([slow] * 6, on_failure="restart", step_timeout=30.0) as batch:
        batch.reset()
        lost = by_node(batch)[short(nodes.workers[0])]
        promise = batch.post_step(np.zeros(6, np.int64))
        time.sleep(0.5)
        nodes.kill(nodes.workers[0])
        time_step = promise()
        assert [i for i in range(6) if time_step.step_type[i] == 2] == lost
        assert batch.num_failures == [int(i in lost) for i in range(6)]


def test_without_restart_a_lost_node_is_raised_and_a_reset_comes_back_elsewhere(nodes):
    with ParallelPyEnvironment([Long] * 6, step_timeout=STEP_TIMEOUT) as batch:
        batch.reset()
        lost = by_node(batch)[short(nodes.workers[1])]
        nodes.kill(nodes.workers[1])
        with pytest.raises(envfleet.ActorDied, match=f"env {lost[0]} of 6"):
            step(batch)
        assert batch.reset().step_type.tolist() == [0] * 6
        assert counts(batch) == [3, 3]


def test_environments_without_room_wait_and_say_so(nodes, caplog):
    options = {"num_cpus": 1}
    with ParallelPyEnvironment(
        [Long] * 6, on_failure="restart", step_timeout=STEP_TIMEOUT, actor_options=options
    ) as batch:
        batch.reset()
        lost = by_node(batch)[short(nodes.workers[0])]
        nodes.kill(nodes.workers[0])
        working = [i for i in range(6) if i not in lost]
        batch.send(np.zeros(6, np.int64))
        received = set()
        with caplog.at_level(logging.WARNING, "envfleet"):
            # The others go on all the while.
            end = time.monotonic() + 60
            while "for resources or a process" not in caplog.text:
                assert time.monotonic() < end
                _, ids = batch.recv(timeout=1.0)
                received |= {*ids.tolist()}
                batch.send(np.zeros(len(ids), np.int64), ids)
        assert received == set(range(6))  # each of the lost with its LAST
        said = next(one for one in caplog.messages if "for resources or a process" in one)
        assert re.match(r"envs? \d.* waits? for .*; asked for \d x 1 CPU; the cluster \(", said)
        assert "0 free" in said
        joined = nodes.add()
        end = time.monotonic() + 120
        back = set()
        while back != set(lost):
            assert time.monotonic() < end
            time_step, ids = batch.recv(timeout=1.0)
            back |= {
                i for i, kind in zip(ids.tolist(), time_step.step_type, strict=True) if not kind
            }
            batch.send(np.zeros(len(ids), np.int64), ids)
        assert sorted(by_node(batch)[short(joined)]) == lost
        assert set(working).isdisjoint(back)


def test_start_is_not_lost_with_a_node_that_ray_still_believes_in(nodes, caplog):
    nodes.kill(nodes.workers[0])
    with ParallelPyEnvironment([ProbeEnv] * 6) as batch:
        assert counts(batch) == [3, 3]
        assert batch.reset().step_type.tolist() == [0] * 6
        assert batch.num_failures == [0] * 6
    assert "does not answer" in caplog.text


# -- nodes that join -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["asked", "by itself"])
def test_node_that_joined_takes_its_share(nodes, how):
    nodes.kill(nodes.workers[0])
    nodes.bury()
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
    arguments = {"rebalance_seconds": 0.05} if how == "by itself" else {}
    with ParallelPyEnvironment([Long] * 6, **arguments) as batch:
        batch.reset()
        step(batch)
        assert counts(batch) == [3, 3]
        nodes.add()
        if how == "asked":
            moved = batch.rebalance()
            time_step = step(batch)
        else:
            time.sleep(0.1)
            time_step = step(batch)
            moved = [i for i in range(6) if time_step.step_type[i] == 2]
        assert len(moved) == 2
        assert [i for i in range(6) if time_step.step_type[i] == 2] == moved
        assert time_step.discount.tolist() == [1.0] * 6
        assert step(batch).step_type.tolist() == [0 if i in moved else 1 for i in range(6)]
        assert counts(batch) == [2, 2, 2]
        assert batch.num_failures == [0] * 6
        assert batch.rebalance() == []
