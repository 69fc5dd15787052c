"""TF-Agents' environments keep their types. Runs where TF-Agents is installed (`make test-tf`)."""

from __future__ import annotations

import functools
import sys

import gin
import numpy as np
import pytest

from envfleet import ActorPyEnvironment, ParallelPyEnvironment, testing

pytestmark = [
    pytest.mark.tf_agents,
    pytest.mark.filterwarnings("ignore"),
]

pytest.importorskip("tf_agents", reason="TF-Agents is not installed: make test-tf")

from tf_agents.drivers import py_driver  # noqa: E402
from tf_agents.environments import random_py_environment  # noqa: E402
from tf_agents.policies import random_py_policy  # noqa: E402
from tf_agents.specs import array_spec  # noqa: E402
from tf_agents.trajectories import time_step as ts  # noqa: E402


def random_env() -> random_py_environment.RandomPyEnvironment:
    return random_py_environment.RandomPyEnvironment(
        array_spec.BoundedArraySpec((3, 3), np.float32, 0, 1),
        array_spec.BoundedArraySpec((7,), np.float32, -1.0, 1.0),
        episode_end_probability=0.2,
        render_size=(2, 2, 3),
    )


@pytest.mark.parametrize("check", testing.ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
def test_environment_keeps_the_contract(check):
    check(random_env)


def test_time_steps_and_specs_are_tf_agents_own(make_batch):
    with make_batch([random_env] * 2) as batch:
        assert isinstance(batch.observation_spec(), array_spec.BoundedArraySpec)
        assert batch.time_step_spec() == random_env().time_step_spec()
        assert batch.action_spec() == random_env().action_spec()
        time_step = batch.reset()
        assert type(time_step) is ts.TimeStep
        assert time_step.is_first().all()
        assert time_step.observation.shape == (2, 3, 3)
        assert time_step.reward.dtype == np.float32
        assert time_step.step_type.dtype == np.int32
        for _ in range(20):
            time_step = batch.step(np.zeros((2, 7), np.float32))
            assert time_step.observation.shape == (2, 3, 3)
        assert batch.render().shape == (2, 2, 2, 3)


def test_environments_with_the_same_default_seed_differ_once_seeded(make_batch):
    with make_batch([random_env] * 2) as batch:
        batch.seed([0, 1])
        observation = batch.reset().observation
        assert not np.array_equal(observation[0], observation[1])
        for i, handle in enumerate(batch.envs):
            expected = random_env()
            expected.seed(i)
            assert np.array_equal(observation[i], expected.reset().observation)
            assert handle.access("_rng") is not None


def test_py_driver_runs_over_the_batch(make_batch):
    with make_batch([random_env] * 2) as batch:
        seen = []
        driver = py_driver.PyDriver(
            batch,
            random_py_policy.RandomPyPolicy(batch.time_step_spec(), batch.action_spec()),
            observers=[seen.append],
            max_steps=20,
        )
        driver.run(batch.reset())
        assert len(seen) >= 10
        assert seen[0].observation.shape == (2, 3, 3)


def test_suite_environment_by_gin_keeps_its_type(on_ray):
    gin.clear_config()
    gin.parse_config(
        """
        suite_gym.load.environment_name = 'CartPole-v1'
        envfleet.ParallelPyEnvironment.env_constructors = @suite_gym.load
        envfleet.ParallelPyEnvironment.num_envs = 2
        """
    )
    try:
        with ParallelPyEnvironment(seed=1) as batch:
            time_step = batch.reset()
            assert type(time_step) is ts.TimeStep
            assert batch.step(np.array([0, 1])).observation.shape == (2, 4)
            assert batch.get_attr("gravity") == [9.8, 9.8]
    finally:
        gin.clear_config()


def test_one_environment_keeps_its_type(backend):
    env = ActorPyEnvironment(random_env, backend=backend)
    env.start()
    with env:
        assert type(env.reset()) is ts.TimeStep
        assert env.step(np.zeros(7, np.float32)).observation.shape == (3, 3)


class Failing(random_py_environment.RandomPyEnvironment):
    def _step(self, action):
        if action[0] == 1:
            raise KeyError("arm")
        return super()._step(action)


def test_episode_that_a_failure_ends_is_a_truncation_of_tf_agents_own(make_batch):
    failing = functools.partial(
        Failing,
        array_spec.BoundedArraySpec((3, 3), np.float32, 0, 1),
        array_spec.BoundedArraySpec((7,), np.float32, -1.0, 1.0),
        episode_end_probability=0.0,
    )
    actions = np.zeros((2, 7), np.float32)
    with make_batch([failing] * 2, on_failure="restart") as batch:
        batch.reset()
        before = batch.step(actions)
        actions[1, 0] = 1
        cut = batch.step(actions)
        assert type(cut) is ts.TimeStep
        assert cut.is_last().tolist() == [False, True]
        assert (cut.reward[1], cut.discount[1]) == (0, 1)
        assert np.array_equal(cut.observation[1], before.observation[1])
        assert batch.step(actions).is_first().tolist() == [False, True]


def test_batched_environment_is_refused(make_batch):
    batched = functools.partial(
        random_py_environment.RandomPyEnvironment,
        array_spec.ArraySpec((3,), np.float32),
        array_spec.BoundedArraySpec((1,), np.float32, -1.0, 1.0),
        batch_size=2,
    )
    with pytest.raises(TypeError, match="is batched"):
        make_batch([batched])


def test_envfleet_imports_nothing_of_tf_agents():
    import subprocess

    code = "import sys, envfleet; assert not any(m.startswith('tensor') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
