"""Fleet: the environments of a batch as actors; start, call, deadlines, rebuild, close.

The one engine. `parallel` puts a face on it and holds no channel; `channels` carries single calls
and knows nothing of failures. It counts in environments (``env_id``, from 0) on the outside and in
actors on the inside; actor ``a`` hosts ``env_ids[a]``, in that order.

The invariant: when a method that waits returns or raises, none of its calls is in flight. A call
that is late is ended with its actor. Only an interrupt (Ctrl-C) leaves calls behind; they are kept
in `Actors.interrupted` until the next reset has settled them, and nothing steps before that.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet import channels, errors, gin_state, specs
from envfleet.actor import Built, Reply
from envfleet.actors import Actors, Lost, Sent
from envfleet.channels import Late
from envfleet.errors import (
    ClosedError,
    EnvFailure,
    EnvFleetError,
    FleetStartError,
    RemoteEnvError,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.layout import Layout
from envfleet.seeding import Seeds

_log = logging.getLogger("envfleet")


class _Build(NamedTuple):
    """Environments that are being built: which, by which calls, and what they told when done."""

    env_ids: dict[int, Sequence[int]]
    calls: dict[int, Sent]
    built: dict[int, Built]
    left: float | None
    """Seconds of the start's deadline that were left when they were sent."""


class Fleet:
    """Environments in actors.

    Args:
      constructors: one callable per environment.
      backend: where the actors live, ``"ray"`` or ``"local"``.
      ray_init: arguments of `ray.init`, should it be needed.
      actor_options: Ray's options, one mapping per environment; those of an actor's first
        environment hold where several share it.
      envs_per_actor: how many environments an actor hosts; the last one may have fewer.
      seeds: the environments' seeds, or None to leave them as their constructors made them.
      deadlines: seconds that a call may take, as `deadlines` gives them, for start, reset, step,
        call and close.

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
        deadlines: Mapping[str, float | None],
    ) -> None:
        self.num_envs = len(constructors)
        starts = range(0, self.num_envs, envs_per_actor)
        self.env_ids = [range(s, min(s + envs_per_actor, self.num_envs)) for s in starts]
        self.time_step_layout = Layout({}, "")
        self.action_layout = Layout({}, "actions")
        self._actors = Actors(
            channels.connector(backend, ray_init),
            self.env_ids,
            [actor_options[ids[0]] for ids in self.env_ids],
            deadlines,
        )
        self._start_timeout = deadlines["start"]
        self._in_process = backend == "local"
        self._seeds = seeds
        self._rebuilds = [0] * self.num_envs
        self._gin = gin_state.scope_only() if self._in_process else gin_state.capture()
        self._constructors = [
            constructor if self._in_process else _pickled(env_id, constructor)
            for env_id, constructor in enumerate(constructors)
        ]
        self._last: list[Reply | None] = [None] * len(self.env_ids)
        self._num_resets = 0
        self._starting: list[_Build] = []
        self._state = "new"

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
            actors, began = range(len(self.env_ids)), time.monotonic()
            for wave in [[a] for a in actors] if one_by_one else [list(actors)]:
                for build in self._starting if one_by_one else []:
                    self._finish_build(build, starting=True)
                # One deadline for all of them, also where they start one after another.
                limit = self._start_timeout
                left = limit and max(0.0, limit - (time.monotonic() - began))
                self._starting.append(self._post_build({a: self.env_ids[a] for a in wave}, left))
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
            built: dict[int, Built] = {}
            for build in self._starting:
                built |= self._finish_build(build, starting=True)
            self.time_step_layout = Layout(built[0].time_step_spec, "")
            self.action_layout = Layout(built[0].action_spec, "actions")
            self._compare(built)
        except BaseException:
            self._end()
            raise
        self._starting.clear()
        self._state = "open"

    def _post_build(
        self, env_ids: Mapping[int, Sequence[int]], left: float | None = None
    ) -> _Build:
        """Sends the constructors on their way, to a new actor where there is none."""
        for a in env_ids:
            if a not in self._actors:
                self._actors.open(a)
        arguments = {
            a: (
                self._actors.rows(a, ids),
                [self._constructors[i] for i in ids],
                [self._seeds and self._seeds.of(i, self._rebuilds[i]) for i in ids],
                self._gin,
            )
            for a, ids in env_ids.items()
        }
        build = _Build(dict(env_ids), {}, {}, left)
        with self._actors.kept_if_interrupted(build.calls):
            self._actors.send("build", arguments, build.calls)
        return build

    def _finish_build(self, build: _Build, starting: bool) -> dict[int, Built]:
        """Waits for environments to be built; by env_id what they told of themselves."""
        if build.built:
            return build.built
        with self._actors.kept_if_interrupted(build.calls):
            outcomes = self._actors.receive(build.calls, "start", starting, build.left)
        late = [a for a, outcome in outcomes.items() if isinstance(outcome, Late)]
        answered = [i for a, ids in build.env_ids.items() if a not in late for i in ids]
        results = self._results(answered, outcomes)
        self._fail(results.values())
        if late:
            raise FleetStartError(self._actors.late_start(late))
        build.built.update({i: self._value(i, result) for i, result in results.items()})
        missing = sorted({module for one in build.built.values() for module in one.unimported})
        if missing and starting:
            _log.warning("gin: actors lack %s: their bindings are not in force", "; ".join(missing))
        return build.built

    def _compare(self, built: Mapping[int, Built]) -> None:
        """Raises `SpecMismatch` with every difference from environment 0's specs."""
        problems = []
        for i, one in sorted(built.items()):
            found = Layout(one.time_step_spec, "").specs
            for path, words in specs.differences(self.time_step_layout.specs, found):
                problems.append(_mismatch(i, str(path[0]), path[1:], words))
            found = Layout(one.action_spec, "actions").specs
            for path, words in specs.differences(self.action_layout.specs, found):
                problems.append(_mismatch(i, "action", path, words))
        if problems:
            raise SpecMismatch("\n".join(problems))

    # -- calling -----------------------------------------------------------------------------------

    def advance(
        self, method: str, arguments: Mapping[int, Sequence[Any]], one_by_one: bool = False
    ) -> None:
        """`reset` or `step` in some actors, by actor what to pass; `columns` gives what came.

        Raises:
          Exception: what the environment of the lowest index raised, or `ActorDied`, or
            `EnvTimeout`; after every call has been settled.
        """
        failures: list[EnvFailure] = []
        for wave in [[a] for a in arguments] if one_by_one else [list(arguments)]:
            calls: dict[int, Sent] = {}
            with self._actors.kept_if_interrupted(calls):
                self._actors.send(method, {a: arguments[a] for a in wave}, calls)
                failures += self._keep(self._actors.receive(calls, method), method)
        self._fail(failures)

    def post_advance(
        self, method: str, arguments: Mapping[int, Sequence[Any]]
    ) -> Callable[[], None]:
        """Like `advance` without waiting; calling what it gives waits, and raises."""
        calls: dict[int, Sent] = {}
        with self._actors.kept_if_interrupted(calls):
            self._actors.send(method, arguments, calls)
        num_resets = self._num_resets

        def resolve() -> None:
            if num_resets != self._num_resets:  # an interrupt kept it from being waited for
                raise ResetNeeded(f"a reset() has taken the place of this {method}()")
            with self._actors.kept_if_interrupted(calls):
                failures = self._keep(self._actors.receive(calls, method), method)
            self._fail(failures)

        return resolve

    def reset(self, env_ids: Sequence[int], one_by_one: bool = False) -> None:
        """Resets some environments, and first rebuilds those of them that have failed.

        Raises:
          ResetNeeded: another environment has failed, or has had no reset yet; none was reset.
          Exception: as `advance`, or what a constructor raised.
        """
        self.advance("reset", self._prepared_for_reset(env_ids), one_by_one)

    def post_reset(self, env_ids: Sequence[int]) -> Callable[[], None]:
        """Like `reset` without waiting for the reset itself."""
        return self.post_advance("reset", self._prepared_for_reset(env_ids))

    def _prepared_for_reset(self, env_ids: Sequence[int]) -> dict[int, Sequence[Any]]:
        """What to pass to each actor's `reset`, once every environment is there to be reset."""
        self._num_resets += 1
        self._recover()
        others = set(range(self.num_envs)) - set(env_ids)
        for i in sorted(others):
            if i in self._actors.failed:
                problem = ResetNeeded(f"reset() without env {i}, but {self._actors.failed[i]}")
                errors.attach(problem, [self._actors.failed[i]])
                raise problem
            if self._last[self._actors.host(i)] is None:
                raise ResetNeeded(f"reset() without env {i}, which has had no reset yet")
        self._revive(env_ids)
        by_actor = self._actors.by_actor(env_ids)
        return {a: (self._actors.rows(a, ids),) for a, ids in by_actor.items()}

    def _revive(self, env_ids: Iterable[int]) -> None:
        """Rebuilds the given environments where they have failed, each with its next seed."""
        broken = sorted(set(env_ids) & self._actors.failed.keys())
        if broken:
            for i in broken:
                self._rebuilds[i] += 1
            build = self._post_build(self._actors.by_actor(broken))
            self._compare(self._finish_build(build, starting=False))
            for i in broken:
                del self._actors.failed[i]

    def _recover(self) -> None:
        """Settles what an interrupt left in flight; an actor that does not answer is ended."""
        for a, (method, outcome) in self._actors.settle_interrupted().items():
            if isinstance(outcome, Lost):
                self._note(outcome.failures.values())
            elif method in ("reset", "step"):
                self._note(self._keep({a: outcome}, method))

    def operate(self, operation: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """One of `actor.OPERATIONS` on some environments, by env_id what to pass.

        Gives their values in the order of `arguments`.

        Raises:
          Exception: like `advance`; an exception leaves its environment usable.
          ResetNeeded: one of them failed before, and was not reset since.
        """
        return self.post(operation, arguments)()

    def post(
        self, operation: str, arguments: Mapping[int, Sequence[Any]]
    ) -> Callable[[], list[Any]]:
        """Like `operate` without waiting; calling what it gives waits for the values, or raises."""
        self.check_ready(operation, arguments)
        calls: dict[int, Sent] = {}
        with self._actors.kept_if_interrupted(calls):
            self._send_operation(operation, arguments, calls)

        def values() -> list[Any]:
            with self._actors.kept_if_interrupted(calls):
                outcomes = self._actors.receive(calls, "call")
            results = self._results(arguments, outcomes)
            self._fail(results.values())
            return [self._value(i, results[i]) for i in arguments]

        return values

    def _send_operation(
        self, operation: str, arguments: Mapping[int, Sequence[Any]], calls: dict[int, Sent]
    ) -> None:
        packed = arguments if self._in_process else _all_pickled(arguments)
        posts = {
            a: (operation, self._actors.rows(a, ids), [packed[i] for i in ids])
            for a, ids in self._actors.by_actor(arguments).items()
        }
        self._actors.send("operate", posts, calls)

    def columns(self) -> list[np.ndarray[Any, Any]]:
        """Every environment's current time step: fresh arrays, one for each leaf.

        Raises:
          ResetNeeded: some environment has no time step.
        """
        columns = self.time_step_layout.empty(self.num_envs)
        for ids, last in zip(self.env_ids, self._last, strict=True):
            if last is None:
                raise ResetNeeded(f"env {ids[0]} has no time step yet: call reset() first")
            beside = last.objects
            if self.time_step_layout.has_objects and not self._in_process:
                beside = [pickle.loads(objects) for objects in beside]
            self.time_step_layout.fill(columns, ids[0], len(ids), last.block, beside)
        self._actors.episode_steps[columns[0] == 0] = 0
        return columns

    def reseed(self, seeds: Seeds) -> list[int]:
        """Seeds every environment anew; gives the seeds."""
        chosen = [seeds.of(i) for i in range(self.num_envs)]
        self.operate("seed", {i: (seed,) for i, seed in enumerate(chosen)})
        self._seeds, self._rebuilds = seeds, [0] * self.num_envs
        return chosen

    def timings(self) -> list[tuple[int, float]]:
        """Per environment: how many resets and steps, and the seconds spent in them."""
        self.check_ready("stats")
        calls: dict[int, Sent] = {}
        with self._actors.kept_if_interrupted(calls):
            self._actors.send("timings", dict.fromkeys(range(len(self.env_ids)), ()), calls)
            outcomes = self._actors.receive(calls, "call")
        results = self._results(range(self.num_envs), outcomes)
        self._fail(results.values())
        return list(results.values())

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
        if self._actors.interrupted:
            raise ResetNeeded(f"{method}() after an interrupt: call reset() first")
        failed = self._actors.failed
        if failed:
            wanted = range(self.num_envs) if env_ids is None else env_ids
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
        interrupted = {i for a in self._actors.interrupted for i in self.env_ids[a]}
        broken = interrupted | self._actors.failed.keys()
        try:
            alive = [i for i in range(self.num_envs) if self._actors.host(i) in self._actors]
            calls: dict[int, Sent] = {}
            self._send_operation("close", dict.fromkeys(alive, ()), calls)
            results = self._results(alive, self._actors.receive(calls, "close"))
        finally:
            self._end()
        self._fail(result for i, result in results.items() if i not in broken)

    def _end(self) -> None:
        self._state = "closed"
        self._actors.end()
        self._last = [None] * len(self.env_ids)

    # -- replies -----------------------------------------------------------------------------------

    def _keep(self, outcomes: Mapping[int, Any], method: str) -> list[EnvFailure]:
        """Keeps the time steps that a reset or a step gave; gives the failures."""
        failures: list[EnvFailure] = []
        for a, outcome in outcomes.items():
            if method == "step":
                ids = self.env_ids[a]
                self._actors.episode_steps[ids[0] : ids[-1] + 1] += 1  # `columns` resets a FIRST's
            if isinstance(outcome, Lost):
                failures += outcome.failures.values()
                continue
            reply = outcome if type(outcome) is Reply else Reply(outcome, [], [])
            failures += reply.failures
            self._last[a] = reply
        return failures

    def _results(self, env_ids: Iterable[int], outcomes: Mapping[int, Any]) -> dict[int, Any]:
        """By env_id what came for the environments that the actors were asked about."""
        results: dict[int, Any] = {}
        for a, ids in self._actors.by_actor(env_ids).items():
            outcome = outcomes[a]
            if isinstance(outcome, Lost):
                results |= {i: outcome.failures[i] for i in ids}
            else:
                results |= zip(ids, outcome, strict=True)
        return results

    def _value(self, env_id: int, result: Any) -> Any:
        if self._in_process:
            return result.value
        try:
            return pickle.loads(result.value)
        except Exception as problem:
            error = RemoteEnvError(
                f"env {env_id} gave a value that cannot be loaded in the caller: "
                f"{type(problem).__name__}: {problem}"
            )
            errors.attach(error, [errors.record(problem, index=env_id, phase="call")])
            raise error from problem

    def _note(self, results: Iterable[Any]) -> list[EnvFailure]:
        """Gives the failures, and remembers those after which an environment has to be rebuilt."""
        failed = self._actors.failed
        failures = [result for result in results if isinstance(result, EnvFailure)]
        for failure in failures:
            if failure.phase in ("construct", "reset", "step") or failure.index in failed:
                failed[failure.index] = failure
                _log.warning("%s", failure)
        return failures

    def _fail(self, results: Iterable[Any]) -> None:
        """Raises the failure of the lowest index, if there is one."""
        failures = sorted(self._note(results), key=lambda failure: failure.index)
        if failures:
            error = errors.merge(failures)
            if failures[0].traceback and gin_state.within_configurable():
                # gin's proxy has no __cause__, but it shows notes.
                errors.note(error, f"remote traceback:\n{failures[0].traceback.rstrip()}")
            raise error


def _mismatch(env_id: int, name: str, path: specs.Path, words: str) -> str:
    at = f" at '{'/'.join(map(str, path))}'" if path else ""
    return f"env {env_id}'s {name}_spec differs from env 0's{at}: {words}"


def _pickled(env_id: int, constructor: Callable[[], Any]) -> bytes:
    try:
        return gin_state.dumps(constructor)
    except Exception as problem:
        raise TypeError(
            f"env_constructors[{env_id}] ({constructor!r}) does not pickle, so it cannot reach an "
            f"actor: {type(problem).__name__}: {problem}. Whatever it holds (open files, locks, "
            "connections, environments) has to be made inside it"
        ) from problem


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
