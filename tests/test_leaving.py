"""How a program ends, and that nothing of ours outlives it; a Ray that others use too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import faults
import numpy as np
import pytest
import ray
from process_table import Process, kill, marked, status, still_running, wait_for

from envfleet import EnvFleetError, ParallelPyEnvironment
from envfleet.testing import FaultyEnv, ProbeEnv, ProbeOracle

GONE_AFTER = 10.0
"""Seconds after the end of a program, or of an actor, in which all that was its has to vanish."""

QUIET = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "object_store_memory": 100_000_000,
    "logging_level": "ERROR",
}

# -- ends of a program -----------------------------------------------------------------------------

PROGRAM = """
import atexit, multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
import envfleet
from envfleet.testing import ProbeEnv

# Tests that a shell has put into the background inherit that an interrupt is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
PLACE = Path({place!r})
SLEEP = ["sleep", "1000"]

class Env(ProbeEnv):
    def __init__(self, env_id):
        super().__init__(env_id)
        self.children = [
            subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)]
        pids = {{"child": self.children[0].pid, "child-in-its-own-session": self.children[1].pid}}
        if {arguments!r}["backend"] == "ray":
            script = ["sh", "-c", "sleep 1000 & echo $!; wait"]
            self.children.append(subprocess.Popen(script, stdout=subprocess.PIPE))
            pids["child-of-a-script"] = int(self.children[-1].stdout.readline())
            pids["child-that-close-forgets"] = subprocess.Popen(SLEEP).pid
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            forked.start()
            pids["forked-child-that-close-forgets"] = forked.pid
            pids["actor"] = os.getpid()
        for kind, pid in pids.items():
            began = Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[19]
            (PLACE / f"{{kind}}.pid.{{env_id}}").write_text(f"{{pid}} {{began}}")
        if {during!r} == "start":
            self.wait()

    def wait(self):
        (PLACE / f"waits.{{self.env_id}}").touch()
        while not (PLACE / "go on").exists():
            time.sleep(0.01)

    def step(self, action):
        if action == 1:
            self.wait()
        return super().step(action)

    def close(self):
        for child in self.children:
            child.terminate()
            child.wait()
        with open(PLACE / f"closed.{{self.env_id}}", "a") as log:
            log.write("closed ")

constructors = [lambda i=i: Env(i) for i in range({num_envs})]
env = envfleet.ParallelPyEnvironment(constructors, **{arguments!r})
env.reset()
env.step([0] * {num_envs})
atexit.register((PLACE / "leaving").touch)  # the last hook runs first
{last}
"""


class End(NamedTuple):
    """A way for a program to end.

    Attributes:
      last: its last line.
      returncode: what it has to end with; None is any but 0, for Ray has ways of its own there.
      signum: what it is sent, once the environments wait.
      during: where the environments wait, ``step`` or ``start``.
      hangs: whether they go on waiting; else until the program has begun to leave.
      closes: whether the environments' `close` can be called.
      says: the last that it prints.
      num_envs: how many there are.
    """

    last: str
    returncode: int | None
    signum: int = 0
    during: str = "step"
    hangs: bool = False
    closes: bool = True
    says: str = ""
    num_envs: int = 2


STEP = "env.step([1] * env.batch_size)"
INTERRUPTED = End(STEP, None, signal.SIGINT, says="\nKeyboardInterrupt", num_envs=4)
ENDS = {
    "return": End("", 0),
    "exception": End("raise KeyError('arm')", 1, says="\nKeyError: 'arm'"),
    "sys.exit": End("sys.exit(3)", 3),
    "interrupt-in-a-step": INTERRUPTED,
    "interrupt-in-a-hang": INTERRUPTED._replace(hangs=True, closes=False),
    "interrupt-in-a-start": INTERRUPTED._replace(hangs=True, closes=False, during="start"),
    "SIGTERM": End(STEP, None, signal.SIGTERM),
    "SIGKILL": End(STEP, None, signal.SIGKILL, hangs=True, closes=False),
}
CASES = [
    *(("own-ray", end) for end in ENDS),
    *(("shared-ray", end) for end in ("return", "interrupt-in-a-step", "SIGTERM", "SIGKILL")),
    # Nothing but the caller is there to end what `close` forgets, or after a signal.
    *(("local", end) for end in ("return", "exception", "sys.exit", "interrupt-in-a-step")),
]
CLOSED = ["child", "child-in-its-own-session"]
FORGOTTEN = [
    "actor",
    "child-that-close-forgets",
    "forked-child-that-close-forgets",
    "child-of-a-script",
]


class Ended(NamedTuple):
    """A program that has ended.

    Attributes:
      end: how.
      place: where its output is, and what its environments wrote.
      returncode: what it ended with.
      mark: an environment variable's value, of all processes that the program itself started.
      until: when everything of it must have vanished.
    """

    end: End
    place: Path
    returncode: int
    mark: str
    until: float

    @property
    def stderr(self) -> str:
        return (self.place / "stderr").read_text()

    def processes(self, kind: str) -> list[Process]:
        """Those that the environments were in, or that they started, by kind."""
        texts = [path.read_text().split() for path in self.place.glob(f"{kind}.pid.*")]
        return [Process(int(pid), began) for pid, began in texts]


def run_to_its_end(end: End, place: Path, mark: str, arguments: dict[str, Any]) -> Ended:
    text = PROGRAM.format(place=str(place), arguments=arguments, **end._asdict())
    (place / "program.py").write_text(text)
    with open(place / "stdout", "w") as stdout, open(place / "stderr", "w") as stderr:
        program = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=place,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "MARK_OF_THE_TEST": mark},
        )

    at_once = 1 if arguments["backend"] == "local" else end.num_envs

    def all_wait() -> bool:
        return len(list(place.glob("waits.*"))) == at_once

    try:
        if end.signum:
            wait_for(lambda: all_wait() or program.poll() is not None, time.monotonic() + 60)
            assert all_wait(), (place / "stderr").read_text()
            # A terminal's Ctrl-C goes to every process in the foreground.
            send = os.killpg if end.signum == signal.SIGINT else os.kill
            send(program.pid, end.signum)
            if not end.hangs:
                wait_for((place / "leaving").exists, time.monotonic() + 60)
                (place / "go on").touch()
        returncode = program.wait(60)
    finally:
        program.kill()
        program.wait()
    return Ended(end, place, returncode, mark, time.monotonic() + GONE_AFTER)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def ended(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Ended]:
    where, name = request.param
    arguments: dict[str, Any] = {"backend": "local" if where == "local" else "ray"}
    if ENDS[name].hangs:
        arguments["close_timeout"] = 1.0
    if where == "own-ray":
        arguments["ray_init"] = QUIET
    elif where == "shared-ray":
        address = request.getfixturevalue("shared_ray")
        arguments["ray_init"] = {"address": address, "logging_level": "ERROR"}
    place, mark = tmp_path_factory.mktemp(f"{where}-{name}"), uuid.uuid4().hex
    try:
        yield run_to_its_end(ENDS[name], place, mark, arguments)
    finally:
        kill(marked(mark))
        left = Ended(ENDS[name], place, 0, mark, 0.0)
        kill([process for kind in CLOSED + FORGOTTEN for process in left.processes(kind)])


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(
    num_cpus=4, include_dashboard=False, object_store_memory=100_000_000))
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[str]:
    """The address of a Ray that was there before, and that others use too."""
    mark = uuid.uuid4().hex
    # In a place of its own, or every `ray.init()` on this machine would find it.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        helper = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_TMPDIR": place, "MARK_OF_THE_TEST": mark},
        )
        try:
            lines = iter(helper.stdout.readline, "")
            yield next(line.split()[1] for line in lines if line.startswith("address"))
            helper.stdin.close()
            helper.wait(30)
        finally:
            kill(marked(mark))
            helper.wait(30)


def test_program_ends_as_it_would_without_a_batch(ended):
    expected, found = ended.end.returncode, ended.returncode
    assert found == expected or (expected is None and found != 0), ended.stderr
    assert ended.stderr.rstrip().endswith(ended.end.says)


@pytest.mark.parametrize("kind", CLOSED + FORGOTTEN)
def test_nothing_that_environments_started_outlives_the_program(kind, ended):
    processes = ended.processes(kind)
    local = kind in FORGOTTEN and ended.place.name.startswith("local")
    assert len(processes) == (0 if local else ended.end.num_envs), ended.stderr
    assert not still_running(processes, ended.until)


def test_nothing_that_the_program_started_outlives_it(ended):
    """A Ray of ours among that, whose own processes take a while to notice a SIGKILL."""
    if ended.end.signum != signal.SIGKILL:
        wait_for(lambda: not marked(ended.mark), ended.until)
        assert not marked(ended.mark)


def test_environments_are_closed_once_where_the_caller_still_could(ended):
    logs = [path.read_text() for path in ended.place.glob("closed.*")]
    if ended.end.closes:
        assert logs == ["closed "] * ended.end.num_envs, ended.stderr
    else:
        assert set(logs) <= {"closed "}


def test_interrupt_prints_one_traceback(ended):
    if ended.end.signum == signal.SIGINT:
        assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr


# -- a Ray that others use too ---------------------------------------------------------------------

RECONNECT = """
import ray, envfleet
from envfleet.testing import ProbeEnv

arguments = {arguments!r}
if {by!r} == "user":
    ray.init(**arguments)
old = envfleet.ParallelPyEnvironment([ProbeEnv], ray_init=arguments)
old.reset()
one = envfleet.ActorPyEnvironment(ProbeEnv)
one.start()
one.reset()
promise = one.step(1, blocking=False)
ray.shutdown()
ray.init(**arguments)
new = envfleet.ParallelPyEnvironment([ProbeEnv])
new.reset()
for use in (promise, lambda: old.step([1]), old.reset, lambda: old.get_attr("env_id")):
    try:
        use()
    except envfleet.EnvFleetError as error:
        assert any(words in str(error) for words in {words!r}), error
    else:
        raise SystemExit("an old batch was of use")
old.close()
one.close()
assert new.step([4]).observation["action"].tolist() == [4]
new.close()
assert ray.is_initialized(), "the user's own was shut down"
try:
    new.step([1])
except envfleet.ClosedError:
    print("all as it should be")
"""


@pytest.mark.parametrize(
    ("where", "by"),
    [("own-ray", "envfleet"), ("shared-ray", "user"), ("shared-ray", "envfleet")],
)
def test_batch_of_a_connection_that_was_shut_down_is_refused_and_leaves_the_new_one_alone(
    where, by, request, tmp_path
):
    arguments: dict[str, Any] = QUIET
    if where == "shared-ray":
        address = request.getfixturevalue("shared_ray")
        arguments = {"address": address, "logging_level": "ERROR"}
    words = ["was shut down", "reset() rebuilds"]
    script = tmp_path / "script.py"
    script.write_text(RECONNECT.format(arguments=arguments, by=by, words=words))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "all as it should be" in done.stdout


class Placed(ProbeEnv):
    """Tells its process."""

    def process(self) -> Process:
        return Process(os.getpid(), status(os.getpid())[19])


def placed(env_id: int) -> Callable[[], Placed]:
    return lambda: Placed(env_id)


def trained(batch: ParallelPyEnvironment) -> list[Process]:
    """Steps a batch of two, checks what it gives; gives the processes of its environments."""
    oracle = ProbeOracle([3, 3])
    oracle.reset()
    oracle.check(batch.reset())
    for t in range(5):
        oracle.step([t, t + 1])
        oracle.check(batch.step([t, t + 1]))
    return batch.call("process")


def make_placed() -> ParallelPyEnvironment:
    return ParallelPyEnvironment([placed(0), placed(1)])


@ray.remote(max_retries=0)
def task(end: str, log: Path) -> None:
    batch = make_placed()
    processes = trained(batch)
    log.write_text("\n".join(f"{pid} {began}" for pid, began in processes))
    if end == "closed":
        batch.close()
    elif end == "raises":
        raise KeyError("arm")
    elif end == "killed":
        faults.sigkill()


@ray.remote
class Trainer:
    """An actor of a user's that holds a batch."""

    def __init__(self, log: Path) -> None:
        self.batch = make_placed()
        self.log = log

    def train(self, end: str) -> None:
        processes = trained(self.batch)
        self.log.write_text("\n".join(f"{pid} {began}" for pid, began in processes))
        if end == "closed":
            self.batch.close()
        elif end == "killed":
            faults.sigkill()


@pytest.mark.parametrize(
    ("inside", "end"),
    [
        *(("task", end) for end in ("closed", "left open", "raises", "killed")),
        *(("actor", end) for end in ("closed", "left open", "killed")),
    ],
)
def test_batch_works_inside_a_task_or_an_actor_and_ends_with_it(inside, end, on_ray, tmp_path):
    log = tmp_path / "processes"
    if inside == "task":
        ref = task.remote(end, log)
    else:
        trainer = Trainer.remote(log)
        ref = trainer.train.remote(end)
    ending = {
        "raises": pytest.raises(KeyError),
        "killed": pytest.raises(ray.exceptions.RayError),
    }
    with ending.get(end, contextlib.nullcontext()):
        ray.get(ref, timeout=60)
    processes = [Process(int(pid), began) for pid, began in map(str.split, log.open())]
    assert len(processes) == 2
    if inside == "actor":
        assert end != "left open" or all(process.runs() for process in processes)
        del trainer
    assert not still_running(processes, time.monotonic() + GONE_AFTER)


@ray.remote
class Counter:
    """An actor of the user's."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> tuple[int, int]:
        self.count += 1
        return self.count, os.getpid()


def test_actors_objects_and_tasks_of_the_user_are_not_touched(on_ray):
    counter = Counter.remote()
    _, pid = ray.get(counter.add.remote())
    array = ray.put(np.arange(100_000))
    for fault in (faults.key_error, faults.sigkill, faults.hang):
        constructors = [ProbeEnv, lambda fault=fault: FaultyEnv(fault)]
        batch = ParallelPyEnvironment(constructors, step_timeout=0.5)
        batch.reset()
        with pytest.raises((KeyError, EnvFleetError)):
            batch.step([0, 0])
        batch.reset()
        batch.close()
    with pytest.raises(KeyError):
        ParallelPyEnvironment([ProbeEnv, faults.Constructor(faults.key_error, "construct")])
    ParallelPyEnvironment([ProbeEnv])  # nobody holds it
    assert ray.get(counter.add.remote(), timeout=10) == (2, pid)
    assert ray.get(array, timeout=10).sum() == 4_999_950_000


def test_two_batches_of_one_process_do_not_meet(make_batch):
    constructors = [lambda i=i: ProbeEnv(i, 2 + i) for i in range(2)]
    oracles = [ProbeOracle([2, 3]) for _ in range(2)]
    with make_batch(constructors) as first, make_batch(constructors) as second:
        batches = [first, second]
        for batch, oracle in zip(batches, oracles, strict=True):
            oracle.reset()
            oracle.check(batch.reset())
        for t in range(6):
            for k in (0, 1, 1):  # the second goes twice as fast
                oracles[k].step([t + k, t])
                oracles[k].check(batches[k].step([t + k, t]))
                oracles[1 - k].check(batches[1 - k].current_time_step())
        first.close()
        oracles[1].step([7, 8])
        oracles[1].check(second.step([7, 8]))
