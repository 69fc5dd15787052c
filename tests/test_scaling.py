"""The simulation and the fit of docs/scaling.md, where the answers are known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from scaling_costs import fit  # noqa: E402
from scaling_simulation import Costs, Setting, Steps, simulate  # noqa: E402


def rate(setting, costs=None, **options):
    return simulate(setting, costs or Costs(), **options).rate


@pytest.mark.parametrize(
    ("num_actors", "per_actor", "cores"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 8), (8, 4, 2), (6, 1, 4)],
)
@pytest.mark.parametrize("at_least", [1.0, 0.25], ids=["lockstep", "first-ready"])
def test_what_costs_nothing_reaches_the_limit(num_actors, per_actor, cores, at_least):
    setting = Setting(num_actors, per_actor, Steps(0.01), cores, at_least=at_least)
    assert rate(setting) == pytest.approx(min(cores, num_actors) / 0.01)


def test_environments_that_wait_need_no_cores():
    assert rate(Setting(16, 1, Steps(0.01, is_busy=False), cores=1)) == pytest.approx(16 / 0.01)


def test_nodes_add_their_cores():
    one, four = (Setting(16, 1, Steps(0.01), 4, num_nodes=n) for n in (1, 4))
    assert rate(four) == pytest.approx(4 * rate(one))


@pytest.mark.parametrize("num_callers", [1, 2, 4, 8])
def test_callers_that_are_the_bottleneck_add_up(num_callers):
    costs = Costs(send=0.001, receive=0.003)
    setting = Setting(64, 2, Steps(1e-9), cores=64, num_callers=num_callers)
    outcome = simulate(setting, costs)
    assert outcome.rate == pytest.approx(num_callers * 2 / 0.004, rel=1e-4)
    assert outcome.main == pytest.approx(1.0, rel=1e-4)


def test_rays_threads_limit_as_well_as_the_main_one():
    costs = Costs(send=0.001, ray=0.004)
    assert rate(Setting(64, 1, Steps(1e-9), cores=64), costs, rounds=40) < 1 / 0.004 * 1.05


def test_a_lockstep_step_is_sending_and_the_way_and_the_step_and_receiving():
    costs = Costs(
        send=0.002, receive=0.001, base=0.004, actor=0.01, step=0.003, there=0.005, back=0.006
    )
    seconds = 8 * 0.002 + 0.005 + (0.01 + 4 * (0.02 + 0.003)) + 0.006 + 0.004 + 8 * 0.001
    assert rate(Setting(8, 4, Steps(0.02), cores=8), costs) == pytest.approx(8 * 4 / seconds)


def test_a_chunk_pays_for_one_call():
    costs = Costs(send=0.001, receive=0.001, actor=0.01)
    step_by_step, chunk = (Setting(1, 1, Steps(0.001), 1, ticks=ticks) for ticks in (1, 100))
    assert rate(step_by_step, costs) == pytest.approx(1 / (0.002 + 0.01 + 0.001))
    assert rate(chunk, costs) == pytest.approx(100 / (0.002 + 0.01 + 100 * 0.001))


def test_first_ready_does_not_wait_for_the_slowest():
    steps = Steps(0.01, sigma=1.5)
    lockstep, first_ready = (
        rate(Setting(32, 1, steps, 32, at_least=share), rounds=100) for share in (1.0, 0.25)
    )
    assert first_ready > 1.5 * lockstep
    assert first_ready == pytest.approx(32 / 0.01, rel=0.35)


def test_a_caller_on_the_actors_cores_takes_one_from_them():
    costs = Costs(send=0.001)
    own, shared = (
        rate(Setting(20, 1, Steps(0.001), 1, is_shared=is_shared), costs)
        for is_shared in (False, True)
    )
    assert shared == pytest.approx(1 / 0.002)  # one core has to do both
    assert own > 1.8 * shared


def test_idle_actors_take_from_the_cores():
    assert rate(Setting(10, 1, Steps(0.01), 1), Costs(idle=0.05)) == pytest.approx(0.5 / 0.01)


def test_lognormal_steps_have_the_mean_that_was_asked_for():
    draws = Steps(0.01, sigma=1.0).sums(5, np.random.default_rng(0))
    assert np.mean([next(draws) for _ in range(20_000)]) == pytest.approx(5 * 0.01, rel=0.02)


def test_the_same_seed_gives_the_same_outcome():
    setting = Setting(16, 2, Steps(0.01, 1.0), 4, at_least=0.25)
    assert simulate(setting, Costs(send=0.001), seed=3) == simulate(
        setting, Costs(send=0.001), seed=3
    )


TERMS = ("base", "calls", "envs", "bytes")
COUNTS = [
    {"calls": calls, "envs": calls * k, "bytes": calls * k * size}
    for calls in (8, 16, 32, 128)
    for k in (1, 8, 64)
    for size in (48, 4096)
]


def test_a_fit_recovers_the_coefficients():
    known = {"base": 1e-4, "calls": 2e-4, "envs": 1e-6, "bytes": 3e-10}
    exact = [sum(known[t] * {"base": 1, **row}[t] for t in TERMS) for row in COUNTS]
    assert fit(TERMS, COUNTS, exact).seconds == pytest.approx(known)
    noise = np.random.default_rng(0).normal(1.0, 0.03, len(exact))
    found = fit(TERMS, COUNTS, exact * noise)
    assert found.seconds["calls"] == pytest.approx(known["calls"], rel=0.1)
    assert found.of(COUNTS[-1]) == pytest.approx(exact[-1], rel=0.05)


def test_no_coefficient_of_a_fit_is_negative():
    falling = [1e-3 * row["calls"] - 1e-7 * row["envs"] for row in COUNTS]
    found = fit(TERMS, COUNTS, falling).seconds
    assert min(found.values()) >= 0
    assert found["envs"] == found["bytes"] == 0
    assert found["calls"] == pytest.approx(1e-3, rel=0.05)
