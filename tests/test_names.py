"""Environments by name: ids in place of constructors, and what the caller has registered."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import gin
import gym_envs
import gymnasium
import numpy as np
import pytest

from envfleet import ActorPyEnvironment, ParallelPyEnvironment
from envfleet.environments.gymnasium import load
from envfleet.interop.gymnasium import RayVectorEnv


def test_id_stands_for_a_constructor(make_batch):
    for given in ({"env_constructors": "CartPole-v1", "num_envs": 2}, {"env_constructors": NAMES}):
        with make_batch(**given, seed=1) as batch:
            assert batch.reset().observation.shape == (2, 4)
            assert [spec.id for spec in batch.get_attr("spec")] == ["CartPole-v1"] * 2


NAMES = ["CartPole-v1"] * 2


def test_id_stands_for_the_constructor_of_a_single_one(backend):
    env = ActorPyEnvironment("CartPole-v1", backend=backend)
    env.start()
    with env:
        assert env.reset().observation.shape == (4,)


def test_module_of_an_id_is_imported_where_the_environment_is_built(make_batch):
    """registering.py is imported by the actor only: it registers when that happens."""
    code = (
        "import sys; from envfleet import ParallelPyEnvironment\n"
        "with ParallelPyEnvironment('registering:Told-v0', num_envs=2, backend='ray') as env:\n"
        "    assert 'registering' not in sys.modules\n"
        "    print(env.reset().observation.tolist())\n"
    )
    assert run(code) == "[[1, 0], [1, 0]]"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=TESTS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "given",
    ["CartPole-v1-no", "NoSuch-v0", "nowhere/NoSuch-v0"],
)
def test_unknown_id_says_what_has_to_be_imported(given, make_batch):
    with pytest.raises(gymnasium.error.UnregisteredEnv, match=rf"has to be imported.*{given}'"):
        make_batch(given, num_envs=2)


def test_module_that_is_not_there_is_named(make_batch):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make_batch("no_such_module:NoSuch-v0", num_envs=1)


def test_id_without_gymnasium_says_what_to_install():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from envfleet import ParallelPyEnvironment\n"
        "try:\n"
        "    ParallelPyEnvironment('CartPole-v1', num_envs=1, backend='local')\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    assert "pip install 'envfleet[gymnasium]'" in run(code)


# -- registrations ---------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Registered in this process, and by no import: a class of its own, made here."""

    class Local(gym_envs.Told):
        pass

    for name, entry_point in (("Here-v0", Local), ("There-v3", "gym_envs:Told")):
        gymnasium.register(name, entry_point=entry_point, kwargs={"length": 2}, max_episode_steps=9)
    yield ["Here-v0", "There-v3"]
    for name in ("Here-v0", "There-v3"):
        del gymnasium.registry[name]


def test_what_the_caller_has_registered_is_registered_in_actors(registered, make_batch):
    for name in registered:
        for given in (name, lambda name=name: gymnasium.make(name)):
            with make_batch(given, num_envs=2) as batch:
                batch.reset()
                assert batch.get_attr("length") == [2, 2]
                assert batch.get_attr("_max_episode_steps") == [9, 9]


def test_registration_of_what_comes_with_gymnasium_reaches_actors(make_batch):
    """Of the library's own class with other arguments, in place of an id, and a spec changed."""
    kept = {name: gymnasium.registry[name] for name in ("Acrobot-v1", "CartPole-v1")}
    entry_point = "gymnasium.envs.classic_control:CartPoleEnv"
    gymnasium.register("Short-v0", entry_point=entry_point, max_episode_steps=5)
    gymnasium.registry["CartPole-v1"] = copy.deepcopy(kept["CartPole-v1"])
    gymnasium.registry["CartPole-v1"].entry_point = gym_envs.Told
    gymnasium.registry["Acrobot-v1"] = copy.deepcopy(kept["Acrobot-v1"])
    gymnasium.registry["Acrobot-v1"].max_episode_steps = 3
    try:
        for name, steps in (("Short-v0", 5), ("CartPole-v1", 500), ("Acrobot-v1", 3)):
            with make_batch(name, num_envs=1) as batch:
                assert batch.get_attr("_max_episode_steps") == [steps]
        with make_batch("CartPole-v1", num_envs=1) as batch:
            assert batch.get_attr("length") == [3]
    finally:
        gymnasium.registry.update(kept)
        del gymnasium.registry["Short-v0"]


def test_registration_that_does_not_travel_says_so(on_ray):
    import threading

    gymnasium.register("Locked-v0", entry_point=Locked(threading.Lock()))
    try:
        with pytest.raises(
            gymnasium.error.UnregisteredEnv, match=r"the caller has registered it.*"
        ):
            ParallelPyEnvironment("Locked-v0", num_envs=1)
        with ParallelPyEnvironment("CartPole-v1", num_envs=1) as batch:  # others do not need it
            batch.reset()
    finally:
        del gymnasium.registry["Locked-v0"]


class Locked:
    def __init__(self, lock: object) -> None:
        self.lock = lock

    def __call__(self) -> gymnasium.Env:
        return gym_envs.Told()


def test_registration_of_the_main_script_reaches_actors(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["(2,", "3)"]


SCRIPT = """
import gymnasium
import numpy as np

from envfleet.interop.gymnasium import RayVectorEnv


class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}


gymnasium.register("Mine-v0", entry_point=Mine)
envs = RayVectorEnv(["Mine-v0"] * 2)
print(envs.reset()[0].shape)
envs.close()
"""


# -- load ------------------------------------------------------------------------------------------


def test_load_takes_the_arguments_of_make_and_wrappers():
    env = load(
        "CartPole-v1", wrappers=[gym_envs.Unused], max_episode_steps=3, render_mode="rgb_array"
    )
    assert isinstance(env, gym_envs.Unused)
    assert env.spec.max_episode_steps == 3
    assert env.render_mode == "rgb_array"


def test_load_is_configured_by_gin(make_batch):
    gin.parse_config("""
        envfleet.environments.gymnasium.load.environment_name = 'CartPole-v1'
        envfleet.environments.gymnasium.load.max_episode_steps = 5
        ParallelPyEnvironment.env_constructors = @envfleet.environments.gymnasium.load
        ParallelPyEnvironment.num_envs = 2
    """)
    try:
        with make_batch() as batch:
            batch.reset()
            for _ in range(5):
                time_step = batch.step(np.array([0, 1]))
            assert time_step.step_type.tolist() == [2, 2]
        with make_batch("Acrobot-v1", num_envs=1) as batch:  # what is bound is for who names it
            assert batch.get_attr("_max_episode_steps") == [500]
        envs = RayVectorEnv(load, num_envs=2, backend="local")
        assert envs.get_attr("spec")[0].max_episode_steps == 5
        envs.close()
    finally:
        gin.clear_config()
