"""Both backends keep the contract of a batch, and the contract notices who does not."""

from __future__ import annotations

import threading
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs

from envfleet import ParallelPyEnvironment, testing
from envfleet.errors import InvalidAction, ResetNeeded


def name(check: Any) -> str:
    return check.__name__


@pytest.mark.parametrize("check", testing.BATCH_CHECKS, ids=name)
def test_batch_keeps_the_contract(check, make_batch):
    check(make_batch)


@pytest.mark.parametrize("check", testing.BATCH_CHECKS, ids=name)
def test_batch_of_actors_that_share_environments_keeps_the_contract(check, make_batch):
    check(lambda constructors: make_batch(constructors, envs_per_actor=2))


@pytest.mark.parametrize("check", testing.BATCH_CHECKS, ids=name)
def test_batch_that_blocks_keeps_the_contract(check):
    check(lambda c: ParallelPyEnvironment(c, True, True, True, backend="local"))


@pytest.mark.parametrize("check", testing.ENVIRONMENT_CHECKS, ids=name)
@pytest.mark.parametrize(
    "constructor",
    [testing.ProbeEnv]
    + [
        lambda env_id=env_id: gymnasium.make(env_id)
        for env_id in ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1", "Taxi-v4")
    ],
    ids=["Probe", "CartPole", "FrozenLake", "Blackjack", "Pendulum", "Taxi"],
)
def test_real_environments_keep_the_contract(check, constructor):
    check(constructor)


class Broken(testing.ProbeEnv):
    """Breaks no rule by itself: the base of those that break one each."""

    def __init__(self):
        super().__init__(episode_length=4)


class Unrecognised:
    reset = step = None


class OtherSpecsEachTime(Broken):
    built = 0

    def __init__(self):
        super().__init__()
        type(self).built += 1
        self.size = self.built

    def action_spec(self):
        return specs.BoundedArray((), np.int64, 0, self.size)


class ResetGivesMid(Broken):
    def reset(self):
        return super().reset()._replace(step_type=dm_env.StepType.MID, reward=0.0, discount=1.0)


class StepGivesFirst(Broken):
    def step(self, action):
        return super().step(action)._replace(step_type=dm_env.StepType.FIRST)


class OtherShape(Broken):
    def step(self, action):
        time_step = super().step(action)
        return time_step._replace(observation={**time_step.observation, "image": np.zeros(3)})


class OtherStructure(Broken):
    def step(self, action):
        return super().step(action)._replace(observation=np.zeros(3))


class UnsafeDtype(Broken):
    def step(self, action):
        time_step = super().step(action)
        return time_step._replace(observation={**time_step.observation, "step": 0.5})


class DiscountOfTwo(Broken):
    def step(self, action):
        return super().step(action)._replace(discount=2.0)


class Unseeded(Broken):
    def step(self, action):
        return super().step(action)._replace(reward=float(np.random.random()))


def unpicklable():
    lock = threading.Lock()
    return lambda: Broken() if lock else None


@pytest.mark.parametrize(
    ("check", "constructor"),
    [
        (testing.constructor_pickles, unpicklable()),
        (testing.environment_is_recognised, Unrecognised),
        (testing.specs_are_the_same_each_time, OtherSpecsEachTime),
        (testing.reset_gives_a_first_time_step, ResetGivesMid),
        (testing.step_gives_no_first_time_step, StepGivesFirst),
        (testing.values_fit_the_specs, OtherShape),
        (testing.values_fit_the_specs, OtherStructure),
        (testing.values_fit_the_specs, UnsafeDtype),
        (testing.discount_is_between_0_and_1, DiscountOfTwo),
        (testing.same_seed_gives_the_same_trajectory, Unseeded),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_environment_that_breaks_a_rule_fails_the_check_of_that_name(check, constructor):
    with pytest.raises(AssertionError):
        check(constructor)
    for other in testing.ENVIRONMENT_CHECKS:
        if constructor in (Unseeded, DiscountOfTwo) and other is not check:
            other(constructor)


def test_every_rule_of_an_environment_has_one_that_breaks_it():
    (mark,) = (
        mark
        for mark in test_environment_that_breaks_a_rule_fails_the_check_of_that_name.pytestmark
        if mark.name == "parametrize"
    )
    assert {check for check, _ in mark.args[1]} == set(testing.ENVIRONMENT_CHECKS)


class Batch:
    """A local batch in disguise: each subclass breaks a rule of the contract."""

    def __init__(self, constructors):
        self._batch = ParallelPyEnvironment(constructors, backend="local")

    def __getattr__(self, name):
        return getattr(self._batch, name)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._batch.close()


class Misrouted(Batch):
    def step(self, actions):
        return self._batch.step(np.roll(actions, 1))


class Stale(Batch):
    last = None

    def step(self, actions):
        stale, self.last = self.last, self._batch.step(actions)
        return stale or self.last


class FirstStepSteps(Batch):
    def step(self, actions):
        self._batch.reset()
        return self._batch.step(actions)


class ResetsAll(Batch):
    def reset(self, env_ids=None):
        return self._batch.reset()


class ReadOnly(Batch):
    def reset(self, env_ids=None):
        time_step = self._batch.reset(env_ids)
        time_step.reward.flags.writeable = False
        return time_step


class TruncatesActions(Batch):
    def step(self, actions):
        return self._batch.step(np.resize(np.asarray(actions, int), 3))


class MovesBeforeItChecks(Batch):
    def step(self, actions):
        try:
            return self._batch.step(actions)
        except InvalidAction:
            self._batch.step(np.zeros(3, int))
            raise


class OneSeed(Batch):
    def seed(self, seed):
        return self._batch.seed([seed] * 3)


class HidesTheClass(Batch):
    def step(self, actions):
        try:
            return self._batch.step(actions)
        except KeyError as error:
            raise RuntimeError("EOF") from error


class GoesOnAfterAFailure(Batch):
    def step(self, actions):
        try:
            return self._batch.step(actions)
        except ResetNeeded:
            return None


class NeverCloses(Batch):
    def close(self):
        pass


@pytest.mark.parametrize(
    ("check", "batch"),
    [
        (testing.every_slot_shows_its_own_environment, Misrouted),
        (testing.every_slot_shows_its_own_environment, Stale),
        (testing.first_step_resets, FirstStepSteps),
        (testing.reset_of_some_leaves_the_others, ResetsAll),
        (testing.results_are_the_callers_own, ReadOnly),
        (testing.wrong_actions_move_nothing, TruncatesActions),
        (testing.wrong_actions_move_nothing, MovesBeforeItChecks),
        (testing.one_seed_gives_distinct_streams, OneSeed),
        (testing.a_failure_is_the_environments_own, HidesTheClass),
        (testing.a_failure_is_the_environments_own, GoesOnAfterAFailure),
        (testing.nothing_works_after_close, NeverCloses),
    ],
    ids=lambda x: x.__name__,
)
def test_batch_that_breaks_a_rule_fails_the_check_of_that_name(check, batch):
    check(Batch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(batch)
