"""What tests of datasets share: the command as a process, and what has to stand in a dataset."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import ray
from test_collector import LAST, expected_episode

from envfleet.collect import load


def rows_of(episode):
    """As `expected_episode` has them."""
    length = len(episode.reward)
    rows = []
    for t in range(length + 1):
        ends = t == length - 1
        here = (t, LAST if t == length else min(t, 1))
        seen = (int(episode.observation["seed"][t]), int(episode.observation["t"][t]))
        if t == length:
            rows.append((*here, *seen, 0, 0.0, 0.0, False, False))
        else:
            done = int(episode.action[t]), float(episode.reward[t]), float(episode.discount[t])
            flags = ends and episode.terminated, ends and episode.truncated
            rows.append((*here, *seen, *done, *flags))
    return rows


def rows_by_episode(dataset):
    found = {episode.episode_id: rows_of(episode) for episode in dataset}
    assert len(found) == len(dataset)
    return found


def expected(number):
    return {k: expected_episode(k) for k in range(number)}


def expected_steps(number):
    """The first so many steps of all episodes; the last one cut short, by truncation."""
    found, k = {}, 0
    while number:
        rows = expected_episode(k)
        length = len(rows) - 1
        if length > number:
            final = (number, LAST, *rows[number][2:4], 0, 0.0, 0.0, False, False)
            rows = [*rows[: number - 1], (*rows[number - 1][:-2], False, True), final]
        found[k] = rows
        number -= len(rows) - 1
        k += 1
    return found


# -- the command, as a process -------------------------------------------------------------------


def settings(backend="ray", **more):
    """A configuration of `SeededEnv` in two actors with two environments each, as bindings."""
    bound = {
        "Collector.env_constructor": "@collecting.SeededEnv",
        "collecting.SeededEnv.seconds": 0.001,
        "Collector.num_actors": 2,
        "Collector.envs_per_actor": 2,
        "Collector.seed": 3,
        "Collector.backend": repr(backend),
        "Collector.on_failure": "'restart'",
        "collect.shard_seconds": 0.1,
        **more,
    }
    return ["import collecting", *(f"{name} = {value}" for name, value in bound.items())]


@contextlib.contextmanager
def command(directory, *bindings, resume=False, backend="ray", **more):
    """The command as a process; on the Ray of the tests."""
    lines = [*settings(backend, **more), *bindings]
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "envfleet.collect", f"--output_dir={directory}"),
            *(f"--gin_bindings={line}" for line in lines),
            *(["--resume"] if resume else []),
        ],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def shards_of(directory):
    return [*Path(directory).glob("data/shard-*.parquet")]


def check_sound(directory):
    """What stands is whole, and nothing stands twice."""
    if not (directory / "dataset.json").exists():
        return
    found = Counter()
    for path in shards_of(directory):
        table = pq.read_table(path)  # torn ones do not open
        found.update(set(table["episode_id"].to_pylist()))
    assert not [k for k, n in found.items() if n > 1]
    rows = rows_by_episode(load(directory, include_cut=False))  # one is, of a run that had ended
    assert rows == {k: expected_episode(k) for k in rows}


def actors_of(directory):
    """Processes of live actors that write there, by what they have open or are called."""
    live = ray._private.state.actors().values()
    return [
        actor["Pid"]
        for actor in live
        if actor["ActorClassName"] == "RayEnvActor" and actor["State"] == "ALIVE" and actor["Pid"]
    ]
