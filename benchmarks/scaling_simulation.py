"""Batches of a thousand environments and more, simulated: an event for whatever ends or arrives.

A caller's main thread, and Ray's threads beside it, do one thing after another. A call travels to
its actor, which shares the cores of its node with others, and back.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np


class Costs(NamedTuple):
    """Seconds of CPU time, and of the way."""

    send: float = 0.0
    """In the caller's main thread, for each call that is sent;"""
    receive: float = 0.0
    """for each reply that is taken;"""
    base: float = 0.0
    """for each time that it does both;"""
    under_way: float = 0.0
    """and for each call that it has to look at, if it does not wait for all."""
    ray: float = 0.0
    """In Ray's threads of the caller, for each call there and back."""
    actor: float = 0.0
    """In the actor, for each call, besides the steps;"""
    step: float = 0.0
    """and for each step of an environment, besides its own time."""
    there: float = 0.0
    """On the way to the actor;"""
    back: float = 0.0
    """and from it."""
    idle: float = 0.0
    """Share of a core that an actor uses for being there."""


class Steps(NamedTuple):
    """How long an environment's step takes: lognormal, or constant where sigma is 0."""

    mean: float
    sigma: float = 0.0
    is_busy: bool = True
    """It computes; else it waits, and uses no core."""

    def sums(self, steps: int, rng: np.random.Generator) -> Iterator[float]:
        """Seconds of so many steps together, again and again."""
        if not self.sigma or not self.mean:
            return itertools.repeat(steps * self.mean)
        mu = np.log(self.mean) - self.sigma**2 / 2
        calls = max(1, min(20_000, 20_000_000 // steps))  # enough of them; then again
        draws = [rng.lognormal(mu, self.sigma, (n, steps)).sum(1) for n in _parts(calls, steps)]
        return itertools.cycle(np.concatenate(draws).tolist())


def _parts(calls: int, steps: int) -> list[int]:
    """Of a million draws at most, to bound the memory."""
    size = max(1, 1_000_000 // steps)
    return [min(size, calls - first) for first in range(0, calls, size)]


class Setting(NamedTuple):
    """What is simulated."""

    num_actors: int
    """Of all callers together."""
    per_actor: int
    steps: Steps
    cores: float
    """Of each node;"""
    num_nodes: int = 1
    num_callers: int = 1
    """Each with its own share of the actors, which go round the nodes."""
    ticks: int = 1
    """Steps of each environment in a call: more than one where the policy is in the actor."""
    at_least: float = 1.0
    """Share of its actors that a caller waits for; 1 is lockstep."""
    is_shared: bool = False
    """Whether the callers share the cores of the first node with the actors there."""

    @property
    def limit(self) -> float:
        """Steps per second if nothing but steps took any time."""
        num_envs = self.num_actors * self.per_actor
        at_once = min(num_envs, self.cores * self.num_nodes) if self.steps.is_busy else num_envs
        return at_once / self.steps.mean if self.steps.mean else float("inf")


class Outcome(NamedTuple):
    """What came of it."""

    rate: float
    """Steps of environments per second."""
    main: float
    """Share of the time that a caller's main thread computed;"""
    ray: float
    """and Ray's threads beside it."""


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), do))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.now, _, do = heapq.heappop(self._events)
            do()


class Node:
    """Cores that jobs share evenly; what is taken from them by others goes first.

    All jobs advance at one rate, so they end in the order of the work that had been done by
    everyone when they began, plus their own.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._cores = cores
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._work = self._rate = self._since = 0.0
        self._plan = 0

    def start(self, work: float, then: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._jobs, (self._work + work, next(self._number), then))
        self._proceed()

    def take(self, cores: float) -> None:
        self._advance()
        self._cores -= cores
        self._proceed()

    def _advance(self) -> None:
        self._work += self._rate * (self._clock.now - self._since)
        self._since = self._clock.now

    def _proceed(self) -> None:
        self._plan += 1
        self._rate = min(1.0, max(0.0, self._cores) / len(self._jobs)) if self._jobs else 0.0
        if self._rate:
            left = max(0.0, self._jobs[0][0] - self._work) / self._rate
            self._clock.after(left, partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:  # something has begun or ended since
            return
        self._advance()
        self._work, _, then = heapq.heappop(self._jobs)
        self._proceed()
        then()


class Thread:
    """Does one thing after another; takes a core from a node that it shares."""

    def __init__(self, clock: Clock, node: Node | None) -> None:
        self._clock, self._node = clock, node
        self._free_at = 0.0
        self._waiting = 0
        self.busy = 0.0

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        if self._node and not self._waiting:
            self._node.take(1)
        self._waiting += 1
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._clock.after(self._free_at - self._clock.now, partial(self._done, seconds, then))

    def _done(self, seconds: float, then: Callable[[], None]) -> None:
        self._waiting -= 1
        if self._node and not self._waiting:
            self._node.take(-1)
        self.busy += seconds
        then()


class Caller:
    """Sends calls to its actors, takes the replies, and sends again.

    Attributes:
      calls: how many replies it has taken.
    """

    def __init__(
        self,
        clock: Clock,
        nodes: Sequence[Node],
        seconds: Iterator[float],
        setting: Setting,
        costs: Costs,
    ) -> None:
        self._clock, self._nodes, self._seconds = clock, nodes, seconds
        self._costs = costs
        self._is_busy = setting.steps.is_busy
        self._overhead = costs.actor + costs.step * setting.per_actor * setting.ticks
        self._at_least = max(1, round(setting.at_least * len(nodes)))
        shared = nodes[0] if setting.is_shared else None
        self.main, self.ray = Thread(clock, shared), Thread(clock, shared)
        self.calls = 0
        self._landed: list[int] = []
        self._is_waiting = False
        self._send(range(len(nodes)))

    def _send(self, actors: Sequence[int]) -> None:
        for a in actors:
            into_ray = partial(self.ray.do, self._costs.ray / 2, partial(self._leave, a))
            self.main.do(self._costs.send, into_ray)
        looking = self._costs.under_way * len(self._nodes)
        self.main.do(looking if self._at_least < len(self._nodes) else 0.0, self._wait)

    def _leave(self, a: int) -> None:
        self._clock.after(self._costs.there, partial(self._work, a))

    def _work(self, a: int) -> None:
        seconds = next(self._seconds)
        computed, waited = (seconds, 0.0) if self._is_busy else (0.0, seconds)
        back = partial(self._clock.after, waited + self._costs.back, partial(self._return, a))
        self._nodes[a].start(self._overhead + computed, back)

    def _return(self, a: int) -> None:
        self.ray.do(self._costs.ray / 2, partial(self._land, a))

    def _land(self, a: int) -> None:
        self._landed.append(a)
        if self._is_waiting:
            self._take()

    def _wait(self) -> None:
        self._is_waiting = True
        self._take()

    def _take(self) -> None:
        if len(self._landed) < self._at_least:
            return
        self._is_waiting = False
        actors, self._landed = self._landed, []
        cost = self._costs.base + self._costs.receive * len(actors)
        self.main.do(cost, partial(self._took, actors))

    def _took(self, actors: list[int]) -> None:
        self.calls += len(actors)
        self._send(actors)


def simulate(setting: Setting, costs: Costs, rounds: int = 12, seed: int = 0) -> Outcome:
    """So many rounds of all environments; the first quarter of them is not counted."""
    clock, rng = Clock(), np.random.default_rng(seed)
    per_node = setting.num_actors / setting.num_nodes
    cores = max(0.01, setting.cores - costs.idle * per_node)
    nodes = [Node(clock, cores) for _ in range(setting.num_nodes)]
    where = [nodes[a % len(nodes)] for a in range(setting.num_actors)]
    seconds = setting.steps.sums(setting.per_actor * setting.ticks, rng)
    callers = [
        Caller(clock, where[c :: setting.num_callers], seconds, setting, costs)
        for c in range(setting.num_callers)
    ]

    def after(rounds: int) -> list[float]:
        """Of when so many are done: the time, calls, seconds of main threads and of Ray's."""
        number = rounds * setting.num_actors
        clock.run_until(lambda: sum(caller.calls for caller in callers) >= number)
        calls = sum(caller.calls for caller in callers)
        main = sum(caller.main.busy for caller in callers) / len(callers)
        return [clock.now, calls, main, sum(caller.ray.busy for caller in callers) / len(callers)]

    before = after(max(1, rounds // 4))
    elapsed, calls, main, ray = (b - a for a, b in zip(before, after(rounds), strict=True))
    steps = calls * setting.per_actor * setting.ticks
    return Outcome(steps / elapsed, main / elapsed, ray / elapsed)
