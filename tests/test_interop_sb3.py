"""RayVecEnv gives what Stable-Baselines3's DummyVecEnv gives."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gym_envs
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

sb3 = pytest.importorskip("stable_baselines3", reason="not installed: make test-peers")

from stable_baselines3.common.callbacks import (  # noqa: E402
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import is_wrapped, make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecVideoRecorder,
    is_vecenv_wrapped,
    sync_envs_normalization,
)

from envfleet import ActorDied, ClosedError, EnvBusy, InvalidAction, ResetNeeded  # noqa: E402
from envfleet.interop.stable_baselines3 import RayVecEnv  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def make(backend: str) -> Iterator[Callable[..., RayVecEnv]]:
    """Vector environments of two environments an actor, closed at the end."""
    made: list[RayVecEnv] = []

    def make(env_fns: Any, **options: Any) -> RayVecEnv:
        made.append(RayVecEnv(env_fns, **{"backend": backend, "envs_per_actor": 2} | options))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def assert_same(found: Any, expected: Any, where: str = "it") -> None:
    """The same structure, dtypes, shapes and values."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            if key != "t":  # the seconds of an episode
                assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{i}]")
    else:
        mine, theirs = np.asarray(found), np.asarray(expected)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), where
        assert mine.tobytes() == theirs.tobytes(), f"{where}: {found} against {expected}"


def compare(ours: VecEnv, theirs: VecEnv, num_steps: int, seed: int = 1) -> int:
    """Steps both by the same actions from the same seeds; gives how many episodes have ended."""
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.num_envs == theirs.num_envs
    ours.seed(seed)
    theirs.seed(seed)
    assert_same(ours.reset(), theirs.reset())
    theirs.action_space.seed(seed)
    num_ended = 0
    for step in range(num_steps):
        assert_same(ours.reset_infos, theirs.reset_infos, f"reset_infos {step}")
        actions = np.stack([theirs.action_space.sample() for _ in range(theirs.num_envs)])
        expected = theirs.step(actions)
        assert_same(ours.step(actions), expected, f"step {step}")
        num_ended += int(expected[2].sum())
    return num_ended


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "LunarLander-v3", "HalfCheetah-v5"]
)
def test_it_gives_what_dummy_vec_env_gives(env_id, make):
    env_fn = functools.partial(gymnasium.make, env_id, max_episode_steps=40)
    assert compare(make([env_fn] * 4), DummyVecEnv([env_fn] * 4), 500) > 40


class Sampled(gym_envs.AnySpace):
    """Observations and actions of two of `SPACES`."""

    def __init__(self, name: str, action_name: str) -> None:
        super().__init__(name)
        self.action_space = gym_envs.AnySpace(action_name).action_space


@pytest.mark.parametrize("name", ["image", "discrete", "multi-binary", "tuple", "dict"])
@pytest.mark.parametrize("action_name", ["box", "multi-discrete", "multi-binary"])
def test_spaces_of_stable_baselines3_go_in_and_out(name, action_name, make):
    env_fn = functools.partial(Sampled, name, action_name)
    assert compare(make([env_fn] * 3), DummyVecEnv([env_fn] * 3), 60) > 20


# -- as Stable-Baselines3 uses it ------------------------------------------------------------------


def test_make_vec_env_makes_it(backend):
    arguments = {
        "n_envs": 4,
        "seed": 5,
        "wrapper_class": gym_envs.Unused,
        "env_kwargs": {"max_episode_steps": 20},
    }
    ours = make_vec_env(
        "CartPole-v1", vec_env_cls=RayVecEnv, vec_env_kwargs={"backend": backend}, **arguments
    )
    theirs = make_vec_env("CartPole-v1", **arguments)
    assert isinstance(ours, RayVecEnv)
    assert isinstance(ours, VecEnv)
    assert ours.env_is_wrapped(Monitor) == [True] * 4
    assert ours.env_is_wrapped(gym_envs.Unused, indices=1) == [True]
    assert ours.env_is_wrapped(gymnasium.wrappers.RecordVideo, indices=[0, 2]) == [False] * 2
    assert [is_wrapped(env, Monitor) for env in theirs.envs] == [True] * 4
    compare(ours, theirs, 60)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "wrap",
    [
        VecNormalize,
        VecMonitor,
        functools.partial(VecFrameStack, n_stack=3),
        lambda env: VecFrameStack(VecNormalize(VecMonitor(env)), 2),
    ],
    ids=["VecNormalize", "VecMonitor", "VecFrameStack", "all"],
)
def test_wrappers_of_stable_baselines3_run_over_it(wrap, make):
    env_fn = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=25)
    ours = wrap(make([env_fn] * 4))
    assert isinstance(ours.unwrapped, RayVecEnv)
    compare(ours, wrap(DummyVecEnv([env_fn] * 4)), 150)
    assert is_vecenv_wrapped(ours, type(ours))


def test_video_is_recorded(make, tmp_path):
    env_fn = functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")
    envs = make([env_fn] * 2)
    recorded = VecVideoRecorder(
        envs, str(tmp_path), record_video_trigger=lambda step: step == 0, video_length=5
    )
    recorded.reset()
    for _ in range(8):
        recorded.step(np.zeros(2, int))
    (video,) = tmp_path.glob("*.mp4")
    assert video.stat().st_size > 1000


def test_render_tiles_the_images(make):
    def both(make: Any) -> VecEnv:
        fns = [functools.partial(gym_envs.Told, 3, "rgb_array", i + 1) for i in range(4)]
        return make(fns)

    ours, theirs = both(make), both(DummyVecEnv)
    ours.reset()
    theirs.reset()
    assert ours.render_mode == "rgb_array"
    assert ours.metadata == theirs.metadata
    assert_same(ours.get_images(), theirs.get_images())
    assert_same(ours.render(), theirs.render())
    assert_same(ours.render("rgb_array"), theirs.render("rgb_array"))


def test_seeds_and_options_are_used_once_and_by_environment(make):
    envs = make([gym_envs.Told] * 3)
    envs.seed(7)
    envs.set_options([{"level": i} for i in range(3)])
    envs.reset()
    envs.reset()
    told = [[(7 + i, {"level": i} if i is not None else None), (None, None)] for i in range(3)]
    assert envs.get_attr("resets") == told
    envs.set_options({"level": 9})
    envs.reset()
    assert envs.reset_infos == [{"options": {"level": 9}}] * 3


def test_attributes_are_those_of_the_environment_that_owns_them(make):
    envs = make([functools.partial(wrapped, i) for i in range(4)])
    assert envs.get_attr("index") == [0, 1, 2, 3]
    assert envs.get_attr("index", indices=[3, 1]) == [3, 1]
    envs.set_attr("level", 5, indices=1)
    assert envs.get_attr("level") == [1, 5, 1, 1]
    assert envs.env_method("own_level") == [1, 5, 1, 1], "set on the outermost wrapper"
    assert envs.env_method("add", 10, times=2, indices=[2]) == [22]
    assert envs.has_attr("level")
    assert envs.has_attr("add")
    assert not envs.has_attr("no_such")
    with pytest.raises(AttributeError, match="no_such"):
        envs.get_attr("no_such")
    with pytest.raises(TypeError, match="is a method"):
        envs.get_attr("add")
    with pytest.raises(KeyError, match="arm"):
        envs.env_method("fail")
    with pytest.raises(ValueError, match="would bypass"):
        envs.env_method("reset")


class WithLevel(gym_envs.Told):
    def own_level(self) -> int:
        return vars(self)["level"]


def wrapped(index: int) -> Any:
    return gym_envs.Unused(WithLevel(index=index))


def test_step_async_and_step_wait_are_a_step_in_two(make):
    envs = make([gym_envs.Told] * 2)
    with pytest.raises(RuntimeError, match="without a call to step_async"):
        envs.step_wait()
    envs.reset()
    envs.step_async(np.array([1, 0]))
    assert envs.step_wait()[1].tolist() == [1.0, 0.0]
    envs.step_async(np.array([1, 0]))
    assert envs.reset()[:, 1].tolist() == [0, 0]  # what is under way is dropped
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]


def test_seeded_reset_drops_what_is_under_way(make):
    envs = make([gym_envs.Told] * 2)
    envs.reset()
    envs.step_async(np.array([1, 0]))
    envs.seed(3)
    assert envs.reset()[:, 1].tolist() == [0, 0]
    assert [resets[-1][0] for resets in envs.get_attr("resets")] == [3, 4]
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]


def test_step_that_is_pending_is_waited_for_before_the_next(make):
    envs = make([gym_envs.Told] * 2)
    with pytest.raises(ResetNeeded, match="before reset"):
        envs.step(np.zeros(2, int))
    envs.reset()
    envs.step_async(np.array([1, 0]))
    with pytest.raises(EnvBusy, match="before step_wait"):
        envs.step_async(np.zeros(2, int))
    assert envs.step_wait()[1].tolist() == [1.0, 0.0]


def test_bits_may_be_floats_as_policies_give_them(make):
    env_fn = functools.partial(Sampled, "box", "multi-binary")
    envs = make([env_fn] * 2)
    model = sb3.PPO("MlpPolicy", envs, n_steps=8, batch_size=16, device="cpu")
    model.learn(32)
    with pytest.raises(InvalidAction, match="float32"):
        envs.step(np.full((2, 4), 0.5, np.float32))


def test_indices_count_from_the_end_as_well(make):
    envs = make([functools.partial(gym_envs.Told, index=i) for i in range(3)])
    assert envs.get_attr("index", indices=-1) == [2]
    assert envs.env_method("add", 1, indices=[-3, 1]) == [1, 2]
    with pytest.raises(IndexError):
        envs.get_attr("index", indices=-4)


def test_images_need_the_mode_for_them(make):
    envs = make([gym_envs.Told] * 2)
    with pytest.warns(UserWarning, match="expected 'rgb_array'"):
        assert envs.get_images() == [None, None]


def test_environment_whose_reset_takes_no_options_will_do(make):
    envs = make([TakesNoOptions] * 2)
    envs.reset()
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]


class TakesNoOptions(gym_envs.Told):
    def reset(self, *, seed: int | None = None) -> Any:
        return super().reset(seed=seed)


def test_render_modes_that_differ_leave_nothing_running(make):
    fns = [functools.partial(gym_envs.Told, 3, mode) for mode in ("rgb_array", None)]
    with pytest.raises(AssertionError, match="render_mode"):
        make(fns)


def test_wrong_number_of_actions_moves_nothing(make):
    envs = make([gym_envs.Told] * 4)
    envs.reset()
    with pytest.raises(InvalidAction, match="leading axis 3, expected batch_size 4"):
        envs.step(np.zeros(3, int))
    assert envs.step(np.zeros(4, int))[0][:, 1].tolist() == [1] * 4


def test_close_twice_is_fine(make):
    envs = make([gym_envs.Told] * 2)
    envs.close()
    envs.close()
    with pytest.raises(ClosedError):
        envs.reset()


def test_terminal_observation_is_not_written_over_by_the_reset(make):
    """Nor is what was given before: the environment has one buffer for all of them."""
    envs = make([functools.partial(gym_envs.Told, 2)] * 2)
    first = envs.reset()
    second = envs.step(np.zeros(2, int))[0]
    third, _, dones, infos = envs.step(np.zeros(2, int))
    assert dones.all()
    assert first.tolist() == [[1, 0]] * 2
    assert second.tolist() == [[1, 1]] * 2
    assert third.tolist() == [[2, 0]] * 2
    assert [info["terminal_observation"].tolist() for info in infos] == [[1, 2]] * 2
    assert [info["TimeLimit.truncated"] for info in infos] == [False] * 2


# -- failures --------------------------------------------------------------------------------------


def test_failure_is_the_environments_own_exception(make):
    envs = make([gym_envs.Fragile] * 3)
    envs.reset()
    with pytest.raises(KeyError, match="arm"):
        envs.step(np.array([0, 1, 0]))
    assert envs.reset()[:, 1].tolist() == [0, 0, 0]


def test_restart_is_a_truncation_with_the_last_good_observation(make):
    envs = make([functools.partial(gym_envs.Fragile, 9)] * 2, on_failure="restart")
    envs.reset()
    envs.step(np.zeros(2, int))
    observations, rewards, dones, infos = envs.step(np.array([0, 1]))
    assert dones.tolist() == [False, True]
    assert rewards.tolist() == [0.0, 0.0]
    assert observations.tolist() == [[1, 2], [1, 0]]
    assert infos[1]["terminal_observation"].tolist() == [1, 1]
    assert infos[1]["TimeLimit.truncated"] is True
    assert "KeyError: 'arm'" in infos[1]["env_failure"]
    assert infos[0] == {"TimeLimit.truncated": False}
    observations, _, dones, infos = envs.step(np.zeros(2, int))
    assert observations.tolist() == [[1, 3], [1, 1]]
    assert not dones.any()
    assert infos == [{"TimeLimit.truncated": False}] * 2


def test_reset_infos_are_those_of_the_episode_that_is_shown(make):
    envs = make([functools.partial(FragileAndTelling, 2)] * 2, on_failure="restart")
    envs.reset()
    envs.reset()
    assert envs.reset_infos == [{"resets": 2}] * 2
    envs.step(np.zeros(2, int))
    assert envs.step(np.array([0, 1]))[2].all()  # one ends its episode, one fails and is rebuilt
    assert envs.reset_infos == [{"resets": 3}, {"resets": 1}]


class FragileAndTelling(gym_envs.Fragile):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"resets": len(self.resets)}


def test_failures_without_end_are_raised_and_reset_goes_on(make):
    envs = make([functools.partial(gym_envs.Fragile, 9)] * 2, on_failure="restart", max_restarts=1)
    envs.reset()
    assert envs.step(np.array([0, 1]))[2].tolist() == [False, True]
    with pytest.raises(KeyError, match="arm"):
        envs.step(np.array([0, 1]))
    assert envs.reset()[:, 1].tolist() == [0, 0]
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]


def test_killed_simulator_is_named(on_ray):
    envs = RayVecEnv([gym_envs.Fragile] * 2)
    envs.reset()
    with pytest.raises(ActorDied, match=r"env 1 of 2"):
        envs.step(np.array([0, 2]))
    envs.close()


# -- training --------------------------------------------------------------------------------------


class Kill(BaseCallback):
    """Kills the process of an environment in the middle of a rollout."""

    def _on_step(self) -> bool:
        if self.n_calls == 40:
            import os
            import signal

            os.kill(self.training_env.env_method("process_id", indices=1)[0], signal.SIGKILL)
        return True


class Killable(gymnasium.Wrapper):
    def process_id(self) -> int:
        import os

        return os.getpid()


def test_training_goes_on_when_a_simulator_is_killed(on_ray):
    envs = make_vec_env(
        "CartPole-v1",
        4,
        seed=1,
        wrapper_class=Killable,
        vec_env_cls=RayVecEnv,
        vec_env_kwargs={"on_failure": "restart", "envs_per_actor": 2},
    )
    model = sb3.PPO("MlpPolicy", envs, n_steps=64, batch_size=64, seed=1, device="cpu")
    model.learn(600, callback=Kill())
    assert model.num_timesteps >= 600
    assert sum(envs.batch.stats().failures) == 2  # both environments of that actor
    envs.close()


CART_POLE = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=50)


@pytest.mark.parametrize(
    ("algorithm", "policy", "env_fn", "arguments"),
    [
        pytest.param(
            *(sb3.PPO, "MlpPolicy", CART_POLE, {"n_steps": 32, "batch_size": 32, "n_epochs": 2}),
            id="PPO",
        ),
        pytest.param(sb3.A2C, "MlpPolicy", CART_POLE, {}, id="A2C"),
        pytest.param(
            *(sb3.A2C, "MultiInputPolicy", functools.partial(BitFlippingEnv, n_bits=4), {}),
            id="A2C on dicts",
        ),
        pytest.param(
            *(sb3.DQN, "MultiInputPolicy", functools.partial(BitFlippingEnv, n_bits=4)),
            {"replay_buffer_class": sb3.HerReplayBuffer, "learning_starts": 50},
            id="DQN with hindsight",  # which has rewards computed by the environment
        ),
    ],
)
def test_training_gives_the_model_that_dummy_vec_env_gives(
    algorithm, policy, env_fn, arguments, make
):
    """Learning twice, so that the second run goes on where the environments are."""
    weights = []
    for envs in (make([env_fn] * 4), DummyVecEnv([env_fn] * 4)):
        model = algorithm(policy, envs, seed=3, device="cpu", **arguments)
        untrained = {name: w.clone() for name, w in model.policy.state_dict().items()}
        model.learn(300)
        model.learn(200, reset_num_timesteps=False)
        assert model.num_timesteps >= 500
        weights.append(model.policy.state_dict())
        assert any(not w.equal(untrained[name]) for name, w in weights[-1].items())
    ours, theirs = weights
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


def test_callbacks_evaluate_save_and_stop(make, tmp_path):
    model = sb3.PPO("MlpPolicy", make([CART_POLE] * 4), n_steps=32, batch_size=64, device="cpu")
    evaluation = EvalCallback(
        VecMonitor(make([CART_POLE] * 2)),
        callback_on_new_best=StopTrainingOnRewardThreshold(1.0),
        eval_freq=20,
        n_eval_episodes=4,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
    )
    model.learn(10_000, callback=[CheckpointCallback(10, str(tmp_path)), evaluation])
    assert model.num_timesteps == 80  # every episode of CartPole has a return of 1 at least
    lengths = np.load(tmp_path / "evaluations.npz")["ep_lengths"]
    assert lengths.shape == (1, 4)
    assert ((lengths > 0) & (lengths <= 50)).all()
    saved = {path.name for path in tmp_path.glob("*.zip")}
    assert saved == {"best_model.zip", "rl_model_40_steps.zip", "rl_model_80_steps.zip"}


def test_normalization_is_saved_loaded_and_shared(make, tmp_path):
    trained = VecNormalize(make([CART_POLE] * 4))
    sb3.A2C("MlpPolicy", trained, seed=1, device="cpu").learn(200)
    trained.save(tmp_path / "normalization.pkl")
    loaded = VecNormalize.load(tmp_path / "normalization.pkl", make([CART_POLE] * 2))
    other = VecNormalize(make([CART_POLE] * 2), training=False)
    assert not np.array_equal(other.obs_rms.mean, trained.obs_rms.mean)
    sync_envs_normalization(trained, other)
    for envs in (loaded, other):
        np.testing.assert_array_equal(envs.obs_rms.mean, trained.obs_rms.mean)
    loaded.training = False
    for envs in (loaded, other):
        envs.seed(4)
    assert_same(loaded.reset(), other.reset())


def test_model_is_saved_loaded_and_goes_on(make, tmp_path):
    env_fn = functools.partial(gymnasium.make, "CartPole-v1")
    model = sb3.A2C("MlpPolicy", make([env_fn] * 4), seed=1, device="cpu")
    model.learn(200)
    model.save(tmp_path / "model")
    loaded = sb3.A2C.load(tmp_path / "model", env=make([env_fn] * 4), device="cpu")
    loaded.learn(200, reset_num_timesteps=False)
    loaded.set_env(make([env_fn] * 4))
    mean, _ = evaluate_policy(loaded, make([env_fn] * 2), n_eval_episodes=4)
    assert mean > 0


def test_spaces_are_those_of_the_environment(make):
    envs = make([gym_envs.Told] * 2)
    assert envs.observation_space == gym_envs.Told.observation_space
    assert isinstance(envs.action_space, spaces.Discrete)


@pytest.mark.parametrize("script", ["ppo_stable_baselines3.py", "ppo_torch.py"])
def test_ppo_learns_cart_pole(script):
    done = subprocess.run(
        [sys.executable, f"examples/{script}"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"return after \d+ steps: ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) >= 400, done.stdout
