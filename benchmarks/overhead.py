"""What a batched step costs beside a bare Ray actor call, as ratios measured in one run.

    python benchmarks/overhead.py --rounds 9 --steps 150

A step of the no-op environments does nothing, so all that is measured is the way there and back.
The bare loop is ``ray.get([a.step.remote(x) for a in actors])`` on actors that return their
argument, made with `ray.remote`'s default options: no batch, no deadline, no capture of exceptions.
It pays for Ray's task events and for pickling arrays, which envfleet avoids; the lean loop does not
pay for them either. All take turns in every round, so that a noisy machine is noisy for all.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import dm_env
import numpy as np
import ray
from dm_env import specs

import envfleet

NUM_ENVS = 8
TARGET = 0.87
"""Least share of the bare loop's steps/s that one environment per actor should reach."""


class Noop(dm_env.Environment):
    """Does nothing, without end."""

    def __init__(self) -> None:
        self._first = dm_env.restart(np.zeros(4, np.float32))
        self._mid = dm_env.transition(0.0, np.zeros(4, np.float32))

    def observation_spec(self) -> specs.Array:
        return specs.Array((4,), np.float32)

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(2)

    def reset(self) -> dm_env.TimeStep:
        return self._first

    def step(self, _action: Any) -> dm_env.TimeStep:
        return self._mid


class Bare:
    """The least that an actor can do."""

    def step(self, x: Any) -> Any:
        return x


def timed(step: Callable[[], object], steps: int) -> float:
    """Batched steps per second."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return steps / (time.perf_counter() - began)


def spread(rates: list[float], reference: list[float]) -> tuple[float, float, float]:
    """Least, median and greatest ratio, round by round."""
    ratios = [rate / base for rate, base in zip(rates, reference, strict=True)]
    return min(ratios), statistics.median(ratios), max(ratios)


def for_loop(envs: list[Noop], actions: np.ndarray) -> None:
    for env, action in zip(envs, actions, strict=True):
        env.step(action)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each contender (9)")
    parser.add_argument("--steps", type=int, default=150, help="batched steps a round (150)")
    options = parser.parse_args()
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps are at least 1")

    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    actions = np.ones(NUM_ENVS, np.int32)
    x = np.ones((), np.int32)  # what one environment is sent
    bare = [ray.remote(Bare).remote() for _ in range(NUM_ENVS)]
    lean_class = ray.remote(Bare).options(enable_task_events=False)
    lean = [lean_class.remote() for _ in range(NUM_ENVS)]
    x_bytes = x.tobytes()
    one_each = envfleet.ParallelPyEnvironment(Noop, num_envs=NUM_ENVS)
    four_each = envfleet.ParallelPyEnvironment(Noop, num_envs=NUM_ENVS, envs_per_actor=4)
    local = envfleet.ParallelPyEnvironment(Noop, num_envs=NUM_ENVS, backend="local")
    in_process = [Noop() for _ in range(NUM_ENVS)]
    reference = "bare ray.get loop, 8 actors"
    measured = "envfleet, 8 actors"
    leaner = "lean loop: bytes, no task events"
    contenders: dict[str, Callable[[], object]] = {
        reference: lambda: ray.get([a.step.remote(x) for a in bare]),
        measured: lambda: one_each.step(actions),
        leaner: lambda: ray.get([a.step.remote(x_bytes) for a in lean]),
        "envfleet, envs_per_actor=4": lambda: four_each.step(actions),
        'envfleet, backend="local"': lambda: local.step(actions),
        "for loop, no batch": lambda: for_loop(in_process, actions),
    }

    print(
        f"{NUM_ENVS} no-op environments, {options.rounds} rounds of {options.steps} batched steps; "
        f"Ray {version('ray')}, numpy {version('numpy')}, Python {platform.python_version()}, "
        f"envfleet {version('envfleet')}\n"
    )
    for step in contenders.values():  # warm up
        timed(step, max(20, options.steps // 2))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(options.rounds):
        for name, step in contenders.items():
            rates[name].append(timed(step, options.steps))
        base, ours = rates[reference][-1], rates[measured][-1]
        print(f"round {i + 1}: bare {base:7.0f}/s  envfleet {ours:7.0f}/s  ratio {ours / base:.3f}")

    print(f"\n{'':34}{'batched steps/s':>16}{'of the bare loop: median, min, max':>38}")
    for name, values in rates.items():
        low, median, high = spread(values, rates[reference])
        typical = statistics.median(values)
        print(f"{name:34}{typical:16,.0f}{median:18,.2f}{low:10,.2f}{high:10,.2f}")
    print()
    for name, words in ((reference, "bare"), (leaner, "lean")):
        low, median, high = spread(rates[measured], rates[name])
        target = f"; target {TARGET}: {'met' if median >= TARGET else 'NOT met'}"
        print(
            f"envfleet / {words}, round by round: median {median:.3f}, min {low:.3f}, "
            f"max {high:.3f}{target if name == reference else ''}"
        )

    for env in (one_each, four_each, local):
        env.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
