"""The batch in dm_env's terms, and one environment of it by dm_env's own checks."""

from __future__ import annotations

import functools
import unittest
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs, test_utils
from dm_envs import Catch

from envfleet import EnvBusy, InvalidAction
from envfleet.interop.dm_env import RayEnvironment


@pytest.fixture
def make(backend):
    made = []

    def make(constructors: Any, **options: Any) -> RayEnvironment:
        made.append(RayEnvironment(constructors, backend=backend, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def catches(num_envs: int) -> list[Any]:
    return [functools.partial(Catch, seed) for seed in range(num_envs)]


def test_batch_is_a_dm_env_environment(make):
    env = make(catches(3))
    assert isinstance(env, dm_env.Environment)
    assert env.observation_spec() == Catch(0).observation_spec()
    assert env.action_spec() == specs.DiscreteArray(3)
    assert env.reward_spec() == Catch(0).reward_spec()
    assert env.discount_spec() == Catch(0).discount_spec()
    assert type(env.reset()) is dm_env.TimeStep
    time_step = env.step(np.zeros(3, int))
    assert time_step.mid().all()
    assert time_step.observation.shape == (3, *Catch(0).observation_spec().shape)


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_every_slot_gives_what_its_environment_gives(make, envs_per_actor):
    env = make(catches(4), envs_per_actor=envs_per_actor)
    alone = [constructor() for constructor in catches(4)]
    expected = [one.reset() for one in alone]
    time_step = env.reset()
    random = np.random.default_rng(0)
    for _ in range(600):
        for i, one in enumerate(expected):
            assert time_step.step_type[i] == one.step_type
            assert time_step.reward[i] == (one.reward or 0)
            assert time_step.discount[i] == (1 if one.first() else one.discount)
            assert time_step.observation[i].tobytes() == one.observation.tobytes()
        actions = random.integers(0, 3, 4)
        time_step = env.step(actions)
        expected = [one.step(action) for one, action in zip(alone, actions, strict=True)]


def test_gymnasium_environments_speak_dm_env_too(make):
    env = make("CartPole-v1", num_envs=2, seed=1)
    assert isinstance(env.observation_spec(), specs.BoundedArray)
    assert isinstance(env.action_spec(), specs.DiscreteArray)
    assert env.reset().first().all()


# -- one environment -------------------------------------------------------------------------------


class OneOfABatch(test_utils.EnvironmentTestMixin):
    """dm_env's own checks, of one environment while the others stand still."""

    def make_object_under_test(self) -> dm_env.Environment:
        self.whole = RayEnvironment(self.constructors(), backend=self.backend)
        return self.whole.single(1)

    def tearDown(self) -> None:
        super().tearDown()
        self.whole.close()


class CatchOnLocal(OneOfABatch, unittest.TestCase):
    backend = "local"

    def constructors(self) -> Any:
        return catches(3)


@pytest.mark.usefixtures("on_ray")
class CatchOnRay(CatchOnLocal):
    backend = "ray"


class CartPole(CatchOnLocal):
    def constructors(self) -> Any:
        return [functools.partial(gymnasium.make, "CartPole-v1")] * 2

    def make_action_sequence(self) -> Any:
        for _ in range(60):
            yield np.int64(1)


def test_stepping_one_leaves_the_others_where_they_are(make):
    env = make(catches(3), envs_per_actor=2)
    env.reset()
    before = env.step(np.ones(3, int))
    one, alone = env.single(1), Catch(1)
    alone.reset()
    alone.step(1)
    for _ in range(5):
        found, expected = one.step(0), alone.step(0)
        assert found.step_type is expected.step_type
        assert np.array_equal(found.observation, expected.observation)
    now = env.batch.current_time_step()
    assert np.array_equal(now.observation[[0, 2]], before.observation[[0, 2]])
    assert np.array_equal(now.observation[1], found.observation)


def test_one_is_not_stepped_while_others_are_under_way(make):
    env = make(catches(3))
    env.reset()
    env.batch.send(np.zeros(1, int), [2])
    for call in (lambda: env.single(0).step(1), lambda: env.single(0).reset()):
        with pytest.raises(EnvBusy, match=r"of env 0 alone, while envs \[2\]"):
            call()
    _, env_ids = env.batch.drain()
    assert env_ids.tolist() == [2]
    assert env.single(0).step(1).mid()


def test_failure_of_one_is_a_truncation_and_then_a_first(make):
    env = make([functools.partial(Catch, i, fails_at=3) for i in range(2)], on_failure="restart")
    one = env.single(0)
    one.reset()
    one.step(0)
    good = one.step(0)
    cut = one.step(0)
    assert cut.last()
    assert (cut.reward, cut.discount) == (0, 1)
    assert np.array_equal(cut.observation, good.observation)
    first = one.step(0)
    assert first.first()
    assert first.reward is None


def test_view_refuses_what_does_not_fit_and_who_is_not_there(make):
    env = make(catches(2))
    with pytest.raises(IndexError, match=r"single\(2\), expected 0 to 1"):
        env.single(2)
    env.reset()
    with pytest.raises(InvalidAction, match="action has shape"):
        env.single(0).step([0, 1])
    env.single(0).close()
    assert env.single(0).step(1).mid(), "closing a view has closed the environment"
