"""ActorPyEnvironment: one environment that lives elsewhere; and a handle on one of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from envfleet import gin_state
from envfleet.actor import MethodOf
from envfleet.actors import deadlines
from envfleet.environments import constructor_of
from envfleet.errors import EnvFailure, EnvFleetError, note
from envfleet.fleet import Fleet
from envfleet.restarts import budget
from envfleet.seeding import Seeds

_T = TypeVar("_T")

_OWN_METHODS = ("reset", "step", "close", "seed", "set_state")
"""Methods of an environment that change its episode: by `call` they would pass by its record."""


class Specs:
    """The specs of a fleet's environments, which are alike."""

    _fleet: Fleet

    def time_step_spec(self) -> Any:
        """A time step whose leaves are specs, without a batch axis, in the environment's types."""
        self._fleet.check_open("time_step_spec")
        return self._fleet.time_step_layout.structure

    def observation_spec(self) -> Any:
        """Spec of one environment's observation."""
        return self.time_step_spec().observation

    def reward_spec(self) -> Any:
        """Spec of one environment's reward."""
        return self.time_step_spec().reward

    def discount_spec(self) -> Any:
        """Spec of one environment's discount."""
        return self.time_step_spec().discount

    def action_spec(self) -> Any:
        """Spec of one environment's action."""
        self._fleet.check_open("action_spec")
        return self._fleet.action_layout.structure


class Closing:
    """The end of a fleet, by `close` or at the end of a ``with`` block."""

    _fleet: Fleet

    def close(self) -> None:
        """Closes the environments, then ends their actors. Twice is fine.

        Raises:
          Exception: what an environment raised in its ``close`` (or `ActorDied`, or `EnvTimeout`
            after ``close_timeout``), when everything has been ended.
        """
        self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as problem:
            if error is None:
                raise
            # The error that is on its way is the one to see; this one is not lost.
            note(error, f"and then closing failed: {type(problem).__name__}: {problem}")


class Promise(Generic[_T]):
    """What an asynchronous call gives. Calling it waits for the value, or raises; again too."""

    def __init__(self, resolve: Callable[[], _T]) -> None:
        self._resolve: Callable[[], _T] | None = resolve
        self._value: _T
        self._error: BaseException | None = None

    def __call__(self) -> _T:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> None:
        """Waits without raising what the call raised."""
        if self._resolve is not None:
            try:
                self._value = self._resolve()
            except Exception as error:
                self._error = error
            self._resolve = None


class EnvHandle(Specs):
    """One environment of a batch: its attributes, methods and specs.

    A public attribute that is not found here is read from the environment, through its wrappers; a
    method comes back as a function that calls it there and waits. Private names never travel by
    themselves; `access` reads them.
    """

    def __init__(self, fleet: Fleet, env_id: int) -> None:
        self._fleet = fleet
        self._env_id = env_id

    def call(self, name: str, *args: Any, **kwargs: Any) -> Promise[Any]:
        """Calls a method of the environment; gives a promise of its result."""
        check_callable(name)
        return self._post("call", name, args, kwargs)

    def access(self, name: str) -> Any:
        """An attribute of the environment, private ones too.

        Raises:
          AttributeError: there is none of that name.
        """
        value = self._post("get_attr", name)()
        if is_method(value):
            return lambda *args, **kwargs: self.call(name, *args, **kwargs)()
        return value

    def __getattr__(self, name: str) -> Any:
        # Pickling, copying and notebooks ask for dunder names: they are answered here.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            self._fleet.check_ready("getattr", [self._env_id])
        except EnvFleetError as problem:  # and hasattr says so, too
            raise AttributeError(f"{name!r}: {problem}") from problem
        return self.access(name)

    def _post(self, operation: str, *arguments: Any) -> Promise[Any]:
        values = self._fleet.post(operation, {self._env_id: arguments})

        def value() -> Any:
            self._wait_moving()  # under its own deadline: the call is queued behind it
            return values()[0]

        return Promise(value)

    def _wait_moving(self) -> None:
        """Waits for a step that is on its way; in a batch the call comes behind it anyway."""


@gin_state.configurable
class ActorPyEnvironment(EnvHandle, Closing):
    """One environment in an actor of its own.

    The drop-in for TF-Agents' `ProcessPyEnvironment`. Actions and time steps have no batch axis. As
    in a batch, a `step` resets where the episode has ended, and its action is ignored; after a
    failure `step` refuses until `reset`, which rebuilds the environment.

    Args:
      env_constructor: a callable without arguments that returns the environment, or its name.
      flatten: accepted for TF-Agents' sake. Leaves travel without their structure either way.
      actor_options, ray_init, backend, transport, seed, on_failure, max_restarts, start_timeout,
        reset_timeout, step_timeout, call_timeout, close_timeout: as for `ParallelPyEnvironment`.

    Raises:
      TypeError: an environment in place of a constructor, or a constructor that does not pickle.
    """

    def __init__(
        self,
        env_constructor: Callable[[], Any] | str,
        flatten: bool = False,
        *,
        actor_options: Mapping[str, Any] | None = None,
        ray_init: Mapping[str, Any] | None = None,
        backend: str = "ray",
        transport: str = "rpc",
        seed: int | None = None,
        on_failure: str = "raise",
        max_restarts: int = 5,
        start_timeout: float | None = 120.0,
        reset_timeout: float | None = None,
        step_timeout: float | None = None,
        call_timeout: float | None = None,
        close_timeout: float | None = 5.0,
    ) -> None:
        del flatten
        constructor = as_constructor(env_constructor, "env_constructor")
        self._moving: Promise[Any] | None = None
        fleet = Fleet(
            [constructor],
            backend=backend,
            transport=transport,
            ray_init=ray_init,
            actor_options=[actor_options or {}],
            envs_per_actor=1,
            seeds=None if seed is None else Seeds(seed, 1),
            max_restarts=budget(on_failure, max_restarts),
            deadlines=deadlines(
                start=start_timeout,
                reset=reset_timeout,
                step=step_timeout,
                call=call_timeout,
                close=close_timeout,
            ),
        )
        super().__init__(fleet, env_id=0)

    @property
    def failures(self) -> tuple[EnvFailure, ...]:
        """The last 1000 failures after which it had to be rebuilt, the oldest first."""
        return tuple(self._fleet.restarts.history)

    def start(self, wait_to_start: bool = True) -> None:
        """Starts the actor and builds the environment in it; again is fine.

        Raises:
          FleetStartError: it was not ready within ``start_timeout``.
          Exception: what the constructor raised.
        """
        self._fleet.post_start()
        if wait_to_start:
            self.wait_start()

    def wait_start(self) -> None:
        """Waits for a `start` that did not; raises as `start` does."""
        self._fleet.wait_start()

    def reset(self, blocking: bool = True) -> Any:
        """Resets the environment, and rebuilds it if it has failed.

        Returns:
          Its first time step, or a `Promise` of it.
        """
        self._wait_moving()
        self._fleet.check_open("reset")
        return self._advance(self._fleet.stepper.reset([0]), blocking)

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Steps the environment; resets it, without the action, if its episode has ended.

        Args:
          action: a structure like `action_spec()`.
          blocking: whether to wait.

        Returns:
          Its time step, leaves of shape `spec.shape`, or a `Promise` of it. One step is on its way
          at a time: another one first waits for it.

        Raises:
          InvalidAction: the action does not fit; the environment has not moved.
          ResetNeeded: the environment failed before, and there was no `reset` since.
          Exception: what the environment raised, or `ActorDied`, or `EnvTimeout`. A `Promise`
            raises it when it is called.
        """
        self._wait_moving()
        self._fleet.check_ready("step")
        self._fleet.tell_if_due(time.monotonic())
        columns = self._fleet.action_layout.columns(action, None)
        return self._advance(self._fleet.stepper.step(columns), blocking)

    def seed(self, seed: int | Sequence[int] | None = None) -> int:
        """Seeds the environment, from its next reset on.

        Args:
          seed: an int as for the constructor; a list of one is exactly the environment's seed; None
            draws from the operating system.

        Returns:
          The environment's seed.

        Raises:
          TypeError: the environment has no way to be seeded.
        """
        self._wait_moving()
        return self._fleet.reseed(Seeds(seed, 1))[0]

    def render(self, mode: str = "rgb_array", blocking: bool = True) -> Any:
        """An image, as the environment gives it, or a `Promise` of one.

        Raises:
          NotImplementedError: a mode other than ``"rgb_array"``.
        """
        check_render_mode(mode)
        image = self._post("render")
        return image() if blocking else image

    def get_info(self) -> Any:
        """What came with the last time step besides it (Gymnasium's info)."""
        return self._post("get_info")()

    def get_state(self) -> Any:
        """The environment's ``get_state()``."""
        return self._post("get_state")()

    def set_state(self, state: Any) -> None:
        """Gives the environment a state of its ``get_state()``; the next `step` goes on from it."""
        self._wait_moving()
        self._post("set_state", state)()

    def current_time_step(self) -> Any:
        """The time step that the environment is at.

        Raises:
          ResetNeeded: there is none: before the first `reset` or `step`, or after a failure.
        """
        self._wait_moving()
        self._fleet.check_ready("current_time_step")
        return self._time_step(self._fleet.stepper.columns())

    def _advance(self, time_steps: Callable[[], list[Any]], blocking: bool) -> Any:
        if blocking:
            return self._time_step(time_steps())
        self._moving = Promise(lambda: self._time_step(time_steps()))
        return self._moving

    def _wait_moving(self) -> None:
        if self._moving is not None:
            self._moving.wait()  # an interrupt leaves it to the reset that must follow
            self._moving = None

    def _time_step(self, columns: list[Any]) -> Any:
        return self._fleet.time_step_layout.unflatten([column[0] for column in columns])


def as_constructor(constructor: Any, where: str) -> Callable[[], Any]:
    """What makes an environment: a constructor as it is, a name as `environments` has it.

    Raises:
      TypeError: it is neither, above all an environment.
    """
    if isinstance(constructor, str):
        return constructor_of(constructor)
    is_instance = not isinstance(constructor, type) and all(
        hasattr(constructor, name) for name in ("reset", "step")
    )
    if is_instance or not callable(constructor):
        name = type(constructor).__qualname__
        # "non-callable" is TF-Agents' word for it, too: tests of existing scripts look for it.
        found = f"an environment (non-callable {name})" if is_instance else f"not callable ({name})"
        raise TypeError(
            f"{where} is {found}: expected a non-called constructor, since "
            "environments are built in their actors (in gin, @make_env and not @make_env())"
        )
    return constructor  # type: ignore[no-any-return]


def check_callable(name: str) -> None:
    """Raises `ValueError` for a method whose call has to pass through the record of episodes."""
    if name in _OWN_METHODS:
        raise ValueError(
            f"call({name!r}) would pass by the record of episodes: use {name}() itself"
        )


def check_render_mode(mode: str) -> None:
    """Raises `NotImplementedError` for another mode than the one whose images can be sent."""
    if mode != "rgb_array":
        raise NotImplementedError(f"Only rgb_array rendering is supported, not {mode!r}")


def is_method(value: Any) -> bool:
    """Whether what an environment gave for an attribute stands for a method of its own."""
    return isinstance(value, MethodOf)
