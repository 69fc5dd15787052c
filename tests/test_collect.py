"""`collect`: what stands in a dataset, however it was collected and whatever failed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time

import collecting
import faults
import gin
import numpy as np
import pytest
from collecting import SeededEnv
from test_collector import expected_episode

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq
import ray
from datasets import (
    actors_of,
    check_sound,
    command,
    expected,
    expected_steps,
    rows_by_episode,
    settings,
    shards_of,
    until,
)

from envfleet.collect import collect, load
from envfleet.collect.episodes import Episodes
from envfleet.collect.ledger import Ledger
from envfleet.collect.shards import ShardWriter, fence, rewrite

ARRANGEMENTS = {
    "one": {"backend": "local"},
    "six in two": {"backend": "local", "num_actors": 2, "envs_per_actor": 3},
    "on Ray": {"num_actors": 2, "envs_per_actor": 2},
    "central": {"num_actors": 2, "envs_per_actor": 2, "inference": "central"},
    "first-ready": {"num_actors": 4, "inference": "central", "min_ready": 2},
}
arranged = pytest.mark.parametrize("how", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
HERE = {"backend": "local", "num_actors": 2, "envs_per_actor": 2}


@pytest.fixture(autouse=True)
def _on_ray(on_ray):
    yield
    gin.clear_config()


def collected(directory, **kwargs):
    kwargs = {"env_constructor": SeededEnv, "seed": 3, **kwargs}
    result = collect(directory, **kwargs)
    dataset = load(directory)
    assert (result.num_steps, result.num_episodes) == (dataset.num_steps, len(dataset))
    return result, dataset


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# -- what stands in a dataset ----------------------------------------------------------------------


@arranged
def test_episodes_are_the_first_ones_however_they_are_collected(tmp_path, how):
    result, dataset = collected(tmp_path / "set", max_episodes=23, **how)
    assert rows_by_episode(dataset) == expected(23)
    assert result.stopped_by == "max_episodes"
    assert dataset.episodes().cut == {}


@arranged
def test_steps_are_the_first_ones_of_all_episodes_and_the_last_is_cut(tmp_path, how):
    result, dataset = collected(tmp_path / "set", max_steps=101, **how)
    assert result.num_steps == 101
    assert result.stopped_by == "max_steps"
    assert rows_by_episode(dataset) == expected_steps(101)
    last = max(rows_by_episode(dataset))
    assert dataset.episodes().cut == {last: "max_steps"}
    assert [e.cut for e in dataset if e.cut] == ["max_steps"]
    assert len(load(tmp_path / "set", include_cut=False)) == last


def test_steps_that_end_with_an_episode_cut_none(tmp_path):
    steps = sum(len(expected_episode(k)) - 1 for k in range(9))
    _, dataset = collected(tmp_path / "set", max_steps=steps, **HERE)
    assert rows_by_episode(dataset) == expected(9)
    assert dataset.episodes().cut == {}


def test_the_first_rule_that_is_reached_ends_a_run(tmp_path):
    result, dataset = collected(tmp_path / "a", max_steps=10_000, max_episodes=5, **HERE)
    assert (result.stopped_by, len(dataset)) == ("max_episodes", 5)
    result, dataset = collected(tmp_path / "b", max_steps=12, max_episodes=500, **HERE)
    assert (result.stopped_by, dataset.num_steps) == ("max_steps", 12)
    result, _ = collected(tmp_path / "c", max_steps=10**9, max_seconds=0.2, **HERE)
    assert result.stopped_by == "max_seconds"


def test_episodes_that_never_end_are_cut_at_the_steps_that_were_asked_for(tmp_path):
    _, dataset = collected(
        tmp_path / "set", env_constructor=collecting.Endless, max_steps=1000, **HERE
    )
    (episode,) = dataset
    assert len(episode.reward) == 1000
    assert (episode.truncated, episode.cut) == (True, "max_steps")


def test_an_episode_that_is_limited_is_truncated_but_not_cut(tmp_path):
    _, dataset = collected(
        tmp_path / "set",
        env_constructor=collecting.Endless,
        max_episodes=6,
        max_episode_steps=30,
        **HERE,
    )
    assert [(len(e.reward), e.truncated, e.cut) for e in dataset] == [(30, True, None)] * 6


def test_seconds_end_a_run_and_episodes_that_go_on_are_kept_and_marked(tmp_path):
    _, dataset = collected(
        tmp_path / "set", env_constructor=collecting.Endless, max_seconds=0.3, **HERE
    )
    assert sorted(e.episode_id for e in dataset) == [0, 1, 2, 3]
    for episode in dataset:
        length = len(episode.reward)
        assert episode.observation["t"].tolist() == [*range(length + 1)]
        assert (episode.truncated, episode.terminated, episode.cut) == (True, False, "max_seconds")


def test_footers_and_rows_agree(tmp_path):
    _, dataset = collected(tmp_path / "set", max_episodes=30, **HERE)
    known = dataset.episodes()
    by_id = {e.episode_id: e for e in dataset}
    assert known.episode_id.tolist() == [*by_id]
    assert known.length.tolist() == [len(e.reward) for e in by_id.values()]
    assert known.returns.tolist() == [e.reward.sum() for e in by_id.values()]
    assert known.env_id.tolist() == [e.episode_id % 4 for e in by_id.values()]
    assert all(e.seed == e.observation["seed"][0] for e in by_id.values())
    assert np.all(np.abs(known.ended - time.time()) < 600)


def test_shards_are_bounded_in_size_and_in_seconds(tmp_path):
    _, dataset = collected(tmp_path / "size", max_episodes=3000, shard_megabytes=0.1, **HERE)
    assert len(dataset.shards) > 5
    sizes = [pq.read_table(s.path).nbytes for s in dataset.shards]
    assert max(sizes) < 2 * 0.1 * 2**20 + 128 * 2 * 70  # what one chunk brings comes on top
    slow = {"env_constructor": collecting.Slow, "shard_seconds": 0.2, **HERE}
    _, dataset = collected(tmp_path / "seconds", max_seconds=2.0, **slow)
    assert len(dataset.shards) >= 4
    assert rows_by_episode(load(tmp_path / "size")) == expected(3000)


@pytest.mark.parametrize("chunk_length", [1, 128])
def test_a_worker_with_nothing_to_do_writes_its_episodes_while_others_are_in_a_step(
    tmp_path, chunk_length
):
    """The other one's step ends when they are on disk: at the end of the run is too late."""
    waits = functools.partial(
        collecting.WaitsForShards, str(tmp_path / "set" / "data"), "shard-0000-*"
    )
    _, dataset = collected(
        tmp_path / "set",
        env_constructor=[collecting.Slow, waits],
        num_actors=2,
        max_episodes=8,
        shard_seconds=2,  # its episodes take less
        chunk_length=chunk_length,
    )
    assert rows_by_episode(dataset) == expected(8)


def test_policy_versions_structures_and_texts_stand_in_their_columns(tmp_path):
    _, dataset = collected(
        tmp_path / "set", env_constructor=collecting.Structured, max_episodes=4, **HERE
    )
    episode = next(iter(dataset))
    assert episode.observation["words"].tolist() == ["begin", "go", "go", "end"]
    assert episode.observation["arm"]["image"].shape == (4, 2, 3)
    assert episode.observation["arm"]["image"].dtype == np.uint8
    assert episode.observation["nothing"].shape == (4, 0)
    assert [a.shape for a in episode.action] == [(3,), (3, 2)]
    assert episode.policy_version.tolist() == [0, 0, 0]


def test_actions_may_be_texts(tmp_path):
    how = {"env_constructor": collecting.Talking, "policy": collecting.speak, "max_episodes": 3}
    _, dataset = collected(tmp_path / "set", **how, **HERE)
    assert [e.action.tolist() for e in dataset] == [["left", "left"]] * 3


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_episodes", "max_steps"])
def test_a_dataset_that_is_gone_on_with_is_the_same_as_one_in_one_go(tmp_path, limit):
    collected(tmp_path / "set", **{limit: 40}, **HERE)
    how = {"backend": "local", "num_actors": 3, "envs_per_actor": 1}  # and by others
    _, dataset = collected(tmp_path / "set", **{limit: 90}, resume=True, **how)
    assert rows_by_episode(dataset) == (expected if limit == "max_episodes" else expected_steps)(90)


def test_one_that_is_complete_starts_nothing_and_stays_as_it_is(tmp_path):
    collected(tmp_path / "set", max_steps=50, **HERE)
    before = contents(tmp_path / "set")
    result, _ = collected(tmp_path / "set", max_steps=50, resume=True, num_actors=10**6)
    assert (result.stopped_by, result.seconds) == ("max_steps", 0.0)
    assert contents(tmp_path / "set") == before


def test_what_seconds_cut_short_is_taken_again(tmp_path):
    collected(tmp_path / "set", max_seconds=0.2, env_constructor=collecting.Slow, **HERE)
    there = len(load(tmp_path / "set"))
    _, dataset = collected(
        tmp_path / "set",
        max_episodes=there + 3,
        env_constructor=collecting.Slow,
        resume=True,
        **HERE,
    )
    assert rows_by_episode(dataset) == expected(there + 3)


def test_the_seed_that_was_drawn_is_gone_on_with(tmp_path):
    collected(tmp_path / "set", max_episodes=5, seed=None, **HERE)
    seed = load(tmp_path / "set").manifest["seed"]
    collected(tmp_path / "set", max_episodes=8, seed=None, resume=True, **HERE)
    collected(tmp_path / "other", max_episodes=8, seed=seed, **HERE)
    assert rows_by_episode(load(tmp_path / "set")) == rows_by_episode(load(tmp_path / "other"))


def test_another_configuration_is_refused_with_all_differences(tmp_path):
    collected(tmp_path / "set", max_episodes=5, max_episode_steps=7, **HERE)
    before = sorted((tmp_path / "set").iterdir())
    with pytest.raises(ValueError, match="another configuration") as refused:
        collected(tmp_path / "set", max_episodes=9, seed=4, policy=collecting.constant, resume=True)
    lines = str(refused.value).splitlines()[1:]
    assert lines == [
        "  max_episode_steps: 7 in the dataset, not there now",
        "  policy: not there in the dataset, collecting.constant now",
        "  seed: 3 in the dataset, 4 now",
    ]
    assert sorted((tmp_path / "set").iterdir()) == before


def test_another_lambda_is_refused_and_the_same_one_is_not(tmp_path):
    def how(note, limit, act=0):
        policy = [collecting.constant, lambda time_step: collecting.constant(time_step)][act]
        return {
            "env_constructor": lambda: collecting.Noted(note),
            "policy": policy,
            "max_episodes": limit,
            **HERE,
        }

    collected(tmp_path / "set", **how("a", 3))
    collected(tmp_path / "set", **how("a", 5), resume=True)
    with pytest.raises(ValueError, match="another configuration") as refused:
        collected(tmp_path / "set", **how("b", 7, act=1), resume=True)
    env, policy = str(refused.value).splitlines()[1:]
    assert "env_constructor: test_collect." in env
    assert policy.startswith("  policy: collecting.constant in the dataset, test_collect.")


def test_a_lambda_that_is_bound_is_told_from_another_too(tmp_path):
    def bind(note):
        gin.bind_parameter("Collector.env_constructor", lambda: collecting.Noted(note))

    bind("a")
    collect(tmp_path / "set", max_episodes=3, **HERE)
    bind("a")
    collect(tmp_path / "set", max_episodes=5, resume=True, **HERE)
    bind("b")
    with pytest.raises(ValueError, match=r"Collector\.env_constructor: <.* in the dataset, <"):
        collect(tmp_path / "set", max_episodes=7, resume=True, **HERE)


def test_words_for_a_lambda_are_its_own_in_any_process_and_on_any_line(tmp_path):
    """Constants in sets have another order in every process."""
    script = tmp_path / "script.py"
    found = []
    for seed, above in (("1", ""), ("2", "\n\n"), ("3", "other = lambda: 0\n")):
        script.write_text(above + LAMBDAS)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout.splitlines())
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(found[0]) == 16


LAMBDAS = """
import functools, gin
from envfleet.collect.identity import words

def of(value):
    return lambda: value

def default(value):
    def named(n=value):
        return n
    return named

def calls_itself(n):
    def again(m=n):
        return again(m - 1)
    return again

@gin.register
def known():
    pass

for made in (
    lambda: 1,
    lambda: 2,
    lambda: 1.0,
    lambda seed: seed,
    lambda batch_size: batch_size,
    lambda: known(),
    lambda: functools.partial(known),
    lambda: [n for n in (1, 2)],
    lambda: [n for n in (1, 3)],
    lambda name: name in {"a", "b", "c", "d", "e"},
    of({"size": [3, {"x", "y", "z"}]}),
    of({"size": [4, {"x", "y", "z"}]}),
    of(known),
    default(1),
    default(of(2)),
    calls_itself(3),
):
    print(words(made))
"""


def test_environments_with_other_specs_are_refused(tmp_path, monkeypatch):
    collected(tmp_path / "set", max_episodes=2, **HERE)
    monkeypatch.setattr(SeededEnv, "action_spec", collecting.Endless.action_spec)
    with pytest.raises(ValueError, match=r"action: .*'maximum': 99.* in the dataset"):
        collected(tmp_path / "set", max_episodes=3, resume=True, **HERE)


def test_fewer_episodes_than_there_are_are_refused(tmp_path):
    collected(tmp_path / "set", max_episodes=5, **HERE)
    with pytest.raises(ValueError, match="holds 5 episodes, more than max_episodes = 3"):
        collected(tmp_path / "set", max_episodes=3, resume=True, **HERE)
    steps = load(tmp_path / "set").num_steps
    with pytest.raises(ValueError, match=f"holds {steps} steps, more than max_steps = 4"):
        collected(tmp_path / "set", max_steps=4, resume=True, **HERE)
    assert len(load(tmp_path / "set")) == 5


def test_a_dataset_is_not_written_over(tmp_path):
    collected(tmp_path / "set", max_episodes=2, **HERE)
    with pytest.raises(FileExistsError, match="there is a dataset"):
        collected(tmp_path / "set", max_episodes=2, **HERE)
    (tmp_path / "set" / "dataset.json").unlink()
    with pytest.raises(FileExistsError, match=r"there are shards, but no dataset\.json"):
        collected(tmp_path / "set", max_episodes=2, resume=True, **HERE)


def test_two_callers_do_not_write_one_dataset(tmp_path):
    with command(tmp_path / "set", "collect.max_seconds = 60", backend="local") as running:
        until(lambda: (tmp_path / "set" / "dataset.json").exists(), running)
        with pytest.raises(BlockingIOError, match="another process"):
            collected(tmp_path / "set", max_episodes=2, resume=True, **HERE)
        running.kill()


def test_a_run_that_was_killed_before_it_took_away_what_is_beyond_is_put_in_order(tmp_path):
    steps = sum(len(expected_episode(k)) - 1 for k in range(9))
    collected(tmp_path / "set", max_episodes=20, **HERE)
    said = {"max_steps": steps, "max_episodes": None, "stopped_by": None}
    (tmp_path / "set" / "run.json").write_text(json.dumps(said))
    for name in ("report.html", "operative_config.gin"):
        (tmp_path / "set" / name).unlink()
    result, dataset = collected(tmp_path / "set", max_steps=steps, resume=True, **HERE)
    assert (result.stopped_by, result.num_steps) == ("max_steps", steps)
    assert rows_by_episode(dataset) == expected(9)
    assert (tmp_path / "set" / "report.html").exists()


def test_an_episode_that_steps_cut_is_taken_again_where_episodes_are_asked_for(tmp_path):
    _, dataset = collected(tmp_path / "set", max_steps=101, **HERE)
    number = len(dataset)
    assert dataset.episodes().cut
    _, dataset = collected(tmp_path / "set", max_episodes=number, resume=True, **HERE)
    assert rows_by_episode(dataset) == expected(number)


def test_episodes_beyond_those_that_are_asked_for_are_taken_away(tmp_path):
    collected(tmp_path / "set", max_episodes=20, **HERE)
    _, dataset = collected(tmp_path / "set", max_seconds=0.2, resume=True, **HERE)
    beyond = int(dataset.episodes().episode_id.max())
    for shard in dataset.shards:  # a hole, as of one that was fast
        kept = ~np.isin(shard.episodes.episode_id, [15, 16])
        rewrite(shard, dataset.columns, kept, {}, "")
    _, dataset = collected(tmp_path / "set", max_episodes=beyond - 5, resume=True, **HERE)
    assert rows_by_episode(dataset) == expected(beyond - 5)


# -- what is known of it ---------------------------------------------------------------------------


def test_an_episode_is_tried_with_its_own_seed_until_it_has_cost_three_workers():
    ledger = Ledger(None, 10)
    for attempts in ({}, {}, {4: 1}, {4: 2}):
        ledger.running[0] = {4: 500}
        ledger.lose(0)
        assert ledger.attempts() == attempts


def test_a_horizon_that_was_too_near_stays_beyond_that():
    ledger = Ledger(100, None)
    ended = np.arange(1, 12)
    length = np.full(11, 10)
    ledger.add_written(Episodes(ended, ended % 2, length, length * 0.0, length * 0.0, {}, {}))
    seen = []
    for _ in range(5):  # episode 0 is missing, and the others were longer than it may be
        seen += [ledger.horizon(2, True), ledger.horizon(2, False)]
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_an_episode_that_a_restart_cut_is_marked(tmp_path, backend):
    constructor = collecting.failing_once(faults.key_error, tmp_path / "once")
    result, dataset = collected(
        tmp_path / "set",
        env_constructor=constructor,
        max_episodes=20,
        on_failure="restart",
        backend=backend,
        num_actors=2,
    )
    found = rows_by_episode(dataset)
    assert found.keys() == expected(20).keys()
    ((number, reason),) = dataset.episodes().cut.items()
    assert reason == "failure"
    cut = next(e for e in dataset if e.cut)
    assert (cut.episode_id, cut.truncated, cut.reward[-1]) == (number, True, 0.0)
    del found[number]
    assert found == {k: rows for k, rows in expected(20).items() if k != number}
    assert result.num_failures == 1
    line = json.loads((tmp_path / "set" / "failures.jsonl").read_text())["line"]
    assert "failed in step" in line
    assert len(load(tmp_path / "set", include_cut=False)) == 19
    assert "failed in step" in (tmp_path / "set" / "report.html").read_text()


def test_an_actor_that_dies_costs_nothing_but_time(tmp_path):
    constructor = collecting.failing_once(faults.sigkill, tmp_path / "once", after=40)
    result, dataset = collected(
        tmp_path / "set",
        env_constructor=constructor,
        max_episodes=60,
        on_failure="restart",
        num_actors=2,
        envs_per_actor=2,
        shard_seconds=0.01,
    )
    assert rows_by_episode(dataset) == expected(60)
    assert dataset.episodes().cut == {}
    assert result.num_failures == 1


def test_what_was_complete_stands_where_a_failure_ends_the_run(tmp_path):
    constructor = collecting.failing_once(faults.key_error, tmp_path / "once", after=40)
    with pytest.raises(Exception, match="arm") as raised:
        collect(
            tmp_path / "set", env_constructor=constructor, seed=3, max_episodes=500, num_actors=2
        )
    assert raised.value.env_failures
    found = rows_by_episode(load(tmp_path / "set"))
    assert found
    assert found == {k: expected_episode(k) for k in found}
    _, dataset = collected(
        tmp_path / "set", env_constructor=constructor, max_episodes=500, resume=True, num_actors=2
    )
    assert rows_by_episode(dataset) == expected(500)


def test_a_shard_that_cannot_be_written_ends_the_run_with_a_clear_error(tmp_path):
    _, dataset = collected(tmp_path / "set", max_episodes=50, **HERE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # a file of more cannot be written
    try:
        with pytest.raises(OSError, match=r"50 episodes with \d+ steps stand") as failed:
            collect(
                tmp_path / "set",
                env_constructor=SeededEnv,
                seed=3,
                max_episodes=3000,
                resume=True,
                **HERE,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG
    assert rows_by_episode(load(tmp_path / "set")) == rows_by_episode(dataset)
    _, dataset = collected(tmp_path / "set", max_episodes=60, resume=True, **HERE)
    assert rows_by_episode(dataset) == expected(60)


def test_a_place_that_cannot_be_written_to_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        collect(tmp_path / "file" / "set", env_constructor=faults.key_error, max_steps=1)


def test_what_fails_before_there_is_a_dataset_leaves_nothing(tmp_path):
    with pytest.raises(Exception, match="arm"):
        collect(tmp_path / "a" / "set", env_constructor=faults.key_error, max_steps=1, **HERE)
    assert not (tmp_path / "a" / "set").exists()


def test_a_writer_that_was_given_up_writes_no_more(tmp_path):
    _, dataset = collected(tmp_path / "set", max_episodes=2, **HERE)
    shard = dataset.shards[0]
    table = pq.read_table(shard.path)
    old = ShardWriter(tmp_path / "set", dataset.columns, 0, "here")
    new = ShardWriter(tmp_path / "set", dataset.columns, 0, "here")
    with pytest.raises(FileNotFoundError):
        old.write(table, shard.episodes)
    new.write(table, shard.episodes)
    with pytest.raises(ValueError, match="episode 0 twice"):
        load(tmp_path / "set")
    fence(tmp_path / "set")
    with pytest.raises(FileNotFoundError):
        new.write(table, shard.episodes)


# -- the command, killed ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_episodes", "max_steps"])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_that_is_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been(
    tmp_path, backend, limit
):
    directory, chance = tmp_path / "set", random.Random(f"{backend} {limit}")
    asked = 1500 if backend == "ray" else 800
    binding = f"collect.{limit} = {asked}"
    for _ in range(3 if backend == "ray" else 8):
        before = len(shards_of(directory)) if directory.exists() else 0
        with command(directory, binding, resume=True, backend=backend) as running:
            if chance.random() < 0.8:  # else it is killed while it starts
                with contextlib.suppress(AssertionError):  # it may have come to its end
                    until(lambda: len(shards_of(directory)) > before, running)  # noqa: B023
                time.sleep(chance.random() * 0.3)
            else:
                time.sleep(chance.random() * 2)
            running.send_signal(signal.SIGKILL)
            running.wait()
        check_sound(directory)
    with command(directory, binding, resume=True, backend=backend) as running:
        output, _ = running.communicate(timeout=120)
        assert running.returncode == 0, output
    found = rows_by_episode(load(directory))
    assert found == (expected if limit == "max_episodes" else expected_steps)(asked)
    assert not (directory / "_staging").exists()


def test_actors_that_are_killed_again_and_again_cost_nothing_but_time(tmp_path):
    directory, chance = tmp_path / "set", random.Random(7)
    with command(
        directory, "collect.max_episodes = 1500", **{"Collector.max_restarts": 100}
    ) as running:
        for _ in range(5):
            before = len(shards_of(directory)) if directory.exists() else 0
            until(lambda: len(shards_of(directory)) > before, running)  # noqa: B023
            time.sleep(chance.random() * 0.2)
            os.kill(chance.choice(actors_of(directory)), signal.SIGKILL)
        output, _ = running.communicate(timeout=120)
        assert running.returncode == 0, output
    dataset = load(directory)
    found, others = rows_by_episode(dataset), dataset.episodes().attempts
    assert sorted(found) == [*range(1500)]  # those that cost an actor thrice have another seed
    assert {k: rows for k, rows in found.items() if k not in others} == {
        k: expected_episode(k) for k in found if k not in others
    }
    assert len(others) < 100
    assert len((directory / "failures.jsonl").read_text().splitlines()) >= 5


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_a_run_in_good_order(tmp_path, number, code):
    directory = tmp_path / "set"
    slow = {"collect.shard_seconds": 60}
    with command(directory, "collect.max_episodes = 100_000", **slow) as running:
        until(lambda: (directory / "dataset.json").exists(), running)
        time.sleep(1.5)
        running.send_signal(number)
        output, _ = running.communicate(timeout=60)
    assert running.returncode == code, output
    assert f"stopped by {number.name}" in output
    check_sound(directory)
    dataset = load(directory)
    assert len(dataset) > 10
    assert dataset.episodes().cut == {}
    assert f"{len(dataset):,} episodes" in output
    assert (directory / "report.html").exists()


# -- the command and gin ---------------------------------------------------------------------------


def run(*arguments, cwd=None):
    from envfleet.collect.command import main

    with contextlib.chdir(cwd or "."):
        return main(arguments)


def bound(*more):
    lines = [*settings("local"), *more]
    return [f"--gin_bindings={line}" for line in lines]


REFUSED = {
    "unknown configurable": ("Colector.num_actors = 2", "No configurable matching 'Colector'"),
    "unknown parameter": ("Collector.num_actor = 2", "doesn't have a parameter named 'num_actor'"),
    "unknown argument of collect": ("collect.max_step = 2", "unknown argument: max_step"),
    "unknown reference": ("Collector.policy = @Polcy", "No configurable matching reference"),
    "wrong type": ("Collector.num_actors = 'two'", "num_actors is 'two', expected an int"),
    "wrong type of a limit": ("collect.max_steps = 1e3", "max_steps is 1000.0, expected an int"),
    "wrong value": ("Collector.envs_per_actor = 0", "envs_per_actor is 0, expected at least 1"),
    "no environment": ("Collector.env_constructor = None", "which environment?"),
    "required": ("Collector.env_constructor = %gin.REQUIRED", "gin.REQUIRED"),
    "no limit": ("collect.max_steps = None", "needs one of max_steps, max_episodes, max_seconds"),
    "no syntax": ("Collector.num_actors = ", "Unable to parse value"),
}


@pytest.mark.parametrize(("binding", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_one_line_and_nothing_is_written(tmp_path, capsys, binding, message):
    code = run(*bound("collect.max_steps = 5", binding), f"--output_dir={tmp_path / 'set'}")
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert said.startswith("envfleet-collect: ")
    assert message in said
    assert not (tmp_path / "set").exists()


UNKNOWN = {
    "version": ("CartPole-v99", "`v99` for environment `CartPole` doesn't exist"),
    "name": ("NoSuch-v0", "`NoSuch` doesn't exist"),
    "namespace": ("nowhere/NoSuch-v0", "Namespace nowhere not found"),
    "no id": ("Cart Pole", "Malformed environment ID: Cart Pole"),
    "module": ("nosuchmodule:Env-v0", "No module named 'nosuchmodule'"),
    "module in a module": ("json.nosuchmodule:Env-v0", "No module named 'json.nosuchmodule'"),
    "id in a module": ("registering:NoSuch-v0", "`NoSuch` doesn't exist"),
    "no module": ("a:b:c-v0", "'a:b' is no module"),
}


@pytest.mark.parametrize(
    ("kind", "backend", "flags"),
    [
        *((kind, "local", flags) for kind in UNKNOWN for flags in ([], ["--dry_run"])),
        *((kind, "ray", []) for kind in ("version", "module", "id in a module")),
    ],
    ids=str,
)
def test_a_name_of_no_environment_is_one_line_and_nothing_is_written(
    tmp_path, capfd, caplog, kind, backend, flags
):
    pytest.importorskip("gymnasium")
    name, message = UNKNOWN[kind]
    lines = f"Collector.env_constructor = '{name}'", f"Collector.backend = '{backend}'"
    code = run(*bound(*lines, "collect.max_steps = 5"), f"--output_dir={tmp_path / 'set'}", *flags)
    said = capfd.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert said.startswith("envfleet-collect: ")
    assert message in said
    assert "failed in construct" not in caplog.text  # which would be a line, too
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("flags", [["--dry_run"], []], ids=str)
@pytest.mark.parametrize(
    "lines",
    [
        ["Collector.env_constructor = ['CartPole-v1', 'CartPole-v1', 'CartPole-v99']"],
        [
            "Collector.env_constructor = @a/envfleet.load_environment",
            "a/envfleet.load_environment.environment_name = 'CartPole-v99'",
        ],
    ],
    ids=["in a list", "in a scope"],
)
def test_a_name_of_no_environment_is_found_wherever_it_stands(tmp_path, capfd, lines, flags):
    pytest.importorskip("gymnasium")
    more = "Collector.envs_per_actor = 3", "collect.max_steps = 5"
    code = run(*bound(*lines, *more), f"--output_dir={tmp_path / 'set'}", *flags)
    said = capfd.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert "`v99` for environment `CartPole` doesn't exist" in said
    assert not (tmp_path / "set").exists()


def test_a_name_that_only_actors_can_look_up_is_one_line_if_it_is_wrong(tmp_path):
    pytest.importorskip("gymnasium")
    script = tmp_path / "script.py"  # its process has no Gymnasium, and cannot load its exceptions
    script.write_text(
        "import sys\nsys.modules['gymnasium'] = None\n"
        "from envfleet.collect.command import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    lines = "Collector.env_constructor = 'CartPole-v99'", "collect.max_steps = 5"
    done = subprocess.run(
        [
            *(sys.executable, script, f"--output_dir={tmp_path / 'set'}"),
            *(f"--gin_bindings={line}" for line in [*settings(), *lines]),
        ],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("envfleet-collect: Environment version `v99`")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("flags", [["--dry_run"], []], ids=str)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising:Value-v0", "of its own"),
        ("raising:Unknown-v0", "`NoSuch` doesn't exist"),  # which it asks for itself
        ("raising:Missing-v0", "nosuchmodule"),
        ("importing:Env-v0", "nosuchmodule"),
    ],
)
def test_what_an_environment_raises_keeps_its_traceback_whatever_it_is(
    tmp_path, monkeypatch, capfd, name, message, flags
):
    pytest.importorskip("gymnasium")
    (tmp_path / "importing.py").write_text("import nosuchmodule\n")
    (tmp_path / "raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    lines = bound(f"Collector.env_constructor = '{name}'", "collect.max_steps = 5")
    with pytest.raises(Exception, match=message) as raised:
        run(*lines, f"--output_dir={tmp_path / 'set'}", *flags)
    assert f"{name.partition(':')[0]}.py" in str(raised.value.__cause__)  # the remote traceback
    assert "envfleet-collect: " not in capfd.readouterr().err
    assert not (tmp_path / "set").exists()


RAISING = """
import gymnasium

def value():
    raise ValueError("of its own")

def unknown():
    return gymnasium.make("NoSuch-v0")

def missing():
    return gymnasium.make("nosuchmodule:Env-v0")

for name, make in (("Value", value), ("Unknown", unknown), ("Missing", missing)):
    if f"{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"{name}-v0", entry_point=make)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "nonsense"),
        (["--gin_file=nowhere.gin"], "no such gin file: nowhere.gin"),
        (["inspect"], "expected flags, inspect DIR or export DIR"),
        (["inspect", "nowhere"], "nowhere holds no dataset"),
        (["export", "nowhere"], "nowhere|needs --format"),
        ([], "where to"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(capsys, arguments, message):
    code = run(*arguments)
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert any(part in said for part in message.split("|"))


def test_flags_are_repeated_and_the_last_one_holds(tmp_path, capsys):
    for name, text in {
        "a.gin": "import collecting\nCollector.env_constructor = @collecting.SeededEnv\n",
        "b.gin": "collect.max_episodes = 3\nCollector.backend = 'local'\nCollector.seed = 3\n",
    }.items():
        (tmp_path / name).write_text(text)
    code = run(
        *("--gin_file=a.gin", "--gin_file", "b.gin", "--gin_bindings=collect.max_episodes = 4"),
        *("--gin_param=collect.max_episodes = 5", "--gin_param", "collect.output_dir = 'set'"),
        cwd=tmp_path,
    )
    assert code == 0
    assert rows_by_episode(load(tmp_path / "set")) == expected(5)
    said = capsys.readouterr()
    assert "in 5 episodes" in said.out
    assert "stopped by max_episodes" in said.out
    assert run("inspect", str(tmp_path / "set")) == 0
    assert "episodes     5" in capsys.readouterr().out


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path, capsys):
    more = "collect.max_steps = 5_000", "Collector.num_actors = 3", "Collector.backend = 'ray'"
    code = run(*bound(*more), "--dry_run", f"--output_dir={tmp_path / 'set'}")
    said = capsys.readouterr().out
    assert code == 0
    assert "3, each with 2 environments: 6 in all" in said
    assert "max_steps = 5,000" in said
    assert "collecting.SeededEnv.seconds = 0.001" in said  # operative: it was called
    assert "envfleet.Collector.num_actors = 3" in said
    assert not (tmp_path / "set").exists()


def test_a_dry_run_makes_no_sense_of_what_the_run_would_not(tmp_path, capsys):
    target = f"collect.output_dir = '{tmp_path / 'set'}'"
    assert run(*bound(target, "collect.max_steps = 5", "collect.num_actors = 7"), "--dry_run") == 0
    assert "7, each with 2 environments" in capsys.readouterr().out
    gin.clear_config()
    assert run(*bound(target), "--dry_run") == 2
    assert "needs one of max_steps" in capsys.readouterr().err
    gin.clear_config()
    assert run(*bound(target, "collect.max_step = 5", "collect.max_steps = 5"), "--dry_run") == 2
    assert "unknown argument: max_step" in capsys.readouterr().err


def test_specs_that_a_dataset_cannot_hold_are_one_line_and_leave_nothing(tmp_path, capsys):
    wrong = "Collector.env_constructor = @collecting.Complex"
    code = run(*bound(wrong, "collect.max_steps = 5"), f"--output_dir={tmp_path / 'a' / 'set'}")
    said = capsys.readouterr().err
    assert code == 2
    assert said.splitlines()[-1].startswith(
        "envfleet-collect: observation is of shape () and dtype"
    )
    assert not (tmp_path / "a").exists()


def test_the_configuration_is_in_force_in_actors_and_what_they_used_comes_back(tmp_path):
    lines = [*settings(), "train/collecting.Noted.note = 'x'", "eval/collecting.Noted.note = 'yy'"]
    lines += ["Collector.env_constructor = [@train/collecting.Noted, @eval/collecting.Noted]"]
    lines += ["NUM = 4", "collect.max_episodes = %NUM", "Collector.envs_per_actor = 1"]
    gin.parse_config(lines)
    collect(tmp_path / "set")
    lengths = {e.episode_id: set(e.observation["t"].tolist()) for e in load(tmp_path / "set")}
    assert lengths == {0: {1}, 1: {2}, 2: {1}, 3: {2}}  # the length of the note
    used = (tmp_path / "set" / "operative_config.gin").read_text()
    assert "train/collecting.Noted.note = 'x'" in used
    assert "eval/collecting.Noted.note = 'yy'" in used
    assert "envfleet.collect.max_episodes = %NUM" in used or "max_episodes" in used
    gin.clear_config()
    gin.parse_config((tmp_path / "set" / "config.gin").read_text())
    collect(tmp_path / "again")
    first, again = (
        {e.episode_id: e.action.tolist() for e in load(tmp_path / name)}
        for name in ("set", "again")
    )
    assert first == again
    gin.parse_config(used, skip_unknown=False)


def test_a_macro_of_the_run_may_change_but_not_one_of_the_data(tmp_path):
    def configure(actors, note):
        gin.clear_config()
        lines = [*settings("local"), "NUM = 4", f"ACTORS = {actors}", f"NOTE = '{note}'"]
        lines += ["Collector.env_constructor = @collecting.Noted", "Collector.envs_per_actor = 1"]
        lines += ["collecting.Noted.note = %NOTE", "Collector.num_actors = %ACTORS"]
        gin.parse_config(lines)

    configure(2, "a")
    collect(tmp_path / "set", max_episodes=2)
    configure(3, "a")
    collect(tmp_path / "set", max_episodes=4, resume=True)
    configure(3, "bb")
    with pytest.raises(ValueError, match=r"Noted\.note: 'a' in the dataset, 'bb' now"):
        collect(tmp_path / "set", max_episodes=5, resume=True)


def test_a_binding_that_cannot_travel_is_named(tmp_path, caplog):
    gin.parse_config([*settings(), "Collector.env_constructor = @collecting.Noted"])
    gin.bind_parameter("collecting.Noted.note", (c for c in "ab"))  # does not pickle
    with caplog.at_level(logging.WARNING, "envfleet"):
        collect(tmp_path / "set", max_episodes=2)
    assert "collecting.Noted.note" in caplog.text
    assert "# collecting.Noted.note = <" in (tmp_path / "set" / "config.gin").read_text()
