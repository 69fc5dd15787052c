"""ParallelPyEnvironment: environments side by side.

A face on a `Fleet`: it checks arguments, turns structures into blocks and back, and steps nothing
itself.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet import gin_state
from envfleet.actors import deadlines
from envfleet.errors import EnvFailure
from envfleet.fleet import Fleet
from envfleet.restarts import budget
from envfleet.seeding import Seeds
from envfleet.single import Closing, EnvHandle, Specs, check_callable, check_constructor, is_method


class Stats(NamedTuple):
    """Where a batch's time went, and what went wrong; lists have an element per environment.

    Attributes:
      num_calls: resets and steps since it was last built; 0 of what waits to be rebuilt, and of its
        neighbours in the same actor.
      env_seconds: seconds that it spent in them.
      waited: seconds that the caller waited for actors, the start included.
      failures: how often it has failed: raised, died or been late.
      restarts: how often it was built anew, attempts that failed included.
      last_failure: its last failure, or None.
      seconds_lost: seconds from the calls in which it failed until it had a time step again.
    """

    num_calls: list[int]
    env_seconds: list[float]
    waited: float
    failures: list[int]
    restarts: list[int]
    last_failure: list[EnvFailure | None]
    seconds_lost: list[float]


@gin_state.configurable
class ParallelPyEnvironment(Specs, Closing):
    """Environments in Ray actors, stepped as one batch.

    The drop-in for TF-Agents' class of that name. Leaves of actions and of time steps have shape
    ``(batch_size, *spec.shape)``; specs never have the batch axis. Time steps have the type that
    the environments speak: TF-Agents' own, or `dm_env.TimeStep`. An environment whose last time
    step was LAST is reset by the next `step`, and its action ignored; so are all of them at the
    first `step`. Not for use from several threads at once.

    Args:
      env_constructors: a callable without arguments for each environment, or one callable together
        with `num_envs`. Called in the actors only. What it returns is a `dm_env.Environment`, a
        `gymnasium.Env` or a TF-Agents `PyEnvironment`.
      start_serially: start one environment after another instead of all at once.
      blocking: step and reset one environment after another instead of all at once.
      flatten: accepted for TF-Agents' sake. Leaves travel without their structure either way.
      num_envs: how many environments, where `env_constructors` is one callable.
      envs_per_actor: how many environments share an actor, and so a remote call.
      actor_options: options of `ray.actor.ActorClass.options` (``num_cpus``, ``num_gpus``,
        ``resources``, ``scheduling_strategy``, ``runtime_env``, ...) for all actors, or a list with
        a mapping for each environment. Default: Ray's, spread over the nodes.
      ray_init: arguments of `ray.init`, which is called only if Ray is not initialised; a Ray that
        was started so is shut down when the last batch on it closes.
      backend: ``"ray"``, or ``"local"``: the same in this process without Ray, for debugging.
      seed: as for `seed`; None leaves the environments as their constructors made them.
      on_failure: what becomes of an environment that raises, whose process dies, or that passes its
        deadline. ``"raise"``: its exception is raised, and the next `reset` rebuilds it.
        ``"restart"``: it is rebuilt while the others go on. Its slot shows the end of the episode
        by truncation (LAST with its last good observation, reward 0, discount 1), then FIRST. One
        that fails in a reset is rebuilt and reset again before that call returns.
      max_restarts: with ``"restart"``, how often in a row an environment is restarted without a
        good step in between; then what it failed with is raised, with every attempt in its notes.
        From the second one on there is a pause first, of 0.2 s and then twice as long each time.
      start_timeout: seconds until every environment must have been built, or be rebuilt.
      reset_timeout, step_timeout, call_timeout: seconds that a reset, a step, any other call may
        take; None for as long as it takes, with a warning that names who is late.
      close_timeout: seconds that the environments' ``close`` may take before they are killed.

    Raises:
      TypeError: an environment in place of a constructor, or a constructor that does not pickle;
        says which.
      ValueError: no constructors; or an argument that contradicts another.
      SpecMismatch: the environments' specs differ; says which, where, expected and found.
      FleetStartError: not all were ready in time; says what was asked for and what there is.
      Exception: what a constructor raised.
    """

    # TF-Agents' TFPyEnvironment(isolation=True) asks for this, to warn that it gains nothing.
    _parallel_execution = True

    def __init__(
        self,
        env_constructors: Callable[[], Any] | Sequence[Callable[[], Any]],
        start_serially: bool = False,
        blocking: bool = False,
        flatten: bool = False,
        *,
        num_envs: int | None = None,
        envs_per_actor: int = 1,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init: Mapping[str, Any] | None = None,
        backend: str = "ray",
        seed: int | Sequence[int] | None = None,
        on_failure: str = "raise",
        max_restarts: int = 5,
        start_timeout: float | None = 120.0,
        reset_timeout: float | None = None,
        step_timeout: float | None = None,
        call_timeout: float | None = None,
        close_timeout: float | None = 5.0,
    ) -> None:
        del flatten
        constructors = _checked_constructors(env_constructors, num_envs)
        self._start_serially = start_serially
        self._blocking = blocking
        self._backend = backend
        self._fleet = Fleet(
            constructors,
            backend=backend,
            ray_init=ray_init,
            actor_options=_checked_options(actor_options, len(constructors)),
            envs_per_actor=_positive("envs_per_actor", envs_per_actor),
            seeds=None if seed is None else Seeds(seed, len(constructors)),
            max_restarts=budget(on_failure, max_restarts),
            deadlines=deadlines(
                start=start_timeout,
                reset=reset_timeout,
                step=step_timeout,
                call=call_timeout,
                close=close_timeout,
            ),
        )
        self.start()

    def __repr__(self) -> str:
        return (
            f"<ParallelPyEnvironment of {self.batch_size} environments, backend {self._backend!r}>"
        )

    def start(self) -> None:
        """Starts the environments. The constructor has done so; again is fine."""
        self._fleet.start(one_by_one=self._start_serially)

    @property
    def batched(self) -> bool:
        """True: time steps and actions have a leading axis."""
        return True

    @property
    def batch_size(self) -> int:
        """Number of environments."""
        return self._fleet.num_envs

    @property
    def envs(self) -> tuple[EnvHandle, ...]:
        """A handle on each environment: its attributes, methods and specs."""
        return tuple(EnvHandle(self._fleet, i) for i in range(self.batch_size))

    # -- stepping ----------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Steps every environment; resets, without its action, one whose episode has ended.

        Args:
          actions: a structure like `action_spec()`, with leaves of shape ``(batch_size, *shape)``.

        Returns:
          A time step; leaves are fresh, writable, contiguous arrays of shape
          ``(batch_size, *shape)``.

        Raises:
          InvalidAction: `actions` do not fit; no environment has moved.
          ResetNeeded: an environment failed before, and there was no `reset` since.
          Exception: what the failing environment of the lowest index raised, or `ActorDied`, or
            `EnvTimeout`; after every other environment has finished its step.
        """
        fleet = self._fleet
        fleet.check_ready("step")
        columns = fleet.action_layout.columns(actions, fleet.num_envs)
        time_steps = fleet.step(columns, one_by_one=self._blocking)
        return fleet.time_step_layout.unflatten(time_steps())

    def reset(self, env_ids: Iterable[int] | None = None) -> Any:
        """Resets environments, and brings back those that have failed.

        Args:
          env_ids: which; the others are not touched. Default: all.

        Returns:
          A time step of the whole batch; slots that were not reset show their current one.

        Raises:
          ResetNeeded: an environment that is not among `env_ids` has failed or has no time step
            yet; none was reset.
          Exception: as `step`, or what a constructor raised.
        """
        fleet = self._fleet
        fleet.check_open("reset")
        time_steps = fleet.reset(self._checked_ids(env_ids), one_by_one=self._blocking)
        return fleet.time_step_layout.unflatten(time_steps())

    def current_time_step(self) -> Any:
        """The time step that every environment is at, as fresh arrays.

        Raises:
          ResetNeeded: there is none: before the first `reset` or `step`, or after a failure.
        """
        self._fleet.check_ready("current_time_step")
        return self._fleet.time_step_layout.unflatten(self._fleet.columns())

    def stats(self) -> Stats:
        """Where the time went so far, in seconds, and what went wrong."""
        timings, restarts = self._fleet.timings(), self._fleet.restarts
        return Stats(
            num_calls=[calls for calls, _ in timings],
            env_seconds=[seconds for _, seconds in timings],
            waited=self._fleet.waited,
            failures=[*restarts.num_failures],
            restarts=[*restarts.num_restarts],
            last_failure=[*restarts.last_failures],
            seconds_lost=[*restarts.seconds_lost],
        )

    @property
    def failures(self) -> tuple[EnvFailure, ...]:
        """The last 1000 failures after which an environment had to be rebuilt, the oldest first."""
        return tuple(self._fleet.restarts.history)

    # -- between steps -----------------------------------------------------------------------------

    def seed(self, seed: int | Sequence[int] | None = None) -> list[int]:
        """Seeds every environment, from its next reset on.

        Args:
          seed: an int gives every environment its own stream, by `numpy.random.SeedSequence`; a
            list needs one for each environment; None draws from the operating system.

        Returns:
          The seed of each environment.

        Raises:
          TypeError: an environment has no way to be seeded.
        """
        self._fleet.check_ready("seed")
        return self._fleet.reseed(Seeds(seed, self.batch_size))

    def render(self, mode: str = "rgb_array") -> np.ndarray[Any, Any]:
        """An image of every environment: uint8 of shape ``(batch_size, height, width, 3)``.

        Raises:
          NotImplementedError: a mode other than ``"rgb_array"``.
          ValueError: an environment gave no image, or one of another size; says which.
        """
        if mode != "rgb_array":
            raise NotImplementedError(f"Only rgb_array rendering is supported, not {mode!r}")
        images = [np.asarray(image) for image in self._operate("render")]
        for i, image in enumerate(images):
            fits = image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8
            if not fits or image.shape != images[0].shape:
                raise ValueError(
                    f"env {i} rendered shape {image.shape} of {image.dtype}, env 0 "
                    f"{images[0].shape}, expected the same (height, width, 3) of uint8 of all"
                )
        return np.stack(images)

    def get_info(self) -> list[Any]:
        """What came with each environment's last time step besides it (Gymnasium's info)."""
        return self._operate("get_info")

    def get_state(self) -> list[Any]:
        """Each environment's ``get_state()``."""
        return self._operate("get_state")

    def set_state(self, states: Sequence[Any]) -> None:
        """Gives each environment a state of its ``get_state()``; the next `step` goes on from it.

        Raises:
          ValueError: not one state for each environment.
        """
        if len(states) != self.batch_size:
            raise ValueError(f"{len(states)} states, expected one for each of {self.batch_size}")
        self._fleet.operate("set_state", {i: (state,) for i, state in enumerate(states)})

    def call(
        self, name: str, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method of each environment, or of what it wraps; gives one result each.

        Raises:
          ValueError: the batch has a method of that name itself, which keeps the episodes' record.
          Exception: what an environment raised; it stays usable.
        """
        check_callable(name)
        return self._operate("call", name, args, kwargs, env_ids=env_ids)

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """An attribute of each environment, or of what it wraps.

        Raises:
          AttributeError: an environment has none of that name.
          TypeError: it is a method, which stays with its environment.
        """
        values = self._operate("get_attr", name, env_ids=env_ids)
        if any(is_method(value) for value in values):
            raise TypeError(f"{name!r} is a method: call({name!r}, ...) calls it")
        return values

    def set_attr(self, name: str, value: Any, env_ids: Iterable[int] | None = None) -> None:
        """Sets an attribute on the outermost wrapper, or environment, that has it."""
        self._operate("set_attr", name, value, env_ids=env_ids)

    def _operate(
        self, operation: str, *arguments: Any, env_ids: Iterable[int] | None = None
    ) -> list[Any]:
        return self._fleet.operate(operation, dict.fromkeys(self._checked_ids(env_ids), arguments))

    def _checked_ids(self, env_ids: Iterable[int] | None) -> list[int]:
        if env_ids is None:
            return list(range(self.batch_size))
        chosen = list(env_ids)
        for i in chosen:
            if not isinstance(i, numbers.Integral) or isinstance(i, bool | np.bool_):
                raise TypeError(f"env_ids has {i!r}, expected indices from 0 on")
            if not 0 <= i < self.batch_size:
                raise IndexError(f"env_ids has {i}, expected 0 to {self.batch_size - 1}")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"env_ids has an index twice: {chosen}")
        return [int(i) for i in chosen]


def _checked_constructors(
    given: Callable[[], Any] | Sequence[Callable[[], Any]], num_envs: int | None
) -> list[Callable[[], Any]]:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if not given:
            raise ValueError("env_constructors is empty, expected at least one constructor")
        if num_envs is not None and num_envs != len(given):
            raise ValueError(f"num_envs is {num_envs}, but env_constructors has {len(given)}")
        for i, constructor in enumerate(given):
            check_constructor(constructor, f"env_constructors[{i}]")
        return list(given)
    check_constructor(given, "env_constructors")
    if num_envs is None:
        raise ValueError("env_constructors is one callable: num_envs says how many environments")
    return [given] * _positive("num_envs", num_envs)


def _checked_options(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, num_envs: int
) -> list[Mapping[str, Any]]:
    if given is None or isinstance(given, Mapping):
        return [given or {}] * num_envs
    for i, options in enumerate(given):
        if not isinstance(options, Mapping):
            raise TypeError(f"actor_options[{i}] is {options!r}, expected a mapping")
    if len(given) != num_envs:
        raise ValueError(
            f"actor_options has {len(given)} elements, expected one mapping, or one for each of "
            f"{num_envs} environments"
        )
    return list(given)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an int")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1")
    return int(value)
