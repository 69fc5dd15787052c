"""RayVecEnv: the batch as a Stable-Baselines3 vector environment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv

from envfleet.errors import EnvBusy, ResetNeeded
from envfleet.interop.members import Array, Members, Outcome, check_callable

Indices = None | int | Iterable[int]


class RayVecEnv(VecEnv):  # type: ignore[misc]
    """Gymnasium environments in Ray actors.

    What it gives is what `DummyVecEnv` gives, bit for bit. An environment whose episode has ended
    is reset by the same step: the last observation is in its info as ``"terminal_observation"``,
    and what its reset gave in `reset_infos`. `ParallelPyEnvironment` says what happens when an
    environment fails: by default its own exception is raised and `reset` rebuilds it; with
    ``on_failure="restart"`` its episode is truncated, with an info ``"env_failure"`` that says why.

    Args:
      env_fns: a constructor, or an id, of each environment; or one of them and ``num_envs``.
      **options: arguments of `envfleet.ParallelPyEnvironment`: ``envs_per_actor``, ``backend``,
        ``on_failure``, ``step_timeout``, ``actor_options``, ``ray_init``, ...

    Attributes:
      batch: the `ParallelPyEnvironment`, with `stats` and `failures`.

    Raises:
      SpecMismatch: the environments' spaces differ; says whose and how.
      ValueError: environments of one process are one and the same object; says which.
      AssertionError: their render modes differ.
      Exception: as `ParallelPyEnvironment`.
    """

    def __init__(
        self,
        env_fns: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        **options: Any,
    ) -> None:
        self._members = Members(env_fns, AutoresetMode.SAME_STEP, options)
        self.batch = self._members.batch
        self._pending: Callable[[], Outcome] | None = None
        self._has_reset = False
        described = self._members.described
        try:
            super().__init__(
                self._members.num_envs, described.observation_space, described.action_space
            )
        except BaseException:
            self.batch.close()
            raise
        self.metadata = dict(described.metadata)

    # -- stepping ----------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Resets every environment, and rebuilds those that have failed.

        By the seeds and options of `seed` and `set_options`, which are used once.

        Returns:
          Observations: an array of shape ``(num_envs, ...)``, or a dict or tuple of them.
        """
        self._pending = None  # what is under way is dropped
        options = [given or None for given in self._options]
        outcome = self._members.reset(range(self.num_envs), self._seeds, options)
        self.reset_infos = [given.info for given in outcome.beside]
        self._reset_seeds()
        self._reset_options()
        self._has_reset = True
        return outcome.observations

    def step_async(self, actions: Any) -> None:
        """Sends the actions, and does not wait; `step_wait` has to follow.

        Raises:
          InvalidAction: `actions` do not fit; no environment has moved.
          ResetNeeded: there was no `reset` yet, or an environment has failed since.
          EnvBusy: the last step was not waited for; it can still be.
        """
        if self._pending is not None:
            raise EnvBusy("step_async() before step_wait()")
        if not self._has_reset:
            raise ResetNeeded("step() before reset()")
        self._pending = self._members.post_step(_whole(self.action_space, actions))

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Waits for what `step_async` has begun.

        Returns:
          Observations, as `reset`; rewards, float32 of shape ``(num_envs,)``; whether the episode
          has ended, bool of that shape; an info for each environment.

        Raises:
          Exception: what an environment raised, `ActorDied`, `EnvTimeout`.
        """
        if self._pending is None:
            raise RuntimeError("step_wait() without a call to step_async()")
        pending, self._pending = self._pending, None
        outcome = pending()
        infos = []
        truncated = outcome.truncated & ~outcome.terminated
        for i, (info, final, _) in enumerate(outcome.beside):
            if final is not None:
                self.reset_infos[i] = info
                info = {**final[1], "terminal_observation": final[0]}
            infos.append({**info, "TimeLimit.truncated": bool(truncated[i])})
        dones = outcome.terminated | outcome.truncated
        return outcome.observations, outcome.rewards.astype(np.float32), dones, infos

    # -- between steps -----------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of environments, or of what they wrap.

        Raises:
          AttributeError: an environment has none of that name.
          TypeError: it is a method, which stays with its environment.
        """
        return self.batch.get_attr(attr_name, self._env_ids(indices))

    def has_attr(self, attr_name: str) -> bool:
        """Whether every environment, or what it wraps, has this attribute or method."""
        return all(self._members.ask("has_wrapper_attr", attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets an attribute on the outermost wrapper, or environment, that has it."""
        env_ids = self._env_ids(indices)
        self._members.ask("set_wrapper_attr", attr_name, value, env_ids=env_ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of environments, or of what they wrap.

        Raises:
          ValueError: ``reset``, ``step`` or ``close``, which the vector environment has itself.
          Exception: what an environment raised; it stays usable.
        """
        check_callable("env_method", method_name)
        env_ids = self._env_ids(indices)
        return self._members.ask("call", method_name, method_args, method_kwargs, env_ids=env_ids)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """Whether environments have a wrapper of this class."""
        env_ids = self._env_ids(indices)
        return self._members.ask("is_wrapped", wrapper_class, env_ids=env_ids)

    def get_images(self) -> list[Any]:
        """An image of each environment, as its ``render()`` gives it.

        None of each, and a warning, if they were not made with ``render_mode="rgb_array"``.
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"no images: render_mode is {self.render_mode!r}, expected 'rgb_array'",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._members.ask("call", "render", (), {})

    def close(self) -> None:
        """Closes the environments, then ends their actors. Twice is fine."""
        self.batch.close()

    def _env_ids(self, indices: Indices) -> list[int]:
        """Indices from 0 on: those from the end count as in a list."""
        chosen = self._get_indices(indices)
        return [i + self.num_envs if -self.num_envs <= i < 0 else i for i in chosen]


def _whole(space: spaces.Space[Any], actions: Any) -> Any:
    """Bits as the space has them: policies of Stable-Baselines3 give them as floats."""
    if isinstance(space, spaces.MultiBinary):
        bits = np.asarray(actions)
        if bits.dtype.kind == "f" and np.isin(bits, (0, 1)).all():
            return bits.astype(space.dtype)
    return actions
