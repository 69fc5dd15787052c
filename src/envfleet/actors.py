"""Actors: calls on their way and back, with deadlines; an actor that does not answer is ended.

Knows which actor hosts which environments, and how far each one's episode is; not what a time step
is. Actor ``a`` hosts ``env_ids[a]``, in that order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet import channels, errors
from envfleet.channels import Died, Late
from envfleet.errors import ActorDied, ClosedError, EnvFailure, EnvFleetError, EnvTimeout

_log = logging.getLogger("envfleet")

_START_NEWS = 5.0
"""Every so many seconds a start says how far it is."""

_LONG_CALL = 60.0
"""After so many seconds a call without a deadline says who is late; then after twice as many."""

_DOING = {
    "start": "its constructor",
    "reset": "reset()",
    "step": "step()",
    "call": "a call",
    "close": "close()",
}


def deadlines(**seconds: float | None) -> dict[str, float | None]:
    """Seconds that a call may take by phase, checked; None waits as long as it takes.

    Raises:
      ValueError: not above 0; says which.
    """
    for name, value in seconds.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}_timeout is {value!r}, expected seconds above 0, or None")
    return seconds


class Sent(NamedTuple):
    """A call on its way: to which actor, and by which of the channels that it has had."""

    method: str
    channel: channels.Channel
    call: channels.Call | None
    """None where an interrupt came while it was being posted: it may have been sent or not."""


class Lost(NamedTuple):
    """The outcome of a call to an actor that died or was late: a failure for each environment."""

    failures: dict[int, EnvFailure]


class Actors:
    """The actors of a fleet.

    Args:
      connect: gives the backend, when the first actor is needed.
      env_ids: for each actor, the environments that it hosts.
      options: for each actor, Ray's options.
      deadlines: seconds that a call may take, by phase.

    Attributes:
      failed: environments that have to be rebuilt, and why.
      interrupted: calls that an interrupt left on their way, by actor.
      episode_steps: how many steps each environment's episode has had.
      waited: seconds that the caller has spent waiting.
    """

    def __init__(
        self,
        connect: Callable[[], channels.Backend],
        env_ids: Sequence[range],
        options: Sequence[Mapping[str, Any]],
        deadlines: Mapping[str, float | None],
    ) -> None:
        self.env_ids = env_ids
        self.num_envs = env_ids[-1][-1] + 1
        self.failed: dict[int, EnvFailure] = {}
        self.interrupted: dict[int, Sent] = {}
        self.episode_steps = np.zeros(self.num_envs, np.int64)
        self.waited = 0.0
        self._connect = connect
        self._backend: channels.Backend | None = None
        self._options = options
        self._deadlines = deadlines
        self._channels: dict[int, channels.Channel] = {}
        self._hellos: dict[int, channels.Call] = {}

    def __contains__(self, a: int) -> bool:
        """Whether the actor is there."""
        return a in self._channels

    def open(self, a: int) -> None:
        """Starts an actor, without waiting for it."""
        if self._backend is None:
            self._backend = self._connect()
        channel = self._backend.open(self.env_ids[a], self._options[a])
        self._channels[a] = channel
        self._hellos[a] = channel.post("hello")

    def end(self) -> None:
        """Ends every actor at once."""
        for channel in self._channels.values():
            channel.kill()
        self._channels.clear()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    # -- calls -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def kept_if_interrupted(self, calls: Mapping[int, Sent]) -> Iterator[None]:
        """Around all that is done with calls, from sending them to keeping what they gave."""
        try:
            yield
        except BaseException:
            self.interrupted |= calls
            raise

    def send(
        self, method: str, arguments: Mapping[int, Sequence[Any]], calls: dict[int, Sent]
    ) -> None:
        """Posts a call to each actor, into `calls`; where one is gone, `Died` stands for it."""
        for a, args in arguments.items():
            channel = self._channels[a]
            calls[a] = Sent(method, channel, None)
            try:
                calls[a] = Sent(method, channel, channel.post(method, *args))
            except Died as died:
                calls[a] = Sent(method, channel, died)

    def receive(
        self,
        calls: Mapping[int, Sent],
        phase: str,
        is_start: bool = False,
        seconds: float | None = None,
    ) -> dict[int, Any]:
        """Waits for every call up to the phase's deadline; by actor its reply, or `Lost`.

        It waits in slices, between which it says who is late. The first start of a fleet says how
        far it is, stops waiting when an environment has failed, and leaves `Late` as it is.
        `seconds` is what is left of the deadline where others have used of it.
        """
        pending = dict(calls)
        outcomes: dict[int, Any] = {}
        left = self._deadlines[phase] if seconds is None else seconds
        waited, patience = 0.0, _START_NEWS if is_start else _LONG_CALL
        started = time.perf_counter()
        try:
            while pending:
                timeout = patience if left is None else min(left, patience)
                outcomes |= self._settle(pending, timeout)
                pending = {a: c for a, c in pending.items() if isinstance(outcomes[a], Late)}
                waited += timeout
                left = None if left is None else left - timeout
                if not pending or left == 0:
                    break
                if not is_start:
                    self._long_call_news(waited, pending, phase)
                    patience *= 2
                elif self._start_news(waited, pending, outcomes):
                    break
        finally:
            self.waited += time.perf_counter() - started
        for a, outcome in outcomes.items():
            if isinstance(outcome, Died):
                outcomes[a] = self._lost(a, calls[a].channel, self._died(a, outcome, phase), phase)
        if pending and not is_start:
            late = EnvTimeout(
                f"{self.names(pending)} of {self.num_envs} did not finish {_DOING[phase]} in "
                f"{self._deadlines[phase]} s"
            )
            for a, sent in pending.items():
                outcomes[a] = self._lost(a, sent.channel, late, phase)
        return outcomes

    def _settle(self, calls: Mapping[int, Sent], timeout: float | None) -> dict[int, Any]:
        """By actor its reply, `Late` or `Died`."""
        outcomes = {a: sent.call for a, sent in calls.items() if isinstance(sent.call, Died)}
        waiting = {a: sent.call for a, sent in calls.items() if a not in outcomes}
        if self._backend is None:
            raise ClosedError("the batch was closed before this promise was called")
        outcomes |= zip(waiting, self._backend.settle([*waiting.values()], timeout), strict=True)
        return outcomes

    def settle_interrupted(self) -> dict[int, tuple[str, Any]]:
        """Settles what an interrupt left on its way: by actor the method, and its reply or `Lost`.

        An actor that does not answer within the deadline of closing is ended.
        """
        known = {a: sent for a, sent in self.interrupted.items() if sent.call is not None}
        outcomes = self._settle(known, self._deadlines["close"]) if known else {}
        settled = {}
        for a, sent in self.interrupted.items():
            outcome = outcomes.get(a, Late())
            if isinstance(outcome, Late):
                outcome = Died("it did not answer after an interrupt")
            if isinstance(outcome, Died):
                outcome = self._lost(a, sent.channel, self._died(a, outcome, "call"), "call")
            settled[a] = sent.method, outcome
        self.interrupted.clear()
        return settled

    # -- ends --------------------------------------------------------------------------------------

    def _died(self, a: int, words: object, phase: str) -> ActorDied:
        ids, (pid, node) = self.env_ids[a], self._place(a)
        whose = "its" if len(ids) == 1 else "their"
        steps = f" {self.episode_steps[ids[0]]} steps into the episode" if phase == "step" else ""
        return ActorDied(
            f"{self.names([a])} of {self.num_envs}: {whose} process died in "
            f"{_DOING[phase]}{steps} (pid {pid}, node {node}): {words}"
        )

    def _lost(self, a: int, channel: channels.Channel, error: EnvFleetError, phase: str) -> Lost:
        """Ends an actor that died or is late, unless another has taken its place already."""
        pid, node = self._place(a)
        failures = {
            i: errors.record(
                error,
                index=i,
                phase="construct" if phase == "start" else phase,
                pid=pid,
                node=node,
                episode_step=int(self.episode_steps[i]),
            )
            for i in self.env_ids[a]
        }
        channel.kill()
        if channel is self._channels.get(a):
            del self._channels[a]
            self.failed |= failures
        return Lost(failures)

    def _place(self, a: int) -> tuple[int | None, str | None]:
        """Process id and node of an actor, as far as it has told them."""
        assert self._backend is not None
        (answer,) = self._backend.settle([self._hellos[a]], 0)
        return answer if isinstance(answer, tuple) else (None, None)

    # -- words -------------------------------------------------------------------------------------

    def late_start(self, late: Sequence[int]) -> str:
        """Words for a start that did not finish: who is where, what was asked, what there is."""
        assert self._backend is not None
        started, total = len(self._channels) - len(late), len(self.env_ids)
        alive = sum(self._place(a)[0] is not None for a in late)
        return (
            f"{started} of {total} actors started in {self._deadlines['start']} s; of the other "
            f"{len(late)}, {alive} run and are in their constructor, {len(late) - alive} wait for "
            f"resources or their process; {self._backend.resources(self._options)}"
        )

    def _long_call_news(self, waited: float, pending: Iterable[int], phase: str) -> None:
        _log.warning(
            "%s of %d still in %s after %.1f s (a %s_timeout would end that)",
            self.names(pending),
            self.num_envs,
            _DOING[phase],
            waited,
            phase,
        )

    def _start_news(
        self, waited: float, pending: Mapping[int, Sent], outcomes: Mapping[int, Any]
    ) -> bool:
        """Says how far a start is; whether to stop waiting, as a constructor has failed already."""
        _log.warning(
            "%d of %d actors started after %.0f s; waiting for %s",
            len(self._channels) - len(pending),
            len(self.env_ids),
            waited,
            self.names(pending),
        )
        return any(
            isinstance(outcome, Died) or any(isinstance(one, EnvFailure) for one in outcome)
            for a, outcome in outcomes.items()
            if a not in pending
        )

    # -- who is where ------------------------------------------------------------------------------

    def host(self, env_id: int) -> int:
        """The actor that hosts an environment."""
        return env_id // len(self.env_ids[0])

    def by_actor(self, env_ids: Iterable[int]) -> dict[int, list[int]]:
        """Environments in ascending order, by the actor that hosts them."""
        by_actor: dict[int, list[int]] = {}
        for i in sorted(env_ids):
            by_actor.setdefault(self.host(i), []).append(i)
        return by_actor

    def rows(self, a: int, env_ids: Iterable[int]) -> list[int]:
        """The rows that environments have in their actor's block."""
        return [i - self.env_ids[a][0] for i in env_ids]

    def names(self, actors: Iterable[int]) -> str:
        ids = [i for a in actors for i in self.env_ids[a]]
        shown = ", ".join(map(str, ids[:20])) + (f", ... ({len(ids)})" if len(ids) > 20 else "")
        return f"env {shown}" if len(ids) == 1 else f"envs {shown}"
