"""The fault table: every way to fail, in every phase, on every backend.

Each case checks the class, the args, the index, the phase, the remote traceback with the user's own
frames, and that what follows is in step.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import faults
import numpy as np
import pytest
from dm_env import specs

from envfleet import (
    ActorDied,
    EnvTimeout,
    ParallelPyEnvironment,
    RemoteEnvError,
    RemoteTraceback,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.testing import ProbeEnv, ProbeOracle

PHASES = ["construct", "specs", "reset", "step", "call", "close"]


class Expected(NamedTuple):
    """What the caller catches; `message` where the args are not the user's."""

    fault: Any
    error: type[BaseException]
    args: tuple[Any, ...] | None = None
    message: str = ""


RAISED = [
    Expected(faults.key_error, KeyError, ("arm",)),
    Expected(faults.file_not_found, FileNotFoundError, (2, "x")),
    Expected(faults.two_arguments, faults.TwoArguments, ("elbow at 2.5",)),
    Expected(faults.one_argument, faults.OneArgument, ("failed with code 7",)),
    Expected(faults.refuses_attributes, faults.RefusesAttributes, ("stubborn",)),
    Expected(faults.args_raise, RemoteEnvError, message="ArgsRaise: argued"),
    Expected(faults.holds_a_lock, RemoteEnvError, message="HoldsALock: locked"),
    Expected(faults.reduce_raises, RemoteEnvError, message="ReduceRaises: reduced"),
    Expected(faults.exception_group, ExceptionGroup, message="several"),
    Expected(faults.chained, KeyError, ("arm",)),
    Expected(faults.stop_iteration, StopIteration, ("enough",)),
    Expected(faults.system_exit, RemoteEnvError, message="SystemExit: 3"),
]
# In the caller's own process an interrupt is the user's Ctrl-C, and the others end the caller.
ENDING = [
    Expected(faults.exit_at_once, ActorDied),
    Expected(faults.sigkill, ActorDied),
    Expected(faults.sigsegv, ActorDied),
    Expected(faults.hang, EnvTimeout),
    Expected(faults.hang_in_c, EnvTimeout),
    Expected(faults.stop, EnvTimeout),
]
HANGS = (faults.hang, faults.hang_in_c, faults.stop)
ON_RAY_ONLY = [Expected(faults.keyboard_interrupt, RemoteEnvError, message="KeyboardInterrupt")]


def case_id(case: Any) -> str:
    return case.fault.__name__ if isinstance(case, Expected) else str(case)


def run(phase: str, fault: Any, backend: str) -> tuple[BaseException, Any]:
    """Drives env 1 of 3 into its fault; gives what was raised and the batch."""
    constructors = [ProbeEnv, faults.Constructor(fault, phase, env_id=1), ProbeEnv]
    # The other environments must have the same ids as slots for the oracle.
    constructors[2] = faults.Constructor(fault, "never", env_id=2)
    limits = {}
    if fault in HANGS:
        kind = "start" if phase in ("construct", "specs") else phase
        limits = {f"{kind}_timeout": 12.0 if kind == "start" else 0.5}
    batch = None
    with pytest.raises(BaseException) as caught:  # noqa: PT012 - the phase says in which line
        batch = ParallelPyEnvironment(constructors, backend=backend, **limits)
        batch.reset()
        batch.step(np.zeros(3, int))
        if phase == "call":
            batch.call("work", env_ids=[1])
        batch.close()
    return caught.value, batch


def check_report(error: BaseException, case: Expected, phase: str) -> None:
    assert type(error) is case.error, repr(error)
    if case.args is not None:
        assert error.args == case.args
    assert case.message in str(error)
    (failure,) = error.env_failures
    assert failure.index == 1
    assert failure.phase == ("construct" if phase == "specs" else phase)
    assert failure.pid is not None
    assert failure.node
    assert "env 1" in str(error) + "".join(getattr(error, "__notes__", []))


def check_traceback(error: BaseException, case: Expected) -> None:
    """The remote traceback begins in the user's code, and goes down to the line that raised."""
    assert isinstance(error.__cause__, RemoteTraceback)
    text = str(error.__cause__)
    assert f"in {case.fault.__name__}" in text
    assert "faults.py" in text
    assert "testing.py" in text or "actor.py" not in text
    assert "ray" not in text.lower().replace("array", "")


def check_state_afterwards(batch: ParallelPyEnvironment | None, phase: str) -> None:
    """Refuses until reset, unless only a call went wrong; then every reply is its own."""
    if batch is None or phase == "close":
        return
    oracle = ProbeOracle([3, 3, 3])
    oracle.reset()
    if phase == "call":
        oracle.step([0, 0, 0])
        oracle.check(batch.current_time_step())
    else:
        with pytest.raises(ResetNeeded):
            batch.step(np.zeros(3, int))
    batch.close()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", RAISED, ids=case_id)
def test_what_an_environment_raises_is_raised_as_it_was(case, phase, backend):
    error, batch = run(phase, case.fault, backend)
    check_report(error, case, phase)
    check_traceback(error, case)
    check_state_afterwards(batch, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", ON_RAY_ONLY, ids=case_id)
def test_an_interrupt_that_an_actor_raises_is_no_interrupt_of_the_caller(case, phase, on_ray):
    error, batch = run(phase, case.fault, "ray")
    check_report(error, case, phase)
    check_traceback(error, case)
    check_state_afterwards(batch, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", ENDING, ids=case_id)
def test_end_of_a_process_is_told(case, phase, on_ray):
    error, batch = run(phase, case.fault, "ray")
    if case.fault in HANGS and phase in ("construct", "specs"):
        assert "2 of 3 actors started in 12.0 s; of the other 1, 1 run" in str(error)
        return
    check_report(error, case, phase)
    if batch is not None and phase == "call":
        with pytest.raises(ResetNeeded, match="env 1"):
            batch.step(np.zeros(3, int))
        batch.close()
    else:
        check_state_afterwards(batch, phase)


@pytest.mark.parametrize("fault", [f.fault for f in RAISED] + [faults.unpicklable_result])
def test_constructor_whose_pickling_fails_names_its_position(fault, session_ray):
    constructors = [ProbeEnv, faults.Constructor(fault, "pickling")]
    # What is no Exception is nothing that pickling does by itself, and ends the caller's program.
    expected = SystemExit if fault is faults.system_exit else TypeError
    with pytest.raises(expected) as caught:
        ParallelPyEnvironment(constructors)
    if expected is TypeError:
        assert "env_constructors[1]" in str(caught.value)
        assert caught.value.__cause__ is not None


def test_result_of_a_call_that_does_not_pickle_is_the_calls_failure(on_ray):
    constructors = [ProbeEnv, faults.Constructor(faults.unpicklable_result, "call", env_id=1)]
    with ParallelPyEnvironment(constructors[1:]) as batch:
        batch.reset()
        with pytest.raises(TypeError, match="pickle") as caught:
            batch.call("work")
        assert caught.value.env_failures[0].phase == "call"
        assert batch.step(np.zeros(1, int)).observation["step"] == 1


class TextEnv(ProbeEnv):
    """An observation of dtype object, which may hold anything."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text

    def observation_spec(self) -> Any:
        return specs.StringArray(())

    def _observation(self, action: Any) -> Any:
        return self.text if self._step == 0 else faults.unpicklable_result()


def test_time_step_that_does_not_pickle_is_the_steps_failure(on_ray):
    with ParallelPyEnvironment([functools.partial(TextEnv, "hello")] * 2) as batch:
        first = batch.reset().observation
        assert first.tolist() == ["hello", "hello"]
        assert type(first[0]) is str
        with pytest.raises(TypeError, match="pickle") as caught:
            batch.step([0, 0])
        assert [failure.phase for failure in caught.value.env_failures] == ["step", "step"]


@pytest.mark.parametrize("phase", ["reset", "step", "specs"])
def test_result_that_is_no_array_says_what_was_expected(phase, backend):
    error, batch = run(phase, faults.unpicklable_result, backend)
    assert isinstance(error, SpecMismatch | AttributeError | TypeError), repr(error)
    assert error.env_failures[0].index == 1
    check_state_afterwards(batch, phase)


def test_all_failures_of_one_step_are_reported_together(make_batch):
    constructors = [
        faults.Constructor(faults.key_error, "step", env_id=0),
        faults.Constructor(faults.key_error, "never", env_id=1),
        faults.Constructor(faults.file_not_found, "step", env_id=2),
    ]
    with make_batch(constructors) as batch:
        batch.reset()
        with pytest.raises(KeyError) as caught:
            batch.step(np.zeros(3, int))
        assert [failure.index for failure in caught.value.env_failures] == [0, 2]
        notes = "\n".join(caught.value.__notes__)
        assert "env 2 failed in step" in notes
        assert "FileNotFoundError" in notes
        # The one in between has finished its step, and waits with it.
        time_step = batch.reset(env_ids=[0, 2])
        assert time_step.observation["step"].tolist() == [0, 1, 0]


def test_several_failed_constructors_are_reported_together(make_batch):
    faulty = faults.Constructor(faults.key_error, "construct")
    with pytest.raises(KeyError) as caught:
        make_batch([faulty, ProbeEnv, faulty])
    assert [failure.index for failure in caught.value.env_failures] == [0, 2]


@pytest.mark.parametrize("fault", [faults.key_error, faults.sigkill, *HANGS])
def test_reset_rebuilds_what_failed_and_every_reply_is_its_own(fault, on_ray, tmp_path):
    constructors = [
        faults.Constructor(faults.key_error, "never", env_id=0),
        faults.Constructor(fault, "step", env_id=1, after=1, once=str(tmp_path / "failed")),
        faults.Constructor(faults.key_error, "never", env_id=2),
    ]
    with ParallelPyEnvironment(constructors, step_timeout=1.0) as batch:
        oracle = ProbeOracle([3, 3, 3])
        oracle.reset()
        batch.reset()
        oracle.step([1, 2, 3])
        oracle.check(batch.step(np.array([1, 2, 3])))
        with pytest.raises((KeyError, ActorDied, EnvTimeout)):
            batch.step(np.array([4, 5, 6]))
        with pytest.raises(ResetNeeded, match="env 1"):
            batch.reset(env_ids=[0])
        oracle.step([4, 5, 6])
        oracle.reset()
        oracle.episode[1] = 0
        oracle.check(batch.reset())
        for t in range(10):
            actions = np.arange(3) + 10 * t
            oracle.step(actions)
            oracle.check(batch.step(actions))


@pytest.mark.parametrize("fault", [faults.key_error, faults.sigkill, faults.hang])
def test_failure_in_an_actor_of_several_environments_is_told_for_each(fault, on_ray, tmp_path):
    never = [faults.Constructor(faults.key_error, "never", env_id=i) for i in range(4)]
    once = str(tmp_path / "failed")
    faulty = faults.Constructor(fault, "step", env_id=2, once=once)
    constructors = [*never[:2], faulty, never[3]]
    with ParallelPyEnvironment(constructors, envs_per_actor=2, step_timeout=1.0) as batch:
        batch.reset()
        with pytest.raises((KeyError, ActorDied, EnvTimeout)) as caught:
            batch.step(np.zeros(4, int))
        failed = [failure.index for failure in caught.value.env_failures]
        assert failed == ([2] if fault is faults.key_error else [2, 3])
        time_step = batch.reset(env_ids=failed)
        assert time_step.observation["env"].tolist() == [0, 1, 2, 3]
        assert time_step.observation["step"].tolist()[:2] == [1, 1]


def test_timeout_names_the_late_environments(on_ray):
    late = faults.Constructor(faults.hang, "step", env_id=1)
    constructors = [ProbeEnv, late, ProbeEnv, late]
    with ParallelPyEnvironment(constructors, step_timeout=0.5) as batch:
        batch.reset()
        with pytest.raises(EnvTimeout, match=r"envs 1, 3 of 4 did not finish step\(\) in 0.5 s"):
            batch.step(np.zeros(4, int))


def test_local_deadline_is_judged_afterwards():
    from envfleet.testing import DelayEnv

    with ParallelPyEnvironment(
        [ProbeEnv, lambda: DelayEnv(0.05)], backend="local", step_timeout=0.01
    ) as batch:
        batch.reset()
        with pytest.raises(EnvTimeout, match="env 1 of 2"):
            batch.step(np.zeros(2, int))


def test_death_is_told_with_process_and_step(on_ray):
    with ParallelPyEnvironment([faults.Constructor(faults.sigkill, "step", after=2)]) as batch:
        batch.reset()
        batch.step([0])
        batch.step([0])
        with pytest.raises(
            ActorDied, match=r"env 0 of 1: its process died in step\(\) 2 steps"
        ) as caught:
            batch.step([0])
        (failure,) = caught.value.env_failures
        assert failure.episode_step == 2
        assert f"pid {failure.pid}" in str(caught.value)


@pytest.mark.parametrize("blocking", [False, True])
def test_lost_environment_knows_its_own_steps_however_the_batch_steps(blocking, backend):
    late = functools.partial(LateAtThirdStep, 0.6)
    with ParallelPyEnvironment(
        [ProbeEnv, ProbeEnv, late], backend=backend, blocking=blocking, step_timeout=0.5
    ) as batch:
        batch.reset()
        for _ in range(2):
            batch.step([0, 0, 0])
        with pytest.raises(EnvTimeout) as caught:
            batch.step([0, 0, 0])
        (failure,) = caught.value.env_failures
        assert (failure.index, failure.episode_step) == (2, 2)


class LateAtThirdStep(ProbeEnv):
    def __init__(self, delay: float) -> None:
        super().__init__(episode_length=9)
        self.delay = delay

    def step(self, action: Any) -> Any:
        if self._step == 2:
            time.sleep(self.delay)
        return super().step(action)


def test_what_failed_before_is_closed_without_news(make_batch):
    constructors = [faults.Constructor(faults.key_error, "step")]
    batch = make_batch(constructors)
    batch.reset()
    with pytest.raises(KeyError):
        batch.step([0])
    batch.close()


def test_error_in_a_with_block_is_not_hidden_by_one_in_close(make_batch):
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: SIM117
        with make_batch([faults.Constructor(faults.key_error, "close")]):
            raise ValueError("mine")
    assert "closing failed: KeyError" in caught.value.__notes__[0]


def test_rebuild_that_fails_is_tried_again_by_the_next_reset(make_batch, tmp_path):
    """The constructor fails at its second and third call."""

    def constructor() -> Any:
        for attempt in range(4):
            if not (tmp_path / str(attempt)).exists():
                (tmp_path / str(attempt)).touch()
                break
        if attempt in (1, 2):
            raise FileNotFoundError(2, "simulator")
        return faults.Constructor(faults.key_error, "step" if attempt == 0 else "never")()

    with make_batch([constructor]) as batch:
        batch.reset()
        with pytest.raises(KeyError):
            batch.step([0])
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                batch.reset()
            with pytest.raises(ResetNeeded, match="FileNotFoundError"):
                batch.step([0])
        assert batch.reset().observation["episode"] == 0
        assert batch.step([5]).observation["action"] == 5


def test_failure_is_logged_in_one_line(make_batch, caplog):
    with make_batch([ProbeEnv, faults.Constructor(faults.key_error, "step")]) as batch:
        batch.reset()
        with pytest.raises(KeyError):
            batch.step([0, 0])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "envfleet"]
    assert line.startswith("env 1 failed in step (pid ")
    assert line.endswith("KeyError: 'arm'")


def test_rebuilt_environment_has_a_seed_of_its_own_that_is_the_same_at_every_run(make_batch):
    seeds = []
    for _ in range(2):
        faulty = faults.Constructor(faults.key_error, "step")
        with make_batch([ProbeEnv, faulty], seed=3) as batch:
            first = batch.reset().observation["seed"].tolist()
            with pytest.raises(KeyError):
                batch.step([0, 0])
            seeds.append((first, batch.reset().observation["seed"].tolist()))
    assert seeds[0] == seeds[1]
    (first, then), _ = seeds
    assert first[0] == then[0]
    assert len({*first, *then}) == 3


def test_call_without_a_deadline_says_who_is_late(on_ray, caplog, monkeypatch):
    from envfleet import actors
    from envfleet.testing import DelayEnv

    monkeypatch.setattr(actors, "_LONG_CALL", 0.2)
    with ParallelPyEnvironment([ProbeEnv, functools.partial(DelayEnv, 1.0)]) as batch:
        batch.reset()
        batch.step([0, 0])
    lines = [record.getMessage() for record in caplog.records if "step()" in record.getMessage()]
    assert lines[0] == "env 1 of 2 still in step() after 0.2 s (a step_timeout would end that)"
    assert 1 <= len(lines) <= 3  # each time it waits twice as long
