"""Gymnasium environments in a batch: values, flags, seeds and spaces."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from envfleet import ParallelPyEnvironment
from envfleet.environments.gymnasium import GymnasiumEnvironment, spec_from_space

IDS = ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "Pendulum-v1", "Acrobot-v1"]


@pytest.mark.parametrize("env_id", IDS)
def test_batch_gives_what_the_environments_give(env_id, backend):
    """Step by step against the same environments in this process, with the same seeds."""
    make = functools.partial(gymnasium.make, env_id, max_episode_steps=25)
    with ParallelPyEnvironment([make] * 2, backend=backend, seed=[3, 4]) as batch:
        time_step = batch.reset()
        alone = [make() for _ in range(2)]
        expected = [(env.reset(seed=3 + i)[0], 0.0, 1.0, 0) for i, env in enumerate(alone)]
        for env in alone:
            env.action_space.seed(1)
        for _ in range(120):
            for i, (observation, reward, discount, step_type) in enumerate(expected):
                found = time_step.observation
                found = tuple(f[i] for f in found) if isinstance(found, tuple) else found[i]
                np.testing.assert_array_equal(found, observation)
                assert time_step.reward[i] == reward
                assert time_step.discount[i] == discount
                assert time_step.step_type[i] == step_type
            actions = [env.action_space.sample() for env in alone]
            time_step = batch.step(np.stack(actions))
            for i, env in enumerate(alone):
                if expected[i][3] == 2:
                    expected[i] = (env.reset()[0], 0.0, 1.0, 0)
                    continue
                observation, reward, terminated, truncated, _ = env.step(actions[i])
                over = terminated or truncated
                expected[i] = (observation, reward, 0.0 if terminated else 1.0, 2 if over else 1)


class EndsBothWays(gymnasium.Env):
    observation_space = spaces.Discrete(3, start=5)
    action_space = spaces.Dict({"go": spaces.Discrete(4, start=-2), "how": spaces.Text(9)})

    def reset(self, *, seed=None, options=None):
        return 5, {"seed": seed}

    def step(self, action):
        assert type(action["go"]) is int
        assert type(action["how"]) is str
        return 7, action["go"], action["go"] > 0, True, {"how": action["how"]}


def test_termination_and_truncation_together_are_a_termination(make_batch):
    with make_batch([EndsBothWays] * 2) as batch:
        batch.reset()
        actions = {"go": [1, -2], "how": np.array(["fast", "slow"], object)}
        time_step = batch.step(actions)
        assert time_step.step_type.tolist() == [2, 2]
        assert time_step.discount.tolist() == [0.0, 1.0]
        assert time_step.reward.tolist() == [1.0, -2.0]
        assert time_step.observation.tolist() == [7, 7]
        assert batch.get_info() == [{"how": "fast"}, {"how": "slow"}]


def test_seed_is_given_to_the_next_reset_only(make_batch):
    with make_batch([EndsBothWays] * 2, seed=[8, 9]) as batch:
        batch.reset()
        assert batch.get_info() == [{"seed": 8}, {"seed": 9}]
        batch.reset()
        assert batch.get_info() == [{"seed": None}, {"seed": None}]


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Discrete(4), specs.DiscreteArray(4, np.int64)),
        (spaces.Discrete(4, start=-1), specs.BoundedArray((), np.int64, -1, 2)),
        (spaces.MultiDiscrete([2, 3]), specs.BoundedArray((2,), np.int64, 0, [1, 2])),
        (spaces.MultiBinary((2, 2)), specs.BoundedArray((2, 2), np.int8, 0, 1)),
        (spaces.Box(-1, 2, (3,), np.float32), specs.BoundedArray((3,), np.float32, -1, 2)),
        (spaces.Text(5), specs.StringArray(())),
    ],
    ids=str,
)
def test_space_becomes_the_spec_that_says_the_same(space, spec):
    found = spec_from_space(space, "space")
    assert found == spec
    found.validate(np.asarray(space.sample(), found.dtype))


def test_space_without_a_spec_says_where_it_stands():
    space = spaces.Dict({"a": spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])})
    with pytest.raises(TypeError, match=r"observation_space\['a'\]\[0\] is a .*Sequence"):
        spec_from_space(space, "observation_space")


def test_render_gives_the_pixels_of_each(make_batch):
    class Painted(EndsBothWays):
        render_mode = "rgb_array"

        def render(self):
            return np.full((2, 3, 3), 9, np.uint8)

    with make_batch([Painted] * 2) as batch:
        assert (batch.render() == 9).all()
        assert batch.render().shape == (2, 2, 3, 3)


def test_adapter_is_what_the_batch_steps():
    assert GymnasiumEnvironment(EndsBothWays()).reset().observation == 5
