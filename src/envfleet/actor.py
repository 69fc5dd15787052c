"""EnvActor: builds, resets and steps environments, and captures what they raise.

Knows nothing of Ray: `channels.remote` makes a Ray actor of it, `channels.local` calls it in the
caller's process. No exception of an environment leaves a method; each becomes an `EnvFailure`,
because Ray's own path would change its class and may kill the actor (ARCHITECTURE.md).

An actor hosts one environment or several; `row` is an environment's place in its actor, and a
block (layout.py) holds one row for each.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import pickle
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from envfleet import gin_state
from envfleet.environments import Environment, as_environment, registrations
from envfleet.environments.wrappers import assign_attr, find_attr
from envfleet.errors import EnvFailure, record
from envfleet.layout import Buffer, Layout

_FIRST, _LAST = 0, 2
_RESET: Any = object()

_BYTES_UP_TO = 32 * 1024
"""Blocks up to this size are returned as `bytes`, which Ray sends as they are: about a third less
time a call than an array. Larger ones are returned as an array, which Ray copies once less."""


class Result(NamedTuple):
    """What an operation gave; pickled where it comes from another process."""

    value: Any


class Reply(NamedTuple):
    """What reset and step give where a bare block does not say it all."""

    block: Buffer
    objects: list[Any]
    """Per row the leaves beside the block, pickled where they come from another process."""
    failures: list[EnvFailure]

    @classmethod
    def of(cls, given: Buffer | Reply) -> Reply:
        """What reset or step gave, as a reply in either case."""
        return given if isinstance(given, Reply) else cls(given, [], [])


class Drilled(NamedTuple):
    """What `drill` gives."""

    num_steps: int
    """How many steps or resets went well."""
    seconds: float
    cpu_seconds: float
    num_failed: int
    last_failure: list[EnvFailure]
    """Or nothing, if there was none."""


class Built(NamedTuple):
    """What `build` gives for one environment."""

    time_step_spec: Any
    action_spec: Any
    unimported: tuple[str, ...]
    """Modules that gin's configuration needs and this process could not import, and why."""


class MethodOf:
    """Stands for a bound method in what `get_attr` gives: a method stays with its environment."""


@dataclasses.dataclass
class _Slot:
    """One hosted environment and where its episode is."""

    environment: Environment | None = None
    over: bool = True
    """Whether the next step is a reset: there was none yet, or the episode has ended."""
    steps: int = 0
    objects: Any = ()


class EnvActor:
    """Hosts the environments `env_ids` of a batch.

    Args:
      env_ids: index in the batch of each hosted environment.
      node: words for where this runs; the host's name if not given.
      in_process: whether this runs in the caller's process, where values need not be pickled and
        an interrupt is the user's own.
    """

    def __init__(
        self, env_ids: Sequence[int], node: str | None = None, in_process: bool = False
    ) -> None:
        self._env_ids = list(env_ids)
        self._slots = [_Slot() for _ in self._env_ids]
        self._in_process = in_process
        self._node = node or platform.node()
        self._layout: Layout | None = None
        self._action_layout: Layout | None = None
        self._block = np.empty(0, np.uint8)
        self._views: list[np.ndarray[Any, Any]] = []
        self._seconds = np.empty(0, np.float32)

    def __repr__(self) -> str:
        ids = self._env_ids
        return f"EnvActor(env={ids[0]})" if len(ids) == 1 else f"EnvActor(envs={ids[0]}..{ids[-1]})"

    def hello(self) -> tuple[int, str]:
        """Process id and node, known to the caller before an environment can go wrong."""
        return os.getpid(), self._node

    # -- building ---------------------------------------------------------------------------------

    def build(
        self,
        rows: Sequence[int],
        constructors: Sequence[Any],
        seeds: Sequence[int | None],
        gin: gin_state.GinState,
        registered: registrations.Pickled,
        specs: Any = None,
    ) -> list[Result | EnvFailure]:
        """Builds the environments of some rows, each a `Built`; closes what stood there.

        `specs` are the batch's (of time step and action), once it has some. A block is laid out by
        them, whatever the environment has: the caller refuses one of others, and its neighbours
        must not suffer from it.
        """
        if not self._in_process:
            registrations.apply(registered)
        return [
            self._outcome(row, "construct", self._build, row, constructor, seed, gin, specs)
            for row, constructor, seed in zip(rows, constructors, seeds, strict=True)
        ]

    def _build(
        self, row: int, constructor: Any, seed: int | None, gin: gin_state.GinState, specs: Any
    ) -> Built:
        previous, self._slots[row] = self._slots[row].environment, _Slot()
        if previous is not None:
            self._outcome(row, "close", previous.close)  # it has failed before: its end is no news
        unimported: tuple[str, ...] = ()
        if not self._in_process:
            constructor = pickle.loads(constructor)  # imports what it needs, which may register
            unimported = gin.apply()
        scope = gin.scoped()
        scope.__enter__()
        try:
            environment = as_environment(constructor())
        finally:
            # Not by `with`: contextlib would set attributes on what the constructor raises.
            scope.__exit__(None, None, None)
        built = Built(environment.time_step_spec(), environment.action_spec(), unimported)
        if self._layout is None:
            specs = specs if self._in_process or specs is None else pickle.loads(specs)
            time_step_spec, action_spec = specs or built[:2]
            self._action_layout = Layout(action_spec, "actions")
            self._lay_out(Layout(time_step_spec, "", timed=True))
        if seed is not None:
            environment.seed(seed)
        self._slots[row].environment = environment
        return built

    def place(self, block: np.ndarray[Any, Any]) -> None:
        """From now on time steps are written into this memory, which has the size of a reply's."""
        block[: len(self._block)] = self._block
        self._block = block
        if self._layout is not None:
            self._lay_out(self._layout)

    def _lay_out(self, layout: Layout) -> None:
        """How time steps lie in the block, which is a new one where its size is another."""
        if len(self._block) != layout.nbytes(len(self._slots)):
            self._block = np.zeros(layout.nbytes(len(self._slots)), np.uint8)
        self._layout, block = layout, self._block
        self._views = layout.views(block, len(self._slots))
        self._seconds = layout.seconds(block, len(self._slots))

    # -- stepping ---------------------------------------------------------------------------------

    def reset(self, rows: Sequence[int] | None = None) -> Buffer | Reply:
        """Resets some environments; the block that comes back holds every row's time step."""
        moved = range(len(self._slots)) if rows is None else rows
        return self._moved(moved, [_RESET] * len(moved))

    def step(
        self, block: Buffer, objects: Sequence[Any] = (), rows: Sequence[int] | None = None
    ) -> Buffer | Reply:
        """Steps every environment (or some) once, or resets it where its episode has ended.

        The block has the actions of those that are stepped, in their order.
        """
        layout = self._action_layout
        assert layout is not None
        moved = range(len(self._slots)) if rows is None else rows
        actions = layout.read(layout.views(block, len(moved)), objects)
        return self._moved(moved, actions)

    def _moved(self, rows: Sequence[int], actions: Sequence[Any]) -> Buffer | Reply:
        """Advances each of these rows; the scalars of all are written together."""
        failures: list[EnvFailure] = []
        written: list[int] = []
        time_steps: list[Any] = []
        flats: list[Sequence[Any]] = []
        seconds: list[float] = []
        layout, views, clock = self._layout, self._views, time.perf_counter
        before = clock()
        for row, action in zip(rows, actions):  # noqa: B905  (hot)
            outcome = self._advance(row, action)
            after = clock()
            seconds.append(after - before)
            before = after
            if type(outcome) is EnvFailure or layout is None:
                failures.append(outcome)
                continue
            try:
                flat = layout.flatten(outcome)
                is_plain = layout.write_arrays(views, row, flat)
            except Exception:
                is_plain = False
            if is_plain:
                written.append(row)
                time_steps.append(outcome)
                flats.append(flat)
            elif (failure := self._write(row, outcome)) is not None:
                failures.append(failure)
        if len(self._seconds):
            self._seconds[slice(None) if len(seconds) == len(self._seconds) else rows] = seconds
        if layout is not None and not layout.write_scalars(views, written, flats):
            for row, time_step in zip(written, time_steps, strict=True):
                failure = self._write(row, time_step, only_scalars=True)
                if failure is not None:
                    failures.append(failure)
        return self._reply(sorted(failures, key=lambda failure: failure.index))

    def _advance(self, row: int, action: Any) -> Any:
        """One step of one environment, or a reset where its episode has ended or for `_RESET`.

        Gives its time step, or an `EnvFailure`.
        """
        slot = self._slots[row]
        environment = slot.environment
        is_reset = slot.over or action is _RESET
        try:
            if environment is None or self._layout is None:
                raise RuntimeError("there is no environment: it failed before")
            if is_reset:
                slot.over = True  # until this reset has succeeded
                time_step = environment.reset()
                slot.steps = 0
            else:
                if self._action_layout is not None and self._action_layout.has_objects:
                    # What came through Ray is read-only memory of Ray's.
                    action = copy.deepcopy(action)
                time_step = environment.step(action)
                # (A step may end an episode and begin the next: GymnasiumMember.)
                slot.steps = 0 if time_step[0] == _FIRST else slot.steps + 1
            slot.over = bool(time_step[0] == _LAST)
            return time_step
        except BaseException as error:
            slot.over = True
            return self._failure(row, "reset" if is_reset else "step", error)

    def _write(self, row: int, time_step: Any, only_scalars: bool = False) -> EnvFailure | None:
        """Writes one row, and says what is wrong with it."""
        slot, layout = self._slots[row], self._layout
        assert layout is not None
        try:
            objects = layout.write(self._views, row, time_step, only_scalars)
            if objects:
                slot.objects = self._carried(objects)
            return None
        except BaseException as error:
            slot.over = True
            return self._failure(row, "step" if slot.steps else "reset", error)

    def _carried(self, objects: list[np.ndarray[Any, Any]]) -> Any:
        """What travels beside a row of the block; nothing where every leaf of it is None.

        Pickled here, where it is this environment's failure if that fails.
        """
        if all(leaf.shape == () and leaf.item() is None for leaf in objects):
            return ()
        # In the caller's process it is copied, since the environment may use its own again.
        return copy.deepcopy(objects) if self._in_process else cloudpickle.dumps(objects)

    def _reply(self, failures: list[EnvFailure]) -> Buffer | Reply:
        small = self._in_process or len(self._block) <= _BYTES_UP_TO
        block: Buffer = self._block.tobytes() if small else self._block
        has_objects = self._layout is not None and self._layout.has_objects
        if failures or (has_objects and any(slot.objects for slot in self._slots)):
            return Reply(block, [slot.objects for slot in self._slots], failures)
        return block

    # -- everything else ---------------------------------------------------------------------------

    def operate(
        self, operation: str, rows: Sequence[int], payloads: Sequence[Any] | bytes
    ) -> list[Result | EnvFailure]:
        """Runs one of `OPERATIONS` on some environments, with a tuple of arguments for each.

        They are pickled where they come from another process; None stands for none. The same
        bytes for all of them come once.
        """
        if isinstance(payloads, bytes):
            payloads = [payloads] * len(rows)
        phase = "close" if operation == "close" else "call"
        return [
            self._outcome(row, phase, self._operate, row, operation, payload)
            for row, payload in zip(rows, payloads, strict=True)
        ]

    def _operate(self, row: int, operation: str, payload: Any) -> Any:
        slot = self._slots[row]
        if slot.environment is None:
            if operation == "close":
                return None
            raise RuntimeError("there is no environment: it failed before")
        environment = slot.environment
        if operation == "close":
            slot.environment = None  # once, however it ends
        if payload is None:
            payload = ()
        elif not self._in_process:
            payload = pickle.loads(payload)
        value = OPERATIONS[operation](environment, *payload)
        if operation == "set_state":
            slot.over = False  # the episode that the state belongs to goes on
        return value

    def drill(self, moves: Sequence[tuple[Buffer, Sequence[Any]]], repeats: int) -> Drilled:
        """Steps every environment by these actions, all of them so many times."""
        failures: list[EnvFailure] = []
        began, cpu = time.perf_counter(), time.process_time()
        for block, objects in itertools.chain.from_iterable(itertools.repeat(moves, repeats)):
            reply = self.step(block, objects)
            failures += reply.failures if isinstance(reply, Reply) else []
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        num_steps = repeats * len(moves) * len(self._slots) - len(failures)
        return Drilled(num_steps, seconds, cpu, len(failures), failures[-1:])

    def usage(self) -> float:
        """Seconds of CPU time that this process has used, those of Ray's threads included."""
        return time.process_time()

    def close(self) -> None:
        """Closes every environment; what they raise is dropped, for nobody waits for it."""
        for row, slot in enumerate(self._slots):
            environment, slot.environment = slot.environment, None
            if environment is not None:
                self._outcome(row, "close", environment.close)

    # -- capture -----------------------------------------------------------------------------------

    def _outcome(
        self, row: int, phase: str, function: Callable[..., Any], *args: Any
    ) -> Result | EnvFailure:
        """What the function gave, pickled where it has to leave the process, or what it raised."""
        try:
            value = function(*args)
            return Result(value if self._in_process else cloudpickle.dumps(value))
        except BaseException as error:
            return self._failure(row, phase, error)

    def _failure(self, row: int, phase: str, error: BaseException) -> EnvFailure:
        if self._in_process and isinstance(error, KeyboardInterrupt):
            raise error  # the user's Ctrl-C arrives in the environment's code and is not its own
        pid, node = self.hello()
        return record(
            gin_state.original(error),
            index=self._env_ids[row],
            phase=phase,
            pid=pid,
            node=node,
            episode_step=self._slots[row].steps,
            in_process=self._in_process,
        )


def _call(environment: Environment, name: str, args: Any, kwargs: Any) -> Any:
    return find_attr(environment.env, name)(*args, **kwargs)


def _get_attr(environment: Environment, name: str) -> Any:
    """The value, or `MethodOf` for what acts on something that stays here: a copy would not."""
    value = find_attr(environment.env, name)
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None) if callable(function) else None
    stays = owner is not None and not inspect.ismodule(owner) and not inspect.isclass(owner)
    return MethodOf() if stays else value


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "get_attr": _get_attr,
    "set_attr": lambda environment, name, value: assign_attr(environment.env, name, value),
    "get_state": lambda environment: find_attr(environment.env, "get_state")(),
    "set_state": lambda environment, state: find_attr(environment.env, "set_state")(state),
    "get_info": lambda environment: environment.get_info(),
    "render": lambda environment: environment.render(),
    "seed": lambda environment, seed: environment.seed(seed),
    "set_options": lambda environment, options: environment.set_options(options),
    "close": lambda environment: environment.close(),
    # What only a face needs: a method of the adapter that it has put around the environment.
    "ask": lambda environment, method, *args: getattr(environment, method)(*args),
}
"""What can be asked of an environment between its steps."""
