"""`on_failure="restart"`: its fault table, its budget, its record, and what goes on besides.

Slots are held against a `ProbeOracle`: in no case does a transition mix two episodes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import faults
import numpy as np
import pytest
from dm_env import specs
from test_faults import ENDING, HANGS, ON_RAY_ONLY, RAISED, TextEnv, case_id

from envfleet import (
    ActorDied,
    EnvTimeout,
    ParallelPyEnvironment,
    ResetNeeded,
    SpecMismatch,
    restarts,
)
from envfleet.testing import ProbeEnv, ProbeOracle

FIRST, MID, LAST = 0, 1, 2


def healthy(env_id: int) -> faults.Constructor:
    return faults.Constructor(faults.never, "never", env_id=env_id)


def failing(directory: Any, cases: list[Any], phase: str, after: int = 0) -> list[Any]:
    """A constructor for each case that fails once, and a healthy one at the end."""
    return [
        *(
            faults.Constructor(
                case.fault, phase, env_id=i, after=after, once=str(directory / str(i))
            )
            for i, case in enumerate(cases)
        ),
        healthy(len(cases)),
    ]


def check_records(batch: ParallelPyEnvironment, cases: list[Any], phase: str) -> None:
    """One record for each case, with the class of what its environment did."""
    assert sorted(failure.index for failure in batch.failures) == list(range(len(cases)))
    for failure in batch.failures:
        assert failure.phase == phase
        error = failure.exception()
        assert type(error) is cases[failure.index].error, repr(error)
    stats = batch.stats()
    assert stats.failures == stats.restarts == [1] * len(cases) + [0]
    assert [one is None for one in stats.last_failure] == [False] * len(cases) + [True]
    lost = stats.seconds_lost
    assert all(seconds > 0 for seconds in lost[:-1])
    assert lost[-1] == 0


def check_step_fails(batch: ParallelPyEnvironment, num_failing: int) -> None:
    """The step in which all but the last fail, and what follows until all are in step again."""
    num_envs = num_failing + 1
    failed, last = slice(0, num_failing), num_envs - 1
    before = batch.reset()
    before = batch.step(np.full(num_envs, 7))
    cut = batch.step(np.full(num_envs, 8))
    assert cut.step_type.tolist() == [LAST] * num_failing + [MID]
    assert (cut.reward[failed] == 0).all()
    assert (cut.discount == 1).all()
    for name, seen in cut.observation.items():
        assert np.array_equal(seen[failed], before.observation[name][failed]), name
    assert cut.observation["step"][last] == 2
    assert cut.observation["action"][last] == 8
    assert np.array_equal(batch.current_time_step().reward, cut.reward)

    first = batch.step(np.full(num_envs, 9))
    assert first.step_type.tolist() == [FIRST] * num_failing + [LAST]
    assert (first.reward[failed] == 0).all()
    assert (first.discount[failed] == 1).all()
    assert first.observation["episode"][failed].tolist() == [0] * num_failing
    assert first.observation["step"].tolist() == [0] * num_failing + [3]

    on = batch.step(np.arange(num_envs))
    assert on.observation["env"].tolist() == list(range(num_envs))
    assert on.observation["step"].tolist() == [1] * num_failing + [0]
    assert on.observation["action"][failed].tolist() == list(range(num_failing))


def test_what_raises_in_a_step_is_cut_and_restarted(make_batch, backend, tmp_path):
    cases = RAISED + (ON_RAY_ONLY if backend == "ray" else [])
    with make_batch(
        failing(tmp_path, cases, "step", after=1), on_failure="restart", envs_per_actor=5
    ) as batch:
        check_step_fails(batch, len(cases))
        check_records(batch, cases, "step")


def test_what_ends_in_a_step_is_cut_and_restarted_in_a_new_actor(on_ray, tmp_path):
    with ParallelPyEnvironment(
        failing(tmp_path, ENDING, "step", after=1), on_failure="restart", step_timeout=1.0
    ) as batch:
        check_step_fails(batch, len(ENDING))
        check_records(batch, ENDING, "step")


@pytest.mark.parametrize("automatic", [False, True], ids=["by reset()", "by step()"])
def test_what_raises_in_a_reset_is_restarted_before_the_call_returns(
    automatic, make_batch, backend, tmp_path
):
    cases = RAISED + (ON_RAY_ONLY if backend == "ray" else [])
    check_reset_fails(make_batch, cases, tmp_path, automatic, envs_per_actor=5)


@pytest.mark.parametrize("automatic", [False, True], ids=["by reset()", "by step()"])
def test_what_ends_in_a_reset_is_restarted_before_the_call_returns(automatic, on_ray, tmp_path):
    limits = {"reset_timeout": 1.0, "step_timeout": 1.0}
    check_reset_fails(ParallelPyEnvironment, ENDING, tmp_path, automatic, **limits)


def check_reset_fails(
    make: Callable[..., Any], cases: list[Any], directory: Any, automatic: bool, **kwargs: Any
) -> None:
    num_envs = len(cases) + 1
    oracle = ProbeOracle([3] * num_envs)
    constructors = failing(directory, cases, "reset", after=1)
    with make(constructors, on_failure="restart", **kwargs) as batch:
        oracle.reset()
        oracle.check(batch.reset())
        for _ in range(3 if automatic else 1):
            oracle.step(np.zeros(num_envs, int))
            oracle.check(batch.step(np.zeros(num_envs, int)))
        time_step = batch.step(np.zeros(num_envs, int)) if automatic else batch.reset()
        oracle.reset()
        oracle.episode[:-1] = 0
        oracle.check(time_step)
        for t in range(5):
            oracle.step(np.arange(num_envs) + t)
            oracle.check(batch.step(np.arange(num_envs) + t))
        # Where the caller knows it only as a step that was lost, it was a step.
        phase = "step" if automatic and cases is ENDING else "reset"
        check_records(batch, cases, phase)


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_first_step_restarts_what_fails_in_its_reset(make_batch, tmp_path, envs_per_actor):
    constructors = failing(tmp_path, RAISED[:2], "reset")
    with make_batch(constructors, on_failure="restart", envs_per_actor=envs_per_actor) as batch:
        assert batch.step([5, 5, 5]).step_type.tolist() == [FIRST] * 3
        assert batch.step([5, 6, 7]).observation["action"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_slot_that_never_had_a_time_step_shows_none(make_batch, tmp_path, envs_per_actor):
    """Env 1 is given up in the first reset, while env 0 is on its way back."""
    once = str(tmp_path / "once")
    constructors = [
        faults.Constructor(faults.key_error, "reset", env_id=0, once=once),
        faults.Lives(tmp_path / "1", *[(faults.key_error, "reset")] * 2, (faults.never, "never")),
    ]
    with make_batch(
        constructors, on_failure="restart", max_restarts=1, envs_per_actor=envs_per_actor
    ) as batch:
        with pytest.raises(KeyError):
            batch.reset()
        with pytest.raises(ResetNeeded):
            batch.current_time_step()
        assert batch.reset().step_type.tolist() == [FIRST, FIRST]
        assert batch.step([1, 2]).observation["action"].tolist() == [1, 2]


@pytest.mark.parametrize("phase", ["construct", "specs"])
def test_start_raises_as_ever(phase, make_batch):
    """There is nothing yet to go on with."""
    with pytest.raises(KeyError) as caught:
        make_batch([ProbeEnv, faults.Constructor(faults.key_error, phase)], on_failure="restart")
    assert caught.value.env_failures[0].index == 1


def test_what_raises_in_a_call_is_raised_and_goes_on(make_batch):
    faulty = faults.Constructor(faults.key_error, "call")
    with make_batch([faulty], on_failure="restart") as batch:
        batch.reset()
        with pytest.raises(KeyError, match="arm"):
            batch.call("work")
        assert batch.step([5]).observation["step"] == 1
        assert batch.failures == ()


def test_what_ends_in_a_call_is_raised_and_cut_by_the_next_step(on_ray, tmp_path):
    cases = ENDING
    num_envs = len(cases) + 1
    with ParallelPyEnvironment(
        failing(tmp_path, cases, "call"), on_failure="restart", call_timeout=1.0
    ) as batch:
        before = batch.reset()
        with pytest.raises((ActorDied, EnvTimeout)) as caught:
            batch.call("work")
        assert [one.index for one in caught.value.env_failures] == list(range(len(cases)))
        assert np.array_equal(batch.current_time_step().step_type, before.step_type)
        cut = batch.step(np.arange(num_envs))
        assert cut.step_type.tolist() == [LAST] * len(cases) + [MID]
        first = batch.step(np.arange(num_envs))
        assert first.step_type.tolist() == [FIRST] * len(cases) + [MID]
        assert first.observation["env"].tolist() == list(range(num_envs))
        check_records(batch, cases, "call")


@pytest.mark.parametrize("case", [RAISED[0], *ENDING[-3:]], ids=case_id)
def test_old_environment_that_cannot_be_closed_does_not_keep_its_slot(case, on_ray, tmp_path):
    """It fails in its step, and then in its `close`."""

    class Stubborn(faults.Lives):
        def __call__(self) -> Any:
            env = super().__call__()
            if env._phase == "step":
                env.close = self.fault
            return env

    stubborn = Stubborn(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"))
    stubborn.fault = case.fault
    with ParallelPyEnvironment(
        [healthy(0), stubborn], on_failure="restart", max_restarts=1, close_timeout=1.0
    ) as batch:
        batch.reset()
        assert batch.step([0, 0]).step_type.tolist() == [MID, LAST]
        assert batch.step([0, 0]).step_type.tolist() == [MID, FIRST]
        assert batch.step([0, 0]).observation["step"].tolist() == [3, 1]


# -- restarting a restart --------------------------------------------------------------------------

ATTEMPTS = [
    ("construct", faults.file_not_found),
    ("specs", faults.holds_a_lock),
    ("reset", faults.two_arguments),
]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_restart_that_fails_is_tried_again_later_each_time(make_batch, tmp_path, envs_per_actor):
    lives = faults.Lives(
        tmp_path / "1",
        (faults.key_error, "step"),
        *[(fault, phase) for phase, fault in ATTEMPTS],
        (faults.never, "never"),
        env_id=1,
    )
    with make_batch(
        [healthy(0), lives], on_failure="restart", envs_per_actor=envs_per_actor
    ) as batch:
        batch.reset()
        assert batch.step([0, 0]).step_type.tolist() == [MID, LAST]
        first = batch.step([0, 0])
        assert first.step_type.tolist() == [MID, FIRST]
        assert first.observation["env"].tolist() == [0, 1]
        assert batch.step([0, 0]).observation["step"].tolist() == [3, 1]
        phases = [failure.phase for failure in batch.failures]
        assert phases == ["step", "construct", "construct", "reset"]
        assert batch.stats().restarts == [0, 4]
    pauses = np.diff(lives.times()[1:])
    assert (pauses > [0.2, 0.4, 0.8]).all(), pauses


@pytest.mark.parametrize("case", ENDING, ids=case_id)
def test_restart_may_end_its_process_too(case, on_ray, tmp_path):
    lives = faults.Lives(
        tmp_path / "1",
        (faults.key_error, "step"),
        (case.fault, "construct"),
        (faults.never, "never"),
    )
    with ParallelPyEnvironment(
        [healthy(0), lives], on_failure="restart", start_timeout=6.0
    ) as batch:
        batch.reset()
        assert batch.step([0, 0]).step_type.tolist() == [MID, LAST]
        assert batch.step([0, 0]).step_type.tolist() == [MID, FIRST]
        # That the old environment was closed may die with the process, before it was sent.
        assert batch.failures[1].phase in ("construct", "close")
        assert type(batch.failures[1].exception()) is case.error


class OtherSpecs(ProbeEnv):
    def observation_spec(self) -> Any:
        return {**super().observation_spec(), "step": specs.Array((), np.int32, "step")}


class ChangesItsSpecs(faults.Lives):
    """The second environment that it builds differs."""

    env_id = 1

    def __call__(self) -> Any:
        env = super().__call__()
        return OtherSpecs(self.env_id) if env._phase == "never" and len(self.times()) == 2 else env


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_rebuilt_environment_of_other_specs_does_not_join(make_batch, tmp_path, envs_per_actor):
    lives = ChangesItsSpecs(
        tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1
    )
    oracle = ProbeOracle([3, 3])
    with make_batch(
        [healthy(0), lives], on_failure="restart", envs_per_actor=envs_per_actor
    ) as batch:
        batch.reset()
        batch.step([0, 0])
        first = batch.step([5, 5])
        assert first.observation["step"].tolist() == [2, 0]
        assert first.observation["step"].dtype == np.int64
        (_, mismatch) = batch.failures
        assert "env 1's observation_spec differs from env 0's at 'step'" in mismatch.message
        assert type(mismatch.exception()) is SpecMismatch
        oracle.episode[:], oracle.at[:] = 0, [2, 0]
        for t in range(6):
            oracle.step([t, t + 10])
            oracle.check(batch.step([t, t + 10]))


class SlowAgain(faults.Lives):
    """From its second call on it takes its time."""

    def __call__(self) -> Any:
        if self.directory.exists():
            time.sleep(0.6)
        return super().__call__()


def test_restarts_in_one_actor_may_overtake_each_other(on_ray, tmp_path):
    """The second attempt for env 0 is sent while the first for env 1 is under way."""
    twice = [(faults.key_error, "step"), (faults.key_error, "construct"), (faults.never, "never")]
    constructors = [
        faults.Lives(tmp_path / "0", *twice, env_id=0),
        SlowAgain(tmp_path / "1", twice[0], twice[2], env_id=1),
    ]
    with ParallelPyEnvironment(constructors, on_failure="restart", envs_per_actor=2) as batch:
        batch.reset()
        assert batch.step([0, 0]).step_type.tolist() == [LAST, LAST]
        assert batch.step([0, 0]).step_type.tolist() == [FIRST, FIRST]
        assert batch.step([0, 0]).observation["step"].tolist() == [1, 1]
        assert batch.stats().restarts == [2, 1]


class FirstChangesItsSpecs(ChangesItsSpecs):
    """The same for env 0."""

    env_id = 0


def test_new_actor_is_laid_out_by_the_batch_whatever_is_built_in_it_first(on_ray, tmp_path):
    """Env 0 takes the process with it, and comes back with other specs; env 1 must not suffer."""
    first = FirstChangesItsSpecs(
        tmp_path / "0", (faults.sigkill, "step"), (faults.never, "never"), env_id=0
    )
    with ParallelPyEnvironment(
        [first, healthy(1)], on_failure="restart", envs_per_actor=2
    ) as batch:
        batch.reset()
        assert batch.step([0, 0]).step_type.tolist() == [LAST, LAST]
        assert batch.step([0, 0]).step_type.tolist() == [FIRST, FIRST]
        assert batch.step([0, 0]).observation["env"].tolist() == [0, 1]
        assert batch.stats().restarts == [2, 1]


class SlowToReset(ProbeEnv):
    def reset(self) -> Any:
        time.sleep(1.5)
        return super().reset()


def test_automatic_reset_has_the_time_of_a_reset(on_ray):
    with ParallelPyEnvironment(
        [SlowToReset, ProbeEnv], on_failure="restart", step_timeout=1.0, reset_timeout=20.0
    ) as batch:
        kinds = [batch.step([0, 0]).step_type.tolist() for _ in range(6)]
        assert kinds == [[kind] * 2 for kind in (FIRST, MID, MID, LAST, FIRST, MID)]
        assert batch.failures == ()


def test_step_whose_result_nobody_took_is_an_interrupt(make_batch):
    with make_batch([ProbeEnv] * 2) as batch:
        batch.reset()
        batch._fleet.stepper.step(
            batch._fleet.action_layout.columns([0, 0], 2)
        )  # here comes Ctrl-C
        with pytest.raises(ResetNeeded, match="interrupt"):
            batch.step([0, 0])
        assert batch.reset().observation["step"].tolist() == [0, 0]
        assert batch.step([0, 0]).observation["step"].tolist() == [1, 1]


@pytest.mark.parametrize("mode", ["raise", "restart"])
def test_reset_that_raises_leaves_no_slot_in_an_episode_that_is_over(mode, make_batch, tmp_path):
    """Env 0 fails in its step; the reset that rebuilds it raises for env 1."""
    constructors = [
        faults.Constructor(faults.key_error, "step", env_id=0, once=str(tmp_path / "0")),
        faults.Constructor(
            faults.file_not_found, "reset", after=1, env_id=1, once=str(tmp_path / "1")
        ),
    ]
    with make_batch(constructors, on_failure=mode, max_restarts=0) as batch:
        batch.reset()
        with pytest.raises(KeyError):
            batch.step([0, 0])
        with pytest.raises(FileNotFoundError):
            batch.reset()
        assert batch.stats().failures == [1, 1]
        # What was rebuilt is shown by the next reset, of whomever: its own was asked for.
        assert batch.reset(env_ids=[1]).step_type.tolist() == [FIRST, FIRST]
        assert batch.step([0, 0]).step_type.tolist() == [MID, MID]


# -- the budget ------------------------------------------------------------------------------------


def test_crash_loop_ends_with_every_attempt_told(make_batch, tmp_path, caplog):
    lives = [(fault, "step") for fault in (faults.key_error, faults.two_arguments)]
    lives += [(faults.file_not_found, "construct"), (faults.key_error, "step")]
    crashing = faults.Lives(tmp_path / "1", *lives, env_id=1)
    with make_batch([healthy(0), crashing], on_failure="restart", max_restarts=3) as batch:
        batch.reset()
        with pytest.raises(KeyError, match="arm") as caught:  # noqa: PT012
            for _ in range(100):
                batch.step([0, 0])
        attempts = ["KeyError", "faults.TwoArguments", "FileNotFoundError", "KeyError"]
        assert [one.type_name for one in caught.value.env_failures] == attempts
        told = "\n".join(caught.value.__notes__)
        assert "env 1 failed 4 times without a good step in between" in told
        assert all(f"  {n}. env 1 failed in " in told for n in range(1, 5))
        lines = [record.getMessage() for record in caplog.records if record.name == "envfleet"]
        assert len(lines) == 4
        assert [line.partition("; ")[2] for line in lines] == [
            "restart 1 of 3 in a row",
            "restart 2 of 3 in a row, in 0.2 s",
            "restart 3 of 3 in a row, in 0.4 s",
            "3 restarts in a row are spent",
        ]
        assert all(line.startswith("env 1 failed in ") for line in lines)
        # As in the other mode: it takes a reset to go on, which tries again with a whole budget.
        with pytest.raises(ResetNeeded, match="env 1"):
            batch.step([0, 0])
        assert batch.reset().observation["env"].tolist() == [0, 1]
        assert batch.step([0, 0]).step_type.tolist() == [MID, LAST]


def test_budget_that_is_spent_in_the_background_is_told_by_the_next_step(on_ray, tmp_path):
    lives = faults.Lives(
        tmp_path / "1", (faults.key_error, "step"), (faults.key_error, "construct")
    )
    with ParallelPyEnvironment([healthy(0), lives], on_failure="restart", max_restarts=1) as batch:
        batch.reset()
        batch.step([0, 0])
        while len(batch.failures) < 2:  # others are asked meanwhile, and nobody is told
            batch.call("add", 1, env_ids=[0])
            batch.stats()
        with pytest.raises(KeyError) as caught:
            batch.step([0, 0])
        assert [one.phase for one in caught.value.env_failures] == ["step", "construct"]
        with pytest.raises(ResetNeeded):
            batch.step([0, 0])


def test_budget_may_be_spent_in_a_reset(make_batch, tmp_path):
    crashing = faults.Lives(tmp_path / "0", (faults.key_error, "reset"))
    with make_batch([crashing], on_failure="restart", max_restarts=1) as batch:
        with pytest.raises(KeyError) as caught:
            batch.reset()
        assert len(caught.value.env_failures) == 2
        with pytest.raises(KeyError) as caught:  # a first step is a reset, and tries again
            batch.reset()
        assert len(caught.value.env_failures) == 2


def test_good_step_gives_the_whole_budget_back(make_batch):
    faulty = faults.Constructor(faults.key_error, "step", after=1)
    with make_batch([faulty], on_failure="restart", max_restarts=1) as batch:
        batch.reset()
        kinds = [int(batch.step([0]).step_type[0]) for _ in range(30)]
        assert kinds == [MID, LAST, FIRST] * 10
        assert batch.stats().restarts == [10]


def test_without_a_budget_it_raises_at_once(make_batch):
    faulty = faults.Constructor(faults.key_error, "step")
    with make_batch([faulty], on_failure="restart", max_restarts=0) as batch:
        batch.reset()
        with pytest.raises(KeyError):
            batch.step([0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"on_failure": "ignore"}, ValueError, "on_failure is 'ignore', expected 'raise' or"),
        ({"on_failure": "restart", "max_restarts": -1}, ValueError, "max_restarts is -1"),
        ({"on_failure": "restart", "max_restarts": 2.5}, TypeError, "max_restarts is 2.5"),
    ],
)
def test_wrong_argument_is_told(arguments, error, words):
    with pytest.raises(error, match=words):
        ParallelPyEnvironment([ProbeEnv], backend="local", **arguments)


# -- what goes on besides --------------------------------------------------------------------------


class Gated(faults.Lives):
    """From its second call on it waits for a file."""

    def __call__(self) -> Any:
        env = super().__call__()
        if len(self.times()) > 1:
            self.directory.with_suffix(".waiting").touch()
            while not self.directory.with_suffix(".open").exists():
                time.sleep(0.01)
        return env


def test_rebuild_goes_on_in_the_background_until_its_first_time_step_is_needed(on_ray, tmp_path):
    """What waited for it would not return: nobody opens the gate meanwhile."""
    gated = Gated(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1)
    limits = dict.fromkeys(["step_timeout", "reset_timeout", "call_timeout"], 10.0)
    with ParallelPyEnvironment(
        [healthy(0), gated, healthy(2)], on_failure="restart", start_timeout=60.0, **limits
    ) as batch:
        batch.reset()
        cut = batch.step([1, 1, 1])
        assert cut.step_type.tolist() == [MID, LAST, MID]
        assert batch.call("add", 1, env_ids=[0, 2]) == [1, 3]
        again = batch.reset(env_ids=[0])
        assert again.observation["episode"].tolist() == [1, 0, 0]
        assert again.step_type.tolist() == [FIRST, LAST, MID]
        assert batch.stats().failures == [0, 1, 0]
        while not (tmp_path / "1.waiting").exists():  # it is being built, though nobody waits
            time.sleep(0.01)
        threading.Timer(0.5, (tmp_path / "1.open").touch).start()
        first = batch.step([5, 6, 7])
        assert first.step_type.tolist() == [MID, FIRST, MID]
        assert first.observation["action"].tolist() == [5, -1, 7]
        assert first.observation["step"].tolist() == [1, 0, 2]


def test_call_to_an_environment_that_is_being_restarted_waits_for_it(on_ray, tmp_path):
    gated = Gated(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1)
    with ParallelPyEnvironment([healthy(0), gated], on_failure="restart") as batch:
        batch.reset()
        batch.step([0, 0])
        threading.Timer(0.5, (tmp_path / "1.open").touch).start()
        assert batch.call("add", 5) == [5, 6]
        assert batch.step([0, 0]).step_type.tolist() == [MID, FIRST]


def test_reset_of_what_is_being_restarted_shows_its_first_time_step(on_ray, tmp_path):
    gated = Gated(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1)
    with ParallelPyEnvironment([healthy(0), gated], on_failure="restart") as batch:
        batch.reset()
        batch.step([0, 0])
        threading.Timer(0.5, (tmp_path / "1.open").touch).start()
        assert batch.reset().observation["episode"].tolist() == [1, 0]
        assert batch.step([0, 0]).observation["step"].tolist() == [1, 1]
        assert len(gated.times()) == 2


def test_interrupt_while_a_restart_is_waited_for_leaves_a_batch_to_reset(on_ray, tmp_path):
    import _thread

    gated = Gated(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1)
    oracle = ProbeOracle([3, 3])
    with ParallelPyEnvironment([healthy(0), gated], on_failure="restart") as batch:
        batch.reset()
        batch.step([0, 0])
        threading.Timer(0.5, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            batch.step([0, 0])
        with pytest.raises(ResetNeeded, match="interrupt"):
            batch.step([0, 0])
        (tmp_path / "1.open").touch()
        oracle.episode[:] = [0, -1]
        oracle.reset()
        oracle.check(batch.reset())
        for t in range(5):
            oracle.step([t, t])
            oracle.check(batch.step([t, t]))


def test_close_does_not_wait_for_a_restart(on_ray, tmp_path):
    gated = Gated(tmp_path / "1", (faults.key_error, "step"), (faults.never, "never"), env_id=1)
    batch = ParallelPyEnvironment(
        [healthy(0), gated], on_failure="restart", start_timeout=None, close_timeout=1.0
    )
    batch.reset()
    batch.step([0, 0])
    batch.close()


@pytest.mark.parametrize("fault", [faults.key_error, faults.sigkill, *HANGS])
def test_neighbours_in_the_actor_keep_their_episodes_if_it_lives(fault, on_ray, tmp_path):
    faulty = faults.Constructor(fault, "step", env_id=2, once=str(tmp_path / "failed"))
    with ParallelPyEnvironment(
        [healthy(0), healthy(1), faulty, healthy(3)],
        envs_per_actor=2,
        on_failure="restart",
        step_timeout=1.0,
    ) as batch:
        batch.reset()
        lives = fault is faults.key_error
        cut = batch.step([0, 0, 0, 9])
        assert cut.step_type.tolist() == [MID, MID, LAST, MID if lives else LAST]
        assert cut.observation["step"].tolist() == [1, 1, 0, 1 if lives else 0]
        first = batch.step([0, 0, 0, 9])
        assert first.step_type.tolist() == [MID, MID, FIRST, MID if lives else FIRST]
        assert first.observation["step"].tolist() == [2, 2, 0, 2 if lives else 0]
        assert first.observation["env"].tolist() == [0, 1, 2, 3]


def test_batch_that_blocks_restarts_too(make_batch, tmp_path):
    cases = RAISED[:2]
    with make_batch(
        failing(tmp_path, cases, "step", after=1), on_failure="restart", blocking=True
    ) as batch:
        check_step_fails(batch, 2)


def test_restart_has_a_seed_of_its_own_that_is_the_same_at_every_run(make_batch, tmp_path):
    def seeds_of_a_run(directory: Any) -> list[list[int]]:
        directory.mkdir()
        constructors = failing(directory, RAISED[:1], "step")
        with make_batch(constructors, on_failure="restart", seed=3) as batch:
            return [
                time_step.observation["seed"].tolist()
                for time_step in (batch.reset(), batch.step([0, 0]), batch.step([0, 0]))
            ]

    runs = [seeds_of_a_run(tmp_path / name) for name in "ab"]
    assert runs[0] == runs[1]
    (first, cut, then), _ = runs
    assert cut == first
    assert then[1] == first[1]
    assert len({first[0], first[1], then[0]}) == 3


def test_cut_episode_keeps_leaves_that_travel_beside_the_block(make_batch, tmp_path):
    class Words(TextEnv):
        def _observation(self, action: Any) -> Any:
            return f"{self.text} {self._step}"

    def constructor(i: int) -> Any:
        def build() -> Any:
            env = Words(f"env {i}")
            if i == 0 and not (tmp_path / "built").exists():
                (tmp_path / "built").touch()
                env.step = lambda action: faults.key_error()
            return env

        return build

    with make_batch(
        [constructor(i) for i in range(3)], on_failure="restart", envs_per_actor=2
    ) as batch:
        batch.reset()
        assert batch.step([0] * 3).observation.tolist() == ["env 0 0", "env 1 1", "env 2 1"]
        assert batch.step([0] * 3).observation.tolist() == ["env 0 0", "env 1 2", "env 2 2"]
        assert batch.step([0] * 3).observation.tolist() == ["env 0 1", "env 1 3", "env 2 3"]


class Discounted(ProbeEnv):
    """Structures of float32 for reward and discount, and a discount that is never 1."""

    def reward_spec(self) -> Any:
        return {"goal": specs.Array((2,), np.float32), "effort": specs.Array((), np.float64)}

    def discount_spec(self) -> Any:
        return specs.BoundedArray((), np.float32, 0, 1)

    def step(self, action: Any) -> Any:
        if action == 13:
            raise KeyError("arm")
        reward = {"goal": np.full(2, 5, np.float32), "effort": 2.0}
        return super().step(action)._replace(reward=reward, discount=np.float32(0.5))


def test_cut_episode_has_reward_and_discount_by_their_specs(make_batch):
    with make_batch([Discounted] * 2, on_failure="restart") as batch:
        batch.reset()
        before = batch.step([0, 0])
        assert before.discount.tolist() == [0.5, 0.5]
        cut = batch.step([0, 13])
        assert cut.step_type.tolist() == [MID, LAST]
        assert cut.reward["goal"].tolist() == [[5, 5], [0, 0]]
        assert cut.reward["effort"].tolist() == [2, 0]
        assert cut.discount.tolist() == [0.5, 1]
        assert (cut.discount.dtype, cut.reward["goal"].dtype) == (np.float32, np.float32)


def test_state_that_is_set_takes_the_place_of_a_first_time_step(make_batch, tmp_path):
    with make_batch(failing(tmp_path, RAISED[:1], "step", after=1), on_failure="restart") as batch:
        batch.reset()
        batch.step([0, 0])
        states = batch.get_state()
        assert batch.step([0, 0]).step_type.tolist() == [LAST, MID]
        batch.set_state(states)
        assert batch.step([4, 4]).observation["step"].tolist() == [2, 2]


def test_one_environment_alone_restarts_too(make_single, tmp_path):
    lives = faults.Lives(
        tmp_path / "0",
        (faults.key_error, "step"),
        (faults.key_error, "reset"),
        (faults.never, "never"),
    )
    env = make_single(lives, on_failure="restart")
    env.reset()
    promise = env.step(0, blocking=False)
    assert promise().step_type == LAST
    assert env.step(0).step_type == FIRST
    assert env.step(3).observation["action"] == 3
    assert [failure.phase for failure in env.failures] == ["step", "reset"]
    env.close()


# -- the record ------------------------------------------------------------------------------------


def test_record_is_bounded_and_outlives_the_batch(make_batch, monkeypatch):
    monkeypatch.setattr(restarts, "_KEPT", 3)
    batch = make_batch(
        [faults.Constructor(faults.key_error, "step", after=1)], on_failure="restart"
    )
    batch.reset()
    for _ in range(15):
        batch.step([0])
    assert batch.stats().failures == [5]
    batch.close()
    assert [failure.phase for failure in batch.failures] == ["step"] * 3
    assert all(failure.original is None for failure in batch.failures)  # it would hold the frames


class TellsItsProcess(ProbeEnv):
    def pid(self) -> int:
        return os.getpid()


def test_stats_ask_no_actor(on_ray):
    with ParallelPyEnvironment([TellsItsProcess] * 2, on_failure="restart") as batch:
        batch.reset()
        os.kill(batch.call("pid")[1], signal.SIGKILL)
        assert batch.stats().failures == [0, 0]
        assert batch.step([0, 0]).step_type.tolist() == [MID, LAST]
        stats = batch.stats()
        assert stats.failures == [0, 1]
        assert stats.num_calls == [2, 1]


def test_record_of_a_batch_that_raises(make_batch):
    with make_batch([ProbeEnv, faults.Constructor(faults.key_error, "step")]) as batch:
        batch.reset()
        with pytest.raises(KeyError):
            batch.step([0, 0])
        stats = batch.stats()
        assert (stats.failures, stats.restarts) == ([0, 1], [0, 0])
        assert stats.last_failure[1] == batch.failures[0]
        batch.reset()
        assert batch.stats().restarts == [0, 1]


def test_record_of_large_exceptions_stays_small(make_batch):
    def fault() -> None:
        raise ValueError("x" * 10_000_000, np.zeros(10_000_000, np.uint8))

    with make_batch([faults.Constructor(fault, "step")], on_failure="restart") as batch:
        batch.reset()
        batch.step([0])
        (failure,) = batch.failures
        assert len(failure.message) + len(failure.traceback) < 100_000
        assert failure.pickled is None


def test_failure_of_many_lines_is_logged_in_one(make_batch, caplog):
    def fault() -> None:
        raise ValueError("first\nsecond\n" + "x" * 10_000)

    with make_batch([faults.Constructor(fault, "step")], on_failure="restart") as batch:
        batch.reset()
        batch.step([0])
        assert "x" * 10_000 in batch.failures[0].message
    (line,) = [record.getMessage() for record in caplog.records if record.name == "envfleet"]
    assert "\n" not in line
    assert len(line) < 1000
    assert "ValueError: first second x" in line
