"""How many environments should share an actor: measured, and by a model of what a step costs.

A call costs the caller and the actor CPU time, whatever the environment does. So cheap
environments gain by sharing a call, until they keep fewer cores busy than there are; and
environments that wait (for a simulator, a network) gain by an actor each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from envfleet.channels import Room
from envfleet.errors import note
from envfleet.fleet import Fleet

_log = logging.getLogger("envfleet")

_CALLS, _CALLING = 50, 0.05
"""So many calls are timed at the least, and for so many seconds."""

_SECONDS = 0.5
"""So long the environment is stepped, or for one step if that takes longer."""

_MOVES = 8
"""By so many random actions, in turn."""

_NEARLY = 0.9
"""More actors are taken where they cut the time to less than this: they cost memory, too."""

ENOUGH_BATCHES = 100
"""After so many batched steps it is known where their time goes."""

_WORTHWHILE = 1.5
"""Advice is given where it makes a batched step this many times faster."""


class Cost(NamedTuple):
    """What was measured, in seconds."""

    step: float
    """Of one environment's step, by the clock."""
    step_cpu: float
    """CPU time of it."""
    call: float
    """From a call to its reply, without the step, if nothing comes in between."""
    caller_cpu: float
    """CPU time that a call takes in the caller."""
    actor_cpu: float
    """CPU time that a call takes in the actor."""


def batch_seconds(num_envs: int, per_actor: int, cost: Cost, cpus: float) -> float:
    """What a batched step takes at the least: by what is used up first.

    That is the time of one actor's environments and its call, all CPU time over the cores, or the
    time that the caller, one thread, takes for all calls.
    """
    num_actors = -(-num_envs // per_actor)
    cpu = num_actors * (cost.caller_cpu + cost.actor_cpu) + num_envs * cost.step_cpu
    return max(cost.call + per_actor * cost.step, cpu / cpus, num_actors * cost.caller_cpu)


def best(num_envs: int, cost: Cost, room: Room) -> int:
    """The number of environments per actor with which a batched step is predicted to be fastest."""
    chosen, least = num_envs, float("inf")
    for num_actors in range(1, int(min(num_envs, max(1, room.actors))) + 1):
        per_actor = -(-num_envs // num_actors)
        seconds = batch_seconds(num_envs, per_actor, cost, room.cpus)
        if seconds < least * _NEARLY:
            chosen, least = per_actor, seconds
    return chosen


def measure(fleet: Fleet) -> Cost:
    """Steps the one environment of a fleet, with random actions."""
    random = np.random.default_rng(0)
    every = [fleet.action_layout.sample(random, 1) for _ in range(_MOVES)]
    moves = every[:1]
    fleet.stepper.reset([0])()
    usage, call, num_calls = fleet.usage(), float("inf"), 0
    fleet.reach()
    started, caller_cpu = time.perf_counter(), time.process_time()
    while num_calls < _CALLS or time.perf_counter() - started < _CALLING:
        began = time.perf_counter()
        fleet.reach()
        call = min(call, time.perf_counter() - began)  # others use the machine, too
        num_calls += 1
    caller_cpu = (time.process_time() - caller_cpu) / num_calls
    actor_cpu = (fleet.usage() - usage) / num_calls
    # In a row, as the environments of an actor are stepped: alone between two calls a step of a few
    # microseconds takes several times as long, for the caches have been used by others.
    num_steps, seconds, cpu, repeats, num_failed = 0, 0.0, 0.0, 1, 0
    while seconds < _SECONDS:
        drilled = fleet.drill(moves, repeats)
        if drilled is None:
            fleet.stepper.reset([0])()
            continue
        num_steps += drilled.num_steps
        num_failed += drilled.num_failed
        if num_failed >= num_steps:  # for each step that fails there is a reset that does not
            fleet.restarts.raise_first(drilled.last_failure)
        seconds, cpu = seconds + drilled.seconds, cpu + drilled.cpu_seconds
        # At first one step, as a step may take long; then calls of a tenth of the time.
        moves = every
        repeats = max(1, int(_SECONDS / 10 / len(moves) * num_steps / seconds))
    if num_failed:
        _log.warning("%d of %d steps failed while they were timed", num_failed, num_steps)
    step = seconds / num_steps
    return Cost(step, min(cpu / num_steps, step), call, caller_cpu, actor_cpu)


def choose(num_envs: int, probe: Callable[[], Fleet]) -> int:
    """Measures in a fleet of one environment, which is closed again, and chooses.

    Says in the log what it has measured and chosen.
    """
    fleet = probe()
    try:
        fleet.start()
        if fleet.action_layout.has_objects:
            _log.info(
                'envs_per_actor="auto": no actions can be drawn by their specs, since some are '
                "strings or objects, so nothing was timed: one environment an actor"
            )
            return 1
        cost, room = measure(fleet), fleet.room()
    except Exception as error:
        note(error, 'while envs_per_actor="auto" timed the first environment, in its own actor')
        raise
    finally:
        try:
            fleet.close()
        except Exception as problem:  # that of the batch will be raised
            _log.warning("closing what was timed: %s: %s", type(problem).__name__, problem)
    per_actor = best(num_envs, cost, room)
    num_actors = -(-num_envs // per_actor)
    predicted = batch_seconds(num_envs, per_actor, cost, room.cpus)
    _log.info(
        'envs_per_actor="auto": a step takes %.3f ms (%.3f of CPU), a call %.3f ms (CPU: '
        "%.3f here, %.3f in the actor), %g CPUs: %d environments go into %d actors of up to %d, "
        "about %.2f ms a batched step%s",
        *(1e3 * seconds for seconds in cost),
        room.cpus,
        num_envs,
        num_actors,
        per_actor,
        1e3 * predicted,
        _local_words(num_envs, cost.step, predicted, room),
    )
    return per_actor


def advise(fleet: Fleet) -> None:
    """Says in the log if a batch's time goes into calls, and what to set."""
    timings, num_envs = fleet.stepper.timings, fleet.num_envs
    batch, overhead = timings.batch_seconds, timings.overhead
    if not overhead > 0.5 * batch:
        return
    step = float(np.nanmean(timings.quantile(0.5)))
    call = overhead / fleet.num_actors
    room = fleet.room()
    cost = Cost(step, step, call, call / 2, call / 2)
    per_actor = best(num_envs, cost, room)
    predicted = batch_seconds(num_envs, per_actor, cost, room.cpus)
    words = _local_words(num_envs, step, min(batch, predicted), room)
    if batch > _WORTHWHILE * predicted and per_actor != len(fleet.env_ids[0]):
        words = f"; envs_per_actor={per_actor} would make it about {1e3 * predicted:.2f} ms{words}"
    by_rpc = {one.transport for one in fleet.actors()} == {"rpc"}
    if by_rpc and room.is_callers:
        words += '; with transport="shared_memory" a call takes about a tenth'
    _log.info(
        "a batched step of %d environments in %d actors takes %.2f ms, of which the %scalls are "
        "%.2f ms (%.2f each) and an environment's own step is %.3f ms%s",
        num_envs,
        fleet.num_actors,
        1e3 * batch,
        "remote " if by_rpc else "",
        1e3 * overhead,
        1e3 * call,
        1e3 * step,
        words or f"; envs_per_actor={per_actor} is as good as any number",
    )


def _local_words(num_envs: int, step: float, predicted: float, room: Room) -> str:
    """Where one process is fastest of all."""
    alone = num_envs * step
    if not room.is_callers or alone >= predicted:
        return ""
    return (
        f'; all in this process, with backend="local" and envs_per_actor="auto", about '
        f"{1e3 * alone:.2f} ms: that is fastest"
    )
