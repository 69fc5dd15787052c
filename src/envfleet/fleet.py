"""Fleet: the environments of a batch as actors; start, call, restart, close.

The one engine. `parallel` puts a face on it and holds no channel; `channels` carries single calls
and knows nothing of failures. It counts in environments (``env_id``, from 0) on the outside and in
actors on the inside; actor ``a`` hosts ``env_ids[a]``, in that order.

The invariant: when a lockstep method returns or raises, no call is in flight that moves a working
environment. A call that is late is ended with its actor. What may be in flight is a restart: the
calls that close, build and reset an environment which has failed, and that nobody else waits for.
An interrupt (Ctrl-C) leaves calls behind; they are kept in `Actors.interrupted` until the next
reset has settled them, and nothing steps before that. `send` and `recv` (first-ready stepping) are
the two halves of a lockstep step: it sends all, and takes all.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envfleet import channels, errors, gin_state, specs
from envfleet.actor import Built, Reply
from envfleet.actors import Actors, Lost, Sent, words_for
from envfleet.channels import Died, Gone
from envfleet.errors import (
    ActorDied,
    ClosedError,
    EnvBusy,
    EnvFailure,
    EnvFleetError,
    FleetStartError,
    RemoteEnvError,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.flights import Flights
from envfleet.layout import Layout
from envfleet.restarts import Restart, Restarts
from envfleet.seeding import Seeds
from envfleet.time_steps import FIRST, LAST, TimeSteps
from envfleet.timings import Timings

_log = logging.getLogger("envfleet")

Columns = list[np.ndarray[Any, Any]]
"""Leaves of a batch, each with a leading axis."""


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
      max_restarts: how often in a row an environment is restarted without a good step in between;
        0 raises what it fails with.
      deadlines: seconds that a call may take, as `deadlines` gives them, for start, reset, step,
        call and close.

    Attributes:
      restarts: who is on the way back, and the record of failures.
      timings: how long environments and lockstep calls have taken.

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
    ) -> None:
        self.num_envs = len(constructors)
        starts = range(0, self.num_envs, envs_per_actor)
        self.env_ids = [range(s, min(s + envs_per_actor, self.num_envs)) for s in starts]
        self.action_layout = Layout({}, "actions")
        self.restarts = Restarts(self.num_envs, max_restarts)
        self.timings = Timings(self.num_envs)
        self._in_process = backend == "local"
        self._time_steps = TimeSteps(self.env_ids, self._in_process)
        self._actors = Actors(
            channels.connector(backend, ray_init),
            self.env_ids,
            [actor_options[ids[0]] for ids in self.env_ids],
            deadlines,
        )
        self._start_timeout, self._close_timeout = deadlines["start"], deadlines["close"]
        self._seeds = seeds
        self._rebuilds = [0] * self.num_envs
        self._gin = gin_state.scope_only() if self._in_process else gin_state.capture()
        self._constructors = [
            constructor if self._in_process else _pickled(env_id, constructor)
            for env_id, constructor in enumerate(constructors)
        ]
        self._no_arguments = () if self._in_process else gin_state.dumps(())
        self._num_resets = 0
        self._specs: Any = None
        # A step that resets as well has the time for either.
        step, reset = deadlines["step"], deadlines["reset"]
        self._resetting_limit = step and max(step, reset or 0.0)
        self._is_last = np.ones(self.num_envs, bool)
        self._busy = np.zeros(len(self.env_ids))
        self._starting: list[Sent] = []
        self._flights = Flights()
        self._all = range(self.num_envs)
        self._state = "new"

    @property
    def num_actors(self) -> int:
        return len(self.env_ids)

    @property
    def time_step_layout(self) -> Layout:
        """Of one environment's time step."""
        return self._time_steps.layout

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
            began = time.monotonic()
            for a, ids in enumerate(self.env_ids):
                if one_by_one and self._starting:
                    self._wait_built(self._starting[-1:])
                # One deadline for all of them, also where they start one after another.
                limit = self._start_timeout
                left = limit and max(0.0, limit - (time.monotonic() - began))
                left = left if one_by_one else limit
                self._actors.open(a, left)
                self._starting.append(self._send_build(a, ids, left))
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
            self._time_steps.layout = Layout(built[0].time_step_spec, "", timed=True)
            self.action_layout = Layout(built[0].action_spec, "actions")
            specs_of_all = built[0].time_step_spec, built[0].action_spec
            self._specs = specs_of_all if self._in_process else gin_state.dumps(specs_of_all)
            problems = [problem for i, one in built.items() for problem in self._compare(i, one)]
            if problems:
                raise SpecMismatch("\n".join(problems))
            missing = sorted({module for one in built.values() for module in one.unimported})
            if missing:
                words = "; ".join(missing)
                _log.warning("gin: actors lack %s: their bindings are not in force", words)
        except BaseException:
            self._end()
            raise
        self._starting.clear()
        self._state = "open"

    def _send_build(self, a: int, env_ids: Sequence[int], limit: float | None = None) -> Sent:
        return self._actors.send(
            a,
            env_ids,
            "start",
            "build",
            self._actors.rows(a, env_ids),
            [self._constructors[i] for i in env_ids],
            [self._seeds and self._seeds.of(i, self._rebuilds[i]) for i in env_ids],
            self._gin,
            self._specs,
            limit=limit,
        )

    def _wait_built(self, builds: Sequence[Sent]) -> dict[int, Built]:
        """By env_id what the environments told of themselves."""
        self._actors.wait(builds, starting=True)
        late = [sent.a for sent in builds if sent.outcome is None]
        results = self._results([sent for sent in builds if sent.outcome is not None])
        failures = [result for result in results.values() if isinstance(result, EnvFailure)]
        for failure in failures:
            _log.warning("%s", failure.line())
        self._raise(failures)
        if late:
            raise FleetStartError(self._actors.late_start(late))
        return {i: self._value(i, result) for i, result in results.items()}

    def _compare(self, env_id: int, built: Built) -> list[str]:
        """Every difference of an environment's specs from the batch's, in words."""
        pairs = [
            (self._time_steps.layout, Layout(built.time_step_spec, "")),
            (self.action_layout, Layout(built.action_spec, "actions")),
        ]
        problems, other = [], "env 0's" if env_id else "what it was at the start"
        for expected, found in pairs:
            for path, words in specs.differences(expected.specs, found.specs):
                name, path = ("action", path) if expected.name else (str(path[0]), path[1:])
                at = f" at '{'/'.join(map(str, path))}'" if path else ""
                problems.append(f"env {env_id}'s {name}_spec differs from {other}{at}: {words}")
        return problems

    # -- stepping ----------------------------------------------------------------------------------

    def step(self, columns: Columns, one_by_one: bool = False) -> Callable[[], Columns]:
        """Steps every environment; calling what it gives waits for the time steps, or raises.

        Args:
          columns: the actions' leaves, of shape ``(num_envs, *shape)``.
          one_by_one: wait for each actor before the next one is asked.

        Raises:
          EnvBusy: some are under way.
          Exception: what the environment of the lowest index raised, or `ActorDied`, or
            `EnvTimeout`; after every call has been settled.
        """
        self._check_lockstep("step")
        began = time.perf_counter()
        self._flights.is_lockstep = True
        self._send_steps(self._all, columns, one_by_one)
        return self._taking_all("step", time.perf_counter() - began)

    def reset(self, env_ids: Sequence[int], one_by_one: bool = False) -> Callable[[], Columns]:
        """Resets some environments, and rebuilds those of them that have failed; like `step`.

        What is under way is settled first, and what it gave is dropped.

        Raises:
          EnvBusy: another environment is under way; none was reset.
          ResetNeeded: another environment has failed, or has had no reset yet; none was reset.
        """
        self._num_resets += 1
        self._settle(env_ids)
        self._flights.is_lockstep = True
        self.restarts.given_up.clear()
        failed = self.restarts.failed
        for i in sorted(set(self._all) - set(env_ids)):
            if i in failed:
                problem = ResetNeeded(f"reset() without env {i}, but {failed[i]}")
                errors.attach(problem, [failed[i]])
                raise problem
            if self._time_steps.step_type(i) is None:
                raise ResetNeeded(f"reset() without env {i}, which has had no reset yet")
        self._send_resets(env_ids, one_by_one)
        return self._taking_all("reset")

    def send_steps(self, env_ids: Sequence[int], columns: Columns) -> None:
        """Steps some environments and does not wait.

        Args:
          env_ids: which, in any order.
          columns: the leaves of their actions, in that order.

        Raises:
          EnvBusy: one of them is under way; none was sent.
          Exception: what an environment failed with in the background; none was sent.
        """
        self._check_free("send", env_ids)
        self._flights.is_lockstep = False
        self._send_steps(env_ids, columns)

    def send_resets(self, env_ids: Sequence[int]) -> None:
        """Resets some environments, and rebuilds those that have failed; does not wait."""
        self._check_free("async_reset", env_ids)
        self._flights.is_lockstep = False
        told = self.restarts.given_up
        told[:] = [failure for failure in told if failure.index not in env_ids]
        self._send_resets(env_ids)

    def receive(
        self, at_least: int | None, timeout: float | None = None, max_staleness: int | None = None
    ) -> tuple[list[int], Columns]:
        """Waits until so many environments have landed (None: all under way); takes all that have.

        Args:
          at_least: how many.
          timeout: seconds after which it takes those that have, however few.
          max_staleness: it waits, too, for those that so many calls could have taken, itself the
            last of them.

        Returns:
          The environments in ascending order, and their time steps.

        Raises:
          ValueError: fewer are under way; nothing was taken.
          Exception: as `step`; what others gave is there for the next call.
        """
        flights = self._flights
        self._check_not_interrupted("recv")
        if at_least is not None and at_least > len(flights):
            raise ValueError(
                f"recv(min_envs={at_least}), but {len(flights)} of {self.num_envs} environments "
                "are under way: send() or async_reset() others first"
            )
        until = None if timeout is None else time.monotonic() + timeout
        self._arrive(at_least, until, flights.receive(max_staleness))
        self._raise_given_up()
        env_ids = sorted(self._landed())
        for i in flights.awaited.intersection(env_ids):
            self._join(i)
        columns = self._time_steps.columns(env_ids)
        flights.end(env_ids)
        self._note(env_ids, columns[0])
        return env_ids, columns

    def columns(self) -> Columns:
        """Every environment's current time step: fresh arrays, one for each leaf.

        Raises:
          ResetNeeded: some environment has no time step.
        """
        columns = self._time_steps.columns()
        self._note(slice(None), columns[0])
        return columns

    def _note(self, env_ids: slice | Sequence[int], step_types: np.ndarray[Any, Any]) -> None:
        """Remembers where episodes are."""
        self._is_last[env_ids] = step_types == LAST
        steps = self._actors.episode_steps
        steps[env_ids] = np.where(step_types == FIRST, 0, steps[env_ids])

    # -- taking off --------------------------------------------------------------------------------

    def _send_steps(
        self, env_ids: Sequence[int], columns: Columns, one_by_one: bool = False
    ) -> None:
        pending = self.restarts.pending
        self._mend()
        self._raise_given_up()
        layout = self.action_layout
        calls: dict[int, tuple[Sequence[int], tuple[Any, ...]]] = {}
        if env_ids is self._all and not pending:
            for a, ids in enumerate(self.env_ids):
                calls[a] = ids, layout.rows(columns, slice(ids.start, ids.stop), len(ids))
        else:
            at = {i: n for n, i in enumerate(env_ids) if i not in pending}
            for a, working in self._actors.by_actor(at).items():
                block = layout.rows(columns, [at[i] for i in working], len(working))
                calls[a] = working, (*block, self._actors.rows(a, working))
        self._take_off("step", env_ids, calls, one_by_one)

    def _send_resets(self, env_ids: Sequence[int], one_by_one: bool = False) -> None:
        for i in env_ids:
            # Also one that an interrupt has left between working and failed.
            if i in self.restarts.failed or self._is_adrift(i):
                self.restarts.forgive(i, owes_last=not self._time_steps.is_over(i))
        self._mend()
        self._raise_given_up()
        by_actor = self._actors.by_actor(set(env_ids) - self.restarts.pending.keys())
        calls = {a: (ids, (self._actors.rows(a, ids),)) for a, ids in by_actor.items()}
        self._take_off("reset", env_ids, calls, one_by_one)

    def _take_off(
        self,
        method: str,
        env_ids: Sequence[int],
        calls: Mapping[int, tuple[Sequence[int], tuple[Any, ...]]],
        one_by_one: bool,
    ) -> None:
        """Sends a step or a reset to those that work; the others are awaited from their restart."""
        flights, pending = self._flights, self.restarts.pending
        flights.take_off(env_ids)
        for i in pending.keys() & set(env_ids) if pending else ():
            if method == "step" and pending[i].owes_last:
                self._truncate(i)
                flights.landed.add(i)
            else:
                flights.awaited.add(i)
        # A step of one whose episode has ended is a reset, and has its time.
        resetting = method == "step" and self._is_last.any()
        with self._actors.kept_if_interrupted(flights.calls):
            for a, (ids, args) in calls.items():
                limit = None
                if resetting and self._is_last[ids[0] : ids[-1] + 1].any():
                    limit = self._resetting_limit
                self._actors.send(a, ids, method, method, *args, limit=limit, into=flights.calls)
                if one_by_one:
                    self._actors.wait(flights.calls)

    # -- landing -----------------------------------------------------------------------------------

    def _taking_all(self, method: str, sending: float | None = None) -> Callable[[], Columns]:
        """What waits for the environments of a lockstep call and takes all of them.

        `sending` is how long it took to send a step: its time is kept.
        """
        flights, num_resets = self._flights, self._num_resets

        def time_steps() -> Columns:
            self._check_promise()
            if num_resets != self._num_resets:  # an interrupt kept it from being waited for
                raise ResetNeeded(f"a reset() has taken the place of this {method}()")
            began = time.perf_counter()
            self._arrive(None)
            rebuilt = self._landed() & flights.awaited
            flights.clear()
            self._raise_given_up()
            for i in rebuilt:
                self._join(i)
            columns = self.columns()
            if sending is not None:
                seconds = sending + time.perf_counter() - began
                self.timings.keep_batch(seconds, float(self._busy.max()))
            return columns

        return time_steps

    def _arrive(
        self,
        at_least: int | None,
        until: float | None = None,
        stale: Collection[int] = (),
    ) -> None:
        """Waits until so many (None: all) have landed, and the stale ones, or one has failed."""
        flights, restarts = self._flights, self.restarts
        while True:
            with self._actors.kept_if_interrupted(flights.calls):
                self._mend()
                landed = self._landed()
                missing = (len(flights) if at_least is None else at_least) - len(landed)
                if missing <= 0 and landed.issuperset(i for i in stale if i in flights):
                    return
                if restarts.given_up and (at_least is not None or not flights.calls):
                    return
                now = time.monotonic()
                if until is not None and now >= until:
                    return
                if at_least is None and flights.calls:
                    self._actors.wait(flights.calls)
                    continue
                coming = [restarts.pending[i] for i in flights.awaited - landed]
                moments = [one.due for one in coming if not one.calls]
                moments += [until] if until is not None else []
                wake = min(moments, default=None)
                calls = [*flights.calls, *(sent for one in coming for sent in one.calls)]
                if calls:
                    # So many calls it takes at the least; a restart goes on by every one of its.
                    number = 1 if coming else max(1, -(-missing // len(self.env_ids[0])))
                    self._actors.wait(calls, at_least=number, until=wake)
                elif wake is not None:
                    time.sleep(max(0.0, wake - now))

    def _landed(self) -> set[int]:
        """Those under way whose time step is there; who was given up is no longer under way."""
        flights, restarts = self._flights, self.restarts
        if not flights.awaited:
            return flights.landed
        flights.end(flights.awaited & restarts.failed.keys())
        return flights.landed | {i for i in flights.awaited if restarts.pending[i].is_ready}

    def _take_arrived(self) -> None:
        """Keeps what calls have given, then who was lost: what an actor gave before it counts."""
        flights = self._flights
        done = [sent for sent in flights.calls if sent.outcome is not None]
        for sent in done:
            if not isinstance(sent.outcome, Lost):
                self._keep(sent)
        self._take_losses()
        for sent in done:
            if isinstance(sent.outcome, Lost):
                for i in sent.env_ids:
                    self._land_failed(i, sent.method)
        if done:
            flights.calls = [sent for sent in flights.calls if sent.outcome is None]

    def _keep(self, sent: Sent) -> None:
        """Keeps what a step or a reset gave."""
        if sent.is_kept:
            return
        moved, a, actors = sent.env_ids, sent.a, self._actors
        unproven = self.restarts.unproven
        reply = sent.outcome if type(sent.outcome) is Reply else Reply(sent.outcome, [], [])
        for failure in reply.failures:
            self._fail(failure, sent.at)
        good: Sequence[int] = moved
        if reply.failures:
            wrong = {failure.index for failure in reply.failures}
            good = [i for i in moved if i not in wrong]
        self._time_steps.keep(a, sent.number, reply, good)
        for i in unproven & set(good) if unproven else ():
            if sent.method == "step" and self._time_steps.step_type(i) != FIRST:
                self.restarts.succeeded(i)
        ids = self.env_ids[a]
        seconds = self.time_step_layout.seconds(reply.block, len(ids))
        if len(good) == len(ids):
            chosen: slice | Sequence[int] = slice(ids.start, ids.stop)
        else:
            chosen, seconds = good, seconds[[i - ids.start for i in good]]
        self.timings.keep(chosen, seconds)
        self._busy[a] = seconds.sum()
        if sent.method == "step":  # of a FIRST, `_note` makes it 0
            actors.episode_steps[chosen] += 1
        self._flights.landed.update(good)
        for failure in reply.failures:
            self._land_failed(failure.index, sent.method)
        sent.is_kept = True

    def _land_failed(self, env_id: int, method: str) -> None:
        """One under way has failed: what its slot shows by this call."""
        flights = self._flights
        if env_id not in self.restarts.pending:
            flights.end([env_id])
        elif method == "reset" or self._time_steps.is_over(env_id):
            flights.awaited.add(env_id)
        else:
            self._truncate(env_id)
            flights.landed.add(env_id)

    def _settle(self, env_ids: Sequence[int]) -> None:
        """Waits for what is under way, and drops it: these environments are to be reset.

        After an interrupt, an actor that does not answer is ended.
        """
        flights, actors = self._flights, self._actors
        if actors.interrupted is None and not flights.is_lockstep:
            others = sorted(set(flights) - set(env_ids))
            if others:
                raise EnvBusy(
                    f"reset() without {words_for(others)} of {self.num_envs}, still under way: "
                    "recv() or drain() first, or reset() all"
                )
            with actors.kept_if_interrupted(flights.calls):
                actors.wait(flights.calls)
        else:
            settled = actors.settle_interrupted(flights.calls)
            flights.calls = [sent for sent in settled if sent.method in ("step", "reset")]
        self._take_arrived()
        flights.clear()

    # -- failing, and coming back ------------------------------------------------------------------

    def _fail(self, failure: EnvFailure, since: float, for_good: bool = False) -> None:
        """An environment has failed: its slot goes on to show what it shows until it is back."""
        i, pending = failure.index, self.restarts.pending
        was_pending = i in pending
        self._time_steps.hold(i)
        self.restarts.fail(failure, since, for_good)
        if i in pending and not was_pending:
            pending[i].owes_last = not self._time_steps.is_over(i)

    def _take_losses(self) -> None:
        """All environments of an actor that is gone have failed, whoever was waiting for it."""
        while self._actors.losses:
            lost = self._actors.losses[0]
            for failure in lost.failures.values():
                self._fail(failure, lost.since, lost.for_good)
            del self._actors.losses[0]

    def _is_adrift(self, env_id: int) -> bool:
        """Whether it neither works nor is known to have failed."""
        if env_id in self.restarts.pending or env_id in self.restarts.failed:
            return False
        return env_id in self._time_steps.held or self._actors.host(env_id) not in self._actors

    def _truncate(self, env_id: int) -> None:
        """The slot shows the end of the episode that a failure ended."""
        self._time_steps.truncate(env_id)
        self.restarts.pending[env_id].owes_last = False

    def _join(self, env_id: int) -> None:
        """The slot shows what its rebuilt environment gave."""
        self.restarts.join(env_id)
        self._time_steps.release(env_id)

    def _await_restarts(self, env_ids: Iterable[int]) -> None:
        """Waits until these environments are ready, or one of them is given up."""
        pending, failed = self.restarts.pending, self.restarts.failed
        while True:
            self._mend()
            missing = [pending[i] for i in env_ids if i in pending and not pending[i].is_ready]
            if not missing or any(i in failed for i in env_ids):
                return
            calls = [sent for one in missing for sent in one.calls]
            wake = min((one.due for one in missing if not one.calls), default=None)
            if calls:
                self._actors.wait(calls, at_least=1, until=wake)
            elif wake is not None:
                time.sleep(max(0.0, wake - time.monotonic()))

    def _mend(self) -> None:
        """Takes what has arrived, and every restart as far as it goes without waiting."""
        pending = self.restarts.pending
        self._take_arrived()
        if not pending:
            return
        self._actors.wait([sent for one in pending.values() for sent in one.calls], until=0.0)
        self._take_arrived()
        for i, restart in sorted(pending.items()):
            if restart.calls and not restart.is_ready:
                self._check_restart(i, restart)
        now = time.monotonic()
        for i, restart in sorted(pending.items()):
            if not restart.calls and restart.due <= now:
                self._send_restart(i, restart)

    def _send_restart(self, env_id: int, restart: Restart) -> None:
        """Closes the old environment where it still stands, builds a new one and resets it."""
        self._rebuilds[env_id] += 1
        self.restarts.num_restarts[env_id] += 1
        a, ids = self._actors.host(env_id), [env_id]
        calls: list[Sent] = []
        with self._actors.kept_if_interrupted(calls):
            if a in self._actors:
                calls.append(self._send_operation(a, "close", {env_id: self._no_arguments}))
            else:
                try:
                    self._actors.open(a)
                except Died as died:
                    error = ActorDied(f"env {env_id} of {self.num_envs} has no new actor: {died}")
                    failure = errors.record(error, index=env_id, phase="construct")
                    self._fail(failure, restart.due, for_good=isinstance(died, Gone))
                    return
            calls.append(self._send_build(a, ids))
            rows = self._actors.rows(a, ids)
            calls.append(self._actors.send(a, ids, "reset", "reset", rows))
        restart.calls = calls  # all of it: half an attempt would be waited for in vain

    def _check_restart(self, env_id: int, restart: Restart) -> None:
        """Looks at what has come of a restart: it is ready, it has failed, or it goes on."""
        for sent in restart.calls:
            outcome = sent.outcome
            if outcome is None or isinstance(outcome, Lost):  # that has been taken
                return
            failures: list[EnvFailure] = []
            if sent.method == "build":
                failures = self._refused(env_id, outcome[0])
            elif sent.method == "reset":
                reply = outcome if type(outcome) is Reply else Reply(outcome, [], [])
                failures = reply.failures
                self._time_steps.keep(sent.a, sent.number, reply, [] if failures else [env_id])
            if failures:  # (those of the old environment's end are no news)
                self._fail(failures[0], sent.at)
                return
        restart.is_ready = True

    def _refused(self, env_id: int, result: Any) -> list[EnvFailure]:
        """Why a rebuilt environment cannot take its slot, if so."""
        if isinstance(result, EnvFailure):
            return [result]
        try:
            problems = self._compare(env_id, self._value(env_id, result))
        except RemoteEnvError as error:  # specs that cannot be loaded here
            return [errors.record(error, index=env_id, phase="construct")]
        if not problems:
            return []
        mismatch = SpecMismatch("\n".join(problems))
        return [errors.record(mismatch, index=env_id, phase="construct")]

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
            self._check_free(operation, arguments)
        self._await_restarts(arguments)
        self._raise_given_up(arguments)
        calls: list[Sent] = []
        packed = arguments if self._in_process else _all_pickled(arguments)
        with self._actors.kept_if_interrupted(calls):
            for a, ids in self._actors.by_actor(arguments).items():
                calls.append(self._send_operation(a, operation, {i: packed[i] for i in ids}))

        def values() -> list[Any]:
            self._check_promise()
            with self._actors.kept_if_interrupted(calls):
                self._actors.wait(calls)
                results = self._results(calls)
                self._mend()
            failures = [result for result in results.values() if isinstance(result, EnvFailure)]
            if operation == "set_state":  # the caller knows where its environments are
                for i in results.keys() - {failure.index for failure in failures}:
                    self._join(i)
            self._raise(failures)
            return [self._value(i, results[i]) for i in arguments]

        return values

    def _send_operation(self, a: int, operation: str, packed: Mapping[int, Any]) -> Sent:
        phase, rows = "close" if operation == "close" else "call", self._actors.rows(a, packed)
        return self._actors.send(
            a, [*packed], phase, "operate", operation, rows, [*packed.values()]
        )

    def reseed(self, seeds: Seeds) -> list[int]:
        """Seeds every environment anew; gives the seeds."""
        chosen = [seeds.of(i) for i in range(self.num_envs)]
        self.operate("seed", {i: (seed,) for i, seed in enumerate(chosen)})
        self._seeds, self._rebuilds = seeds, [0] * self.num_envs
        return chosen

    def usage(self) -> float:
        """Seconds of CPU time that the actors' processes have used."""
        calls: list[Sent] = []
        with self._actors.kept_if_interrupted(calls):
            for a, ids in enumerate(self.env_ids):
                calls.append(self._actors.send(a, ids, "call", "usage"))
            self._actors.wait(calls)
            self._mend()
        self._raise_given_up()
        return float(sum(sent.outcome for sent in calls if not isinstance(sent.outcome, Lost)))

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

    def _check_promise(self) -> None:
        if self._state == "closed":
            raise ClosedError("the batch was closed before this promise was called")

    def check_ready(self, method: str, env_ids: Iterable[int] | None = None) -> None:
        """Raises unless the environments (by default all) can be called."""
        self.check_open(method)
        if self._actors.interrupted is not None:
            raise ResetNeeded(f"{method}() after an interrupt: call reset() first")
        failed = self.restarts.failed
        if failed:
            wanted = range(self.num_envs) if env_ids is None else env_ids
            self._raise_given_up(wanted)
            broken = [failed[i] for i in sorted(wanted) if i in failed]
            if broken:
                problem = ResetNeeded(
                    f"{method}() refused, since {broken[0]}: reset() rebuilds what failed"
                )
                errors.attach(problem, broken)
                raise problem

    def _check_not_interrupted(self, method: str) -> None:
        is_cut = len(self._flights) and self._flights.is_lockstep
        if is_cut or self._actors.interrupted is not None:
            raise ResetNeeded(f"{method}() after an interrupt: call reset() first")

    def _check_lockstep(self, method: str) -> None:
        """Raises unless no environment is under way."""
        self._check_not_interrupted(method)
        if len(self._flights):
            raise EnvBusy(
                f"{method}() while {words_for(sorted(self._flights))} of {self.num_envs} are under "
                "way: drain() takes them in, reset() drops them"
            )

    def _check_free(self, method: str, env_ids: Iterable[int]) -> None:
        """Raises unless none of these environments is under way."""
        self._check_not_interrupted(method)
        busy = sorted(i for i in env_ids if i in self._flights)
        if busy:
            raise EnvBusy(
                f"{method}() of {words_for(busy)} of {self.num_envs}, still under way: recv() or "
                "drain() first"
            )

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
        try:
            calls = [
                self._send_operation(a, "close", dict.fromkeys(ids, self._no_arguments))
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
        self._raise(
            result
            for i, result in results.items()
            if isinstance(result, EnvFailure) and i not in broken
        )

    def _end(self) -> None:
        self._state = "closed"
        self._flights.clear()
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

    def _raise_given_up(self, env_ids: Iterable[int] | None = None) -> None:
        """Raises for the environments (of these) that were given up and nobody was told of."""
        given_up = self.restarts.given_up
        if given_up:
            wanted = range(self.num_envs) if env_ids is None else env_ids
            self._raise([failure for failure in given_up if failure.index in wanted])

    def _raise(self, failures: Iterable[EnvFailure]) -> None:
        """Raises the failure of the lowest index, if there is one, with notes on all others."""
        ordered = sorted(failures, key=lambda failure: failure.index)
        if not ordered:
            return
        raised = {failure.index for failure in ordered}
        self.restarts.given_up[:] = [
            failure for failure in self.restarts.given_up if failure.index not in raised
        ]
        error = errors.merge(ordered, [self.restarts.attempts(failure) for failure in ordered])
        if ordered[0].traceback and gin_state.within_configurable():
            # gin's proxy has no __cause__, but it shows notes.
            errors.note(error, f"remote traceback:\n{ordered[0].traceback.rstrip()}")
        raise error


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
