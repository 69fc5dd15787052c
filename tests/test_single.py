"""ActorPyEnvironment: one environment that lives elsewhere."""

from __future__ import annotations

import functools
import pickle
import time

import faults
import pytest

from envfleet import (
    ActorPyEnvironment,
    ClosedError,
    EnvFleetError,
    EnvTimeout,
    FleetStartError,
    InvalidAction,
    Promise,
    ResetNeeded,
)
from envfleet.testing import DelayEnv, ProbeEnv


class Secretive(ProbeEnv):
    def __init__(self) -> None:
        super().__init__(env_id=3)
        self._secret = "hidden"
        self.log: list[str] = []
        self.append = self.log.append
        self.partial = functools.partial(self.add)

    def _hidden(self, number: int) -> int:
        self._secret = number
        return number

    @property
    def broken(self) -> int:
        raise KeyError("inside a property")


def test_step_and_reset_give_values_without_a_batch_axis(make_single):
    with make_single(ProbeEnv) as env:
        first = env.step(5)
        assert first.step_type == 0
        assert first.observation["image"].shape == (2, 3)
        assert first.observation["action"] == -1
        second = env.step(6)
        assert (second.observation["action"], second.reward) == (6, 1.0)
        assert env.current_time_step().observation["action"] == 6
        assert env.reset().observation["episode"] == 1
        assert env.action_spec() == ProbeEnv().action_spec()


def test_promises_give_each_step_its_own_reply_in_any_order(make_single):
    with make_single(ProbeEnv) as env:
        first = env.reset(blocking=False)
        second = env.step(1, blocking=False)
        third = env.step(2, blocking=False)
        assert all(isinstance(promise, Promise) for promise in (first, second, third))
        assert third().observation["action"] == 2
        assert second().observation["action"] == 1
        assert first().step_type == 0
        assert first().step_type == 0


def test_call_gives_a_promise_and_an_error_leaves_the_environment_usable(make_single):
    with make_single(lambda: ProbeEnv(2)) as env:
        env.reset()
        assert env.call("add", 1, right=2)() == 5
        promise = env.call("add", "x")
        for _ in range(2):
            with pytest.raises(TypeError):
                promise()
        assert env.step(1).observation["step"] == 1


def test_access_reads_private_attributes_and_getattr_public_ones(make_single):
    with make_single(Secretive) as env:
        assert env.access("_secret") == "hidden"
        assert env.env_id == 3
        assert env.add(1, right=2) == 6
        assert env.access("_hidden")(4) == 4
        assert env.access("_secret") == 4
        assert env.partial(1, right=2) == 6
        env.append("line")
        assert env.log == ["line"]
        assert not hasattr(env, "nope")
        with pytest.raises(AttributeError, match="nope"):
            _ = env.nope
        with pytest.raises(KeyError, match="inside a property"):
            _ = env.broken
        with pytest.raises(AttributeError, match="_secret"):
            _ = env._secret
        with pytest.raises((AttributeError, TypeError)):
            pickle.dumps(env)
        assert env.reset().step_type == 0


def test_one_environment_is_seeded_and_given_states_as_a_batch_is(make_single):
    with make_single(lambda: ProbeEnv(3), seed=5) as env:
        by_constructor = env.reset().observation["seed"]
        assert env.seed(7) != by_constructor
        assert env.reset().observation["seed"] == env.seed(7)
        assert env.seed(5) == by_constructor
        assert env.seed([8]) == 8
        assert env.reset().observation["seed"] == 8
        state = env.get_state()
        moving = env.step(1, blocking=False)
        env.set_state(state)
        assert moving().observation["step"] == 1
        assert env.step(1).observation["step"] == 1
        assert env.get_info() == {"episode": 2}


def test_one_environment_renders(make_single):
    with make_single(lambda: ProbeEnv(3)) as env:
        assert env.render().shape == (4, 5, 3)
        assert (env.render("rgb_array", blocking=False)() == 3).all()
        with pytest.raises(NotImplementedError, match="human"):
            env.render("human")


def test_start_without_waiting_is_finished_by_wait_start(backend):
    env = ActorPyEnvironment(ProbeEnv, backend=backend)
    with pytest.raises(EnvFleetError, match=r"before start\(\)"):
        env.reset()
    assert not hasattr(env, "env_id")
    env.start(wait_to_start=False)
    env.wait_start()
    env.start()
    assert env.reset().step_type == 0
    env.close()
    env.close()
    with pytest.raises(ClosedError):
        env.step(0)


def test_promise_after_close_says_so(on_ray):
    env = ActorPyEnvironment(ProbeEnv)
    env.start()
    promise = env.call("add", 1)
    env.close()
    with pytest.raises(ClosedError):
        promise()


def test_close_before_the_first_reset_returns(make_single):
    make_single(ProbeEnv).close()


def test_close_without_start_returns():
    ActorPyEnvironment(ProbeEnv).close()


def test_action_that_does_not_fit_is_refused(make_single):
    with make_single(ProbeEnv) as env:
        env.reset()
        with pytest.raises(InvalidAction, match=r"has shape \(2,\), expected \(\)"):
            env.step([1, 2])
        assert env.step(1).observation["step"] == 1


@pytest.mark.parametrize("fault", [faults.key_error, faults.two_arguments])
def test_error_in_a_step_comes_out_and_reset_goes_on(fault, make_single, tmp_path):
    constructor = faults.Constructor(fault, "step", after=1, once=str(tmp_path / "failed"))
    with make_single(constructor) as env:
        env.reset()
        env.step(1)
        promise = env.step(2, blocking=False)
        with pytest.raises((KeyError, faults.TwoArguments)):
            promise()
        with pytest.raises(ResetNeeded):
            env.step(3)
        assert env.reset().observation["episode"] == 0
        assert env.step(4).observation["action"] == 4


def test_missing_attribute_is_missing_in_every_state(make_single):
    env = make_single(faults.Constructor(faults.key_error, "step"))
    env.reset()
    with pytest.raises(KeyError):
        env.step(0)
    assert not hasattr(env, "nope")
    env.close()
    assert not hasattr(env, "nope")


def test_call_behind_a_step_has_its_whole_deadline(on_ray):
    slow = functools.partial(DelayEnv, 1.5)
    with ActorPyEnvironment(slow, call_timeout=1.0) as env:
        env.start()
        env.reset()
        step = env.step(1, blocking=False)
        assert env.call("add", 1)() == 1
        assert step().observation["action"] == 1


def test_close_does_not_wait_for_a_step_beyond_its_deadline(on_ray):
    env = ActorPyEnvironment(faults.Constructor(faults.hang, "step"), close_timeout=0.5)
    env.start()
    env.reset()
    step = env.step(1, blocking=False)
    with pytest.raises(EnvTimeout):
        env.close()
    with pytest.raises(ClosedError):
        step()


def test_late_promise_does_not_end_the_actor_that_took_the_place(on_ray, tmp_path):
    constructor = faults.Constructor(faults.sigkill, "step", once=str(tmp_path / "failed"))
    env = ActorPyEnvironment(constructor)
    env.start()
    env.reset()
    step = env.step(1, blocking=False)
    call = env.call("add", 1)
    with pytest.raises(EnvFleetError):
        step()
    env.reset()
    with pytest.raises(EnvFleetError):
        call()
    assert env.step(2).observation["action"] == 2
    env.close()


def test_error_in_the_constructor_comes_out_of_start(backend):
    env = ActorPyEnvironment(faults.Constructor(faults.key_error, "construct"), backend=backend)
    with pytest.raises(KeyError):
        env.start()
    with pytest.raises(ClosedError):
        env.reset()


def test_start_has_a_deadline(on_ray):
    env = ActorPyEnvironment(functools.partial(time.sleep, 1000.0), start_timeout=2.0)
    with pytest.raises(FleetStartError, match=r"in 2\.0 s"):
        env.start()


def test_handle_on_one_of_a_batch_reaches_it_alone(make_batch):
    with make_batch([lambda i=i: ProbeEnv(i) for i in range(3)]) as batch:
        assert [handle.env_id for handle in batch.envs] == [0, 1, 2]
        assert batch.envs[2].call("add", 1)() == 3
        assert batch.envs[1].access("_episode") == -1
        assert batch.envs[1].action_spec() == batch.action_spec()
        assert not hasattr(batch.envs[1], "close_all")


def test_environment_in_place_of_a_constructor_is_refused():
    with pytest.raises(TypeError, match="env_constructor is an environment"):
        ActorPyEnvironment(ProbeEnv())


def test_two_batches_share_a_ray_that_envfleet_started():
    """In a process of its own: the last batch on a Ray of ours shuts it down."""
    import subprocess
    import sys

    script = """
import ray, envfleet
from envfleet.testing import ProbeEnv
quiet = dict(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
one = envfleet.ParallelPyEnvironment([ProbeEnv], ray_init=quiet)
two = envfleet.ParallelPyEnvironment([ProbeEnv], ray_init=quiet)
one.close()
assert ray.is_initialized() and two.reset().step_type == 0
two.close()
assert not ray.is_initialized()
three = envfleet.ParallelPyEnvironment([ProbeEnv], ray_init=quiet)
print("pid", three.envs[0].pid if hasattr(three.envs[0], "pid") else "none")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "pid none" in done.stdout
