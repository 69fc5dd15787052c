"""Fleet: the environments of a batch as actors; start, call, close.

The one engine. `parallel` puts a face on it and holds no channel; `channels` carries single calls
and knows nothing of failures. It counts in environments (``env_id``, from 0) on the outside and in
actors on the inside; actor ``a`` hosts ``env_ids[a]``, in that order.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envfleet import channels, errors, gin_state
from envfleet.actor import Built, Drilled
from envfleet.actors import ActorInfo, Actors, Lost, Sent
from envfleet.building import Builder
from envfleet.counters import Counters
from envfleet.errors import (
    ClosedError,
    EnvFailure,
    EnvFleetError,
    FleetStartError,
    ResetNeeded,
)
from envfleet.layout import Layout
from envfleet.mending import Mender
from envfleet.restarts import Restarts
from envfleet.seeding import Seeds
from envfleet.stepping import Columns, Stepper
from envfleet.time_steps import TimeSteps

_log = logging.getLogger("envfleet")

_TELL = 10.0
"""Every so many seconds of stepping a batch tells what it has counted."""


class Fleet:
    """Environments in actors.

    Args:
      constructors: one callable per environment.
      backend: where the actors live, ``"ray"`` or ``"local"``.
      ray_init: arguments of `ray.init`, should it be needed.
      actor_options: Ray's options, one mapping per environment; those of an actor's first
        environment hold where several share it.
      envs_per_actor: how many environments an actor hosts; the last one may have fewer.
      placement, transport: on which nodes, and by what to reach them, as `ParallelPyEnvironment`
        has it.
      seeds: the environments' seeds, or None to leave them as their constructors made them.
      max_restarts: how often in a row an environment is restarted without a good step in between;
        0 raises what it fails with.
      deadlines: seconds that a call may take, as `deadlines` gives them, for start, reset, step,
        call and close.

    Attributes:
      restarts: who is on the way back, and the record of failures.
      stepper: what steps and resets the environments.

    Raises:
      TypeError: a constructor does not pickle; says which and why.
      ValueError: there is no backend of that name.
    """

    def __init__(
        self,
        constructors: Sequence[Callable[[], Any]],
        *,
        backend: str,
        ray_init: Mapping[str, Any] | None,
        actor_options: Sequence[Mapping[str, Any]],
        envs_per_actor: int,
        seeds: Seeds | None,
        max_restarts: int,
        deadlines: Mapping[str, float | None],
        placement: Any = None,
        transport: str = "rpc",
    ) -> None:
        self.num_envs = len(constructors)
        starts = range(0, self.num_envs, envs_per_actor)
        self.env_ids = [range(s, min(s + envs_per_actor, self.num_envs)) for s in starts]
        self.restarts = Restarts(self.num_envs, max_restarts)
        self._in_process = backend == "local"
        self._time_steps = TimeSteps(self.env_ids, self._in_process)
        self._actors = Actors(
            channels.connector(backend, ray_init, placement, transport),
            self.env_ids,
            [actor_options[ids[0]] for ids in self.env_ids],
            deadlines,
        )
        self._start_timeout, self._close_timeout = deadlines["start"], deadlines["close"]
        self._builder = Builder(constructors, seeds, self._in_process)
        self._mender = Mender(self._actors, self._builder, self.restarts, self._time_steps)
        self.stepper = Stepper(
            self._actors, self._builder, self._mender, self.restarts, self._time_steps, deadlines
        )
        self._counters = Counters(self.stepper.timings, self.restarts)
        self._tell_at = time.monotonic() + _TELL
        self._starting: list[Sent] = []
        self._began = 0.0
        self._state = "new"

    @property
    def num_actors(self) -> int:
        return len(self.env_ids)

    @property
    def time_step_layout(self) -> Layout:
        """Of one environment's time step."""
        return self._builder.time_step_layout

    @property
    def action_layout(self) -> Layout:
        """Of one environment's action."""
        return self._builder.action_layout

    # -- starting ----------------------------------------------------------------------------------

    def start(self, one_by_one: bool = False) -> None:
        """Starts every actor, builds every environment and compares their specs. Again is fine.

        Whatever it raises, no actor is left behind.

        Raises:
          FleetStartError: not all were ready within the deadline.
          SpecMismatch: the environments differ.
          Exception: what a constructor raised.
        """
        self.post_start(one_by_one)
        self.wait_start()

    def post_start(self, one_by_one: bool = False) -> None:
        """Like `start`, without waiting; with `one_by_one` it waits for all but the last."""
        if self._state == "closed":
            raise ClosedError("start() after close()")
        if self._state != "new":
            return
        self._state = "starting"
        try:
            self._began = time.monotonic()
            for a, ids in enumerate(self.env_ids):
                if one_by_one and self._starting:
                    self._wait_built(self._starting[-1:])
                # One deadline for all of them, also where they start one after another.
                left = self._left if one_by_one else self._start_timeout
                self._actors.open(a, left)
                self._starting.append(self._builder.send(self._actors, a, ids, left))
            _close_at_exit(self)
        except BaseException:
            self._end()
            raise

    def wait_start(self) -> None:
        """Waits for what `post_start` began; raises as `start` does. Again is fine."""
        if self._state in ("new", "closed"):
            self.check_open("wait_start")
        if self._state != "starting":
            return
        try:
            built = self._wait_built(self._starting)
            self._builder.agree(built)
            self._time_steps.layout = self._builder.time_step_layout
            self._actors.reserve(self.action_layout, self.time_step_layout)
            missing = sorted({module for one in built.values() for module in one.unimported})
            if missing:
                words = "; ".join(missing)
                _log.warning("gin: actors lack %s: their bindings are not in force", words)
        except BaseException:
            self._end()
            raise
        self._starting.clear()
        self._state = "open"

    @property
    def _left(self) -> float | None:
        """Seconds of a start that are left."""
        limit = self._start_timeout
        return limit and max(0.0, limit - (time.monotonic() - self._began))

    def _wait_built(self, builds: Sequence[Sent]) -> dict[int, Built]:
        """By env_id what the environments told of themselves."""
        builds = [*builds]
        self._actors.wait(builds, starting=True)
        while unlucky := [n for n, sent in enumerate(builds) if _never_ran(sent.outcome)]:
            for n in unlucky:  # by now their node is known to be dead, and avoided
                a = builds[n].a
                _log.warning("%s: opened anew, its node has died", self._actors.names([a]))
                self._actors.open(a, self._left)
                again = self._builder.send(self._actors, a, self.env_ids[a], self._left)
                self._starting[self._starting.index(builds[n])] = builds[n] = again
            self._actors.wait(builds, starting=True)
        self._actors.losses = [lost for lost in self._actors.losses if not lost.never_ran]
        late = [sent.a for sent in builds if sent.outcome is None]
        results = self._results([sent for sent in builds if sent.outcome is not None])
        failures = [result for result in results.values() if isinstance(result, EnvFailure)]
        for failure in failures:
            if failure.unknown_name is None:  # or nothing has run, and what is raised says it all
                _log.warning("%s", failure.line())
        self.restarts.raise_first(failures)
        if late:
            raise FleetStartError(self._actors.late_start(late))
        return {i: self._builder.value(i, result) for i, result in results.items()}

    # -- everything else ---------------------------------------------------------------------------

    def operate(self, operation: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """One of `actor.OPERATIONS` on some environments, by env_id what to pass.

        Gives their values in the order of `arguments`.

        Raises:
          Exception: like `step`; an exception leaves its environment usable.
          ResetNeeded: one of them failed before, and was not reset since.
        """
        return self.post(operation, arguments)()

    def post(
        self, operation: str, arguments: Mapping[int, Sequence[Any]]
    ) -> Callable[[], list[Any]]:
        """Like `operate` without waiting; calling what it gives waits for the values, or raises.

        It does wait for the restart of environments that it asks.
        """
        self.check_ready(operation, arguments)
        if operation == "set_state":
            self.stepper.check_free(operation, arguments)
        self.stepper.await_restarts(arguments)
        self.restarts.raise_given_up(arguments)
        calls: list[Sent] = []
        packed: Mapping[int, Any] = arguments if self._in_process else _all_pickled(arguments)
        by_actor = self._actors.by_actor(arguments)
        shared = None
        if not self._in_process and len(by_actor) > 1 and len({*map(id, packed.values())}) == 1:
            shared = self._actors.share(next(iter(packed.values())))
        with self._actors.kept_if_interrupted(calls):
            for a, ids in by_actor.items():
                own = {i: packed[i] for i in ids}
                calls.append(self._actors.send_operation(a, operation, own, shared))

        def values() -> list[Any]:
            self.stepper.check_promise()
            with self._actors.kept_if_interrupted(calls):
                self._actors.wait(calls)
                results = self._results(calls)
                self.stepper.mend()
            failures = [result for result in results.values() if isinstance(result, EnvFailure)]
            done = results.keys() - {failure.index for failure in failures}
            if operation == "set_state":  # the caller knows where its environments are
                for i in done:
                    self._mender.join(i)
            elif operation in ("seed", "set_options"):
                self.stepper.prepared |= done
            self.restarts.raise_first(failures)
            return [self._builder.value(i, results[i]) for i in arguments]

        return values

    def reseed(self, seeds: Seeds) -> list[int]:
        """Seeds every environment anew; gives the seeds."""
        chosen = [seeds.of(i) for i in range(self.num_envs)]
        self.operate("seed", {i: (seed,) for i, seed in enumerate(chosen)})
        self._builder.reseed(seeds)
        return chosen

    def usage(self) -> float:
        """Seconds of CPU time that the process of the first actor has used."""
        return float(self._ask("call", "usage") or 0.0)

    def reach(self) -> None:
        """Calls the first actor as a step does, and has nothing done there."""
        self._ask("reset", "reset", [])

    def drill(self, moves: Sequence[Columns], repeats: int) -> Drilled | None:
        """Has the first actor step its environments, without a call for each step.

        Args:
          moves: actions for them; the call has the time of so many steps.
          repeats: how often all of them, where steps take a fraction of that time.

        Returns:
          None if the actor was lost, and a reset will bring it back.
        """
        rows = len(self.env_ids[0])
        blocks = [self.action_layout.rows(columns, slice(0, rows), rows) for columns in moves]
        limit = self.stepper.resetting_limit
        limit = limit and limit * len(moves)
        drilled: Drilled | None = self._ask("step", "drill", blocks, repeats, limit=limit)
        return drilled

    def _ask(self, phase: str, method: str, *args: Any, limit: float | None = None) -> Any:
        """Calls the first actor itself; None if it was lost, and a reset will bring it back."""
        calls: list[Sent] = []
        with self._actors.kept_if_interrupted(calls):
            calls.append(self._actors.send(0, self.env_ids[0], phase, method, *args, limit=limit))
            self._actors.wait(calls)
            self.stepper.mend()
        self.restarts.raise_given_up()
        (sent,) = calls
        return None if isinstance(sent.outcome, Lost) else sent.outcome

    # -- where they are ----------------------------------------------------------------------------

    def actors(self) -> list[ActorInfo]:
        """Every actor that there is, and where."""
        self.check_open("actors")
        return self._actors.described()

    def rebalance(self) -> list[int]:
        """Moves environments to nodes that are less loaded; gives those that move.

        Those under way stay, and what shares their actor.
        """
        self.check_ready("rebalance")
        moved = self._mender.move_misplaced(self.stepper.under_way)
        self.stepper.mend()
        return moved

    def tell_if_due(self, now: float) -> None:
        """Tells whoever watches the cluster what was counted, every few seconds of stepping."""
        if now >= self._tell_at:
            self._tell_at = now + _TELL
            self._tell()

    def _tell(self) -> None:
        self._actors.publish(self._counters.since(self._actors.waited))

    def room(self) -> channels.Room:
        """What there is for the actors to run on."""
        return self._actors.room()

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the blocks of one batched step, actions and time steps."""
        layouts = (self.action_layout, self.time_step_layout)
        return sum(layout.nbytes(len(ids)) for ids in self.env_ids for layout in layouts)

    @property
    def waited(self) -> float:
        """Seconds that the caller has spent waiting for actors."""
        return self._actors.waited

    # -- state -------------------------------------------------------------------------------------

    def check_open(self, method: str) -> None:
        """Raises `ClosedError` after `close`, and `EnvFleetError` before `start`."""
        if self._state == "open":
            return
        if self._state == "closed":
            raise ClosedError(f"{method}() after close()")
        begun = "start()" if self._state == "new" else "wait_start()"
        raise EnvFleetError(f"{method}() before {begun}")

    def check_ready(self, method: str, env_ids: Iterable[int] | None = None) -> None:
        """Raises unless the environments (by default all) can be called."""
        self.check_open(method)
        if self._actors.interrupted is not None:
            raise ResetNeeded(f"{method}() after an interrupt: call reset() first")
        failed = self.restarts.failed
        if failed:
            wanted = range(self.num_envs) if env_ids is None else env_ids
            self.restarts.raise_given_up(wanted)
            broken = [failed[i] for i in sorted(wanted) if i in failed]
            if broken:
                problem = ResetNeeded(
                    f"{method}() refused, since {broken[0]}: reset() rebuilds what failed"
                )
                errors.attach(problem, broken)
                raise problem

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the environments, then ends the actors. Twice is fine.

        Raises:
          Exception: what an environment raised in its `close`, or `ActorDied`, or `EnvTimeout`;
            after every actor has been ended.
        """
        if self._state != "open":
            self._end()
            return
        # What failed before, or never answered after an interrupt, is closed as well as can be; its
        # end is no news.
        interrupted = {i for sent in self._actors.interrupted or () for i in sent.env_ids}
        broken = interrupted | self.restarts.failed.keys()
        # Those that share an actor with a restart may have to wait for it longer than is given.
        for i in self.restarts.pending:
            broken |= {*self.env_ids[self._actors.host(i)]}
        self._tell()
        try:
            calls = [
                self._actors.send_operation(a, "close", dict.fromkeys(ids))
                for a, ids in enumerate(self.env_ids)
                if a in self._actors
            ]
            # One deadline, also behind a restart or an interrupted call that is on its way.
            limit = self._close_timeout
            self._actors.wait(calls, until=None if limit is None else time.monotonic() + limit)
            self._actors.end_late(sent for sent in calls if sent.outcome is None)
            results = self._results(calls)
        finally:
            self._end()
        self.restarts.raise_first(
            result
            for i, result in results.items()
            if isinstance(result, EnvFailure) and i not in broken
        )

    def _end(self) -> None:
        self._state = "closed"
        self.stepper.close()
        self._actors.end()
        self._time_steps.clear()

    # -- replies -----------------------------------------------------------------------------------

    def _results(self, calls: Iterable[Sent]) -> dict[int, Any]:
        """By env_id what came for the environments that the actors were asked about."""
        results: dict[int, Any] = {}
        for sent in calls:
            if isinstance(sent.outcome, Lost):
                results |= {i: sent.outcome.failures[i] for i in sent.env_ids}
            else:
                results |= zip(sent.env_ids, sent.outcome, strict=True)
        return results


def _never_ran(outcome: Any) -> bool:
    return isinstance(outcome, Lost) and outcome.never_ran


def _all_pickled(arguments: Mapping[int, Sequence[Any]]) -> dict[int, bytes]:
    """Pickled here and not by Ray, whose arrays would be read-only memory for the environment."""
    done: dict[int, bytes] = {}  # by identity: what all environments get is pickled once
    for args in arguments.values():
        if id(args) not in done:
            done[id(args)] = gin_state.dumps(tuple(args))
    return {i: done[id(args)] for i, args in arguments.items()}


# -- what the user forgot to close -----------------------------------------------------------------

_open: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _close_at_exit(fleet: Fleet) -> None:
    """Registered at the first start, so after Ray's own hook, so run before it."""
    if not _registered:
        _registered.append(atexit.register(_close_all))
    _open.add(fleet)


_registered: list[Any] = []


def _close_all() -> None:
    for fleet in list(_open):
        try:
            fleet.close()
        except BaseException as problem:
            _log.warning("closing at exit: %s: %s", type(problem).__name__, problem)
