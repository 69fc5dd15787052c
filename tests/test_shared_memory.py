"""The lane of shared memory: what only it has. What a batch does is tested by either transport."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dm_env
import numpy as np
import pytest
from dm_env import specs
from process_table import Process, kill, marked, still_running, wait_for

from envfleet import ActorDied, EnvTimeout, FleetStartError, ParallelPyEnvironment
from envfleet.actor import EnvActor
from envfleet.channels.lane import ActorEnd, CallerEnd, Memory
from envfleet.testing import ProbeEnv

pytestmark = pytest.mark.usefixtures("on_ray")


def by_lane(constructors, **options):
    return ParallelPyEnvironment(constructors, transport="shared_memory", **options)


class Telling(dm_env.Environment):
    """Says where it runs; observes, and takes, strings as long as it is told."""

    def observation_spec(self):
        return {"text": specs.StringArray(()), "image": specs.Array((50, 50), np.uint8)}

    def action_spec(self):
        return specs.StringArray(())

    def reset(self):
        return dm_env.restart(self._observed(""))

    def step(self, action):
        return dm_env.transition(float(len(str(action))), self._observed(str(action)))

    def _observed(self, text):
        return {"text": text, "image": np.full((50, 50), len(text) % 251, np.uint8)}

    def pid(self):
        return os.getpid()

    def is_on_main_thread(self):
        return threading.current_thread() is threading.main_thread()


class OnMainThread(ProbeEnv):
    def step(self, action):
        assert threading.current_thread() is threading.main_thread()
        return super().step(action)


class Careless(ProbeEnv):
    """Closes what is not its own, as a simulator does that makes a daemon of itself."""

    def step(self, action):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                peer = socket.socket(fileno=os.dup(fd)).getsockname()
                if b"envfleet-" in (peer if isinstance(peer, bytes) else b""):
                    os.close(fd)
        return super().step(action)


def test_the_log_says_once_how_many_actors_use_which(caplog):
    caplog.set_level(logging.INFO, "envfleet")
    with by_lane([ProbeEnv] * 3, envs_per_actor=2) as batch:
        batch.reset()
        batch.step([0, 0, 0])
        assert [one.transport for one in batch.actors] == ["shared_memory"] * 2
    told = [words for words in caplog.messages if "shared memory" in words]
    assert told == ["2 of 2 actors are stepped by shared memory, 0 by remote calls"]


def test_environments_run_on_the_main_thread():
    with by_lane([OnMainThread]) as batch:
        batch.reset()
        batch.step([0])


@pytest.mark.parametrize("size", [1, 60_000, 1_000_000])
def test_what_is_no_plain_array_goes_beside_the_block_whatever_its_size(size):
    texts = ["a" * size, "b" * (size + 1)]
    with by_lane([Telling] * 2) as batch:
        batch.reset()
        for _ in range(3):
            step = batch.step(np.array(texts, object))
            assert step.observation["text"].tolist() == texts
            assert step.reward.tolist() == [size, size + 1]
            assert step.observation["image"][:, 0, 0].tolist() == [size % 251, (size + 1) % 251]


def test_exception_larger_than_a_message_arrives_whole():
    words = "x" * 500_000

    class Wordy(ProbeEnv):
        def step(self, action):
            raise ValueError(words)

    with by_lane([ProbeEnv, Wordy]) as batch:
        batch.reset()
        with pytest.raises(ValueError, match="xxx") as caught:
            batch.step([0, 0])
        assert caught.value.args == (words,)


def test_other_calls_and_steps_go_in_the_order_of_posting():
    with by_lane([ProbeEnv] * 2, envs_per_actor=2) as batch:
        batch.reset()
        for n in range(5):
            batch.step([n, n])
            assert batch.call("observation_spec")
            batch.send([n, n])
            batch.drain()
        assert batch.current_time_step().step_type.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("end", "error"), [(signal.SIGKILL, ActorDied), (signal.SIGSTOP, EnvTimeout)]
)
def test_end_of_an_actor_between_steps_is_seen_by_the_next(end, error):
    with by_lane([Telling] * 2, step_timeout=2.0) as batch:
        batch.reset()
        batch.step(np.array(["a", "b"], object))
        os.kill(batch.actors[1].pid, end)
        began = time.monotonic()
        with pytest.raises(error, match="env 1 of 2"):
            batch.step(np.array(["a", "b"], object))
        assert time.monotonic() - began < 10
        batch.reset()
        batch.step(np.array(["a", "b"], object))
        assert [one.transport for one in batch.actors] == ["shared_memory"] * 2


def test_connection_that_an_environment_closes_costs_its_actor_and_no_more():
    with by_lane([ProbeEnv, Careless], step_timeout=30.0) as batch:
        batch.reset()
        with pytest.raises(ActorDied, match="in its process closed the connection"):
            batch.step([0, 0])
        batch.reset()


class Wide(ProbeEnv):
    def observation_spec(self):
        return specs.Array((50_000_000,), np.uint8)


def test_memory_that_is_not_there_is_an_error_that_says_how_much_was_needed():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, before[1]))  # (Python ignores SIGXFSZ)
    try:
        with pytest.raises(FleetStartError, match=r"^100,\d{3},\d{3} bytes of shared memory are"):
            by_lane([Wide] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_only_the_same_user_gets_in():
    end, actor = ActorEnd(), EnvActor([0])
    serving = threading.Thread(target=end.serve, args=(actor,))
    with pytest.raises(PermissionError, match="another process than 1 answers"):
        CallerEnd(end.name, pid=1)
    if os.getuid() != 0:
        pytest.skip("takes another user")
    script = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "one.connect('\\0' + sys.argv[1])\n"
        "print(len(one.recv(1)))\n"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", script, end.name[1:]], stdout=subprocess.PIPE, text=True
    )
    serving.start()
    assert stranger.communicate(timeout=20)[0] == "0\n"  # hung up on
    assert serving.is_alive()
    caller = CallerEnd(end.name, os.getpid())
    caller.grant(Memory({0: (8, 0)}), 0)
    caller.leave()
    serving.join(20)
    assert not serving.is_alive()


# -- nothing is left -------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import numpy as np
import envfleet
from envfleet.testing import ProbeEnv

batch = envfleet.ParallelPyEnvironment(
    [ProbeEnv] * 4, envs_per_actor=2, transport="shared_memory", on_failure="restart",
    step_timeout=5.0, max_restarts=50, ray_init={ray_init!r})
batch.reset()
print(*(one.pid for one in batch.actors), flush=True)
while True:
    batch.step(np.zeros(4, np.int64))
"""

QUIET = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "object_store_memory": 100_000_000,
    "logging_level": "ERROR",
    "log_to_driver": False,
}


@contextlib.contextmanager
def running(script: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], str]]:
    """A program that steps; its actors' pids, and a mark that all of its processes bear."""
    mark = f"ENVFLEET_TEST={uuid.uuid4().hex}"
    name, value = mark.split("=")
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value},
    )
    assert program.stdout is not None
    try:
        yield program, [int(pid) for pid in program.stdout.readline().split()], mark
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
        kill(marked(mark))


def ours(mark: str) -> list[Process]:
    """All processes but Ray's own agents, which take half a minute to notice that Ray has gone."""
    return [process for process in marked(mark) if not is_an_agent(process)]


def is_an_agent(process: Process) -> bool:
    try:
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return False
    return re.match(r"ray::\w+Agent", command) is not None


def in_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("victim", ["caller", "actor and caller", "actor, then caller"])
def test_killed_at_random_it_leaves_nothing_behind(victim, tmp_path):
    before, chance = in_shared_memory(), random.Random(victim)
    script = tmp_path / "stepping.py"
    script.write_text(PROGRAM.format(ray_init=QUIET))
    with running(script) as (program, pids, mark):
        assert len(pids) == 2
        time.sleep(chance.uniform(0.0, 2.0))
        everything = ours(mark)
        if "actor" in victim:
            os.kill(chance.choice(pids), signal.SIGKILL)
        if "then" in victim:  # while its place is taken
            time.sleep(chance.uniform(0.0, 1.5))
        assert program.poll() is None
        everything += ours(mark)
        program.kill()
        program.wait()
        assert len(everything) > 4
        assert not still_running(everything, time.monotonic() + 20)
        assert not ours(mark)
    wait_for(lambda: in_shared_memory() <= before, time.monotonic() + 10)
    assert in_shared_memory() <= before
