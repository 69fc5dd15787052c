"""First-ready stepping: `async_reset`, `send`, `recv`, `drain`."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dm_env
import faults
import numpy as np
import pytest

from envfleet import (
    ActorDied,
    EnvBusy,
    EnvTimeout,
    InvalidAction,
    ParallelPyEnvironment,
    ResetNeeded,
)
from envfleet.testing import DelayEnv, ProbeEnv

FIRST, MID, LAST = 0, 1, 2


class Gated(ProbeEnv):
    """Whose steps and resets wait until a file of its name is there, which they remove."""

    def __init__(self, directory: Path, env_id: int) -> None:
        super().__init__(env_id)
        self.gate = directory / str(env_id)

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while not self.gate.exists():
            assert time.monotonic() < deadline, "nobody opens the gate"
            time.sleep(0.002)
        self.gate.unlink()

    def reset(self) -> Any:
        self._wait()
        return super().reset()

    def step(self, action: Any) -> Any:
        self._wait()
        return super().step(action)


def probes(number: int) -> list[Any]:
    return [functools.partial(ProbeEnv, i) for i in range(number)]


@pytest.fixture
def gates(tmp_path):
    """Opens the gates of environments."""

    def open_for(*env_ids: int) -> None:
        for i in env_ids:
            assert not (tmp_path / str(i)).exists()
            (tmp_path / str(i)).touch()

    return open_for


@pytest.fixture
def gated(on_ray, tmp_path):
    """A batch of four gated environments, one for each actor."""
    with ParallelPyEnvironment(
        [functools.partial(Gated, tmp_path, i) for i in range(4)], close_timeout=20
    ) as batch:
        yield batch
        for i in range(4):  # nothing waits in vain at the end
            (tmp_path / str(i)).touch()


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("envs_per_actor", [1, 2, 3, 5])
def test_drained_first_ready_gives_what_lockstep_gives(make_batch, backend, envs_per_actor):
    import gymnasium

    def make() -> ParallelPyEnvironment:
        return make_batch(
            [lambda: gymnasium.make("CartPole-v1")] * 5, seed=3, envs_per_actor=envs_per_actor
        )

    random = np.random.default_rng(0)
    actions = random.integers(0, 2, (60, 5))
    with ParallelPyEnvironment(
        lambda: gymnasium.make("CartPole-v1"), num_envs=5, seed=3, backend="local"
    ) as lockstep:
        expected = [lockstep.reset(), *(lockstep.step(action) for action in actions)]
    with make() as batch:
        batch.async_reset()
        found = [batch.drain()]
        for action in actions:
            order = random.permutation(5)
            for part in np.array_split(order, random.integers(1, 4)):
                batch.send(action[part], part)
            found.append(batch.drain())
    for (time_step, env_ids), wanted in zip(found, expected, strict=True):
        assert env_ids.tolist() == [0, 1, 2, 3, 4]
        for mine, theirs in zip(time_step, wanted, strict=True):
            assert np.array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype


@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_every_environment_goes_on_from_where_it_is(make_batch, envs_per_actor):
    """Whatever lands when, each one's time steps are those of its own actions, in order."""
    with make_batch(probes(7), envs_per_actor=envs_per_actor) as batch:
        batch.async_reset()
        sent = dict.fromkeys(range(7), -1)
        seen = dict.fromkeys(range(7), (-1, 0))
        for n in range(60):
            time_step, env_ids = batch.recv(min_envs=1 + n % 5)
            assert len(env_ids) >= 1 + n % 5
            assert len(set(env_ids.tolist())) == len(env_ids)
            for row, i in enumerate(env_ids.tolist()):
                episode, step = seen[i]
                kind = time_step.step_type[row]
                episode, step = (episode + 1, 0) if kind == FIRST else (episode, step + 1)
                observation = {name: leaf[row] for name, leaf in time_step.observation.items()}
                assert observation["env"] == i
                assert (observation["episode"], observation["step"]) == (episode, step)
                assert observation["action"] == (-1 if kind == FIRST else sent[i])
                assert (kind == LAST) == (step == 3)
                seen[i] = episode, step
                sent[i] = 100 * n + i
            batch.send([sent[i] for i in env_ids.tolist()], env_ids)
        time_step, env_ids = batch.drain()
        assert env_ids.tolist() == list(range(7))
        assert np.array_equal(
            batch.current_time_step().observation["step"], time_step.observation["step"]
        )


def test_results_are_fresh_arrays_of_the_callers(make_batch):
    with make_batch(probes(3), envs_per_actor=2) as batch:
        batch.async_reset()
        time_step, env_ids = batch.drain()
        assert env_ids.dtype == np.int64
        for leaf in (time_step.reward, *time_step.observation.values()):
            assert leaf.flags.writeable
            assert leaf.flags.c_contiguous
            assert leaf.base is None
        time_step.observation["image"][...] = 99
        assert (batch.current_time_step().observation["image"] != 99).all()


def test_recv_takes_those_that_are_done_and_leaves_the_slow_ones(gated, gates):
    gated.async_reset()
    gates(2)
    time_step, env_ids = gated.recv()
    assert env_ids.tolist() == [2]
    assert time_step.observation["env"].tolist() == [2]
    gated.send([7], [2])
    gates(2, 0)
    time_step, env_ids = gated.recv(min_envs=2)
    assert env_ids.tolist() == [0, 2]
    assert time_step.observation["step"].tolist() == [0, 1]
    gates(1, 3)
    assert gated.drain()[1].tolist() == [1, 3]


def test_environments_of_one_actor_that_are_sent_together_land_together(on_ray, tmp_path, gates):
    constructors = [functools.partial(Gated, tmp_path, i) for i in range(4)]
    with ParallelPyEnvironment(constructors, envs_per_actor=2) as batch:
        batch.async_reset()
        gates(2, 3)
        assert batch.recv()[1].tolist() == [2, 3]
        gates(0, 1)
        assert batch.drain()[1].tolist() == [0, 1]


def test_actions_go_to_the_environments_they_are_sent_to(make_batch):
    with make_batch(probes(5), envs_per_actor=2) as batch:
        batch.reset()
        batch.send([40, 10, 30], [4, 1, 3])
        time_step, env_ids = batch.drain()
        assert env_ids.tolist() == [1, 3, 4]
        assert time_step.observation["action"].tolist() == [10, 30, 40]


def test_strings_travel_too(make_batch):
    from test_faults import TextEnv

    with make_batch(
        [functools.partial(TextEnv, f"text {i}") for i in range(3)], envs_per_actor=2
    ) as batch:
        whole = batch.reset()
        batch.async_reset([0, 2])
        time_step, _ = batch.drain()
        assert time_step.observation.tolist() == [whole.observation[i] for i in (0, 2)]


# -- deadlines and bounds --------------------------------------------------------------------------


def test_recv_with_a_timeout_gives_what_there_is_and_loses_nothing(gated, gates):
    gated.async_reset()
    time_step, env_ids = gated.recv(timeout=0.01)
    assert env_ids.shape == (0,)
    assert time_step.observation["image"].shape == (0, 2, 3)
    gates(1)
    deadline = time.monotonic() + 30
    found: list[int] = []
    while not found and time.monotonic() < deadline:
        found = gated.recv(min_envs=3, timeout=0.05)[1].tolist()
    assert found == [1]
    gates(0, 2, 3)
    assert gated.drain()[1].tolist() == [0, 2, 3]


def test_recv_with_no_time_at_all_gives_what_has_landed(make_batch):
    with make_batch(probes(2)) as batch:
        batch.async_reset()
        deadline, found = time.monotonic() + 30, set()
        while len(found) < 2 and time.monotonic() < deadline:
            found.update(batch.recv(timeout=0)[1].tolist())
        assert found == {0, 1}


def test_recv_of_more_than_are_under_way_is_an_error(gated, gates):
    with pytest.raises(ValueError, match=r"recv\(min_envs=1\), but 0 of 4 environments"):
        gated.recv()
    gated.async_reset([0, 1])
    with pytest.raises(ValueError, match=r"recv\(min_envs=3\), but 2 of 4 environments"):
        gated.recv(min_envs=3)
    gates(0, 1)
    assert gated.recv(min_envs=2)[1].tolist() == [0, 1]


def test_slow_environment_comes_back_within_max_staleness(on_ray, tmp_path, gates):
    constructors = [functools.partial(Gated, tmp_path, 0), *probes(3)[1:]]
    with ParallelPyEnvironment(constructors, max_staleness=3) as batch:
        batch.async_reset()
        for _ in range(2):
            env_ids = batch.recv(min_envs=2)[1]
            assert env_ids.tolist() == [1, 2]
            batch.send([0, 0], env_ids)
        assert 0 not in batch.recv(min_envs=2, timeout=1.0)[1]  # the third waits for it
        gates(0)
        assert 0 in batch.recv(min_envs=1)[1]
        batch.drain()


def test_without_a_bound_a_slow_environment_is_not_waited_for(gated, gates):
    gated.async_reset()
    gates(1)
    for _ in range(8):
        env_ids = gated.recv()[1]
        assert env_ids.tolist() == [1]
        gated.send([0], env_ids)
        gates(1)
    gates(0, 2, 3)
    gated.drain()


def test_deadline_of_a_step_holds(on_ray, tmp_path):
    constructors = [functools.partial(Gated, tmp_path, 0), *probes(3)[1:]]
    with ParallelPyEnvironment(constructors, step_timeout=1.0, reset_timeout=30.0) as batch:
        (tmp_path / "0").touch()
        batch.reset()
        batch.send([0, 0, 0])
        env_ids = batch.recv(min_envs=2)[1]
        assert env_ids.tolist() == [1, 2]
        with pytest.raises(EnvTimeout, match=r"env 0 of 3 did not finish step\(\) in 1.0 s"):
            batch.recv()
        assert batch.drain()[1].tolist() == []


# -- misuse ----------------------------------------------------------------------------------------


def test_send_to_one_that_is_under_way_names_it(gated, gates):
    gated.async_reset()
    gates(0)
    assert gated.recv()[1].tolist() == [0]
    with pytest.raises(EnvBusy, match=r"send\(\) of envs 1, 3 of 4, still under way"):
        gated.send([0, 0, 0], [0, 1, 3])
    with pytest.raises(EnvBusy, match=r"async_reset\(\) of env 2 of 4"):
        gated.async_reset([2])
    gated.send([5], [0])  # none of the above has moved it
    gates(0, 1, 2, 3)
    time_step, _ = gated.drain()
    assert time_step.observation["step"].tolist() == [1, 0, 0, 0]


def test_lockstep_step_while_some_are_under_way_says_so(make_batch):
    with make_batch(probes(3)) as batch:
        batch.async_reset([1])
        with pytest.raises(EnvBusy, match=r"step\(\) while env 1 of 3 .* drain\(\)"):
            batch.step([0, 0, 0])
        batch.drain()
        assert batch.step([0, 0, 0]).step_type.tolist() == [FIRST, MID, FIRST]


@pytest.mark.parametrize(
    ("actions", "env_ids", "error", "words"),
    [
        ([1, 2], [0], InvalidAction, r"leading axis 2, expected len\(env_ids\) 1"),
        ([1], [3], IndexError, "env_ids has 3, expected 0 to 2"),
        ([1, 1], [2, 2], ValueError, "twice"),
        ([0.5], [1], InvalidAction, "float64"),
    ],
)
def test_wrong_send_moves_nothing(actions, env_ids, error, words, make_batch):
    with make_batch(probes(3)) as batch:
        batch.reset()
        with pytest.raises(error, match=words):
            batch.send(actions, env_ids)
        assert batch.step([0, 0, 0]).observation["step"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda batch: batch.recv(min_envs=0), ValueError, "min_envs is 0"),
        (lambda batch: batch.recv(min_envs=1.5), TypeError, "min_envs is 1.5"),
        (lambda batch: batch.recv(timeout=-1), ValueError, "timeout is -1"),
    ],
)
def test_wrong_recv_says_what_is_wrong(call, error, words, make_batch):
    with make_batch(probes(2)) as batch:
        batch.async_reset()
        with pytest.raises(error, match=words):
            call(batch)
        assert len(batch.drain()[1]) == 2


def test_max_staleness_is_a_positive_number(backend):
    with pytest.raises(ValueError, match="max_staleness is 0"):
        ParallelPyEnvironment(probes(1), backend="local", max_staleness=0)


# -- lockstep and back -----------------------------------------------------------------------------


def test_reset_is_legal_at_any_time_and_drops_what_is_under_way(make_batch):
    with make_batch(probes(4), envs_per_actor=2) as batch:
        batch.async_reset()
        env_ids = batch.recv(min_envs=2)[1]
        batch.send(np.zeros(len(env_ids), int), env_ids)
        time_step = batch.reset()
        assert time_step.step_type.tolist() == [FIRST] * 4
        assert len(batch.drain()[1]) == 0
        assert batch.step([0] * 4).observation["step"].tolist() == [1] * 4


def test_reset_of_some_needs_the_others_at_rest(make_batch):
    with make_batch(probes(3)) as batch:
        batch.async_reset()
        with pytest.raises(EnvBusy, match=r"reset\(\) without envs 1, 2 of 3, still under way"):
            batch.reset([0])
        batch.drain()
        batch.send([0], [2])
        with pytest.raises(EnvBusy, match=r"reset\(\) without env 2 of 3, still under way"):
            batch.reset([0])
        assert batch.drain()[0].observation["step"].tolist() == [1]
        batch.send([0, 0], [0, 1])
        time_step = batch.reset([0, 1])
        assert time_step.observation["step"].tolist() == [0, 0, 1]


def test_calls_to_one_that_is_under_way_come_after_its_step(make_batch):
    with make_batch(probes(2)) as batch:
        batch.reset()
        batch.send([0, 0])
        assert batch.call("add", 5) == [5, 6]
        assert batch.get_attr("env_id") == [0, 1]
        assert [info["episode"] for info in batch.get_info()] == [0, 0]
        with pytest.raises(EnvBusy, match=r"set_state\(\) of envs 0, 1 of 2"):
            batch.set_state([(0, 0)] * 2)
        assert batch.drain()[0].observation["step"].tolist() == [1, 1]


def test_close_while_some_are_under_way(make_batch):
    batch = make_batch(probes(3))
    batch.async_reset()
    batch.close()


# -- failures --------------------------------------------------------------------------------------


def failing_second(fault: Any, phase: str, **kwargs: Any) -> list[Any]:
    return [
        functools.partial(ProbeEnv, 0),
        faults.Constructor(fault, phase, env_id=1, **kwargs),
        functools.partial(ProbeEnv, 2),
    ]


@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_failure_is_raised_once_and_the_others_come_with_the_next_call(make_batch, envs_per_actor):
    with make_batch(
        failing_second(faults.key_error, "step"), envs_per_actor=envs_per_actor
    ) as batch:
        batch.async_reset()
        batch.drain()
        batch.send([7, 7, 7])
        with pytest.raises(KeyError) as caught:
            batch.drain()
        assert caught.value.env_failures[0].index == 1
        time_step, env_ids = batch.drain()
        assert env_ids.tolist() == [0, 2]
        assert time_step.observation["action"].tolist() == [7, 7]
        with pytest.raises(ResetNeeded, match=r"send\(\) refused, since env 1 failed in step"):
            batch.send([1], [1])
        batch.send([8, 8], [0, 2])  # the others go on
        batch.async_reset([1])
        time_step, env_ids = batch.drain()
        assert env_ids.tolist() == [0, 1, 2]
        assert time_step.observation["step"].tolist() == [2, 0, 2]


def test_reset_that_is_refused_drops_nothing(make_batch):
    with make_batch(failing_second(faults.key_error, "step")) as batch:
        batch.reset()
        batch.send([0], [1])
        with pytest.raises(KeyError):
            batch.drain()
        batch.send([0], [0])
        with pytest.raises(ResetNeeded, match="env 1"):
            batch.reset([0])
        assert batch.drain()[1].tolist() == [0]


@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_failure_in_a_step_is_cut_and_restarted(make_batch, tmp_path, envs_per_actor):
    constructors = failing_second(faults.key_error, "step", after=1, once=str(tmp_path / "once"))
    with make_batch(constructors, on_failure="restart", envs_per_actor=envs_per_actor) as batch:
        batch.async_reset()
        batch.drain()
        batch.send([7, 7, 7])
        before, _ = batch.drain()
        batch.send([8, 8, 8])
        cut, env_ids = batch.drain()
        assert env_ids.tolist() == [0, 1, 2]
        assert cut.step_type.tolist() == [MID, LAST, MID]
        assert (cut.reward[1], cut.discount[1]) == (0, 1)
        assert np.array_equal(cut.observation["step"], [2, before.observation["step"][1], 2])
        batch.send([9, 9, 9])
        time_step, _ = batch.drain()
        assert time_step.step_type.tolist() == [LAST, FIRST, LAST]
        assert time_step.observation["step"].tolist() == [3, 0, 3]
        assert batch.stats().restarts == [0, 1, 0]


@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_failure_in_a_reset_is_restarted_before_it_lands(make_batch, tmp_path, envs_per_actor):
    constructors = failing_second(faults.key_error, "reset", once=str(tmp_path / "once"))
    with make_batch(constructors, on_failure="restart", envs_per_actor=envs_per_actor) as batch:
        batch.async_reset()
        time_step, _ = batch.drain()
        assert time_step.step_type.tolist() == [FIRST] * 3
        batch.send([1, 2, 3])
        assert batch.drain()[0].observation["action"].tolist() == [1, 2, 3]
        assert batch.stats().restarts == [0, 1, 0]


class Pid(ProbeEnv):
    def pid(self) -> int:
        return os.getpid()


def test_dead_actor_is_cut_and_others_do_not_wait_for_its_restart(on_ray):
    class SlowToBuild(Pid):
        def __init__(self, env_id: int) -> None:
            super().__init__(env_id, episode_length=10**6)
            time.sleep(2.0 * (env_id == 1))

    constructors = [functools.partial(SlowToBuild, i) for i in range(2)]
    with ParallelPyEnvironment(constructors, on_failure="restart") as batch:
        batch.reset()
        os.kill(batch.call("pid", env_ids=[1])[0], signal.SIGKILL)
        batch.send([0, 0])
        time_step, env_ids = batch.drain()
        assert time_step.step_type.tolist() == [MID, LAST]
        batch.send([0, 0])
        alone = 0
        while 1 not in (landed := batch.recv())[1]:
            alone += 1
            batch.send([0], [0])
        time_step, env_ids = landed
        assert time_step.step_type[env_ids.tolist().index(1)] == FIRST
        assert alone > 20  # in the time of a start, steps of a millisecond or so
        batch.drain()


def test_dead_actor_is_raised_by_recv(on_ray):
    with ParallelPyEnvironment([functools.partial(Pid, i) for i in range(2)]) as batch:
        batch.reset()
        os.kill(batch.call("pid", env_ids=[1])[0], signal.SIGKILL)
        batch.send([0, 0])
        with pytest.raises(ActorDied, match="env 1 of 2"):
            batch.drain()
        assert batch.drain()[1].tolist() == [0]
        assert batch.reset().step_type.tolist() == [FIRST, FIRST]


def test_failure_that_a_call_has_told_leaves_the_others_to_be_received(on_ray):
    with ParallelPyEnvironment([functools.partial(Pid, i) for i in range(2)]) as batch:
        batch.reset()
        pid = batch.call("pid", env_ids=[1])[0]
        batch.send([0], [0])
        os.kill(pid, signal.SIGKILL)
        batch.send([0], [1])
        with pytest.raises(ActorDied):
            batch.call("add", 1, env_ids=[1])
        with pytest.raises(ValueError, match=r"recv\(min_envs=2\), but 1 of 2"):
            batch.recv(min_envs=2)
        assert batch.recv(min_envs=1)[1].tolist() == [0]


def test_step_that_was_received_is_not_cut_by_what_comes_after(on_ray):
    """A time step that has landed is handed over, though its actor has died since."""
    with ParallelPyEnvironment(
        [functools.partial(Pid, i) for i in range(2)], envs_per_actor=2, on_failure="restart"
    ) as batch:
        batch.reset()
        pid = batch.call("pid", env_ids=[0])[0]
        batch.send([5], [0])
        assert batch.call("add", 1, env_ids=[0]) == [1]  # so its step is done
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied):
            batch.call("add", 1, env_ids=[1])
        time_step, env_ids = batch.drain()
        assert env_ids.tolist() == [0]
        assert time_step.step_type.tolist() == [MID]
        assert time_step.observation["action"].tolist() == [5]
        batch.send([6, 6])
        assert batch.drain()[0].step_type.tolist() == [LAST, LAST]
        batch.send([6, 6])
        assert batch.drain()[0].step_type.tolist() == [FIRST, FIRST]


def test_failed_environment_whose_step_had_landed_is_not_under_way(on_ray):
    """The actor of both dies after the step of one: both have failed, and come back."""
    with ParallelPyEnvironment(
        [functools.partial(Pid, i) for i in range(2)], envs_per_actor=2
    ) as batch:
        batch.reset()
        pid = batch.call("pid", env_ids=[0])[0]
        batch.send([0], [0])
        batch.call("add", 1, env_ids=[0])  # so it is done
        batch.send([0], [1])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match="envs 0, 1 of 2"):
            batch.recv(min_envs=2)
        batch.async_reset([0, 1])
        assert batch.drain()[0].step_type.tolist() == [FIRST, FIRST]


def test_failure_in_the_background_does_not_keep_others_from_being_sent(make_batch, tmp_path):
    lives = faults.Lives(
        tmp_path / "lives", (faults.key_error, "step"), (faults.key_error, "reset")
    )
    with make_batch([lives, *probes(2)], on_failure="restart", max_restarts=1) as batch:
        batch.reset()
        batch.send([0, 0, 0])
        assert batch.drain()[0].step_type.tolist() == [LAST, MID, MID]
        told, deadline = False, time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            batch.send([0, 0], [1, 2])  # whatever has become of env 0
            try:
                batch.drain()
            except KeyError:
                told = True
        assert told
        assert batch.drain()[1].tolist() == [1, 2]


@pytest.mark.parametrize("line", ["take_off", "put"])
def test_interrupt_while_sending_leaves_a_batch_to_reset(make_batch, line, monkeypatch):
    """Ctrl-C between the lines: here it comes from where the next line would begin."""
    from envfleet.actors import Actors
    from envfleet.flights import Flights

    with make_batch(probes(2)) as batch:
        batch.reset()

        def interrupted(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            raise KeyboardInterrupt

        owner, name = (Flights, "take_off") if line == "take_off" else (Actors, "send")
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.send([0, 0])
        monkeypatch.undo()
        with pytest.raises(ResetNeeded, match="interrupt"):
            batch.drain()
        for _ in range(2):
            assert batch.reset().step_type.tolist() == [FIRST, FIRST]
        assert batch.step([0, 0]).observation["step"].tolist() == [1, 1]


def test_crash_loop_is_raised_and_the_others_go_on(make_batch):
    constructors = failing_second(faults.key_error, "step")
    with make_batch(constructors, on_failure="restart", max_restarts=1) as batch:
        batch.reset()
        steps = 0

        def until_it_is_given_up() -> None:
            nonlocal steps
            while steps < 20:
                batch.send([0, 0, 0])
                batch.drain()
                steps += 1

        with pytest.raises(KeyError) as caught:
            until_it_is_given_up()
        assert [failure.index for failure in caught.value.env_failures] == [1, 1]
        assert steps == 2  # its truncation, its new start
        assert batch.drain()[1].tolist() == [0, 2]
        batch.send([0, 0], [0, 2])
        assert batch.drain()[1].tolist() == [0, 2]


def test_interrupt_in_recv_leaves_a_batch_to_reset(gated, tmp_path):
    gated.async_reset()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        gated.recv()
    timer.join()
    with pytest.raises(ResetNeeded, match=r"recv\(\) after an interrupt"):
        gated.recv()
    with pytest.raises(ResetNeeded, match=r"send\(\) after an interrupt"):
        gated.send([0], [0])
    enough = threading.Event()

    def keep_open() -> None:
        while not enough.wait(0.01):
            for i in range(4):
                (tmp_path / str(i)).touch()

    doorman = threading.Thread(target=keep_open)
    doorman.start()
    try:
        assert gated.reset().step_type.tolist() == [FIRST] * 4
    finally:
        enough.set()
        doorman.join()


# -- what it is for --------------------------------------------------------------------------------


def test_slow_environment_does_not_hold_up_the_others(on_ray):
    """One in four takes 20 times as long; the ratio is of times, so a busy machine slows both."""
    delays = [0.2, 0.01, 0.01, 0.01]
    with ParallelPyEnvironment([functools.partial(DelayEnv, d) for d in delays]) as batch:
        batch.reset()
        began = time.perf_counter()
        for _ in range(5):
            batch.step([0] * 4)
        lockstep = 20 / (time.perf_counter() - began)
        batch.async_reset()
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < 1.0:
            env_ids = batch.recv(min_envs=2)[1]
            steps += len(env_ids)
            batch.send(np.zeros(len(env_ids), int), env_ids)
        first_ready = steps / (time.perf_counter() - began)
        batch.drain()
    assert first_ready > 1.5 * lockstep


def test_type_of_the_time_step_is_that_of_lockstep(make_batch):
    with make_batch(probes(2)) as batch:
        batch.async_reset([1])
        time_step, _ = batch.recv()
        assert type(time_step) is dm_env.TimeStep
