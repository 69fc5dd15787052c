"""The gin files, policies and trainer of `examples/` that are about collecting."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import ray

from envfleet.collect import Collector

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))

import policies  # noqa: E402

LAST = 2
ON_RAY = {  # workers of the tests' Ray look into tests/ only
    "actor_options": {
        "runtime_env": {
            "env_vars": {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(EXAMPLES)])}
        }
    }
}


# -- gin files -------------------------------------------------------------------------------------

FILES = {
    "cartpole": ((), {"collect.max_steps": 300}, (300, None)),
    "scopes": (("gymnasium",), {"collect.max_episodes": 7}, (1400, 7)),
    "highway": (("highway_env",), {"collect.max_episodes": 3}, (None, 3)),
    "dm_control": (
        ("dm_control",),
        {"collect.max_episodes": 5, "Collector.max_episode_steps": 20},
        (100, 5),
    ),
    "mujoco_torch": (("mujoco", "torch"), {"collect.max_steps": 200}, (200, None)),
}
OF_PEERS = ("highway", "dm_control", "mujoco_torch")


def collected(name, directory, **bindings):
    """What the command of a gin file collects, run where the file says, on the Ray of the tests."""
    pytest.importorskip("absl")
    pytest.importorskip("pyarrow")
    from envfleet.collect import load

    script = Path(sys.executable).with_name("envfleet-collect")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "envfleet.collect"]
    done = subprocess.run(
        [
            *(*command, f"--gin_file=collect_{name}.gin", f"--output_dir={directory}"),
            *(f"--gin_bindings={key} = {value}" for key, value in bindings.items()),
        ],
        cwd=EXAMPLES,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, load(directory)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.peers] * (n in OF_PEERS)) for n in FILES]
)
def test_gin_file_collects_what_it_says(on_ray, tmp_path, name):
    packages, bindings, (num_steps, num_episodes) = FILES[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    printed, dataset = collected(name, tmp_path / "set", **bindings)
    assert num_steps in (None, dataset.num_steps)
    assert num_episodes in (None, len(dataset))
    assert f"{dataset.num_steps:,} steps in {len(dataset)} episode" in printed
    episodes = list(dataset)
    assert sum(len(episode.reward) for episode in episodes) == dataset.num_steps
    assert all(len(episode.policy_version) == len(episode.reward) for episode in episodes)
    assert (tmp_path / "set" / "report.html").exists()


def test_every_gin_file_is_tested_and_says_its_command():
    found = {path.stem.removeprefix("collect_"): path for path in EXAMPLES.glob("collect_*.gin")}
    assert found.keys() == FILES.keys()
    for path in found.values():
        assert f"envfleet-collect --gin_file={path.name} --output_dir=" in path.read_text()


def test_cartpole_of_the_gin_file_is_the_same_in_another_arrangement(on_ray, tmp_path):
    sets = []
    for number, actors in enumerate((1, 2)):
        bindings = {
            "collect.max_steps": 250,
            "Collector.num_actors": actors,
            "Collector.envs_per_actor": 3 - actors,
        }
        _, dataset = collected("cartpole", tmp_path / str(number), **bindings)
        sets.append(sorted(dataset, key=lambda episode: episode.episode_id))
    for one, other in zip(*sets, strict=True):
        assert one.episode_id == other.episode_id
        np.testing.assert_array_equal(one.observation, other.observation)
        np.testing.assert_array_equal(one.action, other.action)


def test_scopes_tell_the_pendulums_apart(on_ray, tmp_path):
    pytest.importorskip("gymnasium")
    _, dataset = collected("scopes", tmp_path / "set", **{"collect.max_episodes": 6})
    for episode in dataset:
        (cosine, sine, speed), after = episode.observation[0], episode.observation[1]
        gravity = (9.81, 1.62, 3.73)[episode.episode_id % 3]
        torque = episode.action[0, 0]
        expected = speed + (1.5 * gravity * sine + 3 * torque) * 0.05
        assert after[2] == pytest.approx(expected, abs=1e-5)
        assert cosine**2 + sine**2 == pytest.approx(1.0, abs=1e-5)


# -- policies --------------------------------------------------------------------------------------

ARRANGEMENTS = [
    {"backend": "local"},
    {"backend": "local", "envs_per_actor": 3},
    {"backend": "local", "num_actors": 2, "envs_per_actor": 5},
    {"num_actors": 2, "envs_per_actor": 2, **ON_RAY},
]


def rows_by_episode(env, policy, max_episodes=7, max_episode_steps=60, **how):
    """Of each episode its observations and actions, row after row."""
    rows = defaultdict(list)
    with Collector(
        env, policy, seed=3, chunk_length=16, max_episode_steps=max_episode_steps, **how
    ) as collector:
        for chunk in collector.collect(max_episodes=max_episodes):
            for tick, column in np.argwhere(chunk.mask):
                row = chunk.observation[tick, column], chunk.action[tick, column]
                rows[int(chunk.episode[tick, column])].append(np.hstack(row))
    return {number: np.array(rows[number]) for number in sorted(rows)}


def check_same_data(env, policy):
    first, *others = (rows_by_episode(env, policy, **how) for how in ARRANGEMENTS)
    assert [*first] == [*range(7)]
    for other in others:
        assert [*other] == [*first]
        for number, rows in first.items():
            np.testing.assert_array_equal(rows, other[number])
    return first


def test_linear_policy_gives_the_same_data_whatever_the_number_of_environments(on_ray):
    weights = [[0.0, 0.1], [0.0, 0.5], [0.0, 8.0], [0.0, 2.0]]
    rows = check_same_data("CartPole-v1", functools.partial(policies.LinearPolicy, weights=weights))
    assert {len(one) for one in rows.values()} == {61}  # it balances; the final row is one more


def test_linear_policy_draws_actions_by_their_chances():
    pytest.importorskip("gymnasium")
    spec, steps = specs_of("CartPole-v1")
    policy = policies.LinearPolicy(spec, steps, weights=[[0.0, np.log(3)]] + [[0.0, 0.0]] * 3)
    observation = np.tile([1.0, 0, 0, 0], (20_000, 1))
    seeds = np.random.default_rng(0).integers(2**63, size=len(observation), dtype=np.uint64)
    actions = policy.action(steps._replace(observation=observation), seeds=seeds)
    assert actions.dtype == spec.dtype
    assert actions.mean() == pytest.approx(0.75, abs=0.015)


def test_linear_policy_refuses_weights_of_another_shape():
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=r"weights have shape \(3, 2\), expected \(4, 2\)"):
        policies.LinearPolicy(*specs_of("CartPole-v1"), weights=np.zeros((3, 2)))


def test_normal_is_normal():
    drawn = policies.normal(np.arange(10_000, dtype=np.uint64), 3)
    assert drawn.shape == (10_000, 3)
    assert drawn.mean() == pytest.approx(0, abs=0.03)
    assert drawn.std() == pytest.approx(1, abs=0.03)
    assert np.corrcoef(drawn.T) == pytest.approx(np.eye(3), abs=0.05)


def specs_of(name):
    from envfleet.environments import as_environment, constructor_of

    env = as_environment(constructor_of(name)())
    return env.action_spec(), env.time_step_spec()


def chunks_before_and_after(weights, env, policy, **how):
    """Of a `Collector` on Ray, one chunk by the first weights, and one by those."""
    with Collector(
        env, policy, num_actors=2, envs_per_actor=2, seed=3, max_policy_lag=0, chunk_length=8, **how
    ) as collector:
        chunks = collector.collect(max_steps=64)
        before = next(chunks)
        assert collector.set_policy(weights) == 1
        after = next(chunks)
        chunks.close()
    assert (before.policy_version, after.policy_version) == (0, 1)
    return before, after


def actions_of(chunk):
    return chunk.action[chunk.mask & (chunk.step_type != LAST)]


def test_set_policy_reaches_the_linear_policy(on_ray):
    weights = np.array([[0, 0], [0, 0], [0, 1], [0, 1]])
    before, after = chunks_before_and_after(
        weights, "CartPole-v1", functools.partial(policies.LinearPolicy, temperature=0.0), **ON_RAY
    )
    assert not actions_of(before).any()  # of equal scores the first one
    is_step = after.mask & (after.step_type != LAST)
    best = (after.observation[is_step] @ weights).argmax(axis=1)
    np.testing.assert_array_equal(actions_of(after), best)
    assert best.any()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_mlp_policy_gives_the_same_data_whatever_the_number_of_environments(on_ray, one_thread):
    pytest.importorskip("mujoco")
    check_same_data("HalfCheetah-v5", policies.MlpPolicy)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_set_policy_reaches_the_mlp_policy(on_ray, one_thread, kind):
    pytest.importorskip("gymnasium")
    net = policies.make_net(*specs_of("Pendulum-v1"))
    state = {name: one.zero_() for name, one in net.state_dict().items()}
    state["4.bias"] += 0.5  # of the last layer
    if kind == "arrays":
        state = {name: one.numpy() for name, one in state.items()}
    before, after = chunks_before_and_after(
        state, "Pendulum-v1", functools.partial(policies.MlpPolicy, noise=0.0), **ON_RAY
    )
    assert np.ptp(actions_of(before)) > 0
    assert actions_of(after) == pytest.approx(2 * np.tanh(0.5))  # torques are from -2 to 2


@pytest.fixture
def one_thread():
    """Of PyTorch's, which a policy in this process sets."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.tf_agents
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_recurrent_policy_collects_and_takes_its_weights(on_ray, env):
    pytest.importorskip("tf_agents", reason="TF-Agents is not installed: make test-tf")
    pytest.importorskip("gymnasium")
    ours = policies.RecurrentPolicy(*specs_of(env), seed=0)
    weights = [np.zeros_like(one) for one in ours.get_weights()]
    _, after = chunks_before_and_after(weights, env, policies.RecurrentPolicy, **ON_RAY)
    assert after.num_steps > 0
    assert np.isfinite(actions_of(after)).all()
    if env == "CartPole-v1":  # all chances are equal, but for the bias of the one and the other
        weights[-1] = np.array([0.0, 50.0], np.float32)
        assert weights[-1].shape == ours.get_weights()[-1].shape
        _, after = chunks_before_and_after(weights, env, policies.RecurrentPolicy, **ON_RAY)
        assert actions_of(after).all()


@pytest.mark.tf_agents
@pytest.mark.filterwarnings("ignore")
def test_recurrent_policy_begins_with_the_same_weights_in_every_actor():
    pytest.importorskip("tf_agents", reason="TF-Agents is not installed: make test-tf")
    pytest.importorskip("gymnasium")
    one, other = (policies.RecurrentPolicy(*specs_of("CartPole-v1"), seed=s) for s in (1, 2))
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# -- the trainer -----------------------------------------------------------------------------------


def test_trainer_learns_from_chunks():
    pytest.importorskip("gymnasium")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_from_chunks.py"), "--steps", "70000"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    means = [float(mean) for mean in re.findall(r"return ([\d.]+)", done.stdout)]
    assert means[0] < 40
    assert means[-1] > 100
