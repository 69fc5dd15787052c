"""GymnasiumMember: a Gymnasium environment as one of a vector environment, in its actor.

What a vector environment of Gymnasium (or Stable-Baselines3) gives beyond dm_env's time step,
flags, infos and what an episode ended with, travels in the observation of the time step, so that
it costs no call of its own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from envfleet.environments.gymnasium import (
    DISCOUNT_SPEC,
    REWARD_SPEC,
    STEP_TYPE_SPEC,
    GymnasiumEnvironment,
    by_parts,
    spec_from_space,
)
from envfleet.environments.wrappers import layers

_PROCESS = os.urandom(16)
"""This process among all others: containers on several nodes have the same process ids."""

_FLAG_SPEC = specs.Array((), bool)
_OBJECT_SPEC = specs.Array((), object)
"""Of any Python object, which travels beside the block."""


class Seen(NamedTuple):
    """What stands in the place of the observation in a member's time step.

    Attributes:
      observation: by the observation space; what has no spec as an object.
      terminated, truncated: of the step that this is the outcome of, as the environment said.
      beside: a `Beside`, or None where that would be empty.
    """

    observation: Any
    terminated: Any
    truncated: Any
    beside: Any


class Beside(NamedTuple):
    """What came with a time step besides it.

    Attributes:
      info: of the reset or step whose observation is shown.
      final: of an episode that ended with SAME_STEP, its last observation and info; or None.
      awaits_reset: whether the reset has failed that should have followed in the same step, so
        that what is shown is still the end of the episode; the next reset raises what it raised.
    """

    info: dict[str, Any]
    final: tuple[Any, dict[str, Any]] | None
    awaits_reset: bool = False


class Described(NamedTuple):
    """What a vector environment has to know of a member."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    identity: tuple[bytes, int]
    """Equal for members that have one and the same environment: in which process, which."""


class GymnasiumMember(GymnasiumEnvironment):
    """A `gymnasium.Env` of any spaces, reset as a vector environment's `AutoresetMode` has it.

    NEXT_STEP is what an actor does with a time step that is LAST. With the other two the actor is
    never shown a LAST: a step that ends the episode resets at once (SAME_STEP) and is FIRST of the
    next one, or it is left to the caller to reset (DISABLED). So a LAST with these is an episode
    that the batch has cut short because the environment failed, unless it says that it awaits a
    reset, the one that should have followed in the step having failed.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], autoreset_mode: AutoresetMode) -> None:
        super().__init__(env)
        self._mode = autoreset_mode
        self._boxed = by_parts(env.observation_space, _box_of)
        self._failed_reset: Exception | None = None

    def _spec_of(self, space: spaces.Space[Any], where: str) -> Any:
        del where  # there is nothing to refuse
        return any_spec(space)

    def time_step_spec(self) -> Any:
        return dm_env.TimeStep(
            STEP_TYPE_SPEC,
            REWARD_SPEC,
            DISCOUNT_SPEC,
            Seen(self._observation_spec, _FLAG_SPEC, _FLAG_SPEC, _OBJECT_SPEC),
        )

    def reset(self) -> Any:
        if self._failed_reset is not None:
            failed, self._failed_reset = self._failed_reset, None
            raise failed
        observation = self._reset()
        return self._time_step(dm_env.StepType.FIRST, 0.0, observation, False, False, None)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, self._info = self.env.step(
            self._to_action(action)
        )
        step_type, final = dm_env.StepType.MID, None
        if terminated or truncated:
            if self._mode is AutoresetMode.NEXT_STEP:
                step_type = dm_env.StepType.LAST
            elif self._mode is AutoresetMode.SAME_STEP:
                step_type = dm_env.StepType.FIRST
                # A copy: the environment may write what its reset gives over it.
                final = copy.deepcopy((observation, self._info))
                try:
                    observation = self._reset()
                except Exception as error:  # which the step that went well is not to suffer from
                    self._failed_reset = error
                    step_type = dm_env.StepType.LAST
                    (observation, self._info), final = final, None
        return self._time_step(step_type, reward, observation, terminated, truncated, final)

    def _time_step(
        self,
        step_type: dm_env.StepType,
        reward: Any,
        observation: Any,
        terminated: Any,
        truncated: Any,
        final: tuple[Any, dict[str, Any]] | None,
    ) -> Any:
        failed = self._failed_reset is not None
        beside = Beside(self._info, final, failed) if self._info or final or failed else None
        return dm_env.TimeStep(
            step_type,
            reward,
            0.0 if terminated else 1.0,
            Seen(self._boxed(observation), bool(terminated), bool(truncated), _box(beside)),
        )

    # -- what faces ask ----------------------------------------------------------------------------

    def describe(self) -> Described:
        env = self.env
        return Described(
            env.observation_space,
            env.action_space,
            env.metadata,
            env.render_mode,
            (_PROCESS, id(env.unwrapped)),
        )

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the environment, or of what it wraps."""
        return self.env.get_wrapper_attr(name)(*args, **kwargs)

    def call_or_get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like `call`, and the value of an attribute that cannot be called."""
        value = self.env.get_wrapper_attr(name)
        return value(*args, **kwargs) if callable(value) else value

    def has_wrapper_attr(self, name: str) -> bool:
        return self.env.has_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets it on the outermost wrapper, or environment, that has it."""
        self.env.set_wrapper_attr(name, value)

    def is_wrapped(self, wrapper: type) -> bool:
        """Whether one of the environment's wrappers is of this class."""
        wrappers = (layer for layer in layers(self.env) if isinstance(layer, gymnasium.Wrapper))
        return any(isinstance(layer, wrapper) for layer in wrappers)


class Member:
    """A constructor of a `GymnasiumMember`.

    Args:
      constructor: of a `gymnasium.Env`.
      autoreset_mode: of the vector environment.
    """

    def __init__(self, constructor: Callable[[], Any], autoreset_mode: AutoresetMode) -> None:
        self._constructor = constructor
        self._mode = autoreset_mode

    def __repr__(self) -> str:
        return repr(self._constructor)  # the user's, in an error

    def __call__(self) -> GymnasiumMember:
        env = self._constructor()
        if not isinstance(env, gymnasium.Env):
            kind = type(env)
            raise TypeError(
                f"the constructor returned a {kind.__module__}.{kind.__qualname__}, expected a "
                "gymnasium.Env"
            )
        return GymnasiumMember(env, self._mode)


# -- spaces without a spec -------------------------------------------------------------------------


def any_spec(space: spaces.Space[Any]) -> Any:
    """Like `spec_from_space`, with the spec of any object where a space has none."""
    if has_spec(space):
        return spec_from_space(space)
    match space:
        case spaces.Dict():
            return {key: any_spec(child) for key, child in space.items()}
        case spaces.Tuple():
            return tuple(any_spec(child) for child in space)
    return _OBJECT_SPEC


def has_spec(space: spaces.Space[Any]) -> bool:
    """Whether a space, and every space in it, has a spec."""
    try:
        spec_from_space(space)
    except TypeError:
        return False
    return True


def _box_of(part: spaces.Space[Any]) -> Callable[[Any], Any] | None:
    """What puts a part of an observation into a box if it has no spec."""
    if has_spec(part):
        return lambda value: value
    return None if isinstance(part, spaces.Dict | spaces.Tuple) else _box


def _box(value: Any) -> np.ndarray[Any, Any]:
    """Anything as one element, which a tuple or list would not be by itself."""
    box = np.empty((), object)
    box[()] = value
    return box
