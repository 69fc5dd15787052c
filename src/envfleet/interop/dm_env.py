"""RayEnvironment: the batch in dm_env's terms, and one environment of it as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from envfleet.errors import EnvBusy
from envfleet.layout import Layout, map_leaves
from envfleet.parallel import ParallelPyEnvironment


class RayEnvironment(dm_env.Environment):  # type: ignore[misc]
    """Environments in Ray actors, as a batched `dm_env.Environment`.

    Time steps are `dm_env.TimeStep` and specs are dm_env's, whatever the environments come from.
    Leaves have shape ``(batch_size, *spec.shape)``. As environments reset at different times,
    reward and discount of a FIRST are 0 and 1 here, and not None.

    Args:
      env_constructors: as for `envfleet.ParallelPyEnvironment`.
      **options: its arguments.

    Attributes:
      batch: the `ParallelPyEnvironment`, for what dm_env has no word for.
    """

    def __init__(
        self,
        env_constructors: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        **options: Any,
    ) -> None:
        self.batch = ParallelPyEnvironment(env_constructors, **options)
        time_step = map_leaves(_as_dm_env, self.batch.time_step_spec())
        self._time_step_spec = dm_env.TimeStep(*time_step)
        self._action_spec = map_leaves(_as_dm_env, self.batch.action_spec())

    @property
    def batch_size(self) -> int:
        """Number of environments."""
        return self.batch.batch_size

    def reset(self) -> dm_env.TimeStep:
        """Resets every environment, and rebuilds those that have failed."""
        return dm_env.TimeStep(*self.batch.reset())

    def step(self, action: Any) -> dm_env.TimeStep:
        """Steps every environment; resets, without its action, one whose episode has ended."""
        return dm_env.TimeStep(*self.batch.step(action))

    def observation_spec(self) -> Any:
        return self._time_step_spec.observation

    def reward_spec(self) -> Any:
        return self._time_step_spec.reward

    def discount_spec(self) -> Any:
        return self._time_step_spec.discount

    def action_spec(self) -> Any:
        return self._action_spec

    def single(self, env_id: int) -> SingleEnvironment:
        """One environment of the batch, as a `dm_env.Environment` without a batch axis."""
        return SingleEnvironment(self, env_id)

    def close(self) -> None:
        """Closes the environments, then ends their actors. Twice is fine."""
        self.batch.close()


class SingleEnvironment(dm_env.Environment):  # type: ignore[misc]
    """One environment of a batch, by dm_env's own rules: reward and discount of a FIRST are None.

    It steps that environment alone, and leaves the others where they are.

    Args:
      whole: the batch.
      env_id: which environment, from 0 on.

    Raises:
      IndexError: there is no such environment.
    """

    def __init__(self, whole: RayEnvironment, env_id: int) -> None:
        if not 0 <= env_id < whole.batch_size:
            raise IndexError(f"single({env_id}), expected 0 to {whole.batch_size - 1}")
        self._whole = whole
        self._env_id = env_id
        self._action_layout = Layout(whole.action_spec(), "action")

    def reset(self) -> dm_env.TimeStep:
        """Resets the environment, and rebuilds it if it has failed.

        Raises:
          EnvBusy: environments of the batch are under way (`ParallelPyEnvironment.send`).
        """
        self._check_idle("reset")
        self._whole.batch.async_reset([self._env_id])
        return self._taken()

    def step(self, action: Any) -> dm_env.TimeStep:
        """Steps the environment; resets it, without the action, if its episode has ended.

        Raises:
          InvalidAction: `action` does not fit.
          EnvBusy: environments of the batch are under way (`ParallelPyEnvironment.send`).
          Exception: what the environment raised, `ActorDied`, `EnvTimeout`; `reset` brings it back.
        """
        self._check_idle("step")
        columns = self._action_layout.columns(action, None)
        self._whole.batch.send(self._action_layout.unflatten(columns), [self._env_id])
        return self._taken()

    def _check_idle(self, method: str) -> None:
        busy = self._whole.batch.under_way
        if busy:
            raise EnvBusy(
                f"{method}() of env {self._env_id} alone, while envs {busy} of the batch are under "
                "way: drain() takes them in"
            )

    def _taken(self) -> dm_env.TimeStep:
        time_step = map_leaves(lambda leaf: leaf[0], self._whole.batch.drain()[0])
        step_type = dm_env.StepType(int(time_step.step_type))
        if step_type is dm_env.StepType.FIRST:
            return dm_env.TimeStep(step_type, None, None, time_step.observation)
        return dm_env.TimeStep(step_type, *time_step[1:])

    def observation_spec(self) -> Any:
        return self._whole.observation_spec()

    def reward_spec(self) -> Any:
        return self._whole.reward_spec()

    def discount_spec(self) -> Any:
        return self._whole.discount_spec()

    def action_spec(self) -> Any:
        return self._whole.action_spec()

    def close(self) -> None:
        """Does nothing: the environment ends with its batch."""


def _as_dm_env(spec: Any) -> specs.Array:
    if isinstance(spec, specs.Array):
        return spec
    name = getattr(spec, "name", None)
    if hasattr(spec, "minimum"):
        return specs.BoundedArray(spec.shape, spec.dtype, spec.minimum, spec.maximum, name)
    return specs.Array(spec.shape, np.dtype(spec.dtype), name)
