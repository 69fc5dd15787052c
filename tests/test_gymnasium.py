"""Gymnasium environments in a batch: values, flags, seeds and spaces."""

from __future__ import annotations

import functools
import pickle

import gymnasium
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from envfleet import ParallelPyEnvironment
from envfleet.environments.gymnasium import GymnasiumEnvironment, space_from_spec, spec_from_space

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
        assert type(action["go"]) is np.int64  # as the sample of a Discrete is
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
    found = spec_from_space(space)
    assert found == spec
    found.validate(np.asarray(space.sample(), found.dtype))


def any_space() -> st.SearchStrategy[spaces.Space]:
    numbers = st.integers(-5, 5)
    shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    integers = st.sampled_from([np.int8, np.int32, np.int64])
    nvec = hnp.arrays(np.int64, shapes.filter(len), elements=st.integers(1, 9))
    lows = hnp.arrays(np.float32, shapes, elements=st.sampled_from([-np.inf, -2.5, 0.0]))
    simple = st.one_of(
        st.builds(spaces.Discrete, st.integers(1, 9), start=numbers, dtype=integers),
        nvec.flatmap(
            lambda n: st.builds(
                spaces.MultiDiscrete,
                st.just(n),
                dtype=integers,
                start=hnp.arrays(np.int64, n.shape, elements=numbers),
            )
        ),
        st.builds(spaces.MultiBinary, st.integers(1, 5) | shapes.filter(len)),
        st.builds(
            spaces.Text,
            st.integers(3, 9),
            min_length=st.integers(0, 3),
            charset=st.sampled_from(["abc", "zyx ", "é"]),
        ),
        st.builds(spaces.Box, lows, st.sampled_from([1.5, np.inf]), dtype=st.just(np.float32)),
        st.builds(spaces.Box, numbers, st.integers(6, 9), shapes, integers),
        st.just(spaces.Box(0, 255, (2, 2), np.uint8)),
        st.just(spaces.Discrete(200, start=56, dtype=np.uint8)),
    )
    return st.recursive(
        simple,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict)
            | st.dictionaries(st.sampled_from("cba"), inner, min_size=1).map(
                lambda children: spaces.Dict(list(children.items()))
            )
        ),
        max_leaves=5,
    )


@hypothesis.given(any_space())
def test_space_that_became_a_spec_comes_back_as_it_was(space):
    there = spec_from_space(space)
    assert_same_space(space_from_spec(there), space)
    travelled = pickle.loads(pickle.dumps(there))
    assert_same_space(space_from_spec(travelled), space)


def assert_same_space(found: spaces.Space, expected: spaces.Space) -> None:
    """Equal, with bounds that are not only close."""
    assert found == expected
    match expected:
        case spaces.Box():
            assert np.array_equal(found.low, expected.low)
            assert np.array_equal(found.high, expected.high)
        case spaces.Text():
            assert found.character_list == expected.character_list
        case spaces.Dict():
            assert list(found) == list(expected)
            for key in expected:
                assert_same_space(found[key], expected[key])
        case spaces.Tuple():
            for mine, theirs in zip(found, expected, strict=True):
                assert_same_space(mine, theirs)


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (specs.DiscreteArray(4), spaces.Discrete(4, dtype=np.int32)),
        (specs.Array((2,), np.float64), spaces.Box(-np.inf, np.inf, (2,), np.float64)),
        (specs.Array((), np.int8), spaces.Box(-128, 127, (), np.int8)),
        (
            specs.BoundedArray((2,), np.float32, [0, 1], 2),
            spaces.Box(np.array([0, 1], np.float32), 2.0, (2,), np.float32),
        ),
        (specs.BoundedArray((), np.int64, 0, 2), spaces.Box(0, 2, (), np.int64)),
        ([specs.DiscreteArray(2, np.int64)], spaces.Tuple([spaces.Discrete(2)])),
    ],
    ids=str,
)
def test_spec_becomes_the_space_of_its_values(spec, space):
    assert_same_space(space_from_spec(spec), space)


def test_string_becomes_a_text_of_any_printable_characters():
    space = space_from_spec(specs.StringArray(()))
    assert space.contains("reach the goal, then (2) stop!")
    assert space.contains("")


@pytest.mark.parametrize("wrong", [specs.StringArray((2,)), specs.Array((), complex), "spec"])
def test_what_has_no_space_says_where_it_stands(wrong):
    with pytest.raises(TypeError, match=r"spec\['a'\]\[1\] is .*, for which there is no space"):
        space_from_spec({"a": (specs.DiscreteArray(2), wrong)})


def test_text_specs_of_different_characters_differ():
    spec = spec_from_space(spaces.Text(5, charset="ab"))
    assert spec == spec_from_space(spaces.Text(5, charset="ba"))
    assert spec != spec_from_space(spaces.Text(5, charset="abc"))
    assert spec == specs.StringArray(())


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
