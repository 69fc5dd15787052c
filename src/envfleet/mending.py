"""Mending: an environment has failed, and comes back.

Makes the calls that a restart takes (close, build, reset), and looks at what has come of them;
`Restarts` decides whether there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from envfleet import errors
from envfleet.actor import Reply
from envfleet.actors import Actors, Lost, Sent
from envfleet.building import Builder
from envfleet.channels import Died, Gone
from envfleet.errors import ActorDied, EnvFailure
from envfleet.restarts import Restart, Restarts
from envfleet.time_steps import TimeSteps

_log = logging.getLogger("envfleet")

_UNPLACED = 5.0
"""After so many seconds without a process a restart says what it waits for."""

_LOOK = 1.0
"""Every so many seconds it is looked whether the nodes of restarts still answer."""


class Mender:
    """Brings the environments of a batch back."""

    def __init__(
        self, actors: Actors, builder: Builder, restarts: Restarts, time_steps: TimeSteps
    ) -> None:
        self._actors = actors
        self._builder = builder
        self._restarts = restarts
        self._time_steps = time_steps
        self._look_at = 0.0

    # -- failing -----------------------------------------------------------------------------------

    def fail(self, failure: EnvFailure, since: float, for_good: bool = False) -> None:
        """An environment has failed: its slot goes on to show what it shows until it is back."""
        i, pending = failure.index, self._restarts.pending
        was_pending = i in pending
        self._time_steps.hold(i)
        self._restarts.fail(failure, since, for_good)
        if i in pending and not was_pending:
            pending[i].owes_last = not self._time_steps.is_over(i)

    def take_losses(self) -> None:
        """All environments of an actor that is gone have failed, whoever was waiting for it."""
        while self._actors.losses:
            lost = self._actors.losses[0]
            for failure in lost.failures.values():
                self.fail(failure, lost.since, lost.for_good)
            del self._actors.losses[0]

    def forgive(self, env_id: int) -> None:
        """The caller resets an environment: it is brought back if it was given up."""
        if env_id in self._restarts.failed or self._is_adrift(env_id):
            self._restarts.forgive(env_id)

    def _is_adrift(self, env_id: int) -> bool:
        """Whether an interrupt has left it between working and failed."""
        if env_id in self._restarts.pending or env_id in self._restarts.failed:
            return False
        return env_id in self._time_steps.held or self._actors.host(env_id) not in self._actors

    # -- moving ------------------------------------------------------------------------------------

    def move_misplaced(self, but: Iterable[int]) -> list[int]:
        """Moves environments to where nodes are less loaded; gives those that move.

        Each is closed, and built anew like one that has failed, which it has not: its episode ends.

        Args:
          but: environments that stay, with those that share their actor.
        """
        actors = self._actors
        staying = {*but, *self._restarts.pending, *self._restarts.failed}
        moving = actors.misplaced({*map(actors.host, staying)})
        moved = [i for a in moving for i in actors.env_ids[a]]
        calls: list[Sent] = []
        with actors.kept_if_interrupted(calls):
            # Before they are closed: they come back in any case, if not elsewhere.
            for i in moved:
                self._time_steps.hold(i)
                self._restarts.move(i, owes_last=not self._time_steps.is_over(i))
            for a in moving:
                nothing = dict.fromkeys(actors.env_ids[a])
                calls.append(actors.send_operation(a, "close", nothing))
            actors.wait(calls)
            for sent in calls:
                if not isinstance(sent.outcome, Lost):
                    actors.leave(sent.a)
        return sorted(moved)

    # -- what its slot shows -----------------------------------------------------------------------

    def truncate(self, env_id: int) -> None:
        """The slot shows the end of the episode that a failure ended."""
        self._time_steps.truncate(env_id)
        self._restarts.pending[env_id].owes_last = False

    def join(self, env_id: int) -> None:
        """The slot shows what its rebuilt environment gave."""
        self._restarts.join(env_id)
        self._time_steps.release(env_id)

    # -- restarts ----------------------------------------------------------------------------------

    def wait(
        self,
        env_ids: Iterable[int],
        others: Sequence[Sent] = (),
        at_least: int = 1,
        until: float | None = None,
    ) -> None:
        """Waits until the restart of one of these goes on, or so many of the other calls are done.

        Or until some time, by `time.monotonic`.
        """
        coming = [self._restarts.pending[i] for i in env_ids]
        moments = [one.due for one in coming if not one.calls]
        moments += [one.calls[0].at + _UNPLACED for one in coming if one.calls and not one.is_told]
        moments += [self._look_at] if any(one.calls for one in coming) else []
        moments += [until] if until is not None else []
        wake = min(moments, default=None)
        calls = [*others, *(sent for one in coming for sent in one.calls)]
        if calls:
            self._actors.wait(calls, at_least=1 if coming else at_least, until=wake)
        elif wake is not None:
            time.sleep(max(0.0, wake - time.monotonic()))

    def poll(self) -> None:
        """Sees which calls of restarts are done, and now and then whether the others can be."""
        pending = self._restarts.pending
        self._actors.wait([sent for one in pending.values() for sent in one.calls], until=0.0)
        now = time.monotonic()
        if now >= self._look_at:
            unready = [i for i, one in pending.items() if one.calls and not one.is_ready]
            self._actors.lose_cut_off(sorted({*map(self._actors.host, unready)}))
            self._look_at = time.monotonic() + _LOOK

    def advance(self) -> None:
        """Takes every restart as far as it goes."""
        pending = self._restarts.pending
        for i, restart in sorted(pending.items()):
            if restart.calls and not restart.is_ready:
                self._check(i, restart)
        now = time.monotonic()
        for i, restart in sorted(pending.items()):
            if not restart.calls and restart.due <= now:
                self._send(i, restart)
        self._tell_unplaced(now)

    def _tell_unplaced(self, now: float) -> None:
        """Says what restarts wait for that have no process yet, once for each attempt."""
        late = {
            i: one
            for i, one in self._restarts.pending.items()
            if one.calls and not one.is_told and now >= one.calls[0].at + _UNPLACED
        }
        for restart in late.values():
            restart.is_told = True
        homeless = self._actors.homeless({self._actors.host(i) for i in late})
        if homeless:
            _log.warning("%s", self._actors.wanting(homeless))

    def _send(self, env_id: int, restart: Restart) -> None:
        """Closes the old environment where it still stands, builds a new one and resets it."""
        self._builder.count_rebuild(env_id)
        self._restarts.num_restarts[env_id] += 1
        actors = self._actors
        a, ids = actors.host(env_id), [env_id]
        calls: list[Sent] = []
        with actors.kept_if_interrupted(calls):
            if a in actors:
                calls.append(actors.send_operation(a, "close", {env_id: None}))
            else:
                try:
                    actors.open(a)
                except Died as died:
                    error = ActorDied(f"env {env_id} of {actors.num_envs} has no new actor: {died}")
                    failure = errors.record(error, index=env_id, phase="construct")
                    self.fail(failure, restart.due, for_good=isinstance(died, Gone))
                    return
            calls.append(self._builder.send(actors, a, ids))
            calls.append(actors.send(a, ids, "reset", "reset", actors.rows(a, ids)))
        restart.is_told = False
        restart.calls = calls  # all of it: half an attempt would be waited for in vain

    def _check(self, env_id: int, restart: Restart) -> None:
        """Looks at what has come of a restart: it is ready, it has failed, or it goes on."""
        for sent in restart.calls:
            outcome = sent.outcome
            if outcome is None or isinstance(outcome, Lost):  # that has been taken
                return
            failures: list[EnvFailure] = []
            if sent.method == "build":
                failures = self._builder.refused(env_id, outcome[0])
            elif sent.method == "reset":
                reply = Reply.of(outcome)
                failures = reply.failures
                self._time_steps.keep(sent.a, sent.number, reply, [] if failures else [env_id])
            if failures:  # (those of the old environment's end are no news)
                self.fail(failures[0], sent.at)
                return
        restart.is_ready = True
