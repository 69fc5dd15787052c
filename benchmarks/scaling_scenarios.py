"""What is simulated: what was measured here, as a check, and clusters of which there are none here.

Costs are those that were fitted to measurements.
"""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from scaling_costs import Fit
from scaling_simulation import Costs, Setting, Steps, simulate

LATENCY, BANDWIDTH = 0.25e-3, 1e9
"""Assumed of a cluster: seconds from process to process, one way, and bytes a second."""
OBSERVED = 48
"""Bytes of an environment's action and time step: four floats are observed."""
TICKS = 128
"""Of a chunk."""
READY = 0.25
"""Share of the environments that first-ready stepping waits for."""
STEPS = (0.01e-3, 0.1e-3, 1e-3, 10e-3, 100e-3)
TAIL = 1.0
"""Sigma of the lognormal: one step in a hundred takes more than six times the mean."""


class Cluster(NamedTuple):
    num_envs: int
    num_nodes: int
    cores: int
    per_actor: tuple[int, ...]
    """Choices; the second one makes an actor for each core."""

    @property
    def per_core(self) -> int:
        return self.per_actor[1]

    def with_more(self, per_core: int) -> "Cluster":
        """Environments: so many for each core."""
        return self._replace(num_envs=per_core * self.cores * self.num_nodes)


CLUSTERS = (Cluster(1024, 8, 32, (1, 4, 16, 64)), Cluster(10_240, 32, 32, (1, 10, 40, 160)))
CALLERS = (1, 2, 4, 8)
MANY = 64
"""Environments an actor, where calls cost next to nothing and a tick of the policy is shared."""

WAYS = ("lockstep", "first-ready", "chunks")

Fits = Mapping[str, Fit]


def at_least(way: str, num_actors: int) -> float:
    """Share of its actors that a caller waits for."""
    return {"lockstep": 1.0, "first-ready": READY, "chunks": 1 / num_actors}[way]


def costs(
    fits: Fits, way: str, per_actor: int, ticks: int, nbytes: float, is_cluster: bool
) -> Costs:
    """What calls cost in one of the ways of stepping.

    Args:
      ticks: steps of each environment in a call.
      nbytes: of a call and its reply.
      is_cluster: whether there is a network in between, and the caller has cores enough for Ray's
        threads to run beside each other; else all of them share those that there are.
    """
    term = {name: found.seconds for name, found in fits.items()}
    there = LATENCY if is_cluster else 0.0
    back = there + (nbytes / BANDWIDTH if is_cluster else 0.0)
    ways = {"there": there, "back": back, "idle": term["actor"]["seconds"]}
    looking = term["ready-receive"]["under_way"]
    if way == "chunks":
        rows, chunk, actor = per_actor * ticks, term["chunk"], term["chunk-actor"]
        return Costs(
            receive=chunk["base"] + chunk["rows"] * rows,
            under_way=looking,
            ray=fits["chunk-ray"].of({"rows": rows}),
            actor=actor["base"] + actor["ticks"] * ticks,
            step=actor["rows"],
            **ways,
        )
    is_ready = way == "first-ready"
    send, receive = (term["ready-" * is_ready + key] for key in ("send", "receive"))
    ray = term["busiest" if is_cluster else "ray"]
    return Costs(
        send=send["calls"] + send["envs"] * per_actor,
        receive=receive["calls"]
        + receive["envs"] * per_actor
        + receive.get("bytes", term["receive"]["bytes"]) * nbytes,
        base=send["base"] + receive["base"],
        under_way=looking if is_ready else 0.0,
        ray=ray["calls"] + ray["bytes"] * nbytes,
        actor=term["actor"]["base"] + term["actor"]["bytes"] * nbytes,
        step=term["actor"]["envs"],
        **ways,
    )


# -- what was measured here ------------------------------------------------------------------------


def validate(fits: Fits, rows: list[dict[str, Any]], cores: int) -> Iterator[dict[str, Any]]:
    """Steps per second of the batches that were measured, as they were and simulated.

    Of the repetition in the middle, on the cores that others left to it. Where environments sleep
    it has all of them, since others then fill gaps.
    """
    for row in rows:
        way = row["way"].removeprefix("paced ")
        if way not in WAYS:
            continue
        num_actors, per_actor, ticks = row["actors"], row["per_actor"], row.get("ticks", 1)
        is_busy, mean, sigma = row.get("pace", (True, 0.0, 0.0))
        steps, others = statistics.median_low(zip(row["steps"], row["others"], strict=True))
        setting = Setting(
            num_actors,
            per_actor,
            Steps(mean, sigma, is_busy),
            cores - others if is_busy else cores,
            ticks=ticks,
            at_least=at_least(way, num_actors),
            is_shared=True,
        )
        nbytes = row.get("bytes", 0.0) / num_actors
        cost = costs(fits, way, per_actor, ticks, nbytes, is_cluster=False)
        yield {
            **{key: row[key] for key in ("way", "actors", "per_actor")},
            "ticks": ticks,
            "bytes": round(nbytes),
            "pace": [is_busy, mean, sigma],
            "others": others,
            "measured": steps,
            "simulated": simulate(setting, cost, rounds=40).rate,
        }


# -- clusters --------------------------------------------------------------------------------------


def run(
    fits: Fits,
    cluster: Cluster,
    way: str,
    per_actor: int,
    steps: Steps,
    num_callers: int = 1,
) -> dict[str, Any]:
    """What came of it, and what it was."""
    num_actors = cluster.num_envs // per_actor
    ticks = TICKS if way == "chunks" else 1
    setting = Setting(
        num_actors,
        per_actor,
        steps,
        cluster.cores,
        cluster.num_nodes,
        num_callers,
        ticks=ticks,
        at_least=at_least(way, num_actors // num_callers),
    )
    cost = costs(fits, way, per_actor, ticks, OBSERVED * per_actor * ticks, is_cluster=True)
    found = simulate(setting, cost, rounds=8)
    return {
        "envs": cluster.num_envs,
        "way": way,
        "per_actor": per_actor,
        "step": steps.mean,
        "sigma": steps.sigma,
        "callers": num_callers,
        "limit": setting.limit,
        **found._asdict(),
    }


def simulated(fits: Fits) -> Iterator[dict[str, Any]]:
    for cluster in CLUSTERS:
        for mean in STEPS:
            constant, tailed = Steps(mean), Steps(mean, TAIL)
            for per_actor in cluster.per_actor:
                yield run(fits, cluster, "lockstep", per_actor, constant, 1)
            for number in CALLERS[1:]:
                yield run(fits, cluster, "lockstep", cluster.per_core, constant, number)
            for way in ("first-ready", "chunks"):
                yield run(fits, cluster, way, cluster.per_core, constant, 1)
            yield run(fits, cluster.with_more(MANY), "chunks", MANY, constant, 1)
            for way in WAYS:
                for number in (1, CALLERS[-1]):
                    yield run(fits, cluster, way, cluster.per_core, tailed, number)
