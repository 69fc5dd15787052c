"""Environments that start processes or threads of their own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from test_leaving import GONE_AFTER, Process, kill, status, still_running

from envfleet import ActorDied, ParallelPyEnvironment
from envfleet.testing import ProbeEnv

Answer = tuple[int, tuple[int, int]]
"""A square, and the process and thread that computed it."""

Ask = Callable[[int], Answer]


def square(number: int) -> Answer:
    return number * number, (os.getpid(), threading.get_ident())


# -- who computes ----------------------------------------------------------------------------------


def serve(receive: Callable[[], int | None], send: Callable[[Answer], None]) -> None:
    while (number := receive()) is not None:
        send(square(number))


def serve_pipe(pipe: Any) -> None:
    serve(pipe.recv, pipe.send)


@contextlib.contextmanager
def process(method: str) -> Iterator[Ask]:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=serve_pipe, args=(there,))
    child.start()

    def ask(number: int) -> Answer:
        here.send(number)
        return here.recv()

    yield ask
    here.send(None)
    child.join()


@contextlib.contextmanager
def program() -> Iterator[Ask]:
    code = "import os\nwhile True: print(int(input()) ** 2, os.getpid(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def ask(number: int) -> Answer:
            print(number, file=child.stdin, flush=True)
            answer, pid = map(int, child.stdout.readline().split())
            return answer, (pid, 0)

        yield ask
        child.terminate()


@contextlib.contextmanager
def daemon() -> Iterator[Ask]:
    """Computes nothing, and does not notice when it is alone."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield lambda number: (number * number, (child.pid, 0))
    child.terminate()
    child.wait()


@contextlib.contextmanager
def thread() -> Iterator[Ask]:
    questions: queue.Queue[int | None] = queue.Queue()
    answers: queue.Queue[Answer] = queue.Queue()
    child = threading.Thread(target=serve, args=(questions.get, answers.put))
    child.start()

    def ask(number: int) -> Answer:
        questions.put(number)
        return answers.get()

    yield ask
    questions.put(None)
    child.join()


@contextlib.contextmanager
def pool() -> Iterator[Ask]:
    with ProcessPoolExecutor(2) as executor:
        yield lambda number: executor.submit(square, number).result()


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Ask]]] = {
    "fork": functools.partial(process, "fork"),
    "spawn": functools.partial(process, "spawn"),
    "forkserver": functools.partial(process, "forkserver"),
    "program": program,
    "daemon": daemon,
    "thread": thread,
    "pool": pool,
}


class Nested(ProbeEnv):
    """Observes, in place of its action, its square, which another process or thread computes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.elsewhere = True
        self._stack = contextlib.ExitStack()
        self._ask = self._stack.enter_context(WAYS[way]())

    def step(self, action: Any) -> Any:
        answer, who = self._ask(int(action))
        self.elsewhere = self.elsewhere and who != (os.getpid(), threading.get_ident())
        return super().step(answer)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._stack.close()


class Vector(dm_env.Environment):
    """Gymnasium's vector of two environments, each in a process, as one environment."""

    def __init__(self, vector: Callable[..., Any] = AsyncVectorEnv) -> None:
        self._vector = vector([functools.partial(gymnasium.make, "CartPole-v1")] * 2)

    def reset(self) -> Any:
        return dm_env.restart(self._vector.reset(seed=3)[0])

    def step(self, action: Any) -> Any:
        observation, rewards, *_ = self._vector.step(action)
        return dm_env.transition(float(rewards.sum()), observation)

    def observation_spec(self) -> Any:
        return specs.Array((2, 4), np.float32)

    def action_spec(self) -> Any:
        return specs.BoundedArray((2,), np.int64, 0, 1)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._vector.close()


# -- the tests -------------------------------------------------------------------------------------


def descendants(ancestor: int) -> list[Process]:
    """The processes that a process has started, and theirs."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := status(int(entry.name)):
            parents[Process(int(entry.name), fields[19])] = int(fields[1])
    found, pids = [], {ancestor}
    while new := [p for p, parent in parents.items() if parent in pids and p not in found]:
        found += new
        pids |= {p.pid for p in new}
    return found


@contextlib.contextmanager
def started_by(batch: ParallelPyEnvironment) -> Iterator[list[Process]]:
    """What its environments have started; after the block at the latest it is ended."""
    processes = [process for pid in batch.call("pid") for process in descendants(pid)]
    try:
        yield processes
    finally:
        kill(processes)


@pytest.mark.parametrize("way", WAYS)
def test_environment_that_has_others_compute_gives_their_values_and_leaves_none(way, on_ray):
    with ParallelPyEnvironment([functools.partial(Nested, way)] * 2) as batch:
        batch.reset()
        for action in (2, 5, 9):
            actions = np.array([action, action + 1])
            assert batch.step(actions).observation["action"].tolist() == (actions**2).tolist()
        assert batch.get_attr("elsewhere") == [True, True]
        with started_by(batch) as processes:
            assert len(processes) >= 2 or way == "thread"
            batch.close()
            assert not still_running(processes, time.monotonic() + GONE_AFTER)


def test_vector_environment_of_gymnasium_gives_its_values_and_leaves_no_process(on_ray):
    alone = Vector(SyncVectorEnv)
    with ParallelPyEnvironment([Vector] * 2) as batch:
        expected, time_step = alone.reset(), batch.reset()
        for t in range(40):  # beyond the end of an episode
            for observation in time_step.observation:
                np.testing.assert_array_equal(observation, expected.observation)
            actions = np.array([t % 2, 1])
            expected, time_step = alone.step(actions), batch.step(np.stack([actions] * 2))
        with started_by(batch) as processes:
            assert len(processes) >= 4
            batch.close()
            assert not still_running(processes, time.monotonic() + GONE_AFTER)


@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "thread"), "vector"])
def test_death_of_an_actor_is_told_though_it_had_processes_and_none_outlives_it(way, on_ray):
    """A forked process has all of the actor's connections, and must not pass for it."""
    make = Vector if way == "vector" else functools.partial(Nested, way)
    with ParallelPyEnvironment([make], step_timeout=GONE_AFTER) as batch:
        action = np.zeros((1, *batch.action_spec().shape), int)
        batch.reset()
        batch.step(action)
        with started_by(batch) as processes:
            assert processes
            os.kill(*batch.call("pid"), signal.SIGKILL)
            until = time.monotonic() + GONE_AFTER
            with pytest.raises(ActorDied):
                batch.step(action)
            assert not still_running(processes, until)
        batch.reset()
        batch.step(action)
