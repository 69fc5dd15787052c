"""What one caller can keep busy: measured here, fitted, and simulated for clusters.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --report        # fits and simulates what was measured before

Writes docs/benchmarks/scaling.json, its figures, and the tables in docs/scaling.md.
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import numpy as np
import ray
import scaling_report
from ray.cluster_utils import Cluster
from run import ROOT, machine, say
from scaling_meter import Meter, memory_mb
from workloads import Paced

from envfleet import ParallelPyEnvironment
from envfleet.collect import Collector

ACTORS, PER_ACTOR = (8, 16, 32, 64, 128), (1, 8, 64)
LARGER = ((8, 8, 1024), (8, 1, 16_384), (16, 64, 256))
"""Actors, environments in each, floats of an observation."""
PACED = ((8, 1), (8, 8), (32, 1), (32, 8))
PACES = ((True, 0.001, 0.0), (True, 0.001, 1.0), (True, 0.004, 0.0), (False, 0.02, 1.0))
"""Whether it computes, mean seconds, sigma: what the simulation is held against."""
ALONE = ((False, 0.0, 0.0), (False, 0.01, 0.0))
"""One actor: call after call, and calls after which all caches have been used by others."""
CHUNKS = ((4, 1, 128), (4, 8, 128), (4, 64, 128), (4, 8, 512))
"""Actors, environments in each, ticks."""
NODES, ON_NODES = (1, 4), 16


def repeated(
    number: int, measure: Callable[[], dict[str, float]], counts: dict[str, Any]
) -> dict[str, Any]:
    """A measurement: its counts, and lists of what each repetition gave."""
    rows = [measure() for _ in range(number)]
    return {**counts, **{key: [round(row[key], 9) for row in rows] for key in rows[0]}}


# -- ways of stepping ------------------------------------------------------------------------------


def lockstep(env: ParallelPyEnvironment, meter: Meter, seconds: float) -> dict[str, float]:
    """Seconds of a step of all: in this thread to send and to receive, in Ray's, of an actor."""
    actions, num_actors = np.zeros(env.batch_size, int), len(meter.actors)
    sending = receiving = 0.0
    steps = 0

    def run() -> None:
        nonlocal sending, receiving, steps
        until = time.perf_counter() + seconds
        while steps < 3 or time.perf_counter() < until:
            began = time.thread_time()
            receive = env.post_step(actions)
            sent = time.thread_time()
            receive()
            received = time.thread_time()
            sending, receiving = sending + sent - began, receiving + received - sent
            steps += 1

    used = meter.used(run)
    return {
        "send": sending / steps,
        "receive": receiving / steps,
        "ray": used["ray"] / steps,
        "busiest": used["busiest"] / steps,
        "actor": used["actor"] / steps / num_actors,
        "wall": used["wall"] / steps,
        "steps": env.batch_size * steps / used["wall"],
        "others": used["others"],
    }


def first_ready(env: ParallelPyEnvironment, meter: Meter, seconds: float) -> dict[str, float]:
    """The same of a round of whoever is ready, a quarter of them at the least."""
    at_least = env.batch_size // 4
    sending = receiving = 0.0
    rounds = taken = 0
    env.async_reset()

    def run() -> None:
        nonlocal sending, receiving, rounds, taken
        until = time.perf_counter() + seconds
        while rounds < 8 or time.perf_counter() < until:
            began = time.thread_time()
            _, env_ids = env.recv(at_least)
            received = time.thread_time()
            env.send(np.zeros(len(env_ids), int), env_ids)
            sent = time.thread_time()
            receiving, sending = receiving + received - began, sending + sent - received
            rounds += 1
            taken += len(env_ids)

    used = meter.used(run)
    env.drain()
    return {
        "send": sending / rounds,
        "receive": receiving / rounds,
        "ray": used["ray"] / rounds,
        "wall": used["wall"] / rounds,
        "steps": taken / used["wall"],
        "others": used["others"],
        "taken": taken / rounds,
    }


@contextlib.contextmanager
def batch(num_actors: int, per_actor: int, floats: int = 4) -> Iterator[tuple[Any, Meter, float]]:
    began = time.perf_counter()
    env = ParallelPyEnvironment(
        [functools.partial(Paced, i, floats) for i in range(num_actors * per_actor)],
        envs_per_actor=per_actor,
        start_timeout=400.0,
    )
    started = time.perf_counter() - began
    try:
        env.reset()
        env.step(np.zeros(env.batch_size, int))
        yield env, Meter(num_actors), started
    finally:
        env.close()


def measure_batch(
    num_actors: int, per_actor: int, floats: int, repeats: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measurements of one batch: in lockstep, first-ready, and at other paces."""
    with batch(num_actors, per_actor, floats) as (env, meter, started):
        counts = {
            "actors": num_actors,
            "calls": num_actors,
            "per_actor": per_actor,
            "envs": env.batch_size,
            "bytes": env.stats().bytes_per_step,
        }
        memory = [memory_mb(process) for process in meter.actors]
        about = {
            "started": round(started, 2),
            "idle": {key: round(share, 5) for key, share in meter.idle.items()},
            **{key: round(statistics.median(one[key] for one in memory)) for key in ("rss", "pss")},
        }
        row = functools.partial(lockstep, env, meter, seconds)
        yield repeated(repeats, row, {"way": "lockstep", **counts, **about})
        if floats == 4:
            ready = repeated(
                repeats, functools.partial(first_ready, env, meter, seconds), {"way": "first-ready"}
            )
            taken = statistics.median(ready.pop("taken"))
            of = {"calls": taken / per_actor, "envs": taken, "under_way": num_actors}
            yield {**counts, **ready, **of}
        if floats == 4 and (num_actors, per_actor) in PACED:
            for pace in PACES:
                env.call("pace", *pace)
                for step in (lockstep, first_ready):
                    found = repeated(repeats, functools.partial(step, env, meter, seconds), {})
                    way = {lockstep: "lockstep", first_ready: "first-ready"}[step]
                    kept = {key: found[key] for key in ("steps", "others")}
                    yield {"way": f"paced {way}", **counts, "pace": pace, **kept}


def measure_chunks(num_actors: int, per_actor: int, ticks: int, repeats: int) -> dict[str, Any]:
    """Of a collector's chunk: seconds in this thread, in Ray's, in its actor."""
    constructor = functools.partial(Paced, 0)
    counts = {
        "way": "chunks",
        "actors": num_actors,
        "per_actor": per_actor,
        "ticks": ticks,
        "rows": ticks * per_actor,
    }
    number = 24 * num_actors
    steps = number * ticks * per_actor
    with Collector(
        constructor, num_actors=num_actors, envs_per_actor=per_actor, chunk_length=ticks, seed=0
    ) as collector:
        meter = Meter(num_actors)

        def chunks() -> dict[str, float]:
            used = meter.used(lambda: list(collector.collect(max_steps=steps)))
            of_chunk = {key: used[key] / number for key in ("main", "ray", "actor")}
            return {**of_chunk, "steps": steps / used["wall"], "others": used["others"]}

        chunks()
        return repeated(repeats, chunks, counts)


@contextlib.contextmanager
def on_nodes(number: int) -> Iterator[None]:
    """A Ray of so many nodes, all of them on this machine: a raylet each, and TCP in between."""
    with tempfile.TemporaryDirectory(prefix="ef", ignore_cleanup_errors=True) as directory:
        # Where it says which cluster is the current one; not for other programs.
        os.environ["RAY_TMPDIR"] = directory
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            for _ in range(number - 1):
                cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            del os.environ["RAY_TMPDIR"]


def measure(repeats: int, seconds: float, most: int) -> Iterator[dict[str, Any]]:
    for number in NODES:
        with on_nodes(number), batch(ON_NODES, 1) as (env, meter, _):
            row = functools.partial(lockstep, env, meter, seconds)
            yield repeated(repeats, row, {"way": "nodes", "nodes": number, "calls": ON_NODES})
    ray.init(
        address="local",
        num_cpus=len(os.sched_getaffinity(0)),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    for chunks in CHUNKS:
        yield measure_chunks(*chunks, repeats)
    with batch(1, 1) as (env, meter, _):
        for pace in ALONE:
            env.call("pace", *pace)
            row = functools.partial(lockstep, env, meter, seconds)
            yield repeated(repeats, row, {"way": "alone", "calls": 1, "pace": pace})
    for larger in LARGER:
        yield from measure_batch(*larger, repeats, seconds)
    for num_actors, per_actor in itertools.product(ACTORS, PER_ACTOR):
        if num_actors <= most:
            yield from measure_batch(num_actors, per_actor, 4, repeats, seconds)
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (3)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each of them (0.6)")
    parser.add_argument("--most", type=int, default=max(ACTORS), help="actors at once (128)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    path = options.out / "benchmarks" / "scaling.json"
    if not options.report:
        began = time.monotonic()
        raw: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": {"ray": ray.__version__, "numpy": np.__version__},
            "python": platform.python_version(),
            "rows": [],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        for row in measure(options.repeats, options.seconds, options.most):
            say(f"{time.monotonic() - began:4.0f} s {brief(row)}")
            raw["rows"].append(row)
            raw["minutes"] = round((time.monotonic() - began) / 60, 1)
            path.write_text(json.dumps(raw) + "\n")  # whatever ends this, what was measured is kept
    scaling_report.write(json.loads(path.read_text()), options.out)


def brief(row: dict[str, Any]) -> str:
    """Counts, and milliseconds."""
    words = {key: value for key, value in row.items() if key not in ("steps", "others", "pace")}
    for key, value in words.items():
        if isinstance(value, list):
            words[key] = f"{1e3 * statistics.median(value):.3g} ms"
    return ", ".join(f"{key} {value}" for key, value in words.items())


if __name__ == "__main__":
    main()
