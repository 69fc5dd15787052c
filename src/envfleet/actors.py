"""Actors: calls on their way and back, with deadlines; an actor that does not answer is ended.

Knows which actor hosts which environments, and how far each one's episode is; not what a time step
is. Actor ``a`` hosts ``env_ids[a]``, in that order.

An actor works through its calls one after another. A call's deadline counts from when somebody
waits for it and no call before it is on its way any more, so none pays for another's time.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet import channels, errors
from envfleet.channels import Died, Gone, Late, NodeLost
from envfleet.errors import ActorDied, EnvFailure, EnvFleetError, EnvTimeout, FleetStartError
from envfleet.layout import Layout

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


@dataclasses.dataclass(eq=False, slots=True)
class Sent:
    """A call on its way."""

    number: int
    """Later calls have larger ones."""
    a: int
    env_ids: Sequence[int]
    """The environments that it moves, or asks."""
    method: str
    phase: str
    limit: float | None
    at: float
    """When it was sent, by `time.monotonic`."""
    call: channels.Call | None = None
    """None where an interrupt came while it was being posted: it may have been sent or not."""
    due: float | None = None
    """When it has to be done, by `time.monotonic`; None while its clock stands still."""
    outcome: Any = None
    """Its reply, or `Lost`; None while it is on its way."""
    is_kept: bool = False
    """Whether the time steps that it gave have been kept."""


@dataclasses.dataclass(eq=False, slots=True)
class Lost:
    """The outcome of every call to an actor that died or was late."""

    failures: dict[int, EnvFailure]
    """For each environment that it hosted."""
    since: float
    """When the call was sent in which it was lost, by `time.monotonic`."""
    for_good: bool
    """Whether there is nothing left that a new actor could live on."""
    never_ran: bool = False
    """Whether it was lost with its node before it had a process there: nothing has run."""


class ActorInfo(NamedTuple):
    """Where some environments of a batch are.

    Attributes:
      env_ids: the environments that share the actor.
      node: address and the beginning of Ray's id of the node; of ``backend="local"`` the host.
      pid: of the actor's process; None while there is none yet.
      actor_id: Ray's, in hex; empty with ``backend="local"``.
      transport: what carries resets and steps.
    """

    env_ids: range
    node: str
    pid: int | None
    actor_id: str
    transport: str


class KeptIfInterrupted:
    """Where something is raised inside, the calls go to `Actors.interrupted`.

    (A class: by `contextlib.contextmanager` it would take several times as long, at every step.)
    """

    __slots__ = ("_actors", "_calls")

    def __init__(self, actors: Actors, calls: Sequence[Sent]) -> None:
        self._actors, self._calls = actors, calls

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._actors.interrupted = [*(self._actors.interrupted or ()), *self._calls]


class Actors:
    """The actors of a fleet.

    Args:
      connect: gives the backend, when the first actor is needed.
      env_ids: for each actor, the environments that it hosts.
      options: for each actor, Ray's options.
      deadlines: seconds that a call may take, by phase.

    Attributes:
      interrupted: calls of which an interrupt kept the caller; None if there was none.
      losses: actors that were lost, until somebody takes them out.
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
        self.interrupted: list[Sent] | None = None
        self.losses: list[Lost] = []
        self.episode_steps = np.zeros(self.num_envs, np.int64)
        self.waited = 0.0
        self._connect = connect
        self._backend: channels.Backend | None = None
        self._options = options
        self._deadlines = deadlines
        self._channels: dict[int, channels.Channel] = {}
        self._places: dict[int, Any] = {}
        self._queues: dict[int, collections.deque[Sent]] = {}
        self._lost: dict[int, Lost] = {}
        self._numbers = itertools.count()

    def __contains__(self, a: int) -> bool:
        """Whether the actor is there."""
        return a in self._channels

    def open(self, a: int, limit: float | None = None) -> None:
        """Starts an actor, without waiting for it; its limit is that of a start unless given.

        Raises:
          Gone: there is nothing any more that it could live on.
        """
        if self._backend is None:
            self._backend = self._connect()
            self._backend.prepare(self._options_of(range(len(self.env_ids))), limit)
        channel = self._backend.open(self.env_ids[a], self._options[a])
        self._channels[a] = channel
        self._queues[a] = collections.deque()
        self._places.pop(a, None)
        self.send(a, self.env_ids[a], "start", "hello", limit=limit)

    def _options_of(self, actors: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """By their first environment."""
        return {self.env_ids[a][0]: self._options[a] for a in actors}

    def misplaced(self, staying: Collection[int]) -> list[int]:
        """Actors that should be on another node, which has joined since, or is less loaded.

        None of those that stay.
        """
        if self._backend is None:
            return []
        there = self._places.keys() & self._channels.keys() - {*staying}
        firsts = self._backend.moves(self._options_of(there))
        return [self.host(first) for first in firsts]

    def publish(self, counted: channels.Counted) -> None:
        """Tells whoever watches the cluster."""
        if self._backend is not None:
            nodes = [self._place(self.host(i))[1] or "none" for i in range(self.num_envs)]
            self._backend.publish(counted, nodes)

    def leave(self, a: int) -> None:
        """Ends an actor whose environments have been closed, and to which no call is on its way."""
        assert self._backend is not None
        channel = self._channels[a]
        channel.kill()  # first: what an interrupt leaves half done is found to be dead
        self._queues.pop(a)
        self._places.pop(a, None)
        del self._channels[a]
        self._backend.kill_orphans([channel])

    def end(self) -> None:
        """Ends every actor at once."""
        ended = [*self._channels.values()]
        for channel in ended:
            channel.kill()
        self._channels.clear()
        self._queues.clear()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.kill_orphans(ended)
            backend.close()

    # -- calls -------------------------------------------------------------------------------------

    def kept_if_interrupted(self, calls: Sequence[Sent]) -> KeptIfInterrupted:
        """Around all that is done with calls, from sending them to keeping what they gave."""
        return KeptIfInterrupted(self, calls)

    def send(
        self,
        a: int,
        env_ids: Sequence[int],
        phase: str,
        method: str,
        *args: Any,
        limit: float | None = None,
        into: list[Sent] | None = None,
    ) -> Sent:
        """Posts a call to an actor, for some of its environments.

        Its limit is the phase's, unless one is given. If the actor is gone, it is `Lost` at once.
        It is `into` a list before it is posted.
        """
        limit = self._deadlines[phase] if limit is None else limit
        sent = Sent(next(self._numbers), a, env_ids, method, phase, limit, time.monotonic())
        if a not in self._channels:
            sent.outcome = self._lost[a]
        else:
            # First here: what is nowhere else after an interrupt is found by its queue.
            self._queues[a].append(sent)
        if into is not None:
            into.append(sent)
        if sent.outcome is not None:
            return sent
        try:
            sent.call = self._channels[a].post(limit, method, *args)
        except Died as died:
            self._lose(a, self._died(a, died, phase), phase, died)
        return sent

    def reserve(self, actions: Layout, time_steps: Layout) -> None:
        """All have built their environments: from now on it is known what a call carries."""
        assert self._backend is not None
        rows = {ids[0]: len(ids) for ids in self.env_ids}
        sizes = {i: (actions.nbytes(n), time_steps.nbytes(n)) for i, n in rows.items()}
        self._backend.reserve(sizes)

    def share(self, payload: bytes) -> Any:
        """What carries the same large payload to several actors; None where that gains nothing."""
        assert self._backend is not None
        return self._backend.share(payload)

    def send_operation(
        self, a: int, operation: str, packed: Mapping[int, Any], shared: Any = None
    ) -> Sent:
        """Posts one of `actor.OPERATIONS`, with arguments for each environment; None for none.

        What is `shared` goes in their place.
        """
        phase, rows = "close" if operation == "close" else "call", self.rows(a, packed)
        payloads = [*packed.values()] if shared is None else shared
        return self.send(a, [*packed], phase, "operate", operation, rows, payloads)

    def wait(
        self,
        calls: Sequence[Sent],
        *,
        at_least: int | None = None,
        until: float | None = None,
        starting: bool = False,
    ) -> None:
        """Waits for calls, each up to its deadline; every one then has its outcome.

        Args:
          calls: the calls.
          at_least: return when so many of those that were on their way have their outcome.
          until: return at that time, by `time.monotonic`; the others stay on their way.
          starting: the first start of a fleet says how far it is, and leaves its calls on their way
            when an environment has failed, or when they are late.
        """
        began = None
        news_at, patience = 0.0, _START_NEWS if starting else _LONG_CALL
        started = time.perf_counter()
        try:
            while waiting := [sent for sent in calls if sent.outcome is None]:
                now = time.monotonic()
                if began is None:
                    began, news_at = now, now + patience
                    left = 0 if at_least is None else max(0, len(waiting) - at_least)
                missing = len(waiting) - left
                if missing <= 0:
                    return
                moments = [news_at]
                if until is not None:
                    moments.append(until)
                involved = self._clocked(waiting, now, moments)
                # A new actor is met as soon as it says hello, or its end could not be told.
                number = 1 if starting else missing if left else None
                outcomes = self._settle(involved, max(0.0, min(moments) - now), number)
                now = time.monotonic()
                late = self._arrived(involved, outcomes, now)
                if late and starting:
                    return
                self.end_late(late)
                if until is not None and now >= until:
                    return
                if now >= news_at:
                    if starting and self._start_news(now - began, calls):
                        return
                    if not starting:
                        self._long_call_news(now - began, calls)
                        patience *= 2
                    news_at = now + patience
        finally:
            self.waited += time.perf_counter() - started

    def _clocked(self, waiting: Sequence[Sent], now: float, moments: list[float]) -> list[Sent]:
        """The calls and all before them; whose turn it is has its clock started, into `moments`."""
        involved: dict[int, Sent] = {}
        for sent in waiting:
            head = self._head(sent)
            if head.due is None and head.limit is not None:
                head.due = now + head.limit
            if head.due is not None:
                moments.append(head.due)
            if head is not sent:
                ahead = itertools.takewhile(lambda s: s is not sent, self._queues[sent.a])  # noqa: B023
                involved |= {s.number: s for s in ahead}
            involved[sent.number] = sent
        return list(involved.values())

    def _head(self, sent: Sent) -> Sent:
        return self._queues[sent.a][0]

    def _settle(self, involved: Sequence[Sent], timeout: float, at_least: int | None) -> list[Any]:
        assert self._backend is not None
        return self._backend.settle([sent.call for sent in involved], timeout, at_least)

    def _arrived(self, involved: Sequence[Sent], outcomes: Sequence[Any], now: float) -> list[Sent]:
        """Gives each call its outcome; returns those that are late."""
        late = []
        for sent, outcome in zip(involved, outcomes, strict=True):
            if sent.outcome is not None:  # of an actor that was lost just now
                continue
            if isinstance(outcome, Died):
                phase = self._head(sent).phase  # where it had got to, whichever call tells of it
                self._lose(sent.a, self._died(sent.a, outcome, phase), phase, outcome)
            elif isinstance(outcome, Late) or (
                outcome is None and sent.due is not None and sent.due <= now
            ):
                late.append(sent)
            elif outcome is not None:
                sent.outcome = outcome
                self._queues[sent.a].remove(sent)
                if sent.method == "hello":
                    self._meet(sent)
        return late

    def _meet(self, hello: Sent) -> None:
        self._places[hello.a] = hello.outcome
        problem = self._channels[hello.a].watch(hello.outcome)
        if problem is not None:
            self._lose(hello.a, FleetStartError(f"{self.names([hello.a])}: {problem}"), "start")
            return
        for constructor in itertools.islice(self._queues[hello.a], 1):
            constructor.due = hello.due  # the start of a process is part of a start

    def end_late(self, late: Iterable[Sent]) -> None:
        """Ends the actors of these calls: `EnvTimeout`, which names all of them."""
        by_kind: dict[tuple[str, float | None], list[int]] = {}
        for sent in late:
            by_kind.setdefault((sent.phase, sent.limit), []).append(sent.a)
        for (phase, limit), actors in by_kind.items():
            error = EnvTimeout(
                f"{self.names(actors)} of {self.num_envs} did not finish {_DOING[phase]} in "
                f"{limit} s{self._no_place(actors)}"
            )
            for a in actors:
                if a in self._channels:
                    self._lose(a, error, phase)

    def lose_cut_off(self, actors: Iterable[int]) -> None:
        """Ends those of these actors whose node does not answer, whatever they are doing."""
        for a in actors:
            if a in self._channels and self._channels[a].is_cut_off():
                phase = self._queues[a][0].phase if self._queues[a] else "call"
                lost = NodeLost("its node does not answer")
                self._lose(a, self._died(a, lost, phase), phase, lost)

    def settle_interrupted(self, moving: Sequence[Sent]) -> list[Sent]:
        """The calls of which an interrupt kept the caller, and `moving`, each with its outcome.

        An actor that does not answer within the deadline of closing is ended.
        """
        calls, self.interrupted = [*(self.interrupted or ()), *moving], None
        unknown = [sent for queue in self._queues.values() for sent in queue if sent.call is None]
        for a in {sent.a for sent in unknown}:
            self._lose(a, self._unanswered(a), "call")
        limit = self._deadlines["close"]
        self.wait(calls, until=None if limit is None else time.monotonic() + limit)
        for a in {sent.a for sent in calls if sent.outcome is None}:
            self._lose(a, self._unanswered(a), "call")
        return [*unknown, *calls]

    # -- ends --------------------------------------------------------------------------------------

    def _died(self, a: int, died: Died, phase: str) -> ActorDied:
        ids, (pid, node) = self.env_ids[a], self._place(a)
        whose = "its" if len(ids) == 1 else "their"
        steps = f" {self.episode_steps[ids[0]]} steps into the episode" if phase == "step" else ""
        return ActorDied(
            f"{self.names([a])} of {self.num_envs}: {whose} process died in "
            f"{_DOING[phase]}{steps} (pid {pid}, node {node}): {self._channels[a].obituary(died)}"
        )

    def _unanswered(self, a: int) -> ActorDied:
        return ActorDied(
            f"{self.names([a])} of {self.num_envs}: ended, since a call was interrupted and not "
            f"answered in {self._deadlines['close']} s"
        )

    def _lose(self, a: int, error: EnvFleetError, phase: str, died: Died | None = None) -> None:
        """Ends an actor that died or is late, and with it all calls on their way to it."""
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
        queue = self._queues.pop(a)
        since = queue[0].at if queue else time.monotonic()
        never_ran = isinstance(died, NodeLost) and a not in self._places
        lost = self._lost[a] = Lost(failures, since, isinstance(died, Gone), never_ran)
        self.losses.append(lost)
        for sent in queue:
            sent.outcome = lost
        assert self._backend is not None
        channel = self._channels.pop(a)
        if died is None or isinstance(died, NodeLost):
            channel.doubt()
        channel.kill()
        self._backend.kill_orphans([channel])

    def _place(self, a: int) -> tuple[int | None, str | None]:
        """Process id and node of an actor, as far as it has told them."""
        place = self._places.get(a)
        return place[:2] if place else (None, None)

    def room(self) -> channels.Room:
        """What there is for actors with the options of the first one."""
        assert self._backend is not None
        return self._backend.room(self._options[0], len(self._channels))

    # -- words -------------------------------------------------------------------------------------

    def homeless(self, actors: Iterable[int]) -> list[int]:
        """Those that have no process yet: they wait for one, or for resources."""
        return [a for a in actors if a in self._channels and a not in self._places]

    def _no_place(self, actors: Iterable[int]) -> str:
        """Words for those that were not placed, if there are any."""
        homeless = self.homeless(actors)
        return f": {self.wanting(homeless)}" if homeless else ""

    def wanting(self, homeless: Sequence[int]) -> str:
        """Words for actors without a process."""
        assert self._backend is not None
        resources = self._backend.resources([self._options[a] for a in homeless])
        waits = "waits" if sum(len(self.env_ids[a]) for a in homeless) == 1 else "wait"
        return f"{self.names(homeless)} {waits} for resources or a process; {resources}"

    def described(self) -> list[ActorInfo]:
        """Every actor that there is."""
        return [
            ActorInfo(
                env_ids=self.env_ids[a],
                node=str(self._place(a)[1] or "not placed yet"),
                pid=self._place(a)[0],
                actor_id=channel.actor_id,
                transport=channel.transport,
            )
            for a, channel in sorted(self._channels.items())
        ]

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

    def _long_call_news(self, waited: float, calls: Iterable[Sent]) -> None:
        heads = {s.a: self._head(s) for s in calls if s.outcome is None}
        for phase in {head.phase for head in heads.values() if head.limit is None}:
            _log.warning(
                "%s of %d still in %s after %.1f s (a %s_timeout would end that)",
                self.names(a for a, head in heads.items() if head.phase == phase),
                self.num_envs,
                _DOING[phase],
                waited,
                phase,
            )

    def _start_news(self, waited: float, calls: Iterable[Sent]) -> bool:
        """Says how far a start is; whether to stop waiting, as a constructor has failed already."""
        pending = [sent.a for sent in calls if sent.outcome is None]
        if not pending:
            return False
        _log.warning(
            "%d of %d actors started after %.0f s; waiting for %s",
            len(self._channels) - len(pending),
            len(self.env_ids),
            waited,
            self.names(pending),
        )
        outcomes = [sent.outcome for sent in calls if sent.outcome is not None]
        return any(
            isinstance(outcome, Lost) or any(isinstance(one, EnvFailure) for one in outcome)
            for outcome in outcomes
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
        return words_for(i for a in actors for i in self.env_ids[a])


def words_for(env_ids: Iterable[int]) -> str:
    """What environments are called in a text, many of them cut short."""
    ids = [*env_ids]
    shown = ", ".join(map(str, ids[:20])) + (f", ... ({len(ids)})" if len(ids) > 20 else "")
    return f"env {shown}" if len(ids) == 1 else f"envs {shown}"


def span(env_ids: Sequence[int]) -> str:
    """Environments that share an actor, in short: ``3``, or ``8..15``."""
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]}..{env_ids[-1]}"


def description(actors: Iterable[ActorInfo]) -> str:
    """A table of where environments are, ordered by node."""
    header = ("node", "envs", "actor", "pid", "transport")
    rows = [
        (one.node, span(one.env_ids), one.actor_id[:12] or "-", str(one.pid or "-"), one.transport)
        for one in sorted(actors, key=lambda one: (one.node, one.env_ids[0]))
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)
