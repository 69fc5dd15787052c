"""RayVectorEnv: the batch as a Gymnasium vector environment."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.environments.gymnasium import make
from envfleet.interop.members import Array, Members, Outcome, check_callable


class RayVectorEnv(VectorEnv[Any, Any, Any]):
    """Gymnasium environments in Ray actors.

    What it gives is what `gymnasium.vector.SyncVectorEnv` gives, bit for bit, and arrays are always
    fresh. `ParallelPyEnvironment` says what happens when an environment fails: by default its own
    exception is raised and `reset` rebuilds it; with ``on_failure="restart"`` its episode is
    truncated, and an info ``"env_failure"`` says why.

    Args:
      env_fns: a constructor, or an id, of each environment; or one of them and ``num_envs``.
      autoreset_mode: an `AutoresetMode` or its value; when an environment is reset whose episode
        has ended: by the next `step`, by the same one, or by nobody but the caller.
      **options: arguments of `envfleet.ParallelPyEnvironment`: ``num_envs``, ``envs_per_actor``,
        ``backend``, ``on_failure``, ``step_timeout``, ``actor_options``, ``ray_init``, ...

    Attributes:
      batch: the `ParallelPyEnvironment`, with `stats` and `failures`.

    Raises:
      ValueError: there is no such mode; or environments of one process are one and the same
        object, says which.
      SpecMismatch: the environments' spaces differ; says whose and how.
      Exception: as `ParallelPyEnvironment`.
    """

    def __init__(
        self,
        env_fns: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        self.closed = True  # until there is something to close
        self.autoreset_mode = _mode(autoreset_mode)
        foreign = sorted(_FOREIGN & options.keys())
        if foreign:
            raise TypeError(
                f"RayVectorEnv has no {', '.join(foreign)}, which Gymnasium's vector environments "
                "have (docs/migrate.md): arrays are always fresh, spaces equal, and actors Ray's"
            )
        self._members = Members(env_fns, self.autoreset_mode, options)
        self.batch = self._members.batch
        self.closed = False
        described = self._members.described
        self.num_envs = self._members.num_envs
        # A copy: an environment's metadata is its class's.
        self.metadata = {**described.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = described.render_mode
        self.single_observation_space = described.observation_space
        self.single_action_space = described.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._pending: Callable[[], Outcome] | None = None
        self._has_reset = False
        self._over = np.zeros(self.num_envs, bool)

    # -- stepping ----------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets every environment, and rebuilds those that have failed.

        Args:
          seed: ``seed + i`` for environment i; or a list with a seed or None for each.
          options: for every environment's ``reset``; not changed. ``"reset_mask"``, bool of shape
            ``(num_envs,)``, says which are reset; the others keep their observation.

        Returns:
          Observations, batched by `observation_space`, and infos of those that were reset.

        Raises:
          TypeError, ValueError: `seed` or the mask are not as they should be; nothing was reset.
        """
        self._check_free("reset")
        mask, options = _split(options, self.num_envs)
        seeds = _seeds(seed, self.num_envs)
        env_ids = np.flatnonzero(mask).tolist()
        outcome = self._members.reset(env_ids, seeds, [options] * self.num_envs)
        self._over[mask] = False
        self._has_reset = True
        return outcome.observations, self._infos(outcome)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Steps every environment.

        Args:
          actions: batched by `action_space`.

        Returns:
          Observations, batched by `observation_space`; rewards, float64 of shape ``(num_envs,)``;
          terminations and truncations, bool of that shape; infos.

        Raises:
          InvalidAction: `actions` do not fit; no environment has moved.
          Exception: what an environment raised, `ActorDied`, `EnvTimeout`.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Sends the actions, and does not wait; `step_wait` has to follow."""
        self._check_free("step")
        if not self._has_reset:
            raise ResetNeeded("step() before reset()")
        if self.autoreset_mode is AutoresetMode.DISABLED and self._over.any():
            raise ResetNeeded(
                f"the episodes of env {', '.join(map(str, np.flatnonzero(self._over)))} have ended "
                "(autoreset_mode is DISABLED): reset(options={'reset_mask': terminated | "
                "truncated}) first"
            )
        self._pending = self._members.post_step(actions)

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Waits for what `step_async` has begun; gives what `step` gives."""
        if self._pending is None:
            raise NoAsyncCallError("step_wait() without a call to step_async()", "step")
        pending, self._pending = self._pending, None
        outcome = pending()
        self._over = outcome.terminated | outcome.truncated
        return (
            outcome.observations,
            outcome.rewards,
            outcome.terminated,
            outcome.truncated,
            self._infos(outcome),
        )

    def _infos(self, outcome: Outcome) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, (info, final, _) in enumerate(outcome.beside):
            if final is not None:
                ended = {"final_obs": final[0], "final_info": final[1]}
                infos = self._add_info(infos, ended, i)
            if info:
                infos = self._add_info(infos, info, i)
        return infos

    def _check_free(self, method: str) -> None:
        if self._pending is not None:
            raise AlreadyPendingCallError(f"{method}() before step_wait()", "step")

    # -- between steps -----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every environment, or of what it wraps; an attribute is its value.

        Raises:
          ValueError: ``reset``, ``step`` or ``close``, which the vector environment has itself.
          Exception: what an environment raised; it stays usable.
        """
        self._check_free(f"call({name!r})")
        check_callable("call", name)
        return tuple(self._members.ask("call_or_get", name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment, or of what it wraps."""
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Sets an attribute on the outermost wrapper, or environment, that has it.

        Args:
          name: of the attribute.
          values: a list or tuple has one for each environment; anything else is for all.
        """
        self._check_free("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values, expected one for each of {self.num_envs}")
        self.batch.operate_each(
            "ask", {i: ("set_wrapper_attr", name, value) for i, value in enumerate(values)}
        )

    def render(self) -> tuple[Any, ...]:
        """What each environment's ``render()`` gives."""
        return self.call("render")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the environments' random number generators."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """What the environments' random number generators were seeded with."""
        return self.get_attr("np_random_seed")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the environments, then ends their actors; see `VectorEnv.close`.

        The arguments are taken for the sake of `AsyncVectorEnv`'s callers. How long it may take
        says ``close_timeout`` of the constructor, and then they are ended anyway.
        """
        del timeout, terminate
        self.closed = True  # whatever follows: an environment may raise in its close
        self.batch.close()


_FOREIGN = {"copy", "context", "daemon", "observation_mode", "shared_memory", "worker"}
"""Arguments of `SyncVectorEnv` and `AsyncVectorEnv` that have no meaning here."""


def vector_spec(env_id: str, **options: Any) -> EnvSpec:
    """What lets `gymnasium.make_vec` make a `RayVectorEnv` of a registered environment.

    ``gymnasium.make_vec(vector_spec("CartPole-v1", envs_per_actor=8), num_envs=64)``: a copy of the
    id's `EnvSpec` with a ``vector_entry_point``, Gymnasium's way to a vector environment of one's
    own.

    Args:
      env_id: as for `gymnasium.make`.
      **options: arguments of `RayVectorEnv`.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = copy.deepcopy(gymnasium.spec(name))
    spec.vector_entry_point = functools.partial(_make, env_id, options)
    return spec


def _make(env_id: str, options: Mapping[str, Any], num_envs: int, **kwargs: Any) -> RayVectorEnv:
    return RayVectorEnv(functools.partial(make, env_id, **kwargs), num_envs=num_envs, **options)


def _mode(given: AutoresetMode | str) -> AutoresetMode:
    try:
        return AutoresetMode(given)
    except ValueError:
        modes = ", ".join(repr(mode.value) for mode in AutoresetMode)
        raise ValueError(f"autoreset_mode is {given!r}, expected one of {modes}") from None


def _seeds(seed: int | Iterable[int | None] | None, num_envs: int) -> list[int | None]:
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise ValueError(f"seed has {len(seeds)} elements, expected one for each of {num_envs}")
    return seeds


def _split(
    options: Mapping[str, Any] | None, num_envs: int
) -> tuple[Array, Mapping[str, Any] | None]:
    """Which environments are to be reset, and the options without that; the caller's stay."""
    if options is None or "reset_mask" not in options:
        return np.ones(num_envs, bool), options
    mask = options["reset_mask"]
    where = "options['reset_mask']"
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        found = mask.dtype if isinstance(mask, np.ndarray) else type(mask).__qualname__
        raise TypeError(f"{where} is a {found}, expected an array of bool")
    if mask.shape != (num_envs,):
        raise ValueError(f"{where} has shape {mask.shape}, expected ({num_envs},)")
    if not mask.any():
        raise ValueError(f"{where} is False for every environment, expected one at least")
    return mask, {key: value for key, value in options.items() if key != "reset_mask"}
