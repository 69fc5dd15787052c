"""ParallelPyEnvironment: arguments, structures, specs, calls between steps, starting."""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
import time
from typing import Any, NamedTuple

import attrs
import dm_env
import faults
import numpy as np
import pytest
import ray
from dm_env import specs

from envfleet import (
    FleetStartError,
    InvalidAction,
    ParallelPyEnvironment,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.testing import DelayEnv, ProbeEnv

# -- constructors ----------------------------------------------------------------------------------


def test_environment_in_place_of_a_constructor_is_named_by_position():
    with pytest.raises(TypeError, match=r"env_constructors\[1\] is an environment .*@make_env\(\)"):
        ParallelPyEnvironment([ProbeEnv, ProbeEnv()])


def test_value_in_place_of_a_constructor_is_named_by_position():
    with pytest.raises(
        TypeError, match=r"env_constructors\[0\] is not callable \(int\).*non-called"
    ):
        ParallelPyEnvironment([3])


def test_no_constructors_are_an_error():
    with pytest.raises(ValueError, match="empty"):
        ParallelPyEnvironment([])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"env_constructors": ProbeEnv}, ValueError, "num_envs"),
        ({"env_constructors": [ProbeEnv], "num_envs": 2}, ValueError, "num_envs is 2"),
        ({"env_constructors": ProbeEnv, "num_envs": 0}, ValueError, "num_envs is 0"),
        ({"env_constructors": [ProbeEnv], "envs_per_actor": 0}, ValueError, "envs_per_actor"),
        ({"env_constructors": [ProbeEnv], "backend": "threads"}, ValueError, "'ray', 'local'"),
        ({"env_constructors": [ProbeEnv], "step_timeout": 0}, ValueError, "step_timeout is 0"),
        ({"env_constructors": [ProbeEnv], "actor_options": [{}] * 2}, ValueError, "2 elements"),
        ({"env_constructors": [ProbeEnv], "actor_options": [None]}, TypeError, r"options\[0\]"),
        ({"env_constructors": [ProbeEnv], "seed": [1, 2]}, ValueError, "2 elements"),
        ({"env_constructors": [ProbeEnv], "seed": -1}, ValueError, "seed is -1"),
        ({"env_constructors": [ProbeEnv], "seed": "x"}, TypeError, "seed is a str"),
    ],
)
def test_contradictory_argument_says_what_was_expected(arguments, error, words):
    with pytest.raises(error, match=words):
        ParallelPyEnvironment(**{"backend": "local", **arguments})


def test_one_callable_makes_as_many_environments_as_asked(make_batch):
    with make_batch(ProbeEnv, num_envs=3) as batch:
        assert batch.batch_size == 3
        assert batch.batched
        assert len(batch.envs) == 3


def test_constructor_that_does_not_pickle_is_named_by_position_and_reason(session_ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"env_constructors\[1\].*lock"):
        ParallelPyEnvironment([ProbeEnv, lambda: lock and ProbeEnv()])


def test_local_backend_needs_no_pickling():
    lock = threading.Lock()
    with ParallelPyEnvironment([lambda: lock and ProbeEnv()], backend="local") as batch:
        batch.reset()


def test_something_else_than_an_environment_is_a_clear_error(make_batch):
    with pytest.raises(TypeError, match=r"returned a collections\.Counter, expected a dm_env"):
        make_batch([collections.Counter])


def test_environment_is_never_built_in_the_caller(on_ray):
    def constructor() -> ProbeEnv:
        import os

        env = ProbeEnv()
        env.pid = os.getpid()
        return env

    import os

    with ParallelPyEnvironment([constructor] * 2) as batch:
        pids = batch.get_attr("pid")
    assert len({*pids, os.getpid()}) == 3


# -- structures ------------------------------------------------------------------------------------


class Arm(NamedTuple):
    angle: Any
    torque: Any


@attrs.define
class Body:
    arm: Any
    name: Any


class NestedEnv(dm_env.Environment):
    """Gives its action back as observation."""

    def __init__(self, structure: Any) -> None:
        self.structure = structure

    def observation_spec(self):
        return self.structure

    action_spec = observation_spec

    def reset(self):
        import tree

        return dm_env.restart(
            tree.map_structure(lambda s: s.generate_value() if s else None, self.structure)
        )

    def step(self, action):
        return dm_env.transition(1.0, action)


FLOAT = specs.Array((2,), np.float32)
INT = specs.BoundedArray((), np.int64, 0, 9)
TEXT = specs.StringArray(())

STRUCTURES = {
    "leaf": FLOAT,
    "scalar": INT,
    "text": TEXT,
    "dict": {"b": INT, "a": FLOAT},
    "ordered": collections.OrderedDict([("z", INT), ("a", FLOAT)]),
    "tuple": (INT, FLOAT, TEXT),
    "list": [INT, [FLOAT, INT]],
    "named": Arm(FLOAT, {"x": INT}),
    "attrs": Body(Arm(INT, FLOAT), TEXT),
    "deep": {"a": ({"b": [Arm(INT, (FLOAT,))]},)},
    "empty": {"a": specs.Array((0, 3), np.uint8), "b": ()},
}


def batched(spec: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    if spec.dtype == object:
        values = np.empty(3, object)
        values[:] = [f"text {i} {seed}" for i in range(3)]
        return values
    return random.integers(0, 9, (3, *spec.shape)).astype(spec.dtype)


@pytest.mark.parametrize("envs_per_actor", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_nested_actions_and_observations_keep_structure_and_values(name, envs_per_actor):
    import tree

    structure = STRUCTURES[name]
    with ParallelPyEnvironment(
        functools.partial(NestedEnv, structure),
        num_envs=3,
        backend="local",
        envs_per_actor=envs_per_actor,
    ) as batch:
        batch.reset()
        for seed in range(3):
            actions = tree.map_structure(functools.partial(batched, seed=seed), structure)
            observation = batch.step(actions).observation
            tree.assert_same_structure(observation, structure)
            tree.map_structure(np.testing.assert_array_equal, observation, actions)
            for leaf, spec in zip(tree.flatten(observation), tree.flatten(structure), strict=True):
                assert leaf.dtype == spec.dtype
                assert leaf.shape == (3, *spec.shape)


def test_deep_structure_travels_over_ray(on_ray):
    structure = {**STRUCTURES, "attrs": None}
    del structure["attrs"]
    import tree

    with ParallelPyEnvironment([functools.partial(NestedEnv, structure)] * 3) as batch:
        batch.reset()
        actions = tree.map_structure(functools.partial(batched, seed=1), structure)
        observation = batch.step(actions).observation
        tree.map_structure(np.testing.assert_array_equal, observation, actions)


@pytest.mark.parametrize("shape", [(84, 84, 4), (210, 160, 3), (400, 400, 3)])
def test_images_arrive_whole_and_are_the_callers_own(shape, on_ray):
    spec = specs.Array(shape, np.uint8)
    constructors = [functools.partial(NestedEnv, {"image": spec, "id": INT})] * 2
    with ParallelPyEnvironment(constructors) as batch:
        batch.reset()
        for i in range(3):
            images = np.random.default_rng(i).integers(0, 255, (2, *shape)).astype(np.uint8)
            found = batch.step({"image": images, "id": np.array([i, i])}).observation["image"]
            assert np.array_equal(found, images)
            assert found.flags.writeable
            assert found.flags.owndata


NESTED = {"move": INT, "arm": (FLOAT, FLOAT)}
GOOD = {"move": np.zeros(2, int), "arm": (np.zeros((2, 2), np.float32),) * 2}


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (
            {**GOOD, "move": np.zeros(7, int)},
            r"actions\['move'\] has leading axis 7, expected batch",
        ),
        ({**GOOD, "move": 3}, r"actions\['move'\] has no leading axis"),
        ({**GOOD, "move": [0.5, 0.5]}, r"actions\['move'\] has dtype float64"),
        ({**GOOD, "move": ["a", "b"]}, r"actions\['move'\] has dtype <U1"),
        ({**GOOD, "arm": (GOOD["arm"][0],)}, r"lacks actions\['arm'\]\[1\]"),
        ({**GOOD, "leg": 1}, r"has unexpected actions\['leg'\]"),
        ({"move": GOOD["move"]}, r"lacks actions\['arm'\]\[0\], actions\['arm'\]\[1\]"),
        (
            {**GOOD, "arm": (np.zeros((2, 3)), np.zeros((2, 2)))},
            r"\[0\] has shape \(2, 3\), expected",
        ),
        ({**GOOD, "arm": ([[1, 2], [3]], np.zeros((2, 2)))}, r"actions\['arm'\]\[0\] is ragged"),
        (None, r"lacks|expected the leaves"),
    ],
    ids=range(10),
)
def test_action_that_does_not_fit_says_which_leaf_and_why(actions, words):
    with ParallelPyEnvironment(
        functools.partial(NestedEnv, NESTED), num_envs=2, backend="local"
    ) as batch:
        batch.step(GOOD)
        with pytest.raises(InvalidAction, match=words):
            batch.step(actions)


def test_actions_are_cast_where_that_is_safe(make_batch):
    with make_batch(functools.partial(NestedEnv, {"f": FLOAT, "i": INT}), num_envs=2) as batch:
        batch.reset()
        observation = batch.step({"f": [[1, 2], [3.5, 4]], "i": np.array([1, 2], np.uint8)})
        assert observation.observation["f"].dtype == np.float32
        assert observation.observation["i"].tolist() == [1, 2]
        too_big = np.array([2**63, 1], np.uint64)
        with pytest.raises(InvalidAction, match="int64 cannot hold"):
            batch.step({"f": np.zeros((2, 2)), "i": too_big})


class WritesToItsAction(NestedEnv):
    def step(self, action):
        action += 1
        return dm_env.transition(1.0, action)


def test_environment_may_write_to_its_action(make_batch):
    with make_batch(functools.partial(WritesToItsAction, FLOAT), num_envs=2) as batch:
        batch.reset()
        actions = np.zeros((2, 2), np.float32)
        assert batch.step(actions).observation.tolist() == [[1, 1], [1, 1]]
        assert actions.tolist() == [[0, 0], [0, 0]]


# -- specs -----------------------------------------------------------------------------------------


def test_specs_are_those_of_one_environment(make_batch):
    with make_batch([ProbeEnv] * 2) as batch:
        assert batch.observation_spec()["image"].shape == (2, 3)
        assert batch.action_spec() == ProbeEnv().action_spec()
        assert batch.reward_spec() == ProbeEnv().reward_spec()
        assert batch.discount_spec() == ProbeEnv().discount_spec()
        assert batch.time_step_spec().observation == batch.observation_spec()


BASE = {"arm": {"torque": specs.BoundedArray((6,), np.float32, -1, 1, "t"), "n": INT}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"arm": {**BASE["arm"], "torque": specs.BoundedArray((7,), np.float32, -1, 1)}},
            [
                "env 1's observation_spec differs from env 0's at 'arm/torque'",
                "'arm/torque': shape (7,) against (6,)",
            ],
        ),
        (
            {"arm": {**BASE["arm"], "torque": specs.BoundedArray((6,), np.float64, -1, 1)}},
            ["'arm/torque': dtype float64 against float32"],
        ),
        (
            {"arm": {**BASE["arm"], "torque": specs.BoundedArray((6,), np.float32, -2, 1)}},
            ["'arm/torque': minimum -2.0 against -1.0"],
        ),
        (
            {"arm": {**BASE["arm"], "torque": specs.Array((6,), np.float32)}},
            ["minimum -inf against -1.0", "maximum inf against 1.0"],
        ),
        ({"arm": {"n": INT}}, ["'arm/torque': no such leaf against shape (6,) dtype float32"]),
        (
            {"arm": {"torque": BASE["arm"]["torque"], "n": FLOAT, "more": INT}},
            ["'arm/n': shape (2,) against ()", "'arm/n': dtype float32", "'arm/more': shape ()"],
        ),
    ],
    ids=["shape", "dtype", "minimum", "unbounded", "missing", "several"],
)
def test_spec_mismatch_says_which_where_and_both_values(other, words):
    constructors = [functools.partial(NestedEnv, s) for s in (BASE, other)]
    with pytest.raises(SpecMismatch) as caught:
        ParallelPyEnvironment(constructors, backend="local")
    for word in words:
        assert word in str(caught.value)
    assert "action_spec" in str(caught.value)


def test_names_and_spec_classes_do_not_count(make_batch):
    one = {"a": specs.BoundedArray((), np.int64, 0, 2, "one"), "b": specs.Array((1,), np.uint8)}
    two = {"a": specs.DiscreteArray(3, np.int64), "b": specs.BoundedArray((1,), np.uint8, 0, 255)}
    with make_batch([functools.partial(NestedEnv, s) for s in (one, two)]) as batch:
        batch.reset()


def test_mismatch_over_ray_leaves_no_actor(on_ray):
    other = {"arm": {"n": INT}}
    with pytest.raises(SpecMismatch, match="env 1"):
        ParallelPyEnvironment([functools.partial(NestedEnv, s) for s in (BASE, other)])


# -- stepping --------------------------------------------------------------------------------------


def test_reset_of_some_before_any_reset_says_so(make_batch):
    with make_batch([ProbeEnv] * 2) as batch, pytest.raises(ResetNeeded, match="without env 1"):
        batch.reset(env_ids=[0])


def test_current_time_step_before_any_says_so(make_batch):
    with make_batch([ProbeEnv] * 2) as batch, pytest.raises(ResetNeeded, match="no time step"):
        batch.current_time_step()


@pytest.mark.parametrize(
    ("env_ids", "error", "words"),
    [
        ([2], IndexError, "expected 0 to 1"),
        ([0, 0], ValueError, "twice"),
        (["a"], TypeError, "'a'"),
    ],
)
def test_wrong_env_ids_are_named(env_ids, error, words, make_batch):
    with make_batch([ProbeEnv] * 2) as batch:
        batch.reset()
        with pytest.raises(error, match=words):
            batch.reset(env_ids=env_ids)
        with pytest.raises(error, match=words):
            batch.get_attr("env_id", env_ids=env_ids)


def test_environments_step_at_the_same_time(on_ray):
    """Four sleeps side by side take about as long as one, and one after another four times that."""
    took = {}
    for blocking in (False, True):
        constructors = [functools.partial(DelayEnv, 0.2, episode_length=99)] * 4
        with ParallelPyEnvironment(constructors, blocking=blocking) as batch:
            batch.reset()
            started = time.perf_counter()
            batch.step([0] * 4)
            took[blocking] = time.perf_counter() - started
    assert took[True] / took[False] > 2


@pytest.mark.parametrize("envs_per_actor", [1, 2, 3])
def test_same_seed_gives_the_same_trajectories_however_they_are_hosted(envs_per_actor, backend):
    import gymnasium

    def trajectories(**kwargs: Any) -> list[Any]:
        with ParallelPyEnvironment(
            lambda: gymnasium.make("CartPole-v1"), num_envs=3, seed=5, **kwargs
        ) as batch:
            random = np.random.default_rng(0)
            return [batch.step(random.integers(0, 2, 3)).observation for _ in range(80)]

    expected = trajectories(backend="local", blocking=True, start_serially=True)
    found = trajectories(backend=backend, envs_per_actor=envs_per_actor)
    assert np.array_equal(expected, found)


# -- between steps ---------------------------------------------------------------------------------


def test_call_reaches_each_environment_with_its_arguments(make_batch):
    with make_batch([functools.partial(ProbeEnv, i) for i in range(3)]) as batch:
        assert batch.call("add", 10, right=100) == [110, 111, 112]
        assert batch.call("add", 10, env_ids=[2, 0]) == [12, 10]
        assert batch.get_attr("env_id") == [0, 1, 2]
        batch.set_attr("env_id", 7, env_ids=[1])
        assert batch.get_attr("env_id") == [0, 7, 2]
        batch.reset()
        assert batch.get_info() == [{"episode": 0}] * 3


def test_call_of_a_method_that_keeps_the_record_is_refused(make_batch):
    with make_batch([ProbeEnv]) as batch, pytest.raises(ValueError, match=r"use step\(\) itself"):
        batch.call("step", 1)


def test_attributes_are_found_and_set_under_wrappers(make_batch):
    import gymnasium

    def constructor() -> Any:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    with make_batch([constructor]) as batch:
        assert batch.get_attr("gravity") == [9.8]
        batch.set_attr("gravity", 1.5)
        assert batch.get_attr("gravity") == [1.5]
        assert batch.get_attr("unwrapped")[0].gravity == 1.5
        with pytest.raises(AttributeError, match="CartPoleEnv has no attribute 'nope'"):
            batch.get_attr("nope")
        with pytest.raises(TypeError, match="is a method"):
            batch.get_attr("render")


def test_render_gives_a_batch_of_images(make_batch):
    with make_batch([functools.partial(ProbeEnv, i) for i in range(3)]) as batch:
        images = batch.render()
        assert images.shape == (3, 4, 5, 3)
        assert images[:, 0, 0, 0].tolist() == [0, 1, 2]
        with pytest.raises(NotImplementedError, match="Only rgb_array"):
            batch.render("human")


def test_render_of_another_size_names_the_environment(make_batch):
    class Bigger(ProbeEnv):
        def render(self):
            return np.zeros((9, 9, 3), np.uint8)

    with make_batch([ProbeEnv, Bigger]) as batch, pytest.raises(ValueError, match="env 1 rendered"):
        batch.render()


@pytest.mark.filterwarnings("ignore:.*without specifying any render mode")
def test_render_without_images_says_how_to_build_the_environment(make_batch):
    import gymnasium

    with make_batch([lambda: gymnasium.make("CartPole-v1")]) as batch:
        batch.reset()
        with pytest.raises(ValueError, match="render_mode='rgb_array'"):
            batch.render()


def test_state_is_given_back(make_batch):
    with make_batch([functools.partial(ProbeEnv, i, 5) for i in range(2)]) as batch:
        batch.reset()
        batch.step([1, 1])
        states = batch.get_state()
        expected = [batch.step([i, i]).observation["step"].tolist() for i in range(4)]
        assert states == [(0, 1), (0, 1)]
        batch.set_state(states)
        found = [batch.step([i, i]).observation["step"].tolist() for i in range(4)]
        assert found == expected
        with pytest.raises(ValueError, match="1 states, expected one for each of 2"):
            batch.set_state(states[:1])


def test_seed_list_gives_each_environment_its_element(make_batch):
    with make_batch([ProbeEnv] * 3) as batch:
        assert batch.seed([4, 5, 6]) == [4, 5, 6]
        assert batch.reset().observation["seed"].tolist() == [4, 5, 6]
        with pytest.raises(ValueError, match="2 elements"):
            batch.seed([1, 2])
        assert len(set(batch.seed(None))) == 3


def test_environment_that_cannot_be_seeded_says_so(make_batch):
    with pytest.raises(TypeError, match=r"NestedEnv has no method seed"):
        make_batch([functools.partial(NestedEnv, FLOAT)], seed=1)


def test_stats_tell_where_the_time_went(make_batch):
    with make_batch([functools.partial(DelayEnv, 0.02)] * 2) as batch:
        for _ in range(3):
            batch.step([0, 0])
        stats = batch.stats()
        assert stats.num_calls == [3, 3]
        assert all(seconds >= 0.04 for seconds in stats.env_seconds)


# -- starting --------------------------------------------------------------------------------------


class SlowToBuild(ProbeEnv):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        time.sleep(seconds)


def test_start_is_parallel_unless_asked_otherwise(on_ray):
    took = {}
    for serially in (False, True):
        started = time.perf_counter()
        constructors = [functools.partial(SlowToBuild, 2.0)] * 4
        ParallelPyEnvironment(constructors, start_serially=serially).close()
        took[serially] = time.perf_counter() - started
    assert took[True] / took[False] > 1.4


class Holder:
    def hold(self):
        pass


def test_start_that_cannot_finish_says_what_was_asked_for_and_what_there_is(on_ray, caplog):
    holder = ray.remote(Holder).options(num_cpus=2).remote()
    ray.get(holder.hold.remote())
    try:
        with pytest.raises(FleetStartError) as caught:
            ParallelPyEnvironment([ProbeEnv] * 2, actor_options={"num_cpus": 2}, start_timeout=8.0)
    finally:
        ray.kill(holder)
    text = str(caught.value)
    assert "1 of 2 actors started in 8.0 s" in text
    assert "1 wait for resources" in text
    assert "asked for 2 x 2 CPU" in text
    assert "4 CPU of which 0 free" in text
    (said,) = [one for one in caplog.messages if "will wait" in one]  # before it was waited for
    assert "4 CPU of which 2 free; 1 of 2 actors will wait for what others hold, up to 8 s" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_cpus": 2}, "2 of 4 actors could never be placed: asked for 4 x 2 CPU; .* 4 CPU"),
        ({"num_cpus": 5}, r"4 of 4 actors .* no autoscaler \(the largest node has 4 CPU"),
        ({"num_gpus": 1}, r"1 GPU; the cluster \(1 nodes\) has .* 0 GPU of which 0 free"),
        ({"resources": {"unicorn": 1}}, r"1 CPU \+ 1 unicorn; .* 0 unicorn of which 0 free"),
    ],
    ids=["all together", "one of them", "gpu", "resource"],
)
def test_start_that_can_never_finish_is_an_error_at_once(on_ray, options, words):
    with pytest.raises(FleetStartError, match=words):
        ParallelPyEnvironment([ProbeEnv] * 4, actor_options=options, start_timeout=None)


def test_placement_that_does_not_exist_is_refused(make_batch):
    with pytest.raises(ValueError, match="placement is 'spreed', expected one of 'spread', 'pack'"):
        make_batch([ProbeEnv], placement="spreed")
    with pytest.raises(ValueError, match="rebalance_seconds is 0"):
        make_batch([ProbeEnv], rebalance_seconds=0)


class Located(ProbeEnv):
    def pid(self):
        return os.getpid()


def test_batch_says_where_its_environments_are(make_batch, request, capsys):
    by = request.node.callspec.params["backend"]
    with make_batch([Located] * 3, envs_per_actor=2) as batch:
        batch.describe()
        first, last = batch.actors
        pids = batch.call("pid")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["node", "envs", "actor", "pid", "transport"]
    assert [first.env_ids, last.env_ids] == [range(2), range(2, 3)]
    assert [first.pid, first.pid, last.pid] == pids
    assert first.transport == ("in process" if by == "local" else by)
    for one, envs, line in zip((first, last), ("0..1", "2"), lines, strict=True):
        assert line.startswith(one.node)
        assert {envs, str(one.pid), one.actor_id[:12] or "-"} <= {*line.split()}


def test_nothing_moves_on_a_single_node(make_batch):
    with make_batch([ProbeEnv] * 2, rebalance_seconds=1e-9) as batch:
        batch.reset()
        batch.step(np.zeros(2, np.int64))
        assert batch.rebalance() == []
        assert batch.step(np.zeros(2, np.int64)).step_type.tolist() == [1, 1]


def test_serial_start_has_one_deadline_for_all(on_ray):
    constructors = [functools.partial(SlowToBuild, 2.0)] * 4
    with pytest.raises(FleetStartError, match=r"of 4 actors started in 5\.0 s"):
        ParallelPyEnvironment(constructors, start_serially=True, start_timeout=5.0)


def test_failed_constructor_is_not_hidden_by_one_that_waits(on_ray):
    constructors = [
        functools.partial(SlowToBuild, 1000.0),
        faults.Constructor(faults.key_error, "construct"),
    ]
    with pytest.raises(KeyError):
        ParallelPyEnvironment(constructors, start_timeout=100.0)


def test_slow_start_says_how_far_it_is(on_ray, caplog):
    with caplog.at_level(logging.WARNING, "envfleet"):
        ParallelPyEnvironment([ProbeEnv, functools.partial(SlowToBuild, 6.5)]).close()
    assert "1 of 2 actors started after 5 s; waiting for env 1" in caplog.text


def test_actor_options_reach_ray_one_by_one(on_ray):
    options = [{"runtime_env": {"env_vars": {"WHICH": str(i)}}, "num_cpus": 0} for i in range(2)]

    def constructor() -> ProbeEnv:
        import os

        return ProbeEnv(int(os.environ["WHICH"]))

    with ParallelPyEnvironment([constructor] * 2, actor_options=options) as batch:
        assert batch.get_attr("env_id") == [0, 1]


def test_option_that_would_break_the_batch_is_refused(on_ray):
    with pytest.raises(ValueError, match=r"max_restarts.*silent wrong answer"):
        ParallelPyEnvironment([ProbeEnv], actor_options={"max_restarts": 3})


def test_rays_own_check_of_options_comes_through(on_ray):
    with pytest.raises(ValueError, match="num_cats"):
        ParallelPyEnvironment([ProbeEnv], actor_options={"num_cats": 3})


def test_a_ray_of_the_users_is_left_running(on_ray):
    ParallelPyEnvironment([ProbeEnv]).close()
    assert ray.is_initialized()


def test_batch_that_nobody_holds_leaves_no_actor(on_ray):
    ParallelPyEnvironment([ProbeEnv])


class SharesItsMemory(dm_env.Environment):
    """All environments of one process show the same array, which each has written to."""

    shown = np.zeros(3, np.float32)

    def __init__(self, number):
        self.number = number

    def reset(self):
        return dm_env.restart(self.show())

    def step(self, action):
        return dm_env.transition(1, self.show())  # an int: not just as the spec has it

    def show(self):
        self.shown[:] = self.number
        return self.shown

    def observation_spec(self):
        return specs.Array((3,), np.float32)

    def action_spec(self):
        return specs.DiscreteArray(2)


def test_environments_may_show_memory_that_another_one_writes_to(make_batch):
    constructors = [functools.partial(SharesItsMemory, i) for i in range(4)]
    with make_batch(constructors, envs_per_actor=4) as batch:
        for time_step in (batch.reset(), batch.step(np.zeros(4, int))):
            assert time_step.observation[:, 0].tolist() == [0, 1, 2, 3]
