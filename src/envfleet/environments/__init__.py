"""What a user's constructor returned, made to speak dm_env, inside the actor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

# By name: the module of this package that is called dm_env, too, hides the other one.
from dm_env import Environment as _DmEnv

from envfleet import gin_state
from envfleet.environments.dm_env import DmEnvironment
from envfleet.errors import unknown


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
    if _is_a(env, "envfleet.environments.gymnasium_member", "GymnasiumMember"):
        return env  # type: ignore[no-any-return]  # of a face, which has made it speak dm_env
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


def constructor_of(environment_name: str) -> Callable[[], Any]:
    """A constructor of the environment of a name; the name is looked up when it is called.

    ``"CartPole-v1"`` and ``"module:Env-v0"`` are Gymnasium's, where the module is imported first;
    ``"dm_control:cartpole/swingup"`` is a domain and a task of dm_control's suite.
    """
    # Not `load` of gymnasium or dm_control: what gin binds to those is for who names them.
    return functools.partial(_make, environment_name)


def _make(environment_name: str, **kwargs: Any) -> Any:
    library, _, name = environment_name.rpartition(":")
    if library == "dm_control":
        from envfleet.environments import dm_control

        return dm_control.make(name, **kwargs)
    try:
        from envfleet.environments.gymnasium import make
    except ModuleNotFoundError as missing:
        if missing.name != "gymnasium":
            raise
        problem = ModuleNotFoundError(
            f"{environment_name!r} is an environment of Gymnasium's, which is not installed: "
            "pip install 'envfleet[gymnasium]'",
            name="gymnasium",
        )
        raise unknown(problem, environment_name) from missing
    return make(environment_name, **kwargs)


def _is_a(env: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(env, cls)


# Not `load`, which is what users call theirs: gin would find `load` ambiguous wherever theirs is
# bound by that name, since this module is always imported.
@gin_state.configurable
def load_environment(environment_name: str, **kwargs: Any) -> Any:
    """An environment by its name, as `constructor_of` has them, whatever library it is of.

    A constructor, when its arguments are bound: by gin, in several scopes for several environments
    (``train/load_environment.environment_name = "CartPole-v1"``, ``@train/load_environment``).

    Args:
      environment_name: as for `constructor_of`.
      **kwargs: as for `gymnasium.make` or `dm_control.suite.load`.

    Raises:
      Exception: as `gymnasium.make` or `dm_control.suite.load`; says what is missing.
    """
    return constructor_of(environment_name)(**kwargs)
