"""Gymnasium environments: spaces to specs, five returned values to a time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces

_REWARD_SPEC = specs.Array((), np.float64, "reward")
_DISCOUNT_SPEC = specs.BoundedArray((), np.float64, 0.0, 1.0, "discount")
_STEP_TYPE_SPEC = specs.BoundedArray((), np.int32, 0, 2, "step_type")


class GymnasiumEnvironment:
    """A `gymnasium.Env` (its API from 0.26 on: five values from `step`, `reset(seed=)`).

    ``terminated`` becomes LAST with discount 0, ``truncated`` LAST with discount 1, both together a
    termination. `get_info` gives the info of the last `reset` or `step`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self._observation_spec = spec_from_space(env.observation_space, "observation_space")
        self._action_spec = spec_from_space(env.action_space, "action_space")
        self._to_action = _action_converter(env.action_space)
        self._seed: int | None = None
        self._info: dict[str, Any] = {}

    def time_step_spec(self) -> Any:
        return dm_env.TimeStep(
            _STEP_TYPE_SPEC, _REWARD_SPEC, _DISCOUNT_SPEC, self._observation_spec
        )

    def action_spec(self) -> Any:
        return self._action_spec

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        observation, self._info = self.env.reset(seed=seed)
        return dm_env.TimeStep(dm_env.StepType.FIRST, 0.0, 1.0, observation)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, self._info = self.env.step(
            self._to_action(action)
        )
        over = terminated or truncated
        return dm_env.TimeStep(
            step_type=dm_env.StepType.LAST if over else dm_env.StepType.MID,
            reward=reward,
            discount=0.0 if terminated else 1.0,
            observation=observation,
        )

    def seed(self, seed: int) -> None:
        """Takes effect at the next reset, as Gymnasium has it; later resets go on from there."""
        self._seed = seed

    def render(self) -> Any:
        image = self.env.render()
        if image is None:
            raise ValueError(
                f"render() gave None: build {type(self.env.unwrapped).__qualname__} with "
                f"render_mode='rgb_array' (it has {self.env.render_mode!r})"
            )
        return image

    def get_info(self) -> Any:
        return self._info

    def close(self) -> None:
        self.env.close()


def spec_from_space(space: spaces.Space[Any], where: str) -> Any:
    """The spec of a space; a `Dict` gives a dict and a `Tuple` a tuple of specs.

    Raises:
      TypeError: a space whose values have no fixed shape (`Sequence`, `Graph`, `OneOf`), or one of
        another library; says where it stands.
    """
    match space:
        case spaces.Box():
            return specs.BoundedArray(space.shape, space.dtype, space.low, space.high)
        case spaces.Discrete(start=start, n=n, dtype=dtype):
            if start == 0:
                return specs.DiscreteArray(int(n), dtype)
            return specs.BoundedArray((), dtype, start, start + n - 1)
        case spaces.MultiDiscrete(start=start, nvec=nvec):
            return specs.BoundedArray(space.shape, space.dtype, start, start + nvec - 1)
        case spaces.MultiBinary():
            return specs.BoundedArray(space.shape, space.dtype, 0, 1)
        case spaces.Text():
            return specs.StringArray(())
        case spaces.Dict():
            return {k: spec_from_space(s, f"{where}[{k!r}]") for k, s in space.items()}
        case spaces.Tuple():
            return tuple(spec_from_space(s, f"{where}[{i}]") for i, s in enumerate(space))
    kind = type(space)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, whose values have no fixed shape and "
        "so no spec"
    )


def _action_converter(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """From an action by the spec to the very type that the space's own samples have."""
    match space:
        case spaces.Discrete():
            return int  # FrozenLake and others look the action up in a dict or a list
        case spaces.Text():
            return str
        case spaces.Dict():
            converters = {key: _action_converter(child) for key, child in space.items()}
            return lambda action: {k: convert(action[k]) for k, convert in converters.items()}
        case spaces.Tuple():
            parts = [_action_converter(child) for child in space]
            return lambda action: tuple(
                convert(value) for convert, value in zip(parts, action, strict=True)
            )
    return np.asarray
