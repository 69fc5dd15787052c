"""dm_env environments: what they return, with the gaps of a first time step filled."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from envfleet.environments.wrappers import find_attr
from envfleet.layout import zeros_and_ones

_SEEDABLE = (("seed",), ("task", "random", "seed"), ("random_state", "seed"))
"""Where an environment can be seeded: by a method of its own, or as dm_control's environments (its
suite's, and those of its composer) by the `RandomState` that they draw from."""


class DmEnvironment:
    """A `dm_env.Environment`.

    dm_env gives ``None`` for reward and discount of a FIRST time step; here they are 0 and 1 of
    their specs, so that a batch of time steps has one dtype.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._no_reward, self._full_discount = zeros_and_ones(
            env.reward_spec(), env.discount_spec()
        )

    def time_step_spec(self) -> Any:
        return dm_env.TimeStep(
            step_type=specs.BoundedArray((), np.int32, 0, 2, "step_type"),
            reward=self.env.reward_spec(),
            discount=self.env.discount_spec(),
            observation=self.env.observation_spec(),
        )

    def action_spec(self) -> Any:
        return self.env.action_spec()

    def reset(self) -> Any:
        return self._filled(self.env.reset())

    def step(self, action: Any) -> Any:
        return self._filled(self.env.step(action))

    def _filled(self, time_step: Any) -> Any:
        if time_step.reward is None:
            time_step = time_step._replace(reward=self._no_reward)
        if time_step.discount is None:
            time_step = time_step._replace(discount=self._full_discount)
        return time_step

    def seed(self, seed: int) -> None:
        self._seed_method()(seed)

    def _seed_method(self) -> Any:
        for names in _SEEDABLE:
            with contextlib.suppress(AttributeError):
                found = functools.reduce(find_attr, names, self.env)
                if callable(found):
                    return found
        raise TypeError(
            f"{type(self.env).__qualname__} has no method seed(seed): dm_env has no rule for "
            "seeding, so give it one, or seed it in its constructor and pass no seed here"
        )

    def render(self) -> Any:
        return find_attr(self.env, "render")()

    def get_info(self) -> Any:
        return find_attr(self.env, "get_info")()

    def close(self) -> None:
        self.env.close()
