"""What a user's constructor returned, made to speak dm_env, inside the actor."""

from __future__ import annotations

import sys
from typing import Any, Protocol

# By name: the module of this package that is called dm_env, too, hides the other one.
from dm_env import Environment as _DmEnv

from envfleet.environments.dm_env import DmEnvironment


class Environment(Protocol):
    """What an actor needs of an environment, whatever ecosystem it comes from.

    A time step is a named tuple with the fields of `dm_env.TimeStep`; its leaves fit
    `time_step_spec()`. `reset` may be called at any time; `step` only after a `reset` whose episode
    has not ended.
    """

    env: Any
    """The user's environment as the constructor returned it."""

    def time_step_spec(self) -> Any:
        """A time step whose leaves are specs, in the environment's own types."""
        ...

    def action_spec(self) -> Any: ...

    def reset(self) -> Any: ...

    def step(self, action: Any) -> Any: ...

    def seed(self, seed: int) -> None:
        """Seeds the environment, from its next reset on.

        Raises:
          TypeError: it has no way to be seeded; ignoring that would give identical environments.
        """
        ...

    def render(self) -> Any:
        """An image of shape ``(height, width, 3)``, dtype uint8."""
        ...

    def get_info(self) -> Any:
        """What came with the last time step besides it."""
        ...

    def close(self) -> None: ...


def as_environment(env: Any) -> Environment:
    """Recognises a user's environment and makes it speak dm_env.

    An environment's package has been imported by whoever built it, so none is imported here.

    Raises:
      TypeError: it is none of the kinds that envfleet knows; says what it is.
    """
    if isinstance(env, _DmEnv):
        return DmEnvironment(env)
    if _is_a(env, "gymnasium", "Env"):
        from envfleet.environments.gymnasium import GymnasiumEnvironment

        return GymnasiumEnvironment(env)
    if _is_a(env, "tf_agents.environments.py_environment", "PyEnvironment"):
        from envfleet.environments.tf_agents import TfAgentsEnvironment

        return TfAgentsEnvironment(env)
    kind = type(env)
    raise TypeError(
        f"the constructor returned a {kind.__module__}.{kind.__qualname__}, expected a "
        "dm_env.Environment, a gymnasium.Env or a TF-Agents PyEnvironment"
    )


def _is_a(env: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(env, cls)
