"""The batch as TF-Agents' own class: its drivers run over it, its promises hold, its faults do not.

Runs where TF-Agents is installed (`make test-tf`). The table of promises is that of TF-Agents'
`ParallelPyEnvironment` and `ProcessPyEnvironment`; the faults are those that its 0.19 has.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dm_env
import gin
import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet import ActorDied, EnvTimeout, InvalidAction, ResetNeeded, SpecMismatch, testing

pytestmark = [pytest.mark.tf_agents, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("tf_agents", reason="TF-Agents is not installed: make test-tf")

import tensorflow as tf  # noqa: E402
from tf_agents.drivers import (  # noqa: E402
    dynamic_episode_driver,
    dynamic_step_driver,
    py_driver,
)
from tf_agents.environments import (  # noqa: E402
    batched_py_environment,
    parallel_py_environment,
    py_environment,
    random_py_environment,
    suite_gym,
    test_envs,
    tf_py_environment,
    utils,
    wrappers,
)
from tf_agents.metrics import py_metrics, tf_metrics  # noqa: E402
from tf_agents.policies import random_py_policy, random_tf_policy  # noqa: E402
from tf_agents.replay_buffers import (  # noqa: E402
    py_uniform_replay_buffer,
    tf_uniform_replay_buffer,
)
from tf_agents.specs import array_spec  # noqa: E402
from tf_agents.train import actor  # noqa: E402
from tf_agents.trajectories import time_step as ts  # noqa: E402
from tf_agents.trajectories import trajectory  # noqa: E402
from tf_agents.utils import common  # noqa: E402

from envfleet.interop import tf_agents  # noqa: E402

ROOT = Path(__file__).parent.parent

ACTION = array_spec.BoundedArraySpec((7,), np.float32, -1.0, 1.0)


class RandomEnv(random_py_environment.RandomPyEnvironment):
    """TF-Agents' environment for tests, with specs of its own."""

    def __init__(self, size: int = 3, **kwargs: Any) -> None:
        super().__init__(array_spec.ArraySpec((size, 3), np.float32), ACTION, **kwargs)


class Faulty(test_envs.CountingEnv):
    """Counts, and goes wrong as its action says."""

    def action_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.int32, 0, 9)

    def _step(self, action: Any) -> Any:
        if action == 1:
            raise KeyError("arm")
        if action == 2:
            os._exit(3)
        if action == 3:
            time.sleep(60)
        return super()._step(action)


class FailsToStart(RandomEnv):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class FailsToReset(RandomEnv):
    def _reset(self) -> Any:
        raise RuntimeError("stuck")


class Drawn(test_envs.CountingEnv):
    """Shows a window unless it is asked for an array, as Gym's environments do."""

    def render(self, mode: str = "human") -> Any:
        return np.full((4, 5, 3), 7, np.uint8) if mode == "rgb_array" else None


class TwoRewards(test_envs.CountingEnv):
    """Rewards of shape (2,), discounts between 0.5 and 1, and an info."""

    def reward_spec(self) -> Any:
        return array_spec.ArraySpec((2,), np.float32, "rewards")

    def discount_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.float32, 0.5, 1.0, "discount")

    def time_step_spec(self) -> Any:
        spec = ts.time_step_spec(self.observation_spec(), self.reward_spec())
        return spec._replace(discount=self.discount_spec())

    def _step(self, action: Any) -> Any:
        return ts.transition(np.int32(3), np.array([1, 2], np.float32), np.float32(0.5), ())

    def _reset(self) -> Any:
        return ts.restart(np.int32(0), reward_spec=self.reward_spec())

    def get_info(self) -> Any:
        return {"fuel": 3}


class Meeting(RandomEnv):
    """Notes the beginning and end of its constructor, and waits for `guests` to begin theirs."""

    def __init__(self, name: str, folder: Path, guests: int, seconds: float) -> None:
        self._note(folder, f"begin {name}")
        (folder / name).touch()
        until = time.monotonic() + seconds
        while len(list(folder.iterdir())) < guests + 1 and time.monotonic() < until:
            time.sleep(0.01)
        super().__init__()
        self._note(folder, f"end {name}")

    def _note(self, folder: Path, line: str) -> None:
        with (folder / "log.txt").open("a") as file:
            file.write(line + "\n")


@pytest.fixture
def make(backend: str) -> Callable[..., Any]:
    """The batch as TF-Agents has it, on either backend; in one actor, which imports TensorFlow."""
    batch = functools.partial(tf_agents.ParallelPyEnvironment, backend=backend)
    return functools.partial(batch, envs_per_actor=4)


@pytest.fixture
def make_one(backend: str) -> Callable[..., Any]:
    """One environment as TF-Agents has it, started."""

    def make_one(constructor: Any, **kwargs: Any) -> Any:
        env = tf_agents.ProcessPyEnvironment(constructor, backend=backend, **kwargs)
        env.start()
        return env

    return make_one


@pytest.fixture
def local() -> Callable[..., Any]:
    """For what is about types and structures alone."""
    return functools.partial(tf_agents.ParallelPyEnvironment, backend="local")


@pytest.fixture
def no_gin() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


def serial(constructors: Any, seeds: Any = None) -> Any:
    """TF-Agents' own implementation, one environment after another in this process."""
    envs = [constructor() for constructor in constructors]
    for env, seed in zip(envs, seeds or [], strict=False):
        env.seed(seed)
    return batched_py_environment.BatchedPyEnvironment(envs, multithreading=False)


def assert_equal(found: Any, expected: Any) -> None:
    """Structure, types, dtypes and values of two time steps are the same."""
    tf.nest.assert_same_structure(found, expected)
    for leaf, wanted in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(leaf, wanted)


# -- the face: what TF-Agents runs over ------------------------------------------------------------


@pytest.mark.parametrize("face", [tf_agents.ParallelPyEnvironment, tf_agents.ProcessPyEnvironment])
def test_classes_are_py_environments_with_all_that_one_has(face):
    assert issubclass(face, py_environment.PyEnvironment)
    public = {name for name in dir(py_environment.PyEnvironment) if not name.startswith("_")}
    assert public <= set(dir(face))
    assert "__call__" not in dir(face), "TFPyEnvironment would call it"


def test_the_library_itself_is_no_py_environment_and_imports_no_tf_agents():
    assert not issubclass(envfleet.ParallelPyEnvironment, py_environment.PyEnvironment)
    code = "import sys, envfleet.interop; assert 'tf_agents' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_validate_py_environment_accepts_a_batch(make):
    with make([RandomEnv] * 2) as batch:
        utils.validate_py_environment(batch, episodes=5)


def py_metrics_of(env: Any, **limits: int) -> Any:
    """What metrics and observers see of a run of a PyDriver."""
    metrics = [
        py_metrics.NumberOfEpisodes(),
        py_metrics.EnvironmentSteps(),
        py_metrics.AverageReturnMetric(batch_size=2),
        py_metrics.AverageEpisodeLengthMetric(batch_size=2),
    ]
    trajectories: list[Any] = []
    policy = random_py_policy.RandomPyPolicy(env.time_step_spec(), env.action_spec(), seed=1)
    driver = py_driver.PyDriver(env, policy, [*metrics, trajectories.append], **limits)
    driver.run(env.reset())
    return [metric.result() for metric in metrics], trajectories


@pytest.mark.parametrize("limits", [{"max_steps": 30}, {"max_episodes": 7}], ids=str)
def test_py_driver_and_its_metrics_see_what_they_see_of_tf_agents_own(local, limits):
    constructors = [test_envs.CountingEnv, functools.partial(test_envs.CountingEnv, 4)]
    expected, wanted = py_metrics_of(serial(constructors), **limits)
    with local(constructors) as batch:
        found, trajectories = py_metrics_of(batch, **limits)
    assert found == expected
    assert found[0] > 0
    assert found[1] > 0
    assert len(trajectories) == len(wanted)
    for one, other in zip(trajectories, wanted, strict=True):
        assert type(one) is trajectory.Trajectory
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_actor_of_a_training_runs(local, tmp_path):
    with local([test_envs.CountingEnv] * 2) as batch:
        policy = random_py_policy.RandomPyPolicy(batch.time_step_spec(), batch.action_spec())
        steps = py_metrics.EnvironmentSteps()
        collector = actor.Actor(
            batch, policy, tf.Variable(0), steps_per_run=10, metrics=[steps], observers=[]
        )
        collector.run()
        assert steps.result() == 10


@pytest.mark.parametrize(
    ("driver_class", "limit"),
    [
        (dynamic_step_driver.DynamicStepDriver, {"num_steps": 20}),
        (dynamic_episode_driver.DynamicEpisodeDriver, {"num_episodes": 5}),
    ],
)
def test_tf_drivers_fill_buffer_and_metrics_as_over_tf_agents_own(make, driver_class, limit):
    constructors = [test_envs.CountingEnv, functools.partial(test_envs.CountingEnv, 4)]

    def collected(env: Any) -> Any:
        tf_env = tf_py_environment.TFPyEnvironment(env)
        policy = random_tf_policy.RandomTFPolicy(tf_env.time_step_spec(), tf_env.action_spec())
        buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(policy.trajectory_spec, 2, 100)
        metrics = [
            tf_metrics.NumberOfEpisodes(),
            tf_metrics.EnvironmentSteps(),
            tf_metrics.AverageReturnMetric(batch_size=2),
        ]
        driver = driver_class(tf_env, policy, [buffer.add_batch, *metrics], **limit)
        common.function(driver.run)()  # in a graph, where other threads of TensorFlow's step
        return buffer.gather_all(), [metric.result().numpy() for metric in metrics]

    expected, values = collected(serial(constructors))
    with make(constructors) as batch:
        found, own_values = collected(batch)
    assert own_values == values
    assert values[1] >= 20
    for name in ("step_type", "observation", "reward", "discount", "next_step_type"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_py_buffer_takes_what_a_batch_of_one_gives(local):
    with local([RandomEnv]) as batch:
        policy = random_py_policy.RandomPyPolicy(batch.time_step_spec(), batch.action_spec())
        buffer = py_uniform_replay_buffer.PyUniformReplayBuffer(policy.trajectory_spec, 100)
        py_driver.PyDriver(batch, policy, [buffer.add_batch], max_steps=20).run(batch.reset())
        assert buffer.size >= 20
        assert buffer.get_next().observation.shape == (3, 3)


def test_tf_py_environment_renders_isolates_and_closes(make):
    tf_env = tf_py_environment.TFPyEnvironment(make([RandomEnv] * 2), isolation=True)
    assert tf_env.batch_size == 2
    assert tf_env.render("rgb_array").shape == (2, 2, 2, 3)
    assert tf_env.reset().observation.shape == (2, 3, 3)
    batch = tf_env.pyenv
    tf_env._pool.close()  # TFPyEnvironment.close joins its pool before it closes it
    batch.close()
    with pytest.raises(envfleet.ClosedError):
        batch.reset()


def test_one_environment_goes_where_a_py_environment_goes(make_one):
    with make_one(RandomEnv) as env:
        utils.validate_py_environment(env, episodes=3)
        limited = wrappers.TimeLimit(env, 2)
        env.reset()
        step_types = [int(limited.step(np.zeros(7, np.float32)).step_type) for _ in range(4)]
        assert step_types[0] == 0
        assert 2 in step_types
        tf_env = tf_py_environment.TFPyEnvironment(env)
        assert tf_env.reset().observation.shape == (1, 3, 3)


# -- environments of other kinds -------------------------------------------------------------------


def test_gymnasium_environments_speak_tf_agents(make):
    with make([lambda: gymnasium.make("CartPole-v1")] * 2, seed=[3, 4]) as batch:
        assert batch.action_spec() == array_spec.BoundedArraySpec((), np.int64, 0, 1)
        for spec in (batch.time_step_spec(), batch.envs[1].time_step_spec()):
            assert spec == ts.time_step_spec(batch.observation_spec())
        utils.validate_py_environment(batch, episodes=3)
        time_step = batch.reset()
        assert type(time_step) is ts.TimeStep
        assert time_step.is_first().all()
        assert time_step.reward.dtype == time_step.discount.dtype == np.float32
        assert (batch.step(np.array([0, 1])).reward == 1).all()
        assert tf_py_environment.TFPyEnvironment(batch).reset().observation.shape == (2, 4)
        assert type(batch.current_time_step()) is ts.TimeStep
        batch.send(np.array([1]), [1])
        assert type(batch.recv()[0]) is ts.TimeStep
        assert type(batch.drain()[0]) is ts.TimeStep


def test_one_gymnasium_environment_speaks_tf_agents(make_one):
    with make_one(lambda: gymnasium.make("CartPole-v1")) as env:
        utils.validate_py_environment(env, episodes=2)
        assert env.reward_spec() == array_spec.ArraySpec((), np.float32)
        assert type(env.reset(blocking=False)()) is ts.TimeStep
        assert env.step(1).reward.dtype == np.float32


@pytest.mark.parametrize("check", testing.BATCH_CHECKS, ids=lambda check: check.__name__)
def test_batch_keeps_the_contract(check, local):
    check(local)


class Speaks(testing.ProbeEnv):
    def observation_spec(self) -> Any:
        return {"said": dm_env.specs.StringArray(())}


def test_strings_have_no_spec_in_tf_agents(local):
    with local([Speaks]) as batch, pytest.raises(TypeError, match="strings"):
        batch.time_step_spec()


# -- scripts that change their import --------------------------------------------------------------

SCRIPT = """
import gin
import numpy as np
from tf_agents.drivers import dynamic_episode_driver
from tf_agents.environments import suite_gym, tf_py_environment
from tf_agents.metrics import tf_metrics
from tf_agents.policies import random_tf_policy
from tf_agents.system import system_multiprocessing as multiprocessing
from tf_agents.environments import parallel_py_environment


def main(argv):
    gin.parse_config("ParallelPyEnvironment.blocking = True")
    env = parallel_py_environment.ParallelPyEnvironment(
        [lambda: suite_gym.load("CartPole-v1")] * 2, flatten=True)
    env.seed([0, 1])
    print("blocking", env._blocking, "envs", len(env.envs))
    tf_env = tf_py_environment.TFPyEnvironment(env)
    policy = random_tf_policy.RandomTFPolicy(tf_env.time_step_spec(), tf_env.action_spec())
    episodes = tf_metrics.NumberOfEpisodes()
    dynamic_episode_driver.DynamicEpisodeDriver(
        tf_env, policy, [episodes], num_episodes=3).run()
    print("episodes", episodes.result().numpy() >= 3)
    env.close()


"""


@pytest.mark.parametrize("start", ["main([])", "multiprocessing.handle_main(main)"])
def test_script_changes_its_import_only(start, tmp_path, on_ray):
    changed = SCRIPT.replace(
        "from tf_agents.environments import parallel_py_environment",
        "from envfleet.interop import tf_agents as parallel_py_environment",
    )
    script = tmp_path / "script.py"
    script.write_text(changed + start + "\n")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "blocking True envs 2" in done.stdout
    assert "episodes True" in done.stdout


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", ["ParallelPyEnvironment", "ProcessPyEnvironment"])
def test_arguments_have_tf_agents_names_and_order(name):
    theirs, ours = getattr(parallel_py_environment, name), getattr(tf_agents, name)
    expected = parameters(theirs.__init__)
    assert parameters(ours.__init__)[: len(expected)] == expected
    methods = ["start", "close", "render", "reset"]
    methods += ["wait_start", "call", "access", "step"] if name == "ProcessPyEnvironment" else []
    for method in methods:
        found, expected = (parameters(getattr(cls, method)) for cls in (ours, theirs))
        assert method == "reset" or found[: len(expected)] == expected, method


def test_environments_start_at_once_by_default():
    start_serially = inspect.signature(tf_agents.ParallelPyEnvironment).parameters["start_serially"]
    assert start_serially.default is False


def test_bare_name_in_gin_is_the_class_here_though_tf_agents_has_registered_its_own(local, no_gin):
    theirs = "tf_agents.environments.parallel_py_environment.ParallelPyEnvironment"
    gin.parse_config(
        f"""
        ParallelPyEnvironment.blocking = True
        {theirs}.start_serially = True
        envfleet.ParallelPyEnvironment.seed = 4
        """
    )
    with local([lambda: gymnasium.make("CartPole-v1")]) as batch:
        assert (batch._blocking, batch._start_serially) == (True, False)
        seeded = batch.reset().observation
    with local([lambda: gymnasium.make("CartPole-v1")], blocking=False, seed=4) as batch:
        assert not batch._blocking
        assert np.array_equal(batch.reset().observation, seeded)
    assert gin.query_parameter(f"{theirs}.start_serially") is True
    with pytest.raises(ValueError, match=r"seed"):
        gin.query_parameter("ParallelPyEnvironment.seed")
    with pytest.raises(ValueError, match="blockin'"):
        gin.parse_config("ParallelPyEnvironment.blockin = True")


def test_errors_under_gin_come_out_as_they_were(local, no_gin):
    gin.parse_config("ParallelPyEnvironment.blocking = True")
    with pytest.raises(RuntimeError, match="no licence") as caught:
        local([FailsToStart])
    assert type(caught.value) is RuntimeError
    assert isinstance(caught.value.__cause__, envfleet.RemoteTraceback)
    # Which is in a note as well where the proxy of a user's own configurable drops the cause.
    assert not any("remote traceback" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="empty"):
        local([])


# -- environments of TF-Agents ---------------------------------------------------------------------


def wrapped_cartpole() -> Any:
    return wrappers.RunStats(
        wrappers.ActionRepeat(wrappers.TimeLimit(suite_gym.load("CartPole-v1"), 30), times=2)
    )


def flattened() -> Any:
    return wrappers.FlattenObservationsWrapper(nested())


def nested() -> Any:
    spec = {"eye": array_spec.BoundedArraySpec((2, 2), np.float32, 0, 1)}
    spec["arm"] = array_spec.BoundedArraySpec((3,), np.float32, -1, 1)
    actions = (ACTION, {"grip": array_spec.BoundedArraySpec((), np.int32, 0, 3)})
    return random_py_environment.RandomPyEnvironment(
        spec, actions, episode_end_probability=0.1, reward_fn=lambda *_: np.float32(0.5)
    )


CARTPOLE_BY_GIN = """
suite_gym.load.environment_name = 'CartPole-v1'
suite_gym.load.env_wrappers = (@limit/TimeLimit, @ActionRepeat, @RunStats)
limit/TimeLimit.duration = 30
ActionRepeat.times = 2
ParallelPyEnvironment.env_constructors = @suite_gym.load
ParallelPyEnvironment.num_envs = 2
"""


@pytest.mark.parametrize("by", ["constructor", "lambda", "gin"])
def test_wrapped_suite_environments_work_in_actors(by, backend, no_gin):
    if by == "gin":
        gin.parse_config(CARTPOLE_BY_GIN)
        batch = tf_agents.ParallelPyEnvironment(seed=[5, 6], backend=backend)
    else:
        constructor = wrapped_cartpole if by == "constructor" else lambda: wrapped_cartpole()
        batch = tf_agents.ParallelPyEnvironment([constructor] * 2, seed=[5, 6], backend=backend)
    gin.clear_config()  # it would hold for the environments to compare with, too
    with batch:
        expected = serial([wrapped_cartpole] * 2, [5, 6])
        assert_equal(batch.reset(), expected.reset())
        for i in range(60):
            actions = np.array([i % 2, (i // 2) % 2])
            assert_equal(batch.step(actions), expected.step(actions))
        episodes = [int(env.episodes) for env in expected.envs]
        assert min(episodes) > 0
        assert [int(n) for n in batch.get_attr("episodes")] == episodes
        assert int(batch.envs[1].total_steps) == int(expected.envs[1].total_steps)
        assert batch.envs[0].gravity == 9.8


@pytest.mark.parametrize("flags", [{}, {"blocking": True}, {"flatten": True}], ids=str)
@pytest.mark.parametrize(
    ("constructor", "seeds"),
    [
        (RandomEnv, [1, 2, 3, 4]),
        (nested, [1, 2, 3, 4]),
        (flattened, [5, 6, 7, 8]),
        (wrapped_cartpole, [1, 2, 3, 4]),
        (functools.partial(test_envs.NestedCountingEnv, 5, nested_action=True), None),
    ],
    ids=["random", "nested", "flattened", "cartpole", "counting"],
)
def test_time_steps_are_those_of_tf_agents_own_serial_implementation(
    constructor, seeds, flags, local
):
    with local([constructor] * 4, seed=seeds, envs_per_actor=2, **flags) as batch:
        compare(batch, serial([constructor] * 4, seeds), 300)


def test_time_steps_that_cross_processes_are_those_of_the_serial_implementation(on_ray):
    constructors = [nested] * 4
    with tf_agents.ParallelPyEnvironment(
        constructors, seed=[1, 2, 3, 4], envs_per_actor=2
    ) as batch:
        compare(batch, serial(constructors, [1, 2, 3, 4]), 1000)


def compare(batch: Any, expected: Any, num_steps: int) -> None:
    """Every time step of both, under the same random actions."""
    assert batch.time_step_spec() == expected.time_step_spec()
    assert batch.action_spec() == expected.action_spec()
    random = np.random.RandomState(0)
    assert_equal(batch.reset(), expected.reset())
    num_firsts = 0
    for _ in range(num_steps):
        actions = array_spec.sample_spec_nest(expected.action_spec(), random, (4,))
        time_step = batch.step(actions)
        assert_equal(time_step, expected.step(actions))
        num_firsts += int(np.count_nonzero(time_step.is_first()))
    assert num_firsts > 4
    assert_equal(batch.reset(), expected.reset())


# -- what TF-Agents' own class promises ------------------------------------------------------------


def test_specs_are_those_of_one_environment(local):
    one = RandomEnv()
    with local([RandomEnv] * 2) as batch:
        assert batch.observation_spec() == one.observation_spec()
        assert batch.time_step_spec() == one.time_step_spec()
        assert batch.action_spec() == one.action_spec()
        assert (batch.batched, batch.batch_size, batch._parallel_execution) == (True, 2, True)


def test_observations_have_the_axis_of_the_batch_at_each_step(local):
    with local([RandomEnv] * 2, True, True) as batch:
        batch.reset()
        for _ in range(2):
            time_step = batch.step(np.zeros((2, 7), np.float32))
            assert time_step.observation.shape == (2, 3, 3)


def test_environment_in_place_of_a_constructor_is_refused(local):
    with pytest.raises(TypeError, match="non-callable"):
        local([RandomEnv()])


@pytest.mark.parametrize("start_serially", [False, True])
def test_constructors_run_together_or_one_after_another(start_serially, tmp_path, on_ray):
    seconds = 0.5 if start_serially else 60
    constructors = [
        functools.partial(Meeting, name, tmp_path, guests=2, seconds=seconds) for name in "ab"
    ]
    tf_agents.ParallelPyEnvironment(constructors, start_serially).close()
    log = (tmp_path / "log.txt").read_text().split()[::2]
    one_by_one = ["begin", "end", "begin", "end"]
    assert log == one_by_one if start_serially else log[:2] == ["begin", "begin"]


def test_actions_are_unstacked_whatever_their_structure(local):
    Nested = namedtuple("Nested", ["action", "other"])
    with local([RandomEnv] * 2) as batch:
        actions = np.arange(14, dtype=np.float32).reshape(2, 7)
        assert [action.tolist() for action in batch._unstack_actions(actions)] == actions.tolist()
        unstacked = batch._unstack_actions(Nested(actions, np.array([13.0, 14.0])))
        assert [type(action) for action in unstacked] == [Nested] * 2
        assert [action.other for action in unstacked] == [13, 14]
        assert np.array_equal(unstacked[1].action, actions[1])
        with pytest.raises(InvalidAction, match=r"\(3, 7\), expected batch_size 2"):
            batch._unstack_actions(np.zeros((3, 7)))


def test_seeds_reach_their_environments(make):
    with make([RandomEnv] * 2) as batch:
        batch.seed([0, 1])
        for i, handle in enumerate(batch._envs):
            state = np.random.RandomState(i).get_state()[1]
            assert np.array_equal(handle.access("_rng").get_state()[1], state)
        with pytest.raises(ValueError, match="seed has 3 elements"):
            batch.seed([0, 1, 2])


def test_images_of_all_and_no_windows(local):
    with local([RandomEnv] * 2) as batch:
        image = batch.render("rgb_array")
        assert (image.shape, image.dtype) == ((2, 2, 2, 3), np.uint8)
        with pytest.raises(NotImplementedError, match="Only rgb_array"):
            batch.render("human")


def test_one_environment_closes_after_start_and_after_steps(make_one):
    make_one(RandomEnv).close()
    env = make_one(RandomEnv)
    assert env.action_spec() == ACTION
    env.reset()
    for _ in range(2):
        assert env.step(np.zeros(7, np.float32)).observation.shape == (3, 3)
    env.close()


def test_batch_closes_after_start(make):
    make([RandomEnv] * 2).close()


def test_one_environment_is_called_as_tf_agents_calls_it(make_one):
    with make_one(RandomEnv) as env:
        assert env.call("seed", 3)() == 3
        expected = RandomEnv()
        expected.seed(3)
        assert_equal(env.call("reset")(), expected.reset())
        action = np.ones(7, np.float32)
        assert_equal(env.call("step", action)(), expected.step(action))
        assert env.call("action_spec")() == ACTION
        assert env.render("rgb_array", blocking=False)().shape == (2, 2, 3)


# -- what goes wrong, and how TF-Agents' own class does it -----------------------------------------


def test_error_in_a_constructor_is_that_error(backend):
    """There: an AssertionError; and what else was started is left running."""
    env = tf_agents.ProcessPyEnvironment(FailsToStart, backend=backend)
    with pytest.raises(RuntimeError, match=r"^no licence") as caught:
        env.start()
    assert type(caught.value) is RuntimeError
    with pytest.raises(RuntimeError, match=r"^no licence") as caught:
        tf_agents.ParallelPyEnvironment([RandomEnv, FailsToStart], backend=backend)
    assert caught.value.env_failures[0].index == 1


def test_error_in_a_reset_is_that_error(make_one):
    with make_one(FailsToReset) as env, pytest.raises(RuntimeError, match=r"^stuck") as caught:
        env.reset()
    assert "FailsToReset" not in str(caught.value)
    assert "_reset" in str(caught.value.__cause__)


def test_environment_is_there_after_an_error_in_a_step(make_one):
    """There: a bare Exception of text, and the worker is gone."""
    with make_one(Faulty) as env:
        env.reset()
        assert env.step(0).observation == 1
        with pytest.raises(KeyError) as caught:
            env.step(1)
        assert caught.value.args == ("arm",)
        with pytest.raises(ResetNeeded):
            env.step(0)
        assert env.reset().observation == 0
        assert env.step(0).observation == 1


def test_attribute_that_is_not_there_does_no_harm(make_one):
    """There: hasattr raises, and the worker is gone."""
    with make_one(Faulty) as env:
        env.reset()
        assert not hasattr(env, "wheels")
        with pytest.raises(AttributeError, match="wheels"):
            env.access("wheels")
        assert env.step(0).observation == 1


def test_no_reply_is_stale_after_one_environment_has_failed(make):
    """There: what the others gave in that step is taken for the next one's."""
    actions = np.zeros(3, np.int32)
    with make([Faulty] * 3, envs_per_actor=1) as batch:
        batch.reset()
        assert batch.step(actions).observation.tolist() == [1, 1, 1]
        with pytest.raises(KeyError) as caught:
            batch.step(np.array([0, 1, 0], np.int32))
        assert [failure.index for failure in caught.value.env_failures] == [1]
        assert batch.reset(env_ids=[1]).observation.tolist() == [2, 0, 2]
        assert batch.step(actions).observation.tolist() == [3, 1, 3]


@pytest.mark.parametrize("number", [1, 3])
def test_wrong_number_of_actions_moves_nothing(local, number):
    """There: zip cuts the longer of the two short, in silence."""
    with local([Faulty] * 2) as batch:
        batch.reset()
        with pytest.raises(ValueError, match=f"leading axis {number}, expected batch_size 2"):
            batch.step(np.zeros(number, np.int32))
        assert batch.step(np.zeros(2, np.int32)).observation.tolist() == [1, 1]


def test_mode_of_render_reaches_the_environment(make, make_one):
    """There: it is checked, and render called without it."""
    with make([Drawn] * 2) as batch:
        assert (batch.render("rgb_array") == 7).all()
    with make_one(Drawn) as env:
        assert (env.render("rgb_array") == 7).all()
        with pytest.raises(NotImplementedError, match="Only rgb_array"):
            env.render("human")


def test_rewards_discounts_and_infos_are_the_environments(make):
    """There: the specs of the base class, and get_info raises."""
    with make([TwoRewards] * 2) as batch:
        assert batch.reward_spec().shape == (2,)
        assert batch.discount_spec().minimum == 0.5
        assert batch.time_step_spec() == TwoRewards().time_step_spec()
        infos: list[Any] = []
        driver = py_driver.PyDriver(
            batch,
            random_py_policy.RandomPyPolicy(batch.time_step_spec(), batch.action_spec()),
            observers=[],
            info_observers=[infos.append],
            max_steps=6,
        )
        time_step, _ = driver.run(batch.reset())
        assert infos == [[{"fuel": 3}] * 2] * 3
        assert time_step.reward.tolist() == [[1, 2]] * 2


def test_mismatch_says_who_and_what(local):
    """There: that there is one."""
    with pytest.raises(SpecMismatch, match=r"env 1's.*shape \(4, 3\) against \(3, 3\)"):
        local([RandomEnv, functools.partial(RandomEnv, 4)])


def test_death_is_told_and_others_go_on(on_ray):
    """There: EOFError, from a pipe."""
    with tf_agents.ParallelPyEnvironment([Faulty] * 2) as batch:
        batch.reset()
        with pytest.raises(ActorDied, match="env 1"):
            batch.step(np.array([0, 2], np.int32))
        assert batch.reset(env_ids=[1]).observation.tolist() == [1, 0]


def test_hang_ends_with_the_deadline(on_ray):
    """There: nothing has a deadline, and close leaves what hangs."""
    with tf_agents.ParallelPyEnvironment([Faulty] * 2, step_timeout=2) as batch:
        batch.reset()
        with pytest.raises(EnvTimeout, match="env 0"):
            batch.step(np.array([3, 0], np.int32))
        assert batch.reset().observation.tolist() == [0, 0]


def test_no_environments_is_an_error_that_says_so(local):
    """There: IndexError."""
    with pytest.raises(ValueError, match="env_constructors is empty"):
        local([])


def test_one_seed_gives_each_environment_its_own(local):
    """There: BatchedPyEnvironment gives all of them the same."""
    with local([RandomEnv] * 2, seed=1) as batch:
        observation = batch.reset().observation
        assert not np.array_equal(observation[0], observation[1])


# -- the example -----------------------------------------------------------------------------------


def test_example_learns():
    done = subprocess.run(
        [sys.executable, "examples/tf_agents_driver.py"],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"average return \w+: ([\d.]+)", done.stdout))
    assert before < 40
    assert after > 3 * before
