"""Measures collecting: envfleet's actors beside plain loops that do the same, taking turns.

    python benchmarks/collecting.py
    python benchmarks/collecting.py --rounds 9 --steps 200000 --memory-steps 0

Writes collecting.json and collecting.md.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import multiprocessing
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gymnasium
import numpy as np
import ray
from run import machine, say

from envfleet.collect import Collector, collect

ROOT = Path(__file__).parent.parent
CORES = 2


class Task(NamedTuple):
    """What is collected.

    Attributes:
      environment: its id.
      envs_per_actor: how many each of the actors has.
      share: of the steps of a round.
      without, written: the targets, as shares of what the cores' plain loops could do.
    """

    environment: str
    envs_per_actor: int
    share: float
    without: float
    written: float


TASKS = {
    "CartPole": Task("CartPole-v1", 256, 1.0, 0.85, 0.75),
    "MuJoCo": Task("HalfCheetah-v5", 16, 0.25, 0.90, 0.85),
}


# -- plain loops: random actions by numpy, and every row kept in arrays ----------------------------


def plain(environment: str, steps: int) -> float:
    """Steps per second of one loop in one process."""
    env = gymnasium.make(environment)
    act, kind = sampler(env.action_space)
    space = env.observation_space
    observations = np.empty((steps, *space.shape), space.dtype)
    actions = np.empty((steps, *env.action_space.shape), kind)
    rewards, terminated, truncated = np.empty(steps), np.empty(steps, bool), np.empty(steps, bool)
    observation, _ = env.reset(seed=0)
    began = time.perf_counter()
    for t in range(steps):
        action = act()
        observations[t], actions[t] = observation, action
        observation, rewards[t], terminated[t], truncated[t], _ = env.step(action)
        if terminated[t] or truncated[t]:
            observation, _ = env.reset(seed=t)
    rate = steps / (time.perf_counter() - began)
    env.close()
    return rate


def sampler(space: gymnasium.Space, batch: tuple[int, ...] = ()) -> tuple[Callable[[], Any], Any]:
    """A random numpy policy of one action, or of a batch; and the actions' dtype."""
    rng = np.random.default_rng(0)
    if isinstance(space, gymnasium.spaces.Discrete):
        return functools.partial(rng.integers, space.n, size=batch or None), np.int64
    size = (*batch, *space.shape)

    def uniform() -> np.ndarray:
        return rng.uniform(space.low, space.high, size).astype(space.dtype)

    return uniform, space.dtype


def vector(environment: str, steps: int, num_envs: int = 8) -> float:
    """Steps per second of a loop over Gymnasium's AsyncVectorEnv."""
    envs = gymnasium.vector.AsyncVectorEnv(
        [functools.partial(gymnasium.make, environment)] * num_envs, context="spawn"
    )
    act, kind = sampler(envs.single_action_space, (num_envs,))
    ticks, space = steps // num_envs, envs.single_observation_space
    observations = np.empty((ticks, num_envs, *space.shape), space.dtype)
    actions = np.empty((ticks, num_envs, *envs.single_action_space.shape), kind)
    rewards = np.empty((ticks, num_envs))
    ends = np.empty((2, ticks, num_envs), bool)
    observation, _ = envs.reset(seed=0)
    began = time.perf_counter()
    for t in range(ticks):
        observations[t], actions[t] = observation, act()
        observation, rewards[t], ends[0, t], ends[1, t], _ = envs.step(actions[t])
    rate = ticks * num_envs / (time.perf_counter() - began)
    envs.close()
    return rate


# -- envfleet's ------------------------------------------------------------------------------------


class Chunks:
    """A collector that is kept, and hands its chunks to somebody who only counts."""

    def __init__(self, task: Task) -> None:
        self._collector = Collector(
            task.environment, num_actors=CORES, envs_per_actor=task.envs_per_actor, seed=1
        )
        self.rate(20_000)

    def rate(self, steps: int) -> float:
        began = time.perf_counter()
        number = sum(chunk.num_steps for chunk in self._collector.collect(max_steps=steps))
        return number / (time.perf_counter() - began)

    def close(self) -> None:
        self._collector.close()


def written(task: Task, steps: int, directory: Path) -> dict[str, float]:
    """Steps per second of a dataset, from the first step until all is on disk, and its bytes."""
    result = collect(
        directory,
        env_constructor=task.environment,
        num_actors=CORES,
        envs_per_actor=task.envs_per_actor,
        seed=1,
        max_steps=steps,
    )
    env = gymnasium.make(task.environment)
    raw = (
        (result.num_steps + result.num_episodes)
        * env.observation_space.dtype.itemsize
        * int(np.prod(env.observation_space.shape))
    )
    act, kind = sampler(env.action_space)
    raw += result.num_steps * (np.asarray(act(), kind).nbytes + 8)  # and a reward
    size = sum(path.stat().st_size for path in directory.glob("data/*.parquet"))
    return {"rate": result.num_steps / result.seconds, "bytes_of_raw": size / raw}


def memory(steps: int, directory: Path) -> list[tuple[float, float]]:
    """MB of this process (RSS), second for second, while a dataset of CartPole's is collected."""
    seen: list[tuple[float, float]] = []
    done, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(1.0):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append((time.monotonic() - began, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        written(TASKS["CartPole"], steps, directory)
    finally:
        done.set()
        watcher.join()
    return seen


# -- rounds ----------------------------------------------------------------------------------------


def alone(function: Callable[..., float], *arguments: Any) -> float:
    """In a process of its own, so that nothing else is in its memory."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure(name: str, rounds: int, steps: int, directory: Path) -> list[dict[str, float]]:
    task = TASKS[name]
    steps = int(steps * task.share)
    chunks, found = Chunks(task), []
    for i in range(rounds):
        turns = {
            "plain": lambda: {"plain": alone(plain, task.environment, steps // 4)},
            "without": lambda: {"without": chunks.rate(steps)},
            "written": lambda: written(task, steps, directory / f"{name}-{i}"),  # noqa: B023
            "vector": lambda: {"vector": alone(vector, task.environment, steps // 8)},
        }
        row: dict[str, float] = {}
        names = [*turns]
        for turn in names[i % len(names) :] + names[: i % len(names)]:
            row |= turns[turn]()
        shutil.rmtree(directory / f"{name}-{i}")
        found.append(row)
        rates = {key: round(value, 2 if value < 100 else None) for key, value in row.items()}
        say(f"{name}: round {i + 1} of {rounds}: {rates}")
    chunks.close()
    return found


def targets(raw: dict[str, Any]) -> list[tuple[str, str, list[float], bool]]:
    """Words, bound, ratios by round, and whether it is met."""
    found = []

    def add(words: str, bound: float, values: list[float], is_most: bool = False) -> None:
        median = statistics.median(values)
        met = median <= bound if is_most else median >= bound
        found.append((words, f"{'<=' if is_most else '>='} {bound:.2f}", values, met))

    for name, rows in raw["rounds"].items():
        task = TASKS[name]
        of_loops = f"against {CORES} x one plain loop"
        for kind, words, bound in (
            ("without", "chunks, nothing written", task.without),
            ("rate", "dataset written", task.written),
        ):
            ratios = [row[kind] / row["plain"] / CORES for row in rows]
            add(f"{name}, {words}, {of_loops}", bound, ratios)
        for kind, words in (("without", "chunks"), ("rate", "dataset written")):
            ratios = [row[kind] / row["vector"] for row in rows]
            add(f"{name}, {words}, against a loop over AsyncVectorEnv x 8", 4.0, ratios)
    if "CartPole" in raw["rounds"]:
        sizes = [row["bytes_of_raw"] for row in raw["rounds"]["CartPole"]]
        add("CartPole, bytes on disk against observations, actions and rewards", 1.1, sizes, True)
    if seen := raw["memory"]:
        early = seen[len(seen) // 10][1]
        add(
            f"CartPole, {raw['memory_steps'] / 1e6:.0f} million steps: caller's memory at the end "
            "against that after a tenth",
            1.1,
            [seen[-1][1] / early],
            True,
        )
    return found


def markdown(raw: dict[str, Any]) -> str:
    of = raw["machine"]
    lines = [
        "# Collecting",
        "",
        "What is measured, and how to read it: [README.md](README.md#collecting). Written by",
        "",
        f"    {raw['command']}",
        "",
        f"{raw['date']}, {raw['minutes']} minutes. {of['cpu']}, {of['cores']} cores, "
        f"{of['memory_gib']} GiB, {of['system']}, load average {of['load_before']} before. Python "
        f"{of['python']}.",
        "",
        "| target | bound | median | min | max | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for words, bound, values, met in targets(raw):
        cells = [f"{f(values):.2f}" for f in (statistics.median, min, max)]
        lines.append(
            f"| {words} | {bound} | {' | '.join(cells)} | {'met' if met else '**NOT met**'} |"
        )
    lines += ["", "Steps per second, by round:", ""]
    lines += [
        "| | plain loop | AsyncVectorEnv x 8 | chunks | dataset written |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rows in raw["rounds"].items():
        for i, row in enumerate(rows, 1):
            cells = [f"{row[kind]:,.0f}" for kind in ("plain", "vector", "without", "rate")]
            lines.append(f"| {name}, {i} | {' | '.join(cells)} |")
    if raw["memory"]:
        lines += [
            "",
            "The caller's memory (RSS) in the long run:",
            "",
            "| seconds | MB |",
            "|---:|---:|",
        ]
        every = max(len(raw["memory"]) // 10, 1)
        lines += [f"| {after:.0f} | {size:.0f} |" for after, size in raw["memory"][::every]]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument(
        "--steps", type=int, default=400_000, help="of CartPole, in a turn (400000)"
    )
    parser.add_argument("--memory-steps", type=int, default=10_000_000, help="0 for none")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    raw: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/collecting.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "rounds": {},
        "memory": [],
        "memory_steps": options.memory_steps,
    }
    began = time.monotonic()
    ray.init(address="local", num_cpus=CORES, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        for name in options.only:
            raw["rounds"][name] = measure(name, options.rounds, options.steps, Path(directory))
        if options.memory_steps:
            raw["memory"] = memory(options.memory_steps, Path(directory) / "long")
    ray.shutdown()
    raw["minutes"] = round((time.monotonic() - began) / 60, 1)
    (options.out / "collecting.json").write_text(json.dumps(raw, indent=1) + "\n")
    (options.out / "collecting.md").write_text(markdown(raw))
    say(markdown(raw))


if __name__ == "__main__":
    main()
