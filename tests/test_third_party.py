"""Environments of others: they step in actors as they do in this process."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import tree

from envfleet.interop.dm_env import RayEnvironment
from envfleet.interop.gymnasium import RayVectorEnv

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

suite = pytest.importorskip(
    "dm_control.suite", reason="dm_control is not installed: make test-peers"
)
pytest.importorskip("minigrid", reason="MiniGrid is not installed: make test-peers")
pytest.importorskip("highway_env", reason="highway-env is not installed: make test-peers")

TASKS = ["cartpole/swingup", "cheetah/run", "reacher/easy"]


def load_task(name: str, seed: int) -> Any:
    return suite.load(*name.split("/"), task_kwargs={"random": seed})


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("way", ["constructor", "name"])
def test_dm_control_gives_what_it_gives_alone(name, way, make_batch):
    """By the seed of a constructor of one's own, and by the batch's seeds for a name."""
    if way == "constructor":
        batch = make_batch([functools.partial(load_task, name, seed) for seed in (3, 4)])
    else:
        batch = make_batch([f"dm_control:{name}"] * 2, seed=[3, 4])
    with batch:
        alone = [load_task(name, seed) for seed in (3, 4)]
        spec = batch.action_spec()
        assert spec == alone[0].action_spec()
        assert batch.observation_spec() == alone[0].observation_spec()
        time_step, expected = batch.reset(), [env.reset() for env in alone]
        random = np.random.default_rng(0)
        for _ in range(1020):  # an episode has 1000 steps
            for i, one in enumerate(expected):
                assert time_step.step_type[i] == one.step_type
                assert time_step.reward[i] == (one.reward or 0.0)
                assert time_step.discount[i] == (1.0 if one.first() else one.discount)
                for key, value in one.observation.items():
                    found = time_step.observation[key][i]
                    assert np.asarray(found).tobytes() == np.asarray(value).tobytes(), key
            actions = random.uniform(spec.minimum, spec.maximum, (2, *spec.shape))
            time_step = batch.step(actions)
            expected = [env.step(action) for env, action in zip(alone, actions, strict=True)]


def test_one_seed_gives_dm_control_environments_that_differ(make_batch):
    seen = []
    for _ in range(2):
        with make_batch("dm_control:cartpole/swingup", num_envs=3, seed=7) as batch:
            seen.append(batch.reset().observation["position"])
    assert len(np.unique(seen[0], axis=0)) == 3
    assert np.array_equal(*seen)


def test_composer_environments_are_seeded_too(make_batch):
    from dm_control.locomotion.examples import basic_cmu_2019

    with make_batch([basic_cmu_2019.cmu_humanoid_go_to_target] * 2, seed=3) as batch:
        target = batch.reset().observation["walker/target"]
        assert not np.array_equal(target[0], target[1])


def test_dm_control_in_dm_envs_terms(backend):
    env = RayEnvironment("dm_control:cartpole/balance", num_envs=2, backend=backend, seed=1)
    one = env.single(1)
    assert one.reset().reward is None
    assert 0 <= one.step(np.zeros(1)).reward <= 1
    env.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dm_control:cartpol/swingup", "no domain 'cartpol'.*cartpole"),
        ("dm_control:cartpole/swing", "'cartpole' has no task 'swing'.*swingup"),
        ("dm_control:cartpole", "'cartpole' has no task ''"),
    ],
)
def test_task_that_dm_control_does_not_have_says_which_there_are(name, words, make_batch):
    with pytest.raises(ValueError, match=words):
        make_batch(name, num_envs=1)


# -- Gymnasium environments of others --------------------------------------------------------------


def compare(make_batch: Any, env_fn: Any, num_steps: int) -> Any:
    """Steps two of them in a batch and in this process; gives the last time step."""
    with make_batch([env_fn] * 2, seed=[3, 4]) as batch:
        alone = [env_fn() for _ in range(2)]
        for i, env in enumerate(alone):
            env.action_space.seed(i)
        time_step = batch.reset()
        expected: list[Any] = [
            (env.reset(seed=3 + i)[0], 0.0, False) for i, env in enumerate(alone)
        ]
        for _ in range(num_steps):
            for i, (observation, reward, over) in enumerate(expected):
                found = tree.map_structure(lambda leaf, i=i: leaf[i], time_step.observation)
                tree.map_structure(np.testing.assert_array_equal, found, observation)
                assert time_step.reward[i] == reward
                assert (time_step.step_type[i] == 2) == over
            actions = [env.action_space.sample() for env in alone]
            time_step = batch.step(np.stack(actions))
            for i, env in enumerate(alone):
                if expected[i][2]:
                    expected[i] = env.reset()[0], 0.0, False
                else:
                    observation, reward, terminated, truncated, _ = env.step(actions[i])
                    expected[i] = observation, reward, bool(terminated or truncated)
        return time_step


def minigrid(**kwargs: Any) -> Any:
    import minigrid  # noqa: F401  (registers its environments)

    return gymnasium.make("MiniGrid-GoToObject-8x8-N2-v0", **kwargs)


def test_minigrid_and_its_missions_of_words(make_batch):
    time_step = compare(make_batch, functools.partial(minigrid, max_steps=30), 300)
    assert time_step.observation["mission"].dtype == object
    assert all(mission.startswith("go to the") for mission in time_step.observation["mission"])


def test_minigrid_through_the_vector_face(backend):
    envs = RayVectorEnv(["minigrid:MiniGrid-Empty-5x5-v0"] * 2, backend=backend)
    sync = gymnasium.vector.SyncVectorEnv([functools.partial(minigrid_empty)] * 2)
    ours, theirs = envs.reset(seed=1)[0], sync.reset(seed=1)[0]
    for _ in range(50):
        assert ours.keys() == theirs.keys()
        assert ours["mission"] == theirs["mission"]
        assert isinstance(ours["mission"], tuple)
        for key in ("direction", "image"):
            np.testing.assert_array_equal(ours[key], theirs[key])
        actions = np.array([2, 1])
        ours, theirs = envs.step(actions)[0], sync.step(actions)[0]
    envs.close()


def minigrid_empty() -> Any:
    import minigrid  # noqa: F401

    return gymnasium.make("MiniGrid-Empty-5x5-v0")


def highway(name: str) -> Any:
    import highway_env  # noqa: F401

    return gymnasium.make(name)


@pytest.mark.parametrize(("name", "num_steps"), [("parking-v0", 150), ("highway-fast-v0", 60)])
def test_highway_env_gives_what_it_gives_alone(name, num_steps, make_batch):
    compare(make_batch, functools.partial(highway, name), num_steps)


def test_highway_example_compares_with_a_loop():
    done = subprocess.run(
        [sys.executable, "examples/highway.py", "--num_envs", "2", "--steps", "10"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("in this process", "in 2 actors", "times"):
        assert row in done.stdout, done.stdout
