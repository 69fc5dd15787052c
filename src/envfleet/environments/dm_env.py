"""dm_env environments: what they return, with the gaps of a first time step filled."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from envfleet.environments.wrappers import find_attr
from envfleet.layout import zeros_and_ones


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
        try:
            seed_env = find_attr(self.env, "seed")
        except AttributeError:
            seed_env = None
        if not callable(seed_env):
            raise TypeError(
                f"{type(self.env).__qualname__} has no method seed(seed): dm_env has no rule for "
                "seeding, so give it one, or seed it in its constructor and pass no seed here"
            )
        seed_env(seed)

    def render(self) -> Any:
        return find_attr(self.env, "render")()

    def get_info(self) -> Any:
        return find_attr(self.env, "get_info")()

    def close(self) -> None:
        self.env.close()
