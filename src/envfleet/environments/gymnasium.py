"""Gymnasium environments: by name, spaces to specs and back, five values to a time step."""

from __future__ import annotations

import ast
import copy
import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces

from envfleet import gin_state
from envfleet.environments import registrations
from envfleet.errors import unknown
from envfleet.specs import bound

REWARD_SPEC = specs.Array((), np.float64, "reward")
DISCOUNT_SPEC = specs.BoundedArray((), np.float64, 0.0, 1.0, "discount")
_FIRST, _MID, _LAST = dm_env.StepType

STEP_TYPE_SPEC = specs.BoundedArray((), np.int32, 0, 2, "step_type")


@functools.partial(gin_state.configurable, module=__name__)
def load(
    environment_name: str,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    **kwargs: Any,
) -> gymnasium.Env[Any, Any]:
    """An environment by its id; a constructor, when its arguments are bound (by gin, say).

    What the caller has registered is registered in actors, too.

    Args:
      environment_name: a registered id, or ``"module:Env-v0"``, whose module is imported first.
      wrappers: applied to it in this order.
      **kwargs: as for `gymnasium.make`: ``max_episode_steps``, ``render_mode`` and those of the
        environment.

    Raises:
      gymnasium.error.UnregisteredEnv: nothing has registered the id; says what is missing.
      ModuleNotFoundError: a module that the id names is not there.
      ValueError: what stands in front of a colon cannot be a module.
    """
    env = make(environment_name, **kwargs)
    for wrap in wrappers:
        env = wrap(env)
    return env


def make(environment_name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make`, which says what to import for an id that nothing has registered."""
    module, colon, _ = environment_name.rpartition(":")
    if colon and not all(map(str.isidentifier, module.split("."))):
        expected = f"expected an id or 'module:Env-v0', and {module!r} is no module"
        raise unknown(ValueError(f"{environment_name!r}: {expected}"), environment_name)
    try:
        return gymnasium.make(environment_name, **kwargs)
    except (gymnasium.error.Error, ModuleNotFoundError) as problem:
        if not _is_about_name(problem, environment_name):
            raise
        unknown(problem, environment_name)
        if not isinstance(problem, gymnasium.error.UnregisteredEnv):
            raise
        lost = registrations.problem(environment_name)
        missing = (
            f"the caller has registered it, but that does not reach this process: {lost}"
            if lost
            else "whatever module registers it has to be imported where the batch is made, or in "
            f"front of the id ('module:{environment_name}')"
        )
        said = type(problem)(f"{problem} ({missing})")
        raise unknown(said, environment_name) from problem


def _is_about_name(problem: Exception, environment_name: str) -> bool:
    """Whether a name leads nowhere; False where it leads to what has raised that itself."""
    if isinstance(problem, ModuleNotFoundError):
        # What is missing may be what the module in front of the name imports, and not that itself.
        missing = getattr(problem.__cause__, "name", None)
        if missing is None or not f"{environment_name.partition(':')[0]}.".startswith(
            f"{missing}."
        ):
            return False
    trace = problem.__traceback__ and problem.__traceback__.tb_next
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") != gymnasium.make.__module__:
            return False  # what is made comes after it in the traceback
        trace = trace.tb_next
    return True


class GymnasiumEnvironment:
    """A `gymnasium.Env` (its API from 0.26 on: five values from `step`, `reset(seed=)`).

    ``terminated`` becomes LAST with discount 0, ``truncated`` LAST with discount 1, both together a
    termination. `get_info` gives the info of the last `reset` or `step`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self._observation_spec = self._spec_of(env.observation_space, "observation_space")
        self._action_spec = self._spec_of(env.action_space, "action_space")
        self._to_action = action_converter(env.action_space)
        self._seed: int | None = None
        self._options: dict[str, Any] | None = None
        self._info: dict[str, Any] = {}

    def _spec_of(self, space: spaces.Space[Any], where: str) -> Any:
        return spec_from_space(space, where)

    def time_step_spec(self) -> Any:
        return dm_env.TimeStep(STEP_TYPE_SPEC, REWARD_SPEC, DISCOUNT_SPEC, self._observation_spec)

    def action_spec(self) -> Any:
        return self._action_spec

    def reset(self) -> Any:
        observation = self._reset()
        return dm_env.TimeStep(_FIRST, 0.0, 1.0, observation)

    def _reset(self) -> Any:
        """The first observation, by the seed and the options that were given for this reset."""
        seed, self._seed = self._seed, None
        options, self._options = self._options, None
        told = {} if options is None else {"options": options}  # which not every environment takes
        observation, self._info = self.env.reset(seed=seed, **told)
        return observation

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, self._info = self.env.step(
            self._to_action(action)
        )
        step_type = _LAST if terminated or truncated else _MID
        return _time_step((step_type, reward, 0.0 if terminated else 1.0, observation))

    def seed(self, seed: int) -> None:
        """Takes effect at the next reset, as Gymnasium has it; later resets go on from there."""
        self._seed = seed

    def set_options(self, options: dict[str, Any] | None) -> None:
        """Gives the next reset its ``options``; a copy, which the environment may change."""
        self._options = copy.deepcopy(options)

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


_time_step = functools.partial(tuple.__new__, dm_env.TimeStep)
"""A time step of its four fields: by the class itself it would take thrice as long."""

_LONG = 1000
"""Characters of a string whose spec says nothing of its length."""


# -- spaces and specs ------------------------------------------------------------------------------


class TextArray(specs.StringArray):  # type: ignore[misc]
    """The spec of a `Text` space: a string, and what the space says of its length and characters.

    Args:
      min_length, max_length: of the string.
      characters: those that it may have, in the space's order.
      name: of the spec.
    """

    def __init__(
        self, min_length: int, max_length: int, characters: str, name: str | None = None
    ) -> None:
        super().__init__((), str, name)
        self.min_length = min_length
        self.max_length = max_length
        self.characters = characters

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and (
            not isinstance(other, TextArray)
            or (
                (self.min_length, self.max_length) == (other.min_length, other.max_length)
                and set(self.characters) == set(other.characters)
            )
        )

    __hash__ = None  # type: ignore[assignment]  # as of every spec

    def __reduce__(self) -> tuple[Any, ...]:
        return TextArray, (self.min_length, self.max_length, self.characters, self.name)


def spec_from_space(space: spaces.Space[Any], where: str = "space") -> Any:
    """The spec of a space; a `Dict` gives a dict and a `Tuple` a tuple of specs.

    A space of integers whose spec might be a `Box`'s as well stands in the name of its spec.

    Args:
      space: of Gymnasium.
      where: what it is called in an error.

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
            end = int(start) + int(n)  # which its own dtype may not hold
            return specs.BoundedArray((), dtype, start, end - 1, "Discrete")
        case spaces.MultiDiscrete(start=start, nvec=nvec):
            highest = start + nvec - 1
            return specs.BoundedArray(space.shape, space.dtype, start, highest, "MultiDiscrete")
        case spaces.MultiBinary():
            # MultiBinary(5) and MultiBinary([5]) have one shape and are not equal.
            return specs.BoundedArray(space.shape, space.dtype, 0, 1, f"MultiBinary({space.n})")
        case spaces.Text():
            characters = "".join(space.character_list)
            return TextArray(space.min_length, space.max_length, characters)
        case spaces.Dict():
            return {k: spec_from_space(s, f"{where}[{k!r}]") for k, s in space.items()}
        case spaces.Tuple():
            return tuple(spec_from_space(s, f"{where}[{i}]") for i, s in enumerate(space))
    if space.shape is None and space.dtype is not None and space.dtype.kind == "U":
        return specs.StringArray(())  # of another library: MiniGrid's missions
    kind = type(space)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, whose values have no fixed shape and "
        "so no spec (envfleet.interop.gymnasium.RayVectorEnv takes it)"
    )


def space_from_spec(spec: Any, where: str = "spec") -> spaces.Space[Any]:
    """The space of a spec or a structure of specs; what `spec_from_space` gave, exactly.

    An array without bounds becomes a `Box` of all that its dtype holds, a string a `Text` of any
    printable ASCII characters.

    Args:
      spec: of dm_env or like those; in dicts, tuples and lists.
      where: what it is called in an error.

    Raises:
      TypeError: something that is no spec, or of a dtype that no space has; says where it stands.
    """
    match spec:
        case dict():
            # As pairs, since a Dict sorts the keys of a dict.
            return spaces.Dict(
                [(k, space_from_spec(s, f"{where}[{k!r}]")) for k, s in spec.items()]
            )
        case tuple() | list():
            return spaces.Tuple([space_from_spec(s, f"{where}[{i}]") for i, s in enumerate(spec)])
        case TextArray():
            return spaces.Text(spec.max_length, min_length=spec.min_length, charset=spec.characters)
        case specs.StringArray(shape=()):
            return spaces.Text(_LONG, min_length=0, charset=string.printable)
        case specs.DiscreteArray():
            return spaces.Discrete(spec.num_values, dtype=spec.dtype)
        case specs.BoundedArray(name="Discrete", shape=(), minimum=low, maximum=high):
            return spaces.Discrete(int(high) - int(low) + 1, start=int(low), dtype=spec.dtype)
        case specs.BoundedArray(name="MultiDiscrete", minimum=low, maximum=high):
            sizes = high.astype(np.int64) - low + 1
            return spaces.MultiDiscrete(sizes, dtype=spec.dtype, start=low)
        case specs.BoundedArray(name=str(name)) if name.startswith("MultiBinary("):
            return spaces.MultiBinary(ast.literal_eval(name.removeprefix("MultiBinary")))
    if not hasattr(spec, "shape") or np.dtype(getattr(spec, "dtype", "O")).kind not in "iufb":
        raise TypeError(f"{where} is {spec!r}, for which there is no space")
    low, high = (
        np.broadcast_to(bound(spec, field).astype(spec.dtype), spec.shape)
        for field in ("minimum", "maximum")
    )
    return spaces.Box(low, high, spec.shape, spec.dtype)


def action_converter(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """From an action by the spec to the very type that the space's own samples have."""

    def of_part(part: spaces.Space[Any]) -> Callable[[Any], Any] | None:
        match part:
            case spaces.Discrete():
                return part.dtype.type  # FrozenLake and others look the action up in a dict
            case spaces.Text():
                return str
            case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
                return np.asarray
        return None

    return by_parts(space, of_part)


def by_parts(
    space: spaces.Space[Any],
    of_part: Callable[[spaces.Space[Any]], Callable[[Any], Any] | None],
) -> Callable[[Any], Any]:
    """A function of values that are laid out as the space's, worked out once.

    `of_part` gives the function for the space or a part of it. Where it gives None, a `Dict` or a
    `Tuple` has one for each of its parts, and anything else stays as it is.
    """
    chosen = of_part(space)
    if chosen is not None:
        return chosen
    match space:
        case spaces.Dict():
            functions = {key: by_parts(child, of_part) for key, child in space.items()}
            return lambda value: {key: of(value[key]) for key, of in functions.items()}
        case spaces.Tuple():
            parts = [by_parts(child, of_part) for child in space]
            return lambda value: tuple(of(item) for of, item in zip(parts, value, strict=True))
    return lambda value: value
