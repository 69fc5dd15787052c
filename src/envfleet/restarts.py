"""Restarts: which environments are on their way back, what is left of their budget, the record.

It decides and remembers; `mending` makes the calls. With a budget of 0 an environment that fails
waits for the caller's `reset` (``on_failure="raise"``), and that is all the difference there is.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import numbers
import time
from collections.abc import Iterable

from envfleet import errors, gin_state
from envfleet.actors import Sent
from envfleet.errors import ActorDied, EnvFailure, EnvTimeout

_log = logging.getLogger("envfleet")

_KEPT = 1000
"""How many failures the record holds: the last ones."""

_CAUSES = {
    f"{kind.__module__}.{kind.__qualname__}": cause
    for kind, cause in ((ActorDied, "died"), (EnvTimeout, "timeout"))
}

_BACK_OFF, _LONGEST_BACK_OFF = 0.2, 10.0
"""Seconds before the second restart in a row; before each further one twice as many."""


def budget(on_failure: str, max_restarts: int) -> int:
    """How many restarts in a row an environment has, by the arguments of a batch.

    Raises:
      ValueError: another `on_failure` than ``"raise"`` or ``"restart"``, or a negative number.
      TypeError: `max_restarts` is no int.
    """
    if on_failure not in ("raise", "restart"):
        raise ValueError(f"on_failure is {on_failure!r}, expected 'raise' or 'restart'")
    if not isinstance(max_restarts, numbers.Integral) or isinstance(max_restarts, bool):
        raise TypeError(f"max_restarts is {max_restarts!r}, expected an int")
    if max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts}, expected at least 0")
    return int(max_restarts) if on_failure == "restart" else 0


@dataclasses.dataclass(eq=False)
class Restart:
    """One environment on its way back, from its failure to its next time step."""

    began: float
    """When it failed, by `time.monotonic`."""
    due: float
    """When the next attempt may begin."""
    owes_last: bool = False
    """Whether the caller still has to be shown the end of the episode that the failure ended."""
    was_reset: bool = False
    """Whether the caller has reset it, so that its slot has to show its first time step next."""
    calls: list[Sent] = dataclasses.field(default_factory=list)
    """The attempt that is on its way; empty while it backs off."""
    is_ready: bool = False
    """Whether the rebuilt environment has its first time step, which nobody has been shown."""
    is_told: bool = False
    """Whether it was said that this attempt waits for resources."""


class Restarts:
    """The restarts of a batch, by env_id.

    Args:
      num_envs: size of the batch.
      max_in_a_row: restarts without a good step in between, before an environment is given up.

    Attributes:
      pending: environments on their way back.
      failed: environments that were given up, and why, until the caller resets them.
      given_up: those of them that the caller has not been told of.
      history: the last failures.
      num_failures, num_restarts, last_failures: per environment, since the start.
      seconds_lost: per environment, from its failures until it had a time step again.
      causes: how many failures by (cause, phase); a cause is ``died``, ``timeout`` or ``raised``.
      restart_causes: how many environments were built anew by cause, ``moved`` among them.
    """

    def __init__(self, num_envs: int, max_in_a_row: int) -> None:
        self.pending: dict[int, Restart] = {}
        self.failed: dict[int, EnvFailure] = {}
        self.given_up: list[EnvFailure] = []
        self.history: collections.deque[EnvFailure] = collections.deque(maxlen=_KEPT)
        self.num_failures = [0] * num_envs
        self.num_restarts = [0] * num_envs
        self.last_failures: list[EnvFailure | None] = [None] * num_envs
        self.seconds_lost = [0.0] * num_envs
        self.causes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.restart_causes: collections.Counter[str] = collections.Counter()
        self._max_in_a_row = max_in_a_row
        self._in_a_row: dict[int, list[EnvFailure]] = {}

    def fail(self, failure: EnvFailure, since: float, for_good: bool = False) -> None:
        """An environment has failed: it becomes pending, or failed where its budget is spent.

        Args:
          failure: what happened; of an environment that is pending already, an attempt that failed.
          since: when the call was sent in which it failed, by `time.monotonic`.
          for_good: whether there is nothing left that it could be restarted on.
        """
        i, limit, now = failure.index, self._max_in_a_row, time.monotonic()
        if i in self.failed:  # it was given up before: this is no news
            return
        restart = self.pending.get(i) or Restart(began=since, due=0.0)
        attempts = self._in_a_row.get(i, [])
        # Of a pending one the old environment hung in its end: that was no attempt at a new one.
        was_closing = failure.phase == "close" and i in self.pending
        if not was_closing:
            attempts = [*attempts, failure]
        wait = 0.0
        if for_good or len(attempts) > limit:
            self.failed[i] = failure
            self.pending.pop(i, None)
            self.given_up.append(failure)
            self.seconds_lost[i] += now - restart.began
            told = "; there is nothing to restart it on" if for_good else ""
            told = told or (f"; {limit} restarts in a row are spent" if limit else "")
        else:
            if len(attempts) > 1 and not was_closing:
                wait = min(_LONGEST_BACK_OFF, _BACK_OFF * 2.0 ** (len(attempts) - 2))
            restart.calls, restart.is_ready, restart.due = [], False, now + wait
            self.pending[i] = restart
            pause = f", in {wait:g} s" if wait else ""
            told = f"; restart {len(attempts)} of {limit} in a row{pause}"
            told = "; it is built in a new actor" if was_closing else told
        self._in_a_row[i] = attempts
        cause = _CAUSES.get(failure.type_name, "raised")
        self.causes[cause, failure.phase] += 1
        self.restart_causes[cause] += i in self.pending
        kept = failure.abridged()
        self.history.append(kept)
        self.num_failures[i] += 1
        self.last_failures[i] = kept
        _log.warning("%s%s", failure.line(), told)

    def forgive(self, env_id: int) -> None:
        """The caller resets an environment that was given up: it has a whole budget again."""
        now = time.monotonic()
        self.pending[env_id] = Restart(began=now, due=now)
        self._in_a_row.pop(env_id, None)
        self.failed.pop(env_id, None)
        self.given_up = [failure for failure in self.given_up if failure.index != env_id]

    def move(self, env_id: int, owes_last: bool) -> None:
        """The environment is built anew elsewhere, and has not failed."""
        now = time.monotonic()
        self.pending[env_id] = Restart(began=now, due=now, owes_last=owes_last)
        self.restart_causes["moved"] += 1

    def succeeded(self, env_id: int) -> None:
        """The environment has made a good step: its failures are no longer in a row."""
        self._in_a_row.pop(env_id, None)

    @property
    def unproven(self) -> set[int]:
        """Environments that have made no good step since they failed."""
        return set(self._in_a_row)

    def attempts(self, failure: EnvFailure) -> list[EnvFailure]:
        """The failures in a row that led to this one, itself the last; just itself if none did."""
        attempts = self._in_a_row.get(failure.index, [])
        return [*attempts] if failure in attempts[-1:] else [failure]

    def join(self, env_id: int) -> None:
        """The environment is back: its first time step is being shown."""
        restart = self.pending.pop(env_id, None)
        if restart is not None:
            self.seconds_lost[env_id] += time.monotonic() - restart.began

    # -- raising -----------------------------------------------------------------------------------

    def raise_given_up(self, env_ids: Iterable[int] | None = None) -> None:
        """Raises for the environments (of these) that were given up and nobody was told of."""
        if self.given_up:
            wanted = None if env_ids is None else set(env_ids)
            self.raise_first(
                failure for failure in self.given_up if wanted is None or failure.index in wanted
            )

    def raise_first(self, failures: Iterable[EnvFailure]) -> None:
        """Raises the failure of the lowest index, if there is one, with notes on all others."""
        ordered = sorted(failures, key=lambda failure: failure.index)
        if not ordered:
            return
        raised = {failure.index for failure in ordered}
        self.given_up = [failure for failure in self.given_up if failure.index not in raised]
        error = errors.merge(ordered, [self.attempts(failure) for failure in ordered])
        if ordered[0].traceback and gin_state.within_configurable():
            # gin's proxy has no __cause__, but it shows notes.
            errors.note(error, f"remote traceback:\n{ordered[0].traceback.rstrip()}")
        raise error
