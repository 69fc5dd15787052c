"""How many environments share an actor, what a step costs, and what the log advises."""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import dm_env
import faults
import numpy as np
import pytest
from dm_env import specs

from envfleet import EnvTimeout, ParallelPyEnvironment
from envfleet.channels import Room
from envfleet.testing import DelayEnv, ProbeEnv
from envfleet.tuning import Cost, batch_seconds, best

HERE = Room(cpus=2, actors=float("inf"), is_callers=True)
CALL = {"call": 1.2e-3, "caller_cpu": 0.4e-3, "actor_cpu": 0.8e-3}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "envfleet"]


class Cheap(dm_env.Environment):
    """Whose step takes next to nothing."""

    def __init__(self) -> None:
        self._first = dm_env.restart(np.zeros(2, np.float32))
        self._mid = dm_env.transition(0.0, np.zeros(2, np.float32))

    def reset(self) -> Any:
        return self._first

    def step(self, action: Any) -> Any:
        return self._mid

    def observation_spec(self) -> Any:
        return specs.Array((2,), np.float32)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(2)


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_envs", "step", "step_cpu", "num_actors"),
    [
        pytest.param(16, 10e-6, 10e-6, 1, id="cheap: one call for all"),
        pytest.param(16, 1e-3, 1e-3, 2, id="computes: an actor for each core"),
        pytest.param(8, 20e-3, 1e-4, 8, id="waits: an actor for each environment"),
        pytest.param(1, 1e-3, 1e-3, 1, id="one environment"),
    ],
)
def test_number_of_actors_by_what_a_step_costs(num_envs, step, step_cpu, num_actors):
    chosen = best(num_envs, Cost(step, step_cpu, **CALL), HERE)
    assert -(-num_envs // chosen) == num_actors


def test_no_more_actors_than_fit():
    cost = Cost(20e-3, 0.0, **CALL)
    assert best(8, cost, HERE._replace(actors=3)) == 3
    assert best(8, cost, HERE._replace(actors=0)) == 8  # they wait for an autoscaler together


def test_more_cores_take_more_actors():
    cost = Cost(1e-3, 1e-3, **CALL)
    chosen = [best(64, cost, HERE._replace(cpus=cpus)) for cpus in (1, 2, 8)]
    assert chosen == [64, 32, 8]


def test_a_batch_takes_what_is_used_up_first():
    cost = Cost(step=1e-3, step_cpu=1e-3, call=1e-3, caller_cpu=1e-3, actor_cpu=0.0)
    assert batch_seconds(16, 16, cost, cpus=64) == pytest.approx(17e-3)  # one actor's way
    assert batch_seconds(16, 4, cost, cpus=1) == pytest.approx(20e-3)  # all CPU time
    free = cost._replace(step=0.0, step_cpu=0.0)
    assert batch_seconds(16, 1, free, cpus=64) == pytest.approx(16e-3)  # the caller


# -- "auto" ----------------------------------------------------------------------------------------


def test_auto_gives_environments_that_wait_an_actor_each(on_ray, caplog):
    caplog.set_level(logging.INFO, "envfleet")
    slow = functools.partial(DelayEnv, 0.1)
    with ParallelPyEnvironment(slow, num_envs=3, envs_per_actor="auto") as batch:
        assert batch.envs_per_actor == 1
        assert batch.reset().step_type.tolist() == [0, 0, 0]
    (told,) = [message for message in messages(caplog) if "auto" in message]
    assert "3 environments go into 3 actors of up to 1" in told
    assert "local" not in told


def test_auto_puts_cheap_environments_together_and_names_the_local_backend(on_ray, caplog):
    caplog.set_level(logging.INFO, "envfleet")
    with ParallelPyEnvironment(Cheap, num_envs=16, envs_per_actor="auto") as batch:
        assert batch.envs_per_actor >= 8
        assert len(batch.reset().reward) == 16
    (told,) = [message for message in messages(caplog) if "auto" in message]
    assert 'all in this process, with backend="local"' in told


def test_auto_keeps_within_the_resources_that_actors_hold(on_ray):
    slow = functools.partial(DelayEnv, 0.05)
    with ParallelPyEnvironment(
        slow, num_envs=6, envs_per_actor="auto", actor_options={"num_cpus": 2}
    ) as batch:
        assert batch.envs_per_actor == 3  # this Ray has 4 CPUs


def test_auto_gives_the_same_trajectories(make_batch):
    def observations(**kwargs: Any) -> Any:
        import gymnasium

        with make_batch([lambda: gymnasium.make("CartPole-v1")] * 3, seed=11, **kwargs) as batch:
            return [batch.step([0, 1, 0]).observation for _ in range(30)]

    assert np.array_equal(observations(), observations(envs_per_actor="auto"))


def test_constructor_that_fails_is_raised_by_auto_as_ever(make_batch):
    with pytest.raises(KeyError, match="arm"):
        make_batch([faults.Constructor(faults.key_error, "construct")], envs_per_actor="auto")


def test_auto_bears_with_environments_that_fail_now_and_then(make_batch, tmp_path, caplog):
    fails = faults.Constructor(faults.key_error, "step", after=1, once=str(tmp_path / "once"))
    with make_batch([fails, ProbeEnv], on_failure="restart", envs_per_actor="auto") as batch:
        assert batch.reset().step_type.tolist() == [0, 0]


def test_auto_goes_on_when_the_process_dies(on_ray, tmp_path):
    dies = faults.Constructor(faults.sigkill, "step", after=1, once=str(tmp_path / "once"))
    with ParallelPyEnvironment([dies], on_failure="restart", envs_per_actor="auto") as batch:
        assert batch.reset().step_type.tolist() == [0]


def test_auto_says_what_it_was_doing(on_ray):
    hangs = faults.Constructor(faults.hang, "step", after=1)
    with pytest.raises(EnvTimeout, match=r"step\(\)") as caught:
        ParallelPyEnvironment([hangs], envs_per_actor="auto", step_timeout=0.5)
    assert any('"auto" timed the first' in note for note in caught.value.__notes__)


def test_auto_needs_no_more_time_than_calls_have(on_ray):
    with ParallelPyEnvironment(
        [ProbeEnv] * 2, envs_per_actor="auto", call_timeout=5, step_timeout=5
    ) as batch:
        assert batch.reset().step_type.tolist() == [0, 0]


def test_another_word_than_auto_is_refused():
    with pytest.raises(TypeError, match="envs_per_actor is 'many'"):
        ParallelPyEnvironment([ProbeEnv], envs_per_actor="many")


# -- advice ----------------------------------------------------------------------------------------


def test_batch_dominated_by_the_remote_call_says_so_once(on_ray, caplog):
    caplog.set_level(logging.INFO, "envfleet")
    with ParallelPyEnvironment(Cheap, num_envs=4) as batch:
        for _ in range(220):
            batch.step([0] * 4)
    (told,) = [message for message in messages(caplog) if "batched step" in message]
    assert "a batched step of 4 environments in 4 actors takes" in told
    assert "envs_per_actor=" in told
    assert 'backend="local"' in told
    assert 'transport="shared_memory"' in told


def test_auto_measures_the_transport_that_there_is(on_ray, caplog):
    caplog.set_level(logging.INFO, "envfleet")
    calls = []
    for transport in ("rpc", "shared_memory"):
        with ParallelPyEnvironment(Cheap, num_envs=4, envs_per_actor="auto", transport=transport):
            pass
        (told,) = re.findall(r"a call (\S+) ms \(CPU: (\S+) here, (\S+) in", caplog.text)
        calls.append([float(number) for number in told])
        caplog.clear()
    assert np.all(np.array(calls[1]) < np.array(calls[0]) / 2)


def test_batch_of_slow_environments_says_nothing(on_ray, caplog):
    caplog.set_level(logging.INFO, "envfleet")
    with ParallelPyEnvironment(functools.partial(DelayEnv, 0.02), num_envs=1) as batch:
        for _ in range(110):
            batch.step([0])
    assert not any("batched step" in message for message in messages(caplog))


# -- stats -----------------------------------------------------------------------------------------


def test_stats_tell_what_a_step_costs_and_who_is_slowest(make_batch):
    constructors = [functools.partial(DelayEnv, seconds) for seconds in (0.0, 0.03, 0.01)]
    with make_batch(constructors, envs_per_actor=2) as batch:
        before = batch.stats()
        assert before.slowest is None
        assert np.isnan(before.step_p50).all()
        assert np.isnan(before.batch_seconds)
        for _ in range(6):
            batch.step([0] * 3)
        stats = batch.stats()
    assert stats.slowest == 1
    assert stats.num_calls == [6, 6, 6]
    assert stats.step_p50[0] < 0.01 <= stats.step_p50[2] < stats.step_p50[1]
    assert 0.03 <= stats.step_p50[1] <= stats.step_p99[1]
    assert stats.batch_seconds >= 0.03
    assert 0 < stats.call_overhead < stats.batch_seconds
    assert stats.waited >= 0 if before.waited == 0 else stats.waited > before.waited
    # 6 int64 scalars, 6 float32, step type, reward, discount, seconds; and the actions
    assert stats.bytes_per_step > 3 * (8 + 5 * 8 + 6 * 4 + 4 + 8 + 8 + 4)


def test_quantiles_are_of_the_last_thousand(make_batch):
    from envfleet.timings import Timings

    timings = Timings(2)
    for n in range(1500):
        timings.keep([1], np.array([n], np.float32))
    timings.keep(slice(0, 2), np.array([7.0, 1500.0], np.float32))
    assert timings.quantile(0.5) == [7.0, 1000.5]
    assert timings.quantile(0.0) == [7.0, 501.0]
    assert timings.num_calls.tolist() == [1, 1501]


# -- payloads --------------------------------------------------------------------------------------


class Images(dm_env.Environment):
    """An image of which every byte tells environment and step."""

    def __init__(self, env_id: int, shape: tuple[int, ...], nested: bool = False) -> None:
        self.env_id, self.shape, self.nested, self.at = env_id, shape, nested, 0

    def _observation(self) -> Any:
        image = np.full(self.shape, 10 * self.env_id + self.at, np.uint8)
        return {"camera": image, "speed": np.float32(self.at)} if self.nested else image

    def reset(self) -> Any:
        self.at = 0
        return dm_env.restart(self._observation())

    def step(self, action: Any) -> Any:
        self.at += 1
        return dm_env.transition(0.0, self._observation())

    def observation_spec(self) -> Any:
        image = specs.Array(self.shape, np.uint8)
        return {"camera": image, "speed": specs.Array((), np.float32)} if self.nested else image

    def action_spec(self) -> Any:
        return specs.DiscreteArray(2)


@pytest.mark.parametrize("nested", [False, True], ids=["image", "dict"])
@pytest.mark.parametrize("shape", [(84, 84, 4), (210, 160, 3)], ids=["84x84x4", "210x160x3"])
def test_images_arrive_whole(shape, nested, make_batch):
    constructors = [functools.partial(Images, i, shape, nested) for i in range(3)]
    with make_batch(constructors, envs_per_actor=2) as batch:
        kept = [batch.reset(), *(batch.step([0] * 3) for _ in range(4))]
        batch.send([0], [2])
        alone, _ = batch.drain()
    for at, time_step in enumerate(kept):
        image = time_step.observation["camera"] if nested else time_step.observation
        assert image.shape == (3, *shape)
        assert [set(np.unique(one)) for one in image] == [{10 * i + at} for i in range(3)]
        assert image.flags.owndata  # the caller's own, and no window on Ray's memory
    image = alone.observation["camera"] if nested else alone.observation
    assert (image == 25).all()


OWN_RAY = """
import os, functools, numpy as np, ray
from envfleet import ParallelPyEnvironment
from test_tuning import Images

batch = ParallelPyEnvironment(
    [functools.partial(Images, 0, (300_000,))],
    ray_init={"address": "local", "num_cpus": 1, "include_dashboard": False,
              "object_store_memory": 100_000_000, "logging_level": "ERROR"},
)
batch.reset()

@ray.remote
def reply(size):
    return np.zeros(size, np.uint8)

def nodes(size):  # whose object store holds it
    ref = reply.remote(size)
    ray.wait([ref])
    return len(ray.experimental.get_object_locations([ref])[ref]["node_ids"])

print("in the store:", nodes(50_000), nodes(300_000), nodes(700_000))
print("ours:", os.environ.get("RAY_max_direct_call_object_size"))
batch.close()
"""


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "0 0 1"), ("100000", "0 1 1")], ids=["ours", "the user's"]
)
def test_ray_of_our_own_sends_larger_replies_with_the_answer(given, expected):
    import subprocess
    import sys

    environment = dict(os.environ)
    environment.pop("RAY_max_direct_call_object_size", None)
    if given:
        environment["RAY_max_direct_call_object_size"] = given
    ended = subprocess.run(
        [sys.executable, "-c", OWN_RAY], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert f"in the store: {expected}\n" in ended.stdout
    assert f"ours: {given}\n" in ended.stdout
