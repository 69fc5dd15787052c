"""Worker: an actor's environments and its policy, as an environment of the engine's.

Its action is an `Order`, its observation a `Report`: one remote call for many steps. So a worker is
started, restarted, timed out and closed as every environment is, by the one engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dm_env
import numpy as np
from dm_env import specs

from envfleet import seeding
from envfleet.collect.policies import BatchedPolicy
from envfleet.collect.rollout import Chunk, Rollout
from envfleet.errors import EnvFailure
from envfleet.parallel import ParallelPyEnvironment


class Order(NamedTuple):
    """What a worker is to do next.

    Attributes:
      ticks: how many steps of its batch, at most.
      horizon, steps, begin: as for `Rollout.plan`.
    """

    ticks: int
    horizon: int | None
    steps: np.ndarray[Any, Any] | None
    begin: np.ndarray[Any, Any] | None


class Report(NamedTuple):
    """What a worker has done.

    Attributes:
      chunk: the rows.
      failures: environments that failed, counted through the run.
      is_idle: whether nothing is left for it to do.
    """

    chunk: Chunk
    failures: list[EnvFailure]
    is_idle: bool


class Worker(dm_env.Environment):  # type: ignore[misc]
    """Environments and a policy, built where this is built.

    Args:
      env_constructors: of its environments.
      make_batch: makes the batch of them.
      policy: as for `BatchedPolicy`.
      seed: of the run.
      first_env: number of its first environment.
      num_envs: how many environments the run has in all.
      max_episode_steps: as for `Rollout`.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[[], Any]],
        make_batch: Callable[..., ParallelPyEnvironment],
        policy: Any,
        *,
        seed: int,
        first_env: int,
        num_envs: int,
        max_episode_steps: int | None,
    ) -> None:
        self._batch = make_batch(env_constructors)
        self._first_env = first_env
        self._num_told = 0
        try:
            self._policy = BatchedPolicy(
                policy,
                time_step_spec=self._batch.time_step_spec(),
                action_spec=self._batch.action_spec(),
                batch_size=self._batch.batch_size,
                seed=seeding.of_episode(seed, first_env, _OF_POLICIES)[0],
            )
            self._rollout = Rollout(
                self._batch,
                self._policy,
                seed=seed,
                first_env=first_env,
                num_envs=num_envs,
                max_episode_steps=max_episode_steps,
            )
        except BaseException:
            self._batch.close()
            raise

    def reset(self) -> Any:
        return dm_env.restart(np.asarray(None, object))

    def step(self, action: Any) -> Any:
        order: Order = action
        self._rollout.plan(order.horizon, order.steps, order.begin)
        chunk = self._rollout.run(order.ticks)
        report = Report(chunk, self._news(), self._rollout.is_idle)
        return dm_env.transition(0.0, _boxed(report))

    def _news(self) -> list[EnvFailure]:
        """Failures since the last report, each told with the environment's number in the run."""
        told, self._num_told = self._num_told, sum(self._batch.num_failures)
        new = self._batch.failures[-(self._num_told - told) :] if self._num_told > told else ()
        return [dataclasses.replace(one, index=one.index + self._first_env) for one in new]

    def set_weights(self, weights: Any, version: int) -> None:
        """The weights of the policy from now on."""
        self._policy.set_weights(weights, version)

    def bytes_per_step(self) -> int:
        """Of one environment: what its time step and action take."""
        return self._batch.stats().bytes_per_step // self._batch.batch_size

    def observation_spec(self) -> Any:
        return specs.Array((), object, "report")

    def action_spec(self) -> Any:
        return specs.Array((), object, "order")

    def close(self) -> None:
        self._batch.close()


_OF_POLICIES = 2**31
"""In the place of an attempt: seeds of policies are none of episodes."""


def _boxed(value: Any) -> np.ndarray[Any, Any]:
    box = np.empty((), object)
    box[()] = value
    return box
