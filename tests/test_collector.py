"""`Collector`: policies beside environments, and chunks of what they did."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections import defaultdict

import collecting
import gin
import numpy as np
import pytest
from collecting import SeededEnv

from envfleet.collect import Collector, RandomPolicy
from envfleet.collect.policies import BatchedPolicy
from envfleet.seeding import of_episode, of_steps

LAST = 2

ARRANGEMENTS = {
    "one": {"backend": "local"},
    "six in two": {"backend": "local", "num_actors": 2, "envs_per_actor": 3},
    "on Ray": {"num_actors": 2, "envs_per_actor": 2},
    "on Ray, together": {"num_actors": 2, "envs_per_actor": 2, "max_policy_lag": 0},
    "central": {"num_actors": 2, "envs_per_actor": 2, "inference": "central"},
    "first-ready": {"num_actors": 2, "envs_per_actor": 2, "inference": "central", "min_ready": 1},
}
arranged = pytest.mark.parametrize("how", ARRANGEMENTS.values(), ids=ARRANGEMENTS)


@pytest.fixture(autouse=True)
def _on_ray(on_ray):
    yield
    gin.clear_config()


def collect(constructor=SeededEnv, policy=None, *, limits, **kwargs):
    with Collector(constructor, policy, seed=kwargs.pop("seed", 3), **kwargs) as collector:
        chunks = list(collector.collect(**limits))
        return chunks, collector.stats()


def episodes_of(chunks):
    """By the episode's number its rows, each a tuple, in the order in which they came."""
    rows = defaultdict(list)
    for chunk in chunks:
        for at in zip(*np.nonzero(chunk.mask), strict=True):
            rows[int(chunk.episode[at])].append(
                (
                    int(chunk.t[at]),
                    int(chunk.step_type[at]),
                    int(chunk.observation["seed"][at]),
                    int(chunk.observation["t"][at]),
                    int(chunk.action[at]),
                    float(chunk.reward[at]),
                    float(chunk.discount[at]),
                    bool(chunk.terminated[at]),
                    bool(chunk.truncated[at]),
                )
            )
    return dict(rows)


def expected_episode(number, seed=3):
    """The rows of an episode of a `SeededEnv` under the random policy, from their definition."""
    env_seed, key = of_episode(seed, number)
    policy = RandomPolicy(SeededEnv().action_spec())
    length = 2 + env_seed % 8
    rows = []
    for t in range(length):
        seeds = of_steps(np.array([key], np.uint64), np.array([t]))
        action = int(policy.action(None, seeds)[0])
        ends, odd = t == length - 1, env_seed % 2 == 1
        discount = 0.0 if ends and not odd else 1.0
        row = t, min(t, 1), env_seed, t, action, float(action), discount
        rows.append((*row, ends and not odd, ends and odd))
    return [*rows, (length, LAST, env_seed, length, 0, 0.0, 0.0, False, False)]


# -- the same episodes, whoever collects them ------------------------------------------------------


@arranged
def test_an_episode_depends_on_its_number_and_the_seed_alone(how):
    chunks, stats = collect(limits={"max_episodes": 13}, chunk_length=7, **how)
    assert episodes_of(chunks) == {k: expected_episode(k) for k in range(13)}
    assert stats.stopped_by == "max_episodes"
    assert stats.num_steps == sum(len(expected_episode(k)) - 1 for k in range(13))


@arranged
def test_steps_are_counted_exactly_and_shared_equally(how):
    chunks, stats = collect(limits={"max_steps": 103}, chunk_length=10, **how)
    taken = defaultdict(int)
    for chunk in chunks:
        is_step = chunk.mask & (chunk.step_type != LAST)
        assert chunk.num_steps == is_step.sum()
        for env_id, number in zip(chunk.env_ids, is_step.sum(axis=0), strict=True):
            taken[int(env_id)] += int(number)
    assert sum(taken.values()) == stats.num_steps == 103
    assert max(taken.values()) - min(taken.values()) <= 1
    assert stats.stopped_by == "max_steps"
    for number, rows in episodes_of(chunks).items():
        expected = expected_episode(number)
        assert rows == expected[: len(rows)]


def test_the_next_call_goes_on_where_the_last_one_stopped():
    with Collector(SeededEnv, num_actors=2, envs_per_actor=2, seed=3, chunk_length=6) as collector:
        chunks = [*collector.collect(max_steps=31), *collector.collect(max_episodes=9)]
    assert episodes_of(chunks) == {k: expected_episode(k) for k in range(9)}


def test_seconds_end_a_run_and_what_is_on_its_way_still_comes():
    chunks, stats = collect(limits={"max_seconds": 0.3}, num_actors=2, chunk_length=10)
    assert stats.stopped_by == "max_seconds"
    assert stats.num_steps == sum(chunk.num_steps for chunk in chunks) > 0


@pytest.mark.parametrize("more", [{}, {"inference": "central", "min_ready": 2}])
def test_an_episode_that_is_too_long_is_truncated(more):
    how = {"num_actors": 3, "backend": "local", "max_episode_steps": 4, **more}
    chunks, _ = collect(limits={"max_episodes": 12}, **how)
    for number, rows in episodes_of(chunks).items():
        expected = expected_episode(number)
        if len(expected) > 5:
            *before, last = rows
            assert [row[:6] for row in before] == [row[:6] for row in expected[:4]]
            assert before[-1][7:] == (False, True)
            assert last[:4] == (4, LAST, *expected[4][2:4])
        else:
            assert rows == expected


def test_a_central_policy_need_not_wait_for_the_slowest():
    slow, fast = (functools.partial(SeededEnv, seconds) for seconds in (0.05, 0.001))
    how = {"inference": "central", "num_actors": 2, "min_ready": 1}
    chunks, _ = collect([slow, fast], limits={"max_seconds": 1.5}, **how)
    steps = sum(np.count_nonzero(c.mask & (c.step_type != LAST), axis=0) for c in chunks)
    assert steps[1] > 4 * steps[0] > 0  # in lockstep they would have the same


@pytest.mark.parametrize("min_ready", [None, 1])
def test_a_central_policy_steps_its_environments_by_shared_memory(caplog, min_ready):
    how = {"inference": "central", "num_actors": 2, "envs_per_actor": 2, "min_ready": min_ready}
    with caplog.at_level(logging.INFO, "envfleet"):
        chunks, _ = collect(limits={"max_episodes": 9}, transport="shared_memory", **how)
    assert episodes_of(chunks) == {k: expected_episode(k) for k in range(9)}
    assert "2 of 2 actors are stepped by shared memory, 0 by remote calls" in caplog.messages


def test_the_row_after_a_chunk_is_where_the_next_one_begins():
    with Collector(SeededEnv, seed=3, envs_per_actor=2, chunk_length=3, backend="local") as one:
        first, second = one.collect(max_steps=12)
    after = first.next_time_step
    assert np.array_equal(after.observation["t"], second.observation["t"][0])
    assert np.array_equal(after.step_type, second.step_type[0])


def test_several_constructors_share_the_environments():
    kinds = [SeededEnv, functools.partial(collecting.FailsOnce, os.abort, "/nowhere/at/all", 10**9)]
    chunks, _ = collect(kinds, limits={"max_episodes": 6}, envs_per_actor=4, backend="local")
    assert sorted(episodes_of(chunks)) == [*range(6)]
    with pytest.raises(ValueError, match="2 constructors, which do not share 3 environments"):
        Collector(kinds, envs_per_actor=3, backend="local")


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [collecting.constant, lambda ts: [7] * len(ts.reward)])
def test_a_function_of_a_time_step_is_a_policy(policy):
    chunks, _ = collect(policy=policy, limits={"max_steps": 20}, envs_per_actor=2)
    actions = [row[4] for rows in episodes_of(chunks).values() for row in rows if row[1] != LAST]
    assert set(actions) == {7}


@arranged
def test_the_state_of_a_policy_begins_anew_with_each_episode(how):
    chunks, _ = collect(policy=collecting.Counting, limits={"max_episodes": 9}, **how)
    for rows in episodes_of(chunks).values():
        assert [row[4] for row in rows[:-1]] == [*range(len(rows) - 1)]


def test_a_constructor_is_told_what_it_names():
    chunks, _ = collect(policy=collecting.Told, limits={"max_steps": 40}, num_actors=2)
    rows = [row for rows in episodes_of(chunks).values() for row in rows if row[1] != LAST]
    assert len({row[4] for row in rows}) == 2, "each actor's policy has a seed of its own"


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match="the policy is a dict, expected a callable of a time step"):
        Collector(SeededEnv, dict, backend="local")


def test_a_random_policy_keeps_to_the_bounds_and_reaches_them():
    from dm_env import specs

    spec = {
        "a": specs.BoundedArray((2,), np.int32, -1, [1, 2]),
        "b": specs.BoundedArray((3,), np.float32, [-2, 0, 5], [2, 1, 6]),
        "c": specs.Array((), np.float64),
    }
    seeds = of_steps(np.full(4000, 5, np.uint64), np.arange(4000))
    drawn = RandomPolicy(spec).action(None, seeds)
    assert [set(column) for column in drawn["a"].T] == [{-1, 0, 1}, {-1, 0, 1, 2}]
    assert drawn["a"].dtype == np.int32
    assert drawn["b"].dtype == np.float32
    for column, (low, high) in zip(drawn["b"].T, [(-2, 2), (0, 1), (5, 6)], strict=True):
        assert low <= column.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < column.max() <= high
        assert abs(column.mean() - (low + high) / 2) < 0.05 * (high - low)
    assert drawn["c"].shape == (4000,)
    assert np.corrcoef(drawn["b"][:, 0], drawn["c"])[0, 1] < 0.05


def test_a_random_policy_says_what_it_cannot_draw():
    from dm_env import specs

    with pytest.raises(TypeError, match=r"actions\['word'\] is of object"):
        RandomPolicy({"word": specs.StringArray(())})


def test_weights_reach_every_actor_and_chunks_say_by_which_they_were_collected():
    with Collector(SeededEnv, collecting.Weighted, 2, 2, chunk_length=5) as collector:
        seen = []
        for number, chunk in enumerate(collector.collect(max_steps=400)):
            acted = chunk.action[chunk.mask & (chunk.step_type != LAST)]
            assert set(acted.tolist()) <= {chunk.policy_version}
            seen.append(chunk.policy_version)
            if number < 5:  # large enough to be put in Ray's store once
                weights = np.full(100_000, number + 1)
                assert collector.set_policy(weights) == number + 1
        assert seen[0] == 0
        assert seen[-4:] == [5] * 4


def test_with_no_lag_every_chunk_is_by_the_newest_weights():
    how = {"num_actors": 2, "envs_per_actor": 2, "chunk_length": 5, "max_policy_lag": 0}
    with Collector(SeededEnv, collecting.Weighted, **how) as collector:
        versions = []
        for chunk in collector.collect(max_steps=200):
            versions.append(chunk.policy_version)
            # 50 steps of each are ten chunks at least; who has more ends may need another round.
            assert chunk.mask.shape[1] == 4 or len(versions) > 10
            collector.set_policy(np.full(1, len(versions)))
        assert versions == [*range(len(versions))], (
            "rows of ends are no steps, so there are some more"
        )
        assert len(versions) >= 10
        assert collector.stats().dropped_steps == 0


def test_a_chunk_that_is_too_old_is_dropped_and_its_steps_taken_again():
    how = {"num_actors": 2, "chunk_length": 5, "max_policy_lag": 1}
    with Collector(SeededEnv, collecting.Weighted, **how) as collector:
        total = version = 0
        for chunk in collector.collect(max_steps=100):
            assert chunk.policy_version >= version - 1
            total += chunk.num_steps
            if version < 9:
                for _ in range(3):
                    version = collector.set_policy(np.full(1, version + 1))
        assert total == 100
        assert collector.stats().dropped_steps > 0
    with (
        Collector(SeededEnv, backend="local", max_policy_lag=1) as collector,
        pytest.raises(ValueError, match="would leave a hole"),
    ):
        collector.collect(max_episodes=3)


def test_a_policy_without_weights_says_so():
    with (
        Collector(SeededEnv, backend="local") as collector,
        pytest.raises(TypeError, match="RandomPolicy has no method set_weights"),
    ):
        collector.set_policy(1)


# -- failures --------------------------------------------------------------------------------------


def raising():
    raise KeyError("arm")


def dying():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failure_is_raised_as_it_was(tmp_path):
    fails = functools.partial(collecting.FailsOnce, raising, str(tmp_path / "once"))
    with pytest.raises(KeyError, match="arm"):
        collect(fails, limits={"max_steps": 100}, num_actors=2)


@pytest.mark.parametrize(
    "how",
    [{"backend": "local"}, {}, {"inference": "central"}, {"inference": "central", "min_ready": 1}],
)
def test_an_episode_that_a_failure_cuts_is_truncated_and_the_next_has_its_own_seed(tmp_path, how):
    fails = functools.partial(collecting.FailsOnce, raising, str(tmp_path / "once"))
    how = {**how, "envs_per_actor": 2, "on_failure": "restart"}
    chunks, stats = collect(fails, limits={"max_episodes": 8}, **how)
    found = episodes_of(chunks)
    assert sorted(found) == [*range(8)]
    wrong = [k for k, rows in found.items() if rows != expected_episode(k)]
    assert len(wrong) == 1
    *before, last_action, last = found[wrong[0]]
    expected = expected_episode(wrong[0])
    assert before == expected[: len(before)]
    assert last_action[:5] == expected[len(before)][:5]
    assert last_action[5:] == (0.0, 1.0, False, True)
    assert last[:2] == (len(before) + 1, LAST)
    assert [failure.index for failure in stats.failures] == [wrong[0] % 2]


@pytest.mark.parametrize("how", [{}, {"inference": "central", "min_ready": 1}])
def test_an_episode_whose_reset_failed_is_the_one_of_its_seed(tmp_path, how):
    fails = functools.partial(collecting.FailsInReset, raising, str(tmp_path / "once"), 2)
    how = {"envs_per_actor": 2, "on_failure": "restart", "backend": "local", **how}
    chunks, stats = collect(fails, limits={"max_episodes": 8}, **how)
    assert episodes_of(chunks) == {k: expected_episode(k) for k in range(8)}
    assert len(stats.failures) == 1


def test_an_actor_that_dies_comes_back_with_the_weights_and_begins_no_episode_twice(tmp_path):
    dies = functools.partial(collecting.FailsOnce, dying, str(tmp_path / "once"), 30)
    how = {"num_actors": 2, "envs_per_actor": 2, "on_failure": "restart", "chunk_length": 4}
    with Collector(dies, collecting.Weighted, seed=3, **how) as collector:
        collector.set_policy(np.full(1, 9))
        chunks = list(collector.collect(max_steps=300))
        stats = collector.stats()
    assert stats.num_steps == 300
    assert [failure.type_name for failure in stats.failures] == ["envfleet.errors.ActorDied"]
    unended = 0
    for number, rows in episodes_of(chunks).items():
        times = [row[0] for row in rows]
        assert times == [*range(len(times))]
        assert {row[4] for row in rows if row[1] != LAST} == {9}
        assert {row[2] for row in rows} == {of_episode(3, number)[0]}
        unended += rows[-1][1] != LAST
    assert 1 <= unended <= 2 + 4, "those that the dead actor had begun, and those of the end"


# -- use -------------------------------------------------------------------------------------------


def test_a_run_needs_a_rule_that_ends_it():
    with Collector(SeededEnv, backend="local") as collector:
        with pytest.raises(ValueError, match="needs one of max_steps, max_episodes, max_s"):
            collector.collect()
        with pytest.raises(ValueError, match="max_steps is 0, expected more than 0"):
            collector.collect(max_steps=0)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_actors": 0}, "num_actors is 0"),
        ({"inference": "here"}, "inference is 'here', expected 'actors' or 'central'"),
        ({"max_policy_lag": -1}, "max_policy_lag is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"min_ready": 1}, "min_ready is 1, expected 1 to 1"),
        (
            {"inference": "central", "num_actors": 2, "min_ready": 3},
            "min_ready is 3, expected 1 to 2",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_make_no_sense_are_refused_by_name(kwargs, words):
    with pytest.raises(ValueError, match=words):
        Collector(SeededEnv, backend="local", **kwargs)


def test_a_run_that_is_left_can_be_followed_by_another():
    with Collector(SeededEnv, num_actors=2, seed=3, chunk_length=5) as collector:
        for _ in collector.collect(max_steps=1000):
            break
        assert sum(chunk.num_steps for chunk in collector.collect(max_steps=40)) == 40


def test_gin_configures_collector_and_policy():
    gin.parse_config("""
        Collector.env_constructor = 'CartPole-v1'
        Collector.policy = @RandomPolicy
        Collector.envs_per_actor = 2
        Collector.backend = 'local'
        Collector.seed = 1
    """)
    with Collector() as collector:
        assert sum(chunk.num_steps for chunk in collector.collect(max_steps=30)) == 30


def test_seeds_of_steps_are_all_different():
    keys = np.repeat(np.array([of_episode(0, k)[1] for k in range(200)], np.uint64), 50)
    seeds = of_steps(keys, np.tile(np.arange(50), 200))
    assert len(set(seeds.tolist())) == 10_000


def test_a_state_that_is_empty_is_none():
    class Stateless:
        def get_initial_state(self, batch_size):
            return ()

        def action(self, time_step):
            return np.zeros(2, np.int64)

    policy = BatchedPolicy(Stateless, time_step_spec=None, action_spec=None, batch_size=2, seed=0)
    assert policy.actions(None, np.zeros(2, np.uint64)).tolist() == [0, 0]
