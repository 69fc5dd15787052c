"""What `Dataset.write_transitions` writes is what RLlib's offline reader learns from."""

from __future__ import annotations

import dm_env
import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")
pytest.importorskip("ray.rllib", exc_type=ImportError)

import gymnasium
import pyarrow.parquet as pq
import ray.data
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from test_collect_readers import DISCOUNT, REWARD, bits, write_rows

from envfleet.collect.columns import Columns, numpy_of
from envfleet.environments.gymnasium import spec_from_space

SCHEMA = {
    "eps_id": "episode_id",
    "obs": "observation",
    "new_obs": "next_observation",
    "actions": "action",
    "rewards": "reward",
    "terminateds": "terminated",
    "truncateds": "truncated",
}


def at_random(observation, random):
    return random.integers(2)


def to_the_leaning_side(observation, random):
    return np.int64(observation[2] > 0)


def play(directory, policy, shards=2, episodes=12, limit=25):
    """A dataset of CartPole under a policy, and its rows."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=limit)
    random = np.random.default_rng(0)
    observations = spec_from_space(env.observation_space)
    columns = Columns.of(
        dm_env.TimeStep(None, REWARD, DISCOUNT, observations), spec_from_space(env.action_space)
    )
    names = [name for name in columns.schema.names if name != "cut"]
    written = []
    for shard in range(shards):
        rows = []
        for number in range(shard * episodes, (shard + 1) * episodes):
            observation, _ = env.reset(seed=number)
            t, is_over = 0, False
            while not is_over:
                action = policy(observation, random)
                after, reward, terminated, truncated, _ = env.step(action)
                is_over = terminated or truncated
                came = (reward, 1.0 - terminated, terminated, truncated)
                rows.append((number, 0, t, min(t, 1), observation, action, *came, 0))
                observation, t = after, t + 1
            rows.append((number, 0, t, 2, observation, 0, 0.0, 0.0, False, False, 0))
        values = [np.array(of) for of in zip(*rows, strict=True)]
        types = [columns.schema.field(name).type for name in names]
        written.append(
            {
                name: of if of.ndim > 1 else of.astype(kind.to_pandas_dtype())
                for name, of, kind in zip(names, values, types, strict=True)
            }
        )
    return write_rows(directory, columns, written), written


def configured(config, directory, **training):
    env = gymnasium.make("CartPole-v1")
    return (
        config.environment(observation_space=env.observation_space, action_space=env.action_space)
        .env_runners(num_env_runners=0)
        .learners(num_learners=0)
        .debugging(seed=0)
        .training(train_batch_size_per_learner=128, **training)
        .offline_data(
            input_=[str(directory)],
            input_read_schema=SCHEMA,
            # Instead of RLlib's own "concurrency", of which Ray Data warns.
            map_batches_kwargs={"concurrency": None, "compute": ray.data.ActorPoolStrategy(size=1)},
            dataset_num_iters_per_learner=1,
        )
    )


def losses(config, iterations):
    """The loss of each training iteration."""
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(iterations)]
    finally:
        algorithm.stop()
    return [result["learners"]["default_policy"]["total_loss"] for result in results]


def test_transitions_are_steps_with_what_was_observed_next(tmp_path):
    dataset, written = play(tmp_path / "data", at_random)
    files = dataset.write_transitions(tmp_path / "transitions")
    for file, rows in zip(files, written, strict=True):
        table = pq.read_table(file)
        found = {name: numpy_of(table.column(name)) for name in table.column_names}
        steps = np.flatnonzero(rows["step_type"] != 2)
        assert found.keys() == {*rows, "next_observation"}
        for name, values in rows.items():
            assert bits(found[name]) == bits(values[steps]), name
        assert bits(found["next_observation"]) == bits(rows["observation"][steps + 1])


def test_marwil_trains_on_a_dataset_of_random_actions(tmp_path, session_ray):
    dataset, _ = play(tmp_path / "data", at_random)
    dataset.write_transitions(tmp_path / "transitions")
    found = losses(configured(MARWILConfig(), tmp_path / "transitions"), 2)
    assert np.isfinite(found).all()


def test_behaviour_cloning_learns_the_policy_of_the_dataset(tmp_path, session_ray):
    dataset, _ = play(tmp_path / "data", to_the_leaning_side)
    dataset.write_transitions(tmp_path / "transitions")
    found = losses(configured(BCConfig(), tmp_path / "transitions", lr=3e-3), 80)
    assert np.isfinite(found).all()
    # Of actions that do not belong to their observations nothing could be learnt: it would stay.
    # A median, as each loss is that of one batch.
    assert np.median(found[-10:]) < found[0] / 3
