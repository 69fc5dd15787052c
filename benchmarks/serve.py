"""One contender in a process of its own, which works through commands that come on stdin.

    python benchmarks/serve.py envfleet-auto

A command is a line of JSON, and so is its answer on stdout:

    {"do": "make", "workload": "busy-16"}    {"notes": [...], "versions": {"numpy": ..., ...}}
    {"do": "run", "seconds": 0.5}            {"value": 1234.5}
    {"do": "close"}                          {}

The value is steps of environments per second; of a workload that is a start, the seconds of one.
What fails is answered by {"error": ...}. Between commands it waits, so that contenders of several
virtual environments can take turns.
"""

import itertools
import json
import os
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from contenders import CONTENDERS, Contender
from workloads import WORKLOADS, Workload

PACKAGES = (
    *("envfleet", "ray", "numpy", "gymnasium", "mujoco"),
    *("stable-baselines3", "tianshou", "torch", "tf-agents", "tensorflow-cpu"),
)
BATCHES = 64
"""So many batches of random actions are drawn beforehand, and then used again and again."""

STRIDE_SECONDS = 0.2
"""Ray takes a tenth of a second to be as fast as before once its processes were stopped."""


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def random_actions(workload: Workload) -> Any:
    env = workload.constructors[0]()
    space = env.action_space
    space.seed(0)
    batches = [np.stack([space.sample() for _ in range(workload.num_envs)]) for _ in range(BATCHES)]
    env.close()
    return itertools.cycle(batches)


def rate(contender: Contender, actions: Any, seconds: float) -> float:
    """Steps of environments per second."""
    steps, passed = 0, 0.0
    began = time.perf_counter()
    while passed < seconds:
        steps += contender.step(next(actions))
        passed = time.perf_counter() - began
    return steps / passed


def start_seconds(contender: type[Contender], workload: Workload) -> float:
    """From nothing but Ray to a first batch."""
    began = time.perf_counter()
    batch = contender(workload)
    batch.reset()
    seconds = time.perf_counter() - began
    batch.close()
    return seconds


class Server:
    """Holds one batch of environments at a time."""

    def __init__(self, contender: type[Contender]) -> None:
        self.contender = contender
        self.workload: Workload | None = None
        self.batch: Contender | None = None
        self.actions: Any = None

    def make(self, workload: str) -> dict[str, Any]:
        self.workload = WORKLOADS[workload]
        if self.workload.is_start:
            start_seconds(self.contender, self.workload)  # starts Ray, and fills the disk's cache
            return {"notes": [], "versions": versions()}
        self.actions = random_actions(self.workload)
        self.batch = self.contender(self.workload)
        self.batch.reset()
        return {"notes": self.batch.notes, "versions": versions()}

    def run(self, seconds: float) -> dict[str, Any]:
        if self.workload.is_start:
            return {"value": start_seconds(self.contender, self.workload)}
        rate(self.batch, self.actions, STRIDE_SECONDS)
        return {"value": rate(self.batch, self.actions, seconds)}

    def close(self) -> dict[str, Any]:
        batch, self.batch = self.batch, None
        if batch is not None:
            batch.close()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody else prints is no answer
    server = Server(CONTENDERS[sys.argv[1]])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(server, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
