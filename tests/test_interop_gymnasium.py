"""RayVectorEnv gives what Gymnasium's own vector environments give."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gym_envs
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from envfleet import ActorDied, InvalidAction, SpecMismatch, gin_state
from envfleet.actor import EnvActor, Reply
from envfleet.environments.gymnasium_member import Member
from envfleet.interop.gymnasium import RayVectorEnv, vector_spec

MODES = [pytest.param(mode, id=mode.name) for mode in AutoresetMode]


def assert_same(found: Any, expected: Any, where: str = "it") -> None:
    """The same types, dtypes, shapes and values; of a single number its type may differ."""
    if isinstance(expected, int | np.integer | np.floating) and not isinstance(expected, bool):
        assert np.shape(found) == (), where
        assert np.asarray(found).dtype.kind == np.asarray(expected).dtype.kind, where
        assert found == expected, where
        return
    assert type(found) is type(expected), f"{where}: {found!r} against {expected!r}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), where
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{i}]")
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        if expected.dtype.hasobject:
            assert_same(found.tolist(), expected.tolist(), where)
        else:
            assert found.tobytes() == expected.tobytes(), f"{where}: {found} against {expected}"
    else:
        assert found == expected, where


def compare(ours: Any, theirs: Any, num_steps: int, seed: int = 1) -> int:
    """Steps both by the same actions from the same seeds; gives how many episodes have ended."""
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.metadata == theirs.metadata
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed))
    theirs.action_space.seed(seed)
    ended = np.zeros(theirs.num_envs, bool)
    num_ended = 0
    for step in range(num_steps):
        if ended.any() and theirs.metadata["autoreset_mode"] is AutoresetMode.DISABLED:
            outcome = ours.reset(options={"reset_mask": ended.copy()})
            assert_same(outcome, theirs.reset(options={"reset_mask": ended}), f"reset {step}")
        actions = theirs.action_space.sample()
        expected = theirs.step(actions)
        assert_same(ours.step(actions), expected, f"step {step}")
        ended = expected[2] | expected[3]
        num_ended += ended.sum()
    return int(num_ended)


@pytest.fixture
def make(backend: str) -> Iterator[Callable[..., RayVectorEnv]]:
    """Vector environments of two actors, closed at the end."""
    made: list[RayVectorEnv] = []

    def make(env_fns: Any, **options: Any) -> RayVectorEnv:
        options = {"backend": backend, "envs_per_actor": 2} | options
        made.append(RayVectorEnv(env_fns, **options))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


IDS = ["CartPole-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "LunarLander-v3", "Hopper-v5"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", IDS)
def test_it_gives_what_sync_vector_env_gives(env_id, mode, make):
    env_fn = functools.partial(gymnasium.make, env_id, max_episode_steps=40)
    with_sync = SyncVectorEnv([env_fn] * 4, autoreset_mode=mode)
    num_ended = compare(make([env_fn] * 4, autoreset_mode=mode), with_sync, 600)
    assert num_ended > 40
    with_sync.close()


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("name", gym_envs.SPACES)
def test_every_space_of_gymnasium_goes_in_and_out(name, backend, make):
    env_fn = functools.partial(gym_envs.AnySpace, name)
    for mode in AutoresetMode if backend == "local" else [AutoresetMode.SAME_STEP]:
        ours = make([env_fn] * 3, autoreset_mode=mode, envs_per_actor=3)
        theirs = SyncVectorEnv([env_fn] * 3, autoreset_mode=mode)
        assert compare(ours, theirs, 60) > 20


def test_actions_of_any_space_that_do_not_fit_move_nothing(make):
    env_fn = functools.partial(gym_envs.AnySpace, "sequence in a dict")
    envs = make([env_fn] * 3, envs_per_actor=3)
    theirs = SyncVectorEnv([env_fn] * 3)
    assert_same(envs.reset(seed=1), theirs.reset(seed=1))
    envs.action_space.seed(0)
    actions = envs.action_space.sample()
    for wrong in (
        {"steps": actions["steps"]},
        {"steps": actions["steps"][:2], "goal": actions["goal"]},
        {"steps": actions["steps"], "goal": (actions["goal"][0], actions["goal"][1][:1])},
    ):
        with pytest.raises(InvalidAction, match="actions"):
            envs.step(wrong)
    assert_same(envs.step(actions), theirs.step(actions))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wrap",
    [
        wrappers.NormalizeObservation,
        wrappers.NormalizeReward,
        wrappers.DictInfoToList,
        functools.partial(wrappers.ClipReward, min_reward=-0.5, max_reward=0.5),
        functools.partial(wrappers.TransformAction, func=lambda actions: actions // 2),
        wrappers.FlattenObservation,
        lambda env: wrappers.NormalizeReward(wrappers.NormalizeObservation(env)),
    ],
)
def test_gymnasiums_vector_wrappers_run_over_it_unchanged(wrap, mode, make):
    env_fn = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)
    ours = make([env_fn] * 4, autoreset_mode=mode)
    try:
        theirs = wrap(SyncVectorEnv([env_fn] * 4, autoreset_mode=mode))
    except ValueError as refused:  # some wrappers are not for every mode
        with pytest.raises(ValueError, match=re.escape(str(refused))):
            wrap(ours)
        return
    compare(wrap(ours), theirs, 100)


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_are_those_of_sync_vector_env(mode, make):
    env_fn = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)

    class WithoutTimes(wrappers.RecordEpisodeStatistics):
        def step(self, actions: Any) -> Any:
            *outcome, infos = super().step(actions)
            if "episode" in infos:
                del infos["episode"]["t"]
                infos["episode"].pop("_t", None)
            return *outcome, infos

    ours = WithoutTimes(make([env_fn] * 4, autoreset_mode=mode))
    theirs = WithoutTimes(SyncVectorEnv([env_fn] * 4, autoreset_mode=mode))
    if mode is AutoresetMode.DISABLED:
        # Gymnasium takes the mask out of the caller's options, so that the wrapper around it wipes
        # the statistics of all: what is compared with is what the wrapper gives for the mask.
        reset = theirs.env.reset
        theirs.env.reset = lambda *, seed=None, options=None: reset(
            seed=seed, options=options and dict(options)
        )
    assert compare(ours, theirs, 100) > 10
    assert list(ours.return_queue) == list(theirs.return_queue)
    assert list(ours.length_queue) == list(theirs.length_queue)


# -- resets ----------------------------------------------------------------------------------------


def test_seeds_and_options_reach_the_environments_that_are_reset(make):
    envs = make([gym_envs.Told] * 4)
    envs.reset(seed=5, options={"level": 2})
    assert envs.get_attr("resets") == tuple([(5 + i, {"level": 2})] for i in range(4))
    mask = np.array([True, False, False, True])
    options = {"reset_mask": mask, "level": 3}
    _, infos = envs.reset(seed=[1, 2, None, None], options=options)
    assert envs.get_attr("resets") == (
        [(5, {"level": 2}), (1, {"level": 3})],
        [(6, {"level": 2})],
        [(7, {"level": 2})],
        [(8, {"level": 2}), (None, {"level": 3})],
    )
    assert options == {"reset_mask": mask, "level": 3}, "the caller's options were changed"
    assert infos["options"]["level"].tolist() == [3, 0, 0, 3]
    assert infos["_options"].tolist() == [True, False, False, True]
    envs.reset()
    assert envs.get_attr("resets")[0][-1] == (None, None), "a seed is for one reset"


def test_partial_reset_leaves_the_others_in_their_episode(make):
    envs = make([gym_envs.Told] * 4)
    envs.reset()
    envs.step(np.zeros(4, int))
    observation, _ = envs.reset(options={"reset_mask": np.array([False, True, False, False])})
    assert observation.tolist() == [[1, 1], [2, 0], [1, 1], [1, 1]]
    assert envs.step(np.zeros(4, int))[0].tolist() == [[1, 2], [2, 1], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("seed", "options", "error", "words"),
    [
        ([1, 2], None, ValueError, "seed has 2 elements, expected one for each of 3"),
        (None, {"reset_mask": [True] * 3}, TypeError, "is a list, expected an array of bool"),
        (None, {"reset_mask": np.ones(3)}, TypeError, "is a float64, expected an array of bool"),
        (None, {"reset_mask": np.ones(2, bool)}, ValueError, r"shape \(2,\), expected \(3,\)"),
        (None, {"reset_mask": np.zeros(3, bool)}, ValueError, "False for every environment"),
    ],
)
def test_wrong_seed_or_mask_resets_nothing(seed, options, error, words):
    with RayVectorEnvs([gym_envs.Told] * 3) as envs:
        envs.reset()
        with pytest.raises(error, match=words):
            envs.reset(seed=seed, options=options)
        assert envs.get_attr("resets") == ([(None, None)],) * 3


class RayVectorEnvs(RayVectorEnv):
    """Local ones, closed at the end of a block."""

    def __init__(self, env_fns: Any, **options: Any) -> None:
        super().__init__(env_fns, **{"backend": "local"} | options)

    def __enter__(self) -> RayVectorEnvs:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def test_final_observation_is_not_what_the_reset_wrote_over_it(make):
    envs = make([gym_envs.Told] * 2, autoreset_mode="SameStep")
    envs.reset()
    for _ in range(3):
        observation, _, terminated, _, infos = envs.step(np.zeros(2, int))
    assert terminated.all()
    assert observation.tolist() == [[2, 0], [2, 0]]
    assert [final.tolist() for final in infos["final_obs"]] == [[1, 3], [1, 3]]
    assert infos["final_info"]["over"].tolist() == [True, True]


def test_disabled_autoreset_refuses_a_step_of_an_episode_that_is_over(make):
    envs = make([gym_envs.Told, functools.partial(gym_envs.Told, 9)], autoreset_mode="Disabled")
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(2, int))
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"episodes of env 0 have ended"):
        envs.step(np.zeros(2, int))
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert envs.step(np.zeros(2, int))[0].tolist() == [[2, 1], [1, 4]]


def test_step_before_reset_is_refused(make):
    envs = make([gym_envs.Told] * 2)
    with pytest.raises(gymnasium.error.ResetNeeded, match="before reset"):
        envs.step(np.zeros(2, int))


def test_what_was_given_out_stays_as_it_was(make):
    envs = make([gym_envs.Told] * 2)
    first, _ = envs.reset()
    second = envs.step(np.zeros(2, int))[0]
    assert first.tolist() == [[1, 0], [1, 0]]
    second[:] = 99
    assert envs.step(np.zeros(2, int))[0].tolist() == [[1, 2], [1, 2]]


def test_infos_that_were_given_out_stay_as_they_were(make):
    envs = make([Tracing] * 2)
    envs.reset()
    first = envs.step(np.array([1, 2]))[4]
    envs.step(np.array([0, 0]))
    assert first["trace"].tolist() == [[1], [2]]


class Tracing(gym_envs.Told):
    """Gives one list in its infos, and adds to it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.trace: list[int] = []
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.trace.append(action)
        return *super().step(action)[:4], {"trace": self.trace}


@pytest.mark.parametrize(("env_id", "has_infos"), [("CartPole-v1", False), ("Taxi-v4", True)])
def test_step_without_infos_is_one_block_of_bytes(env_id, has_infos):
    """Nothing is pickled for it, as for an environment without a face."""
    member = Member(functools.partial(gymnasium.make, env_id), AutoresetMode.SAME_STEP)
    actor = EnvActor([0], in_process=True)
    actor.build([0], [member], [1], gin_state.scope_only(), {})
    assert isinstance(actor.reset(), Reply if has_infos else bytes)


# -- sending and waiting ---------------------------------------------------------------------------


def test_step_async_and_step_wait_are_a_step_in_two(make):
    envs = make([gym_envs.Told] * 2)
    envs.reset()
    envs.step_async(np.array([0, 1]))
    for call in (
        lambda: envs.step_async(np.zeros(2, int)),
        lambda: envs.reset(),
        lambda: envs.get_attr("level"),
    ):
        with pytest.raises(gymnasium.error.AlreadyPendingCallError):
            call()
    assert envs.step_wait()[1].tolist() == [0.0, 1.0]
    with pytest.raises(gymnasium.error.NoAsyncCallError):
        envs.step_wait()


# -- between steps ---------------------------------------------------------------------------------


def test_attributes_and_methods_are_those_under_the_wrappers(make):
    env_fns = [functools.partial(wrapped, i) for i in range(3)]
    envs = make(env_fns)
    assert envs.get_attr("index") == (0, 1, 2)
    assert envs.call("add", 10, times=2) == (20, 21, 22)
    assert envs.call("level") == (1, 1, 1)
    envs.set_attr("level", 5)
    assert envs.get_attr("level") == (5, 5, 5)
    envs.set_attr("level", [7, 8, 9])
    assert [env["level"] for env in envs.call("unwrapped_state")] == [7, 8, 9], "set on the wrapper"
    with pytest.raises(ValueError, match="2 values, expected one for each of 3"):
        envs.set_attr("level", [1, 2])
    with pytest.raises(AttributeError, match="no_such"):
        envs.get_attr("no_such")
    with pytest.raises(KeyError, match="arm"):
        envs.call("fail")
    for name in ("reset", "step", "close"):
        with pytest.raises(ValueError, match="would bypass"):
            envs.call(name)
    envs.reset(seed=3)
    assert envs.np_random_seed == (3, 4, 5)
    assert len(envs.np_random) == 3


class WithState(gym_envs.Told):
    def unwrapped_state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name == "level"}


def wrapped(index: int) -> Any:
    return gym_envs.Unused(WithState(index=index))


def test_render_gives_what_each_environment_renders(make):
    envs = make([functools.partial(gym_envs.Told, 3, "rgb_array", i) for i in range(2)])
    assert envs.render_mode == "rgb_array"
    assert envs.metadata["render_fps"] == 7
    envs.reset()
    images = envs.render()
    assert isinstance(images, tuple)
    assert [image[0, 0, 0] for image in images] == [0, 1]


def test_metadata_of_the_environment_class_is_left_alone():
    with RayVectorEnvs([gym_envs.Told] * 2) as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert "autoreset_mode" not in gym_envs.Told.metadata


def test_close_twice_is_fine_and_nothing_works_afterwards(make):
    envs = make([gym_envs.Told] * 2)
    envs.reset()
    envs.close()
    envs.close()
    assert envs.closed
    with pytest.raises(Exception, match="after close"):
        envs.step(np.zeros(2, int))


def test_different_spaces_say_whose(make):
    env_fns = [functools.partial(gym_envs.AnySpace, name) for name in ("sequence", "one of")]
    with pytest.raises(SpecMismatch, match=r"env 1's observation_space is OneOf.*env 0's is Seq"):
        make([env_fns[0], env_fns[1]])


def test_one_environment_for_several_is_refused():
    env = gym_envs.Told()
    with pytest.raises(ValueError, match="env 0 and env 2 are one and the same object"):
        RayVectorEnv([lambda: env, gym_envs.Told, lambda: env], backend="local")


def test_arguments_of_gymnasiums_own_are_refused_by_name():
    with pytest.raises(TypeError, match="RayVectorEnv has no copy, shared_memory"):
        RayVectorEnv([gym_envs.Told], backend="local", shared_memory=True, copy=False)
    envs = RayVectorEnv((gym_envs.Told for _ in range(2)), backend="local")
    envs.close(timeout=3, terminate=True)
    with pytest.raises(TypeError, match=r"env_constructors\[0\] .*AnySpace.* does not pickle"):
        RayVectorEnv([functools.partial(gym_envs.AnySpace, threading.Lock())])


def test_auto_takes_one_an_actor_where_actions_cannot_be_drawn(on_ray):
    envs = RayVectorEnv(
        [functools.partial(gym_envs.AnySpace, "sequence in a dict")] * 2, envs_per_actor="auto"
    )
    assert envs.batch.envs_per_actor == 1
    envs.close()


def test_unknown_mode_says_which_there_are():
    with pytest.raises(
        ValueError, match=r"is 'same', expected one of 'NextStep', 'SameStep', 'Dis"
    ):
        RayVectorEnv([gym_envs.Told], backend="local", autoreset_mode="same")


def test_what_is_no_gymnasium_environment_is_refused(make):
    with pytest.raises(TypeError, match=r"returned a builtins\.dict, expected a gymnasium\.Env"):
        make([dict] * 2)
    with pytest.raises(
        TypeError, match=r"env_constructors\[0\] is an environment \(non-callable Told\)"
    ):
        make([gym_envs.Told()])


def test_wrong_number_of_actions_moves_nothing(make):
    envs = make([gym_envs.Told] * 4)
    envs.reset()
    with pytest.raises(InvalidAction, match="leading axis 3, expected batch_size 4"):
        envs.step(np.zeros(3, int))
    assert envs.step(np.zeros(4, int))[0].tolist() == [[1, 1]] * 4


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_failure_is_the_environments_own_exception_and_reset_brings_it_back(mode, make):
    envs = make([gym_envs.Fragile] * 3, autoreset_mode=mode)
    envs.reset(seed=1)
    with pytest.raises(KeyError, match="arm") as caught:
        envs.step(np.array([0, 1, 0]))
    assert caught.value.env_failures[0].index == 1
    observation, _ = envs.reset(seed=4, options={"level": 1})
    assert envs.get_attr("resets")[0][-1] == (4, {"level": 1})
    assert envs.get_attr("resets")[1][-1] == (5, {"level": 1}), "the rebuilt one was not seeded"
    assert observation[:, 1].tolist() == [0, 0, 0]
    assert envs.step(np.zeros(3, int))[0][:, 1].tolist() == [1, 1, 1]


class FailsToReset(gym_envs.Told):
    """Its second reset raises; an episode ends with a success."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.resets:
            raise KeyError("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, _, over, _, _ = super().step(action)
        return observation, 100.0, over, False, {"is_success": over}


def test_reset_that_fails_leaves_the_step_before_it_as_it_was(make):
    envs = make(
        [functools.partial(FailsToReset, 2), functools.partial(gym_envs.Told, 9)],
        autoreset_mode="SameStep",
        on_failure="restart",
    )
    for _ in range(2):
        envs.reset() if envs.batch.failures == () else None
        envs.step(np.zeros(2, int))
        observation, reward, terminated, truncated, infos = envs.step(np.zeros(2, int))
        assert reward[0] == 100.0
        assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, False])
        assert infos["final_obs"][0].tolist() == [1, 2]
        assert infos["final_info"]["is_success"].tolist() == [True, False]
        assert observation[0].tolist() == [1, 0], "not of the rebuilt one"
        assert "KeyError: 'reset'" in infos["env_failure"][0]
    assert [failure.phase for failure in envs.batch.failures] == ["reset", "reset"]
    raising = make([functools.partial(FailsToReset, 1)] * 2, autoreset_mode="SameStep")
    raising.reset()
    with pytest.raises(KeyError, match="reset"):
        raising.step(np.zeros(2, int))
    assert raising.reset()[0].tolist() == [[1, 0], [1, 0]]


class SlowToReset(gym_envs.Told):
    """All its resets but the first take longer than a step may."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(1.0 if self.resets else 0.0)
        return super().reset(seed=seed, options=options)


def test_step_that_resets_has_the_time_of_a_reset(make):
    envs = make(
        [functools.partial(SlowToReset, 1)] * 2,
        autoreset_mode="SameStep",
        step_timeout=0.5,
        reset_timeout=60.0,
    )
    envs.reset()
    assert envs.step(np.zeros(2, int))[0].tolist() == [[2, 0], [2, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_restart_shows_a_truncation_that_says_why(mode, make):
    envs = make(
        [functools.partial(gym_envs.Fragile, 5)] * 3, autoreset_mode=mode, on_failure="restart"
    )
    envs.reset()
    envs.step(np.zeros(3, int))
    observation, reward, terminated, truncated, infos = envs.step(np.array([0, 1, 0]))
    assert terminated.tolist() == [False] * 3
    assert truncated.tolist() == [False, True, False]
    assert reward.tolist() == [0.0, 0.0, 0.0]
    assert observation[[0, 2]].tolist() == [[1, 2], [1, 2]]
    if mode is AutoresetMode.SAME_STEP:
        assert observation[1].tolist() == [1, 0]
        assert infos["final_obs"][1].tolist() == [1, 1]
        infos = infos["final_info"]
    else:
        assert observation[1].tolist() == [1, 1]
    assert "KeyError: 'arm'" in infos["env_failure"][1]
    assert infos["_env_failure"].tolist() == [False, True, False]
    if mode is AutoresetMode.DISABLED:
        envs.reset(options={"reset_mask": truncated})
    after = envs.step(np.zeros(3, int))[0]
    # With the mask it is told its (empty) options, in a reset after that of the rebuilding.
    expected = {"NEXT_STEP": [1, 0], "SAME_STEP": [1, 1], "DISABLED": [2, 1]}[mode.name]
    assert after.tolist() == [[1, 3], expected, [1, 3]]


def test_termination_before_a_failure_stays_one(make):
    """The flags of the episode before do not come back with the truncation."""
    envs = make(
        [functools.partial(gym_envs.Fragile, 2)] * 2,
        autoreset_mode="SameStep",
        on_failure="restart",
    )
    envs.reset()
    envs.step(np.zeros(2, int))
    assert envs.step(np.zeros(2, int))[2].tolist() == [True, True]
    _, _, terminated, truncated, infos = envs.step(np.array([0, 1]))
    assert (terminated.tolist(), truncated.tolist()) == ([False, False], [False, True])
    assert infos["final_obs"][1].tolist() == [2, 0]
    assert envs.batch.failures[0].episode_step == 0, "counted on from the episode before"


def test_seeded_reset_reaches_what_is_being_rebuilt(make):
    """Its first time step is there already, by another seed: that one is not shown."""
    envs = make([gym_envs.Fragile] * 3, on_failure="restart")
    envs.reset()
    envs.step(np.array([0, 1, 0]))
    observation, _ = envs.reset(seed=8)
    assert [resets[-1][0] for resets in envs.get_attr("resets")] == [8, 9, 10]
    assert observation[:, 1].tolist() == [0, 0, 0]
    assert envs.step(np.zeros(3, int))[0][:, 1].tolist() == [1, 1, 1]


def test_what_is_rebuilt_has_a_seed_by_those_of_the_reset(make):
    seen = []
    for _ in range(2):
        envs = make([gym_envs.Fragile] * 3, on_failure="restart")
        envs.reset(seed=5)
        envs.step(np.array([0, 1, 0]))
        envs.step(np.zeros(3, int))
        seen.append(envs.get_attr("resets")[1][0][0])
    assert isinstance(seen[0], int)
    assert seen[0] == seen[1] != 6


def test_killed_simulator_is_named(on_ray):
    envs = RayVectorEnv([gym_envs.Fragile] * 2)
    envs.reset()
    with pytest.raises(ActorDied, match=r"env 1 of 2.*signal 9|SIGKILL"):
        envs.step(np.array([0, 2]))
    envs.reset()
    assert envs.step(np.zeros(2, int))[0].tolist() == [[2, 1], [1, 1]]
    envs.close()


def test_short_episodes_are_good_steps(make):
    """With SAME_STEP every step of these is a first one again: the budget counts in a row."""
    envs = make(
        [functools.partial(gym_envs.Fragile, 1)] * 2,
        autoreset_mode="SameStep",
        on_failure="restart",
        max_restarts=1,
    )
    envs.reset()
    for _ in range(3):
        envs.step(np.array([1, 0]))
        envs.step(np.array([0, 0]))


# -- the way in ------------------------------------------------------------------------------------


def test_make_vec_reaches_it_by_the_vector_entry_point(backend):
    spec = vector_spec("CartPole-v1", backend=backend, envs_per_actor=2, autoreset_mode="SameStep")
    envs = gymnasium.make_vec(spec, num_envs=4, max_episode_steps=7)
    assert isinstance(envs, RayVectorEnv)
    assert envs.spec is not None
    assert envs.spec.id == "CartPole-v1"
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.num_envs == 4
    env_fn = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=7)
    compare(envs, SyncVectorEnv([env_fn] * 4, autoreset_mode="SameStep"), 30)
    envs.close()
    assert gymnasium.spec("CartPole-v1").vector_entry_point != spec.vector_entry_point


def test_id_with_the_entry_point_reaches_it_too():
    spec = vector_spec("CartPole-v1", backend="local")
    gymnasium.register("Ray/CartPole-v1", vector_entry_point=spec.vector_entry_point)
    try:
        envs = gymnasium.make_vec(
            "Ray/CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"
        )
        assert isinstance(envs, RayVectorEnv)
        assert envs.reset()[0].shape == (3, 4)
        envs.close()
    finally:
        del gymnasium.registry["Ray/CartPole-v1"]


def test_environment_may_change_its_options(make):
    given = {"level": {"walls": [1, 2]}}
    envs = make([Greedy] * 2)
    envs.reset(options=given)
    assert given == {"level": {"walls": [1, 2]}}
    assert envs.get_attr("took") == (1, 1), "one has taken what was for the other"


class Greedy(gym_envs.Told):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.took = options["level"]["walls"].pop(0)
        return super().reset(seed=seed, options=options)


def test_space_of_another_library_travels_as_an_object(make):
    envs = make([OfAnotherLibrary] * 2)
    observation, _ = envs.reset()
    assert observation == ({"any": "thing"}, {"any": "thing"})


class AnyThing(spaces.Space[Any]):
    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return {"any": "thing"}

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyThing)


class OfAnotherLibrary(gymnasium.Env[Any, Any]):
    observation_space = AnyThing()
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}
