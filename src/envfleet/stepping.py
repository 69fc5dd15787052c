"""Stepping: a time step for every action, all together or as they come.

`send_steps` and `receive` (first-ready stepping) are the two halves of a lockstep `step`: that one
sends all, and takes all.

The invariant: when a lockstep call returns or raises, no call is in flight that moves a working
environment. A call that is late is ended with its actor. What may be in flight is a restart: the
calls that close, build and reset an environment which has failed, and that nobody else waits for.
An interrupt (Ctrl-C) leaves calls behind; they are kept in `Actors.interrupted` until the next
reset has settled them, and nothing steps before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envfleet import errors
from envfleet.actor import Reply
from envfleet.actors import Actors, Lost, Sent, words_for
from envfleet.building import Builder
from envfleet.errors import ClosedError, EnvBusy, ResetNeeded
from envfleet.flights import Flights
from envfleet.mending import Mender
from envfleet.restarts import Restarts
from envfleet.time_steps import FIRST, LAST, TimeSteps
from envfleet.timings import Timings

Columns = list[np.ndarray[Any, Any]]
"""Leaves of a batch, each with a leading axis."""


class Stepper:
    """Steps and resets the environments of a fleet.

    Args:
      actors, builder, mender, restarts, time_steps: the fleet's.
      deadlines: seconds that a call may take, by phase.

    Attributes:
      timings: how long environments and lockstep calls have taken.
      resetting_limit: seconds that a step may take which resets as well: the longer of the two.
      prepared: environments that were told what to do in their next reset, so that the first time
        step which a restart has brought is not enough.
    """

    def __init__(
        self,
        actors: Actors,
        builder: Builder,
        mender: Mender,
        restarts: Restarts,
        time_steps: TimeSteps,
        deadlines: Mapping[str, float | None],
    ) -> None:
        self.timings = Timings(actors.num_envs)
        self._actors = actors
        self._builder = builder
        self._mender = mender
        self._restarts = restarts
        self._time_steps = time_steps
        self._num_envs = actors.num_envs
        self._flights = Flights()
        self._all = range(actors.num_envs)
        step, reset = deadlines["step"], deadlines["reset"]
        self.resetting_limit = step and max(step, reset or 0.0)
        self._is_last = np.ones(actors.num_envs, bool)
        self._seconds = np.full(actors.num_envs, np.nan)
        self._starts = np.array([ids.start for ids in actors.env_ids])
        self._num_resets = 0
        self.prepared: set[int] = set()
        self._is_closed = False

    def close(self) -> None:
        """Nothing steps any more, and promises raise."""
        self._is_closed = True
        self._flights.clear()

    # -- lockstep ----------------------------------------------------------------------------------

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
        # One by one, most of it would be the others' steps.
        return self._taking_all("step", None if one_by_one else time.perf_counter() - began)

    def reset(self, env_ids: Sequence[int], one_by_one: bool = False) -> Callable[[], Columns]:
        """Resets some environments, and rebuilds those of them that have failed; like `step`.

        What is under way is settled first, and what it gave is dropped.

        Raises:
          EnvBusy: another environment is under way; none was reset.
          ResetNeeded: another environment has failed, or has had no reset yet; none was reset.
        """
        self._num_resets += 1
        if len(self._flights) and not self._flights.is_lockstep:
            # Before what is under way is dropped.
            self._check_at_rest(env_ids)
            self._check_others(env_ids)
        self._settle()
        self._flights.is_lockstep = True
        self._restarts.given_up.clear()
        self._check_others(env_ids)
        # Those of a reset that raised for another one are owed their first time step, too.
        pending = self._restarts.pending
        owed = [i for i in pending if pending[i].was_reset and i not in env_ids]
        self._send_resets([*env_ids, *owed], one_by_one)
        return self._taking_all("reset")

    def _check_at_rest(self, env_ids: Sequence[int]) -> None:
        """Raises unless only environments that are to be reset are under way."""
        others = sorted(set(self._flights) - set(env_ids))
        if others and self._actors.interrupted is None:
            raise EnvBusy(
                f"reset() without {words_for(others)} of {self._num_envs}, still under way: "
                "recv() or drain() first, or reset() all"
            )

    def _check_others(self, env_ids: Sequence[int]) -> None:
        """Raises unless the environments that are not to be reset have a time step to show."""
        failed = self._restarts.failed
        for i in sorted(set(self._all) - set(env_ids)):
            if i in failed:
                problem = ResetNeeded(f"reset() without env {i}, but {failed[i]}")
                errors.attach(problem, [failed[i]])
                raise problem
            if self._time_steps.step_type(i) is None:
                raise ResetNeeded(f"reset() without env {i}, which has had no reset yet")

    # -- first-ready -------------------------------------------------------------------------------

    def send_steps(self, env_ids: Sequence[int], columns: Columns) -> None:
        """Steps some environments and does not wait.

        Args:
          env_ids: which, in any order.
          columns: the leaves of their actions, in that order.

        Raises:
          EnvBusy: one of them is under way; none was sent.
          Exception: what one of them failed with in the background; none was sent.
        """
        self.check_free("send", env_ids)
        self._flights.is_lockstep = False
        self._send_steps(env_ids, columns)

    def send_resets(self, env_ids: Sequence[int]) -> None:
        """Resets some environments, and rebuilds those that have failed; does not wait."""
        self.check_free("async_reset", env_ids)
        self._flights.is_lockstep = False
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
        with self._actors.kept_if_interrupted(flights.calls):
            self.mend()
        self._restarts.raise_given_up()
        if at_least is not None and at_least > len(flights):
            raise ValueError(
                f"recv(min_envs={at_least}), but {len(flights)} of {self._num_envs} environments "
                "are under way: send() or async_reset() others first"
            )
        until = None if timeout is None else time.monotonic() + timeout
        self._arrive(at_least, until, flights.receive(max_staleness))
        self._restarts.raise_given_up()
        env_ids = sorted(self._landed())
        for i in flights.awaited.intersection(env_ids):
            self._mender.join(i)
        columns = self._time_steps.columns(env_ids)
        flights.end(env_ids)
        self._note(env_ids, columns[0])
        self._keep_seconds(env_ids)
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
        is_first = step_types == FIRST
        if np.count_nonzero(is_first):
            steps = self._actors.episode_steps
            steps[env_ids] = np.where(is_first, 0, steps[env_ids])

    def _keep_seconds(self, env_ids: slice | Sequence[int]) -> None:
        """What the calls that have landed took the environments; NaN of who failed in them."""
        self.timings.keep(env_ids, self._seconds[env_ids])
        self._seconds[env_ids] = np.nan

    def _busiest(self) -> float:
        """Seconds of the actor whose environments took longest together."""
        longest = np.maximum.reduce(np.add.reduceat(self._seconds, self._starts))
        if np.isnan(longest):  # some have failed
            longest = np.add.reduceat(np.nan_to_num(self._seconds), self._starts).max()
        return float(longest)

    # -- taking off --------------------------------------------------------------------------------

    def _send_steps(
        self, env_ids: Sequence[int], columns: Columns, one_by_one: bool = False
    ) -> None:
        pending = self._restarts.pending
        self.mend()
        self._restarts.raise_given_up(env_ids)
        layout = self._builder.action_layout
        calls: dict[int, tuple[Sequence[int], tuple[Any, ...]]] = {}
        if env_ids is self._all and not pending:
            for a, ids in enumerate(self._actors.env_ids):
                calls[a] = ids, layout.rows(columns, slice(ids.start, ids.stop), len(ids))
        else:
            at = {i: n for n, i in enumerate(env_ids) if i not in pending}
            for a, working in self._actors.by_actor(at).items():
                block = layout.rows(columns, [at[i] for i in working], len(working))
                calls[a] = working, (*block, self._actors.rows(a, working))
        self._take_off("step", env_ids, calls, one_by_one)

    def _send_resets(self, env_ids: Sequence[int], one_by_one: bool = False) -> None:
        for i in env_ids:
            self._mender.forgive(i)
        self.mend()
        self._restarts.raise_given_up(env_ids)
        pending = self._restarts.pending
        for i in pending.keys() & set(env_ids):
            pending[i].was_reset, pending[i].owes_last = True, False
            if i in self.prepared and pending[i].is_ready:
                self._mender.join(i)
        self.prepared.difference_update(env_ids)
        by_actor = self._actors.by_actor(set(env_ids) - pending.keys())
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
        flights, pending = self._flights, self._restarts.pending
        # A step of one whose episode has ended is a reset, and has its time.
        resetting = method == "step" and self._is_last.any()
        with self._actors.kept_if_interrupted(flights.calls):
            flights.take_off(env_ids)
            for i in pending.keys() & set(env_ids) if pending else ():
                if method == "step" and pending[i].owes_last:
                    self._mender.truncate(i)
                    flights.landed.add(i)
                else:
                    flights.awaited.add(i)
            for a, (ids, args) in calls.items():
                limit = None
                if resetting and self._is_last[ids[0] : ids[-1] + 1].any():
                    limit = self.resetting_limit
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
            self.check_promise()
            if num_resets != self._num_resets:  # an interrupt kept it from being waited for
                raise ResetNeeded(f"a reset() has taken the place of this {method}()")
            began = time.perf_counter()
            self._arrive(None)
            moved = slice(None) if len(flights) == self._num_envs else list(flights)
            rebuilt = self._landed() & flights.awaited
            flights.clear()
            busiest = self._busiest()
            self._keep_seconds(moved)
            self._restarts.raise_given_up()
            for i in rebuilt:
                self._mender.join(i)
            columns = self.columns()
            if sending is not None:
                self.timings.keep_batch(sending + time.perf_counter() - began, busiest)
            return columns

        return time_steps

    def _arrive(
        self,
        at_least: int | None,
        until: float | None = None,
        stale: Collection[int] = (),
    ) -> None:
        """Waits until so many (None: all) have landed, and the stale ones, or one has failed."""
        flights, restarts = self._flights, self._restarts
        has_looked = False
        while True:
            with self._actors.kept_if_interrupted(flights.calls):
                self.mend()
                landed = self._landed()
                wanted = len(flights) if at_least is None else min(at_least, len(flights))
                missing = wanted - len(landed)
                if missing <= 0 and landed.issuperset(i for i in stale if i in flights):
                    return
                if restarts.given_up and (at_least is not None or not flights.calls):
                    return
                if has_looked and until is not None and time.monotonic() >= until:
                    return
                if not flights.calls and not flights.awaited - landed:
                    raise ResetNeeded("environments were lost by an interrupt: call reset() first")
                has_looked = True
                if at_least is None and flights.calls:
                    self._actors.wait(flights.calls)
                    continue
                # So many calls at the least it takes until so many have landed.
                number = max(1, -(-missing // len(self._actors.env_ids[0])))
                self._mender.wait(flights.awaited - landed, flights.calls, number, until)

    def _landed(self) -> set[int]:
        """Those under way whose time step is there."""
        flights, pending = self._flights, self._restarts.pending
        return flights.landed | {
            i for i in flights.awaited if i not in pending or pending[i].is_ready
        }

    def _take_arrived(self) -> None:
        """Keeps what calls have given, then who was lost: what an actor gave before it counts."""
        flights = self._flights
        done = [sent for sent in flights.calls if sent.outcome is not None]
        for sent in done:
            if not isinstance(sent.outcome, Lost):
                self._keep(sent)
        self._mender.take_losses()
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
        unproven = self._restarts.unproven
        reply = Reply.of(sent.outcome)
        for failure in reply.failures:
            self._mender.fail(failure, sent.at)
        good: Sequence[int] = moved
        if reply.failures:
            wrong = {failure.index for failure in reply.failures}
            good = [i for i in moved if i not in wrong]
        self._time_steps.keep(a, sent.number, reply, good)
        for i in unproven & set(good) if unproven else ():
            # One whose episode was over has been reset by this step, which proves nothing yet.
            if sent.method == "step" and not self._is_last[i]:
                self._restarts.succeeded(i)
        ids = actors.env_ids[a]
        seconds = self._builder.time_step_layout.seconds(reply.block, len(ids))
        if len(good) == len(ids):
            chosen: slice | Sequence[int] = slice(ids.start, ids.stop)
        else:
            chosen, seconds = good, seconds[[i - ids.start for i in good]]
        self._seconds[chosen] = seconds
        if sent.method == "step":  # of a FIRST, `_note` makes it 0
            actors.episode_steps[chosen] += 1
        self._flights.landed.update(good)
        for failure in reply.failures:
            self._land_failed(failure.index, sent.method)
        sent.is_kept = True

    def _land_failed(self, env_id: int, method: str) -> None:
        """One under way has failed: what its slot shows by this call."""
        flights = self._flights
        self._seconds[env_id] = np.nan
        if env_id not in self._restarts.pending:
            flights.end([env_id])
        elif method == "reset" or self._time_steps.is_over(env_id):
            flights.awaited.add(env_id)
        else:
            self._mender.truncate(env_id)
            flights.landed.add(env_id)

    def _settle(self) -> None:
        """Waits for what is under way, and drops it: a reset follows.

        After an interrupt, an actor that does not answer is ended.
        """
        flights, actors = self._flights, self._actors
        if actors.interrupted is None and not flights.is_lockstep:
            with actors.kept_if_interrupted(flights.calls):
                actors.wait(flights.calls)
        else:
            settled = actors.settle_interrupted(flights.calls)
            flights.calls = [sent for sent in settled if sent.method in ("step", "reset")]
        self._take_arrived()
        flights.clear()

    def mend(self) -> None:
        """Takes what has arrived, and every restart as far as it goes without waiting.

        Who was given up is no longer under way.
        """
        self._take_arrived()
        if self._restarts.pending:
            self._mender.poll()
            self._take_arrived()
            self._mender.advance()
        if self._restarts.failed:
            self._flights.end(self._restarts.failed)

    def await_restarts(self, env_ids: Iterable[int]) -> None:
        """Waits until these environments are ready, or one of them is given up."""
        pending, failed = self._restarts.pending, self._restarts.failed
        while True:
            self.mend()
            missing = [i for i in env_ids if i in pending and not pending[i].is_ready]
            if not missing or any(i in failed for i in env_ids):
                return
            self._mender.wait(missing)

    # -- state -------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[int]:
        """Environments that have been called and not yet taken."""
        return sorted(self._flights)

    def check_promise(self) -> None:
        """Raises `ClosedError` for a promise that is called after the end."""
        if self._is_closed:
            raise ClosedError("the batch was closed before this promise was called")

    def _check_not_interrupted(self, method: str) -> None:
        is_cut = len(self._flights) and self._flights.is_lockstep
        if is_cut or self._actors.interrupted is not None:
            raise ResetNeeded(f"{method}() after an interrupt: call reset() first")

    def _check_lockstep(self, method: str) -> None:
        """Raises unless no environment is under way."""
        self._check_not_interrupted(method)
        if len(self._flights):
            raise EnvBusy(
                f"{method}() while {words_for(sorted(self._flights))} of {self._num_envs} are "
                "under way: drain() takes them in, reset() drops them"
            )

    def check_free(self, method: str, env_ids: Iterable[int]) -> None:
        """Raises unless none of these environments is under way."""
        self._check_not_interrupted(method)
        busy = sorted(i for i in env_ids if i in self._flights)
        if busy:
            raise EnvBusy(
                f"{method}() of {words_for(busy)} of {self._num_envs}, still under way: recv() or "
                "drain() first"
            )
