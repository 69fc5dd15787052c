"""ParallelPyEnvironment: environments side by side.

A face on a `Fleet`: it checks arguments, turns structures into blocks and back, and steps nothing
itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from envfleet import channels, gin_state, tuning
from envfleet.actors import ActorInfo, deadlines, description, words_for
from envfleet.errors import EnvFailure
from envfleet.fleet import Fleet
from envfleet.restarts import budget
from envfleet.seeding import Seeds
from envfleet.single import (
    Closing,
    EnvHandle,
    Specs,
    as_constructor,
    check_callable,
    check_render_mode,
    is_method,
)

_log = logging.getLogger("envfleet")


class Stats(NamedTuple):
    """Where a batch's time went, and what went wrong; lists have an element per environment.

    Quantiles are of the last 1000 resets and steps, seconds by the clock of the actor's process:
    with more actors than cores they include waiting for a core. NaN where there was none.

    Attributes:
      num_calls: resets and steps that gave a time step.
      env_seconds: seconds that it spent in them.
      step_p50, step_p99: quantiles of the seconds of one.
      slowest: the environment with the largest median; None before the first call.
      batch_seconds: median seconds of a lockstep step.
      call_overhead: median seconds of a lockstep step beyond those of the actor whose environments
        took longest, for each actor: what a remote call costs.
      bytes_per_step: bytes of actions and time steps that a batched step moves, strings apart.
      waited: seconds that the caller waited for actors, the start included.
      failures: how often it has failed: raised, died or been late.
      restarts: how often it was built anew, attempts that failed included.
      last_failure: its last failure, or None.
      seconds_lost: seconds from the calls in which it failed until it had a time step again.
    """

    num_calls: list[int]
    env_seconds: list[float]
    step_p50: list[float]
    step_p99: list[float]
    slowest: int | None
    batch_seconds: float
    call_overhead: float
    bytes_per_step: int
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
        `gymnasium.Env` or a TF-Agents `PyEnvironment`. A name stands for a constructor:
        ``"CartPole-v1"`` or ``"module:Env-v0"`` of Gymnasium, ``"dm_control:cartpole/swingup"``.
      start_serially: start one environment after another instead of all at once.
      blocking: step and reset one environment after another instead of all at once.
      flatten: accepted for TF-Agents' sake. Leaves travel without their structure either way.
      num_envs: how many environments, where `env_constructors` is one callable.
      envs_per_actor: how many environments share an actor, and so a remote call; those of one
        actor are stepped one after another. ``"auto"`` builds the first environment once more,
        measures some of its steps and what a remote call costs, and chooses; the log (level INFO)
        says what, and where ``backend="local"`` is faster than any number.
      actor_options: options of `ray.actor.ActorClass.options` (``num_cpus``, ``num_gpus``,
        ``resources``, ``label_selector``, ``runtime_env``, ...) for all actors, or a list with a
        mapping for each environment. Default: Ray's.
      placement: on which nodes. ``"spread"``: on all of them, evenly by their cores. ``"pack"``: on
        as few as have a core for each actor, the caller's first. ``"strict_spread"``: each actor on
        a node of its own. A placement group of Ray's, or a ``scheduling_strategy``: as Ray does it.
        Default: the placement group of the worker or trial that makes the batch, where Ray Train or
        Ray Tune has given it one for its actors too; ``"spread"`` otherwise. An environment's own
        ``scheduling_strategy`` or ``label_selector`` in `actor_options` comes first.
      transport: what carries resets and steps, where there is a choice. ``"rpc"``: Ray's remote
        calls. ``"shared_memory"``: for actors on the caller's machine (Linux) memory that both
        have and a socket, which takes a tenth of the time; what comes of a call is the same. The
        log says how many actors use which.
      rebalance_seconds: so often `step` and `send` call `rebalance`; None for never.
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
      max_staleness: first-ready stepping only: no environment's time step comes later than with so
        many calls of `recv` after it was sent; the last of them waits for it. 1 waits for all of
        them; None for none.
      start_timeout: seconds until every environment must have been built, or be rebuilt.
      reset_timeout, step_timeout, call_timeout: seconds that a reset, a step, any other call may
        take; None for as long as it takes, with a warning that names who is late.
      close_timeout: seconds that the environments' ``close`` may take before they are killed.

    Raises:
      TypeError: an environment in place of a constructor, or a constructor that does not pickle;
        says which.
      ValueError: no constructors; or an argument that contradicts another.
      SpecMismatch: the environments' specs differ; says which, where, expected and found.
      FleetStartError: not all were ready in time, or there could never be room for all; says what
        was asked for and what there is.
      Exception: what a constructor raised.
    """

    # TF-Agents' TFPyEnvironment(isolation=True) asks for this, to warn that it gains nothing.
    _parallel_execution = True

    def __init__(
        self,
        env_constructors: Callable[[], Any] | str | Sequence[Callable[[], Any] | str],
        start_serially: bool = False,
        blocking: bool = False,
        flatten: bool = False,
        *,
        num_envs: int | None = None,
        envs_per_actor: int | Literal["auto"] = 1,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        placement: Any = None,
        transport: str = "rpc",
        rebalance_seconds: float | None = None,
        ray_init: Mapping[str, Any] | None = None,
        backend: str = "ray",
        seed: int | Sequence[int] | None = None,
        on_failure: str = "raise",
        max_restarts: int = 5,
        max_staleness: int | None = None,
        start_timeout: float | None = 120.0,
        reset_timeout: float | None = None,
        step_timeout: float | None = None,
        call_timeout: float | None = None,
        close_timeout: float | None = 5.0,
    ) -> None:
        del flatten
        if max_staleness is not None:
            max_staleness = _positive("max_staleness", max_staleness)
        self._max_staleness = max_staleness
        self._rebalance_seconds = _seconds("rebalance_seconds", rebalance_seconds)
        self._rebalance_at = time.monotonic() + (rebalance_seconds or float("inf"))
        constructors = _checked_constructors(env_constructors, num_envs)
        self._start_serially = start_serially
        self._blocking = blocking
        self._backend = backend
        if envs_per_actor == "auto" and backend == "local":
            envs_per_actor = len(constructors)  # there are no calls to be saved
        if envs_per_actor != "auto":
            envs_per_actor = _positive("envs_per_actor", envs_per_actor)
        make_fleet = functools.partial(
            Fleet,
            backend=backend,
            ray_init=ray_init,
            actor_options=_checked_options(actor_options, len(constructors)),
            placement=placement,
            transport=transport,
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
        with contextlib.ExitStack() as kept:
            if envs_per_actor == "auto":
                # The Ray that is started for the measurement is the one of the batch, too.
                connection = channels.connector(backend, ray_init, placement, transport)()
                kept.callback(connection.close)
                probe = functools.partial(make_fleet, constructors[:1], envs_per_actor=1)
                envs_per_actor = tuning.choose(len(constructors), probe)
            self._fleet = make_fleet(constructors, envs_per_actor=envs_per_actor)
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
    def envs_per_actor(self) -> int:
        """How many environments share an actor; the last one may have fewer."""
        return len(self._fleet.env_ids[0])

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
        return self.post_step(actions)()

    def post_step(self, actions: Any) -> Callable[[], Any]:
        """Like `step` without waiting; calling what it gives waits for the time step, or raises.

        For faces that send and wait apart. Nothing else can be asked of the batch in between.
        """
        fleet = self._fleet
        fleet.check_ready("step")
        self._look_around()
        columns = fleet.action_layout.columns(actions, fleet.num_envs)
        columns_of_all = fleet.stepper.step(columns, one_by_one=self._blocking)

        def time_step() -> Any:
            leaves = columns_of_all()
            num_batches = fleet.stepper.timings.num_batches
            if num_batches == tuning.ENOUGH_BATCHES and self._backend == "ray":
                tuning.advise(fleet)
            return self._time_step(leaves)

        return time_step

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
        time_steps = fleet.stepper.reset(self._checked_ids(env_ids), one_by_one=self._blocking)
        return self._time_step(time_steps())

    # -- first-ready stepping ----------------------------------------------------------------------

    def async_reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Resets environments, and rebuilds those that have failed, without waiting.

        Args:
          env_ids: which. Default: all. `recv` gives their time steps.

        Raises:
          EnvBusy: one of them is under way; none was reset.
        """
        self._fleet.check_open("async_reset")
        self._fleet.stepper.send_resets(self._checked_ids(env_ids))

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Steps some environments without waiting; resets one whose episode has ended.

        Those of one actor that are sent together share a remote call, and land together.

        Args:
          actions: a structure like `action_spec()`; leaves have shape ``(len(env_ids), *shape)``.
          env_ids: whose actions these are, in their order. Default: all.

        Raises:
          InvalidAction: `actions` do not fit.
          EnvBusy: an environment is under way; says which.
          ResetNeeded: an environment failed before, and there was no reset since.
          In every case none was sent.
        """
        fleet = self._fleet
        chosen = self._checked_ids(env_ids)
        fleet.check_ready("send", chosen)
        self._look_around()
        columns = fleet.action_layout.columns(actions, len(chosen), "len(env_ids)")
        fleet.stepper.send_steps(chosen, columns)

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[Any, np.ndarray[Any, Any]]:
        """Waits until environments that are under way have landed, and takes all that have.

        Args:
          min_envs: how many there have to be.
          timeout: seconds after which it takes those that have landed, be it none. Nothing is
            lost: the others can be received later.

        Returns:
          A time step, whose leaves are fresh arrays of shape ``(n, *shape)``, and the n
          environments whose it is: int64 of shape ``(n,)``, ascending.

        Raises:
          ValueError: fewer than `min_envs` are under way.
          Exception: what the failing environment of the lowest index raised, or `ActorDied`, or
            `EnvTimeout`. It is no longer under way, and `async_reset` of it brings it back. What
            the others gave comes with the next call.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}, expected seconds from 0 on, or None")
        return self._received(_positive("min_envs", min_envs), timeout)

    def drain(self) -> tuple[Any, np.ndarray[Any, Any]]:
        """Waits for all environments that are under way: `step` can be called again.

        Returns:
          Like `recv`: time steps and environments, none of them if none was under way.

        Raises:
          Exception: as `recv`, after every one has landed; the next call gives what the others did.
        """
        return self._received(None, None)

    def _received(
        self, at_least: int | None, timeout: float | None
    ) -> tuple[Any, np.ndarray[Any, Any]]:
        fleet = self._fleet
        fleet.check_open("drain" if at_least is None else "recv")
        env_ids, columns = fleet.stepper.receive(at_least, timeout, self._max_staleness)
        return self._time_step(columns), np.asarray(env_ids, np.int64)

    def _time_step(self, columns: Sequence[np.ndarray[Any, Any]]) -> Any:
        """Leaves of all environments, or of some, as a time step."""
        return self._fleet.time_step_layout.unflatten(columns)

    @property
    def under_way(self) -> list[int]:
        """Environments that were sent and not yet received, in ascending order."""
        return self._fleet.stepper.under_way

    # -- on a cluster ------------------------------------------------------------------------------

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """Where the environments are: one element for each actor."""
        return tuple(self._fleet.actors())

    def describe(self) -> None:
        """Prints where the environments are: nodes, their environments, actors and processes."""
        print(description(self.actors))

    def rebalance(self) -> list[int]:
        """Moves environments from loaded nodes to others, such as have joined since the start.

        What moves is closed and built anew there, with the next of its seeds; so its episode ends:
        its next `step` shows LAST by truncation, as after a failure, which it does not count as.
        Only with ``placement="spread"``, and not those that are under way, or whose `actor_options`
        say where they belong.

        Returns:
          The environments that move, in ascending order.

        Raises:
          ResetNeeded: an environment failed before, and there was no `reset` since.
        """
        moved = self._fleet.rebalance()
        if moved:
            _log.info("%s of %d move to other nodes", words_for(moved), self.batch_size)
        return moved

    def _look_around(self) -> None:
        """What is done now and then between steps."""
        now = time.monotonic()
        self._fleet.tell_if_due(now)
        if now >= self._rebalance_at:
            self.rebalance()
            self._rebalance_at = time.monotonic() + (self._rebalance_seconds or float("inf"))

    # -- the batch as it is ------------------------------------------------------------------------

    def current_time_step(self) -> Any:
        """The time step that every environment is at, as fresh arrays.

        Of one under way it is the last one, or already the one that `recv` will give.

        Raises:
          ResetNeeded: there is none: before the first `reset` or `step`, or after a failure.
        """
        self._fleet.check_ready("current_time_step")
        return self._time_step(self._fleet.stepper.columns())

    def stats(self) -> Stats:
        """Where the time went so far, in seconds, and what went wrong."""
        self._fleet.check_open("stats")
        timings, restarts = self._fleet.stepper.timings, self._fleet.restarts
        medians, step_p99 = timings.quantiles(0.5, 0.99)
        return Stats(
            num_calls=timings.num_calls.tolist(),
            env_seconds=timings.env_seconds.tolist(),
            step_p50=medians,
            step_p99=step_p99,
            slowest=timings.slowest(medians),
            batch_seconds=timings.batch_seconds,
            call_overhead=timings.overhead / self._fleet.num_actors,
            bytes_per_step=self._fleet.bytes_per_step,
            waited=self._fleet.waited,
            failures=[*restarts.num_failures],
            restarts=[*restarts.num_restarts],
            last_failure=[*restarts.last_failures],
            seconds_lost=[*restarts.seconds_lost],
        )

    @property
    def num_failures(self) -> list[int]:
        """How often each environment has failed, as `stats` has it, and cheap to ask."""
        return [*self._fleet.restarts.num_failures]

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
        check_render_mode(mode)
        images = [np.asarray(image) for image in self.operate("render")]
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
        return self.operate("get_info")

    def get_state(self) -> list[Any]:
        """Each environment's ``get_state()``."""
        return self.operate("get_state")

    def set_state(self, states: Sequence[Any]) -> None:
        """Gives each environment a state of its ``get_state()``; the next `step` goes on from it.

        Raises:
          ValueError: not one state for each environment.
        """
        if len(states) != self.batch_size:
            raise ValueError(f"{len(states)} states, expected one for each of {self.batch_size}")
        self.operate_each("set_state", {i: (state,) for i, state in enumerate(states)})

    def call(
        self, name: str, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method of each environment, or of what it wraps; gives one result each.

        Raises:
          ValueError: the batch has a method of that name itself, which keeps the episodes' record.
          Exception: what an environment raised; it stays usable.
        """
        check_callable(name)
        return self.operate("call", name, args, kwargs, env_ids=env_ids)

    def post_call(self, name: str, *args: Any) -> Callable[[], list[Any]]:
        """Like `call` of all without waiting; calling what it gives waits for the results.

        What is under way goes on: an actor's calls are done in the order in which they were posted.
        """
        check_callable(name)
        arguments: tuple[Any, ...] = name, args, {}
        return self._fleet.post("call", dict.fromkeys(range(self.batch_size), arguments))

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """An attribute of each environment, or of what it wraps.

        Raises:
          AttributeError: an environment has none of that name.
          TypeError: it is a method, which stays with its environment.
        """
        values = self.operate("get_attr", name, env_ids=env_ids)
        if any(is_method(value) for value in values):
            raise TypeError(f"{name!r} is a method: call({name!r}, ...) calls it")
        return values

    def set_attr(self, name: str, value: Any, env_ids: Iterable[int] | None = None) -> None:
        """Sets an attribute on the outermost wrapper, or environment, that has it."""
        self.operate("set_attr", name, value, env_ids=env_ids)

    def operate(
        self, operation: str, *arguments: Any, env_ids: Iterable[int] | None = None
    ) -> list[Any]:
        """One of `actor.OPERATIONS` on environments; what the methods above and faces ask with."""
        return self.operate_each(operation, dict.fromkeys(self._checked_ids(env_ids), arguments))

    def operate_each(self, operation: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Like `operate`, with arguments for each environment, by its index."""
        return self._fleet.operate(operation, arguments)

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
    given: Callable[[], Any] | str | Sequence[Callable[[], Any] | str], num_envs: int | None
) -> list[Callable[[], Any]]:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if not given:
            raise ValueError("env_constructors is empty, expected at least one constructor")
        if num_envs is not None and num_envs != len(given):
            raise ValueError(f"num_envs is {num_envs}, but env_constructors has {len(given)}")
        return [as_constructor(one, f"env_constructors[{i}]") for i, one in enumerate(given)]
    constructor = as_constructor(given, "env_constructors")
    if num_envs is None:
        raise ValueError("env_constructors is one callable: num_envs says how many environments")
    return [constructor] * _positive("num_envs", num_envs)


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


def _seconds(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} is {value!r}, expected seconds above 0, or None")
    return value


def _positive(name: str, value: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an int")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1")
    return int(value)
