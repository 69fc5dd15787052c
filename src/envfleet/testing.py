"""Contracts to test environments and batches with, and small real environments.

    @pytest.mark.parametrize("check", envfleet.testing.ENVIRONMENT_CHECKS, ids=lambda c: c.__name__)
    def test_my_environment(check):
        check(make_my_env)

A check takes a constructor (of an environment), or a function from constructors to a batch, raises
`AssertionError` in words where a rule is broken, and is named after the rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import dm_env
import numpy as np
from dm_env import specs

from envfleet.environments import Environment, as_environment
from envfleet.errors import (
    ClosedError,
    EnvFleetError,
    InvalidAction,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.layout import Layout

Constructor = Callable[[], Any]
MakeBatch = Callable[[Sequence[Constructor]], Any]

_FIRST, _MID, _LAST = 0, 1, 2
_STEPS = 200


# -- environments ----------------------------------------------------------------------------------


class ProbeEnv(dm_env.Environment):  # type: ignore[misc]
    """Tells in every observation where it comes from, so that no mix-up goes unseen.

    Observation: a dict of int64 scalars: ``env`` (its id), ``episode`` and ``step`` (from 0),
    ``action`` (the last one, -1 in a first time step), ``seed`` (-1 without), and ``image``, a
    float32 array of shape (2, 3) filled with the id. Episodes have ``episode_length``
    steps and end by turns in a termination and a truncation. The reward is the step's number.
    """

    def __init__(self, env_id: int = 0, episode_length: int = 3) -> None:
        self.env_id = env_id
        self.episode_length = episode_length
        self.num_closed = 0
        self._episode = -1
        self._step = 0
        self._seed = -1

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> Any:
        self._episode += 1
        self._step = 0
        return dm_env.restart(self._observation(-1))

    def step(self, action: Any) -> Any:
        self._step += 1
        observation, reward = self._observation(action), float(self._step)
        if self._step < self.episode_length:
            return dm_env.transition(reward, observation)
        if self._episode % 2:
            return dm_env.truncation(reward, observation)
        return dm_env.termination(reward, observation)

    def _observation(self, action: Any) -> dict[str, Any]:
        return {
            "env": np.int64(self.env_id),
            "episode": np.int64(self._episode),
            "step": np.int64(self._step),
            "action": np.int64(action),
            "seed": np.int64(self._seed),
            "image": np.full((2, 3), self.env_id, np.float32),
        }

    def observation_spec(self) -> Any:
        names = ("env", "episode", "step", "action", "seed")
        scalars = {name: specs.Array((), np.int64, name) for name in names}
        return {**scalars, "image": specs.Array((2, 3), np.float32, "image")}

    def action_spec(self) -> Any:
        return specs.BoundedArray((), np.int64, 0, 10**9, "action")

    def get_state(self) -> tuple[int, int]:
        return self._episode, self._step

    def set_state(self, state: tuple[int, int]) -> None:
        self._episode, self._step = state

    def get_info(self) -> dict[str, int]:
        return {"episode": self._episode}

    def render(self) -> Any:
        return np.full((4, 5, 3), self.env_id, np.uint8)

    def add(self, left: int, right: int = 0) -> int:
        """Something to call."""
        return self.env_id + left + right


class DelayEnv(ProbeEnv):
    """A `ProbeEnv` whose every step takes `delay` seconds of sleep."""

    def __init__(self, delay: float, env_id: int = 0, episode_length: int = 3) -> None:
        super().__init__(env_id, episode_length)
        self.delay = delay

    def step(self, action: Any) -> Any:
        time.sleep(self.delay)
        return super().step(action)


class FaultyEnv(ProbeEnv):
    """A `ProbeEnv` that runs `fault` in one phase of its life.

    Args:
      fault: what goes wrong: raises, exits, hangs. What it returns is the phase's result.
      phase: ``construct``, ``specs``, ``reset``, ``step``, ``call`` (the method `work`) or
        ``close``.
      after: how many resets or steps of that phase go well before.
      once: a path; where it is given, the fault happens only if nothing stands there yet, so that a
        rebuilt environment works.
    """

    def __init__(
        self,
        fault: Callable[[], Any],
        phase: str = "step",
        *,
        after: int = 0,
        env_id: int = 0,
        once: str | None = None,
        episode_length: int = 3,
    ) -> None:
        super().__init__(env_id, episode_length)
        self._fault, self._phase, self._after, self._once = fault, phase, after, once
        self._fail("construct")

    def _fail(self, phase: str, result: Any = None) -> Any:
        if phase != self._phase:
            return result
        if self._after > 0:
            self._after -= 1
            return result
        if self._once is not None:
            try:
                with open(self._once, "x"):
                    pass
            except FileExistsError:
                return result
        return self._fault()

    def observation_spec(self) -> Any:
        return self._fail("specs", super().observation_spec())

    def reset(self) -> Any:
        return self._fail("reset", super().reset())

    def step(self, action: Any) -> Any:
        return self._fail("step", super().step(action))

    def work(self) -> Any:
        """Something to call that may fail."""
        return self._fail("call", "done")

    def close(self) -> None:
        self._fail("close")


# -- the contract of an environment ----------------------------------------------------------------


def constructor_pickles(constructor: Constructor) -> None:
    """It reaches an actor: what it closes over pickles."""
    try:
        cloudpickle.loads(cloudpickle.dumps(constructor))
    except Exception as problem:
        raise AssertionError(f"the constructor does not pickle: {problem}") from problem


def environment_is_recognised(constructor: Constructor) -> None:
    """It returns an environment of a kind that envfleet knows."""
    try:
        _built(constructor)
    except TypeError as problem:
        raise AssertionError(str(problem)) from problem


def specs_are_the_same_each_time(constructor: Constructor) -> None:
    """Two environments of one constructor have equal specs."""
    from envfleet.specs import differences

    for layouts in zip(_layouts(_built(constructor)), _layouts(_built(constructor)), strict=True):
        problems = differences(*(layout.specs for layout in layouts))
        assert not problems, f"specs differ from one environment to the next: {problems}"


def reset_gives_a_first_time_step(constructor: Constructor) -> None:
    """A reset begins an episode, also in the middle of one."""
    environment = _built(constructor)
    actions = _actions(environment)
    for _ in range(2):
        step_type = environment.reset().step_type
        assert step_type == _FIRST, f"reset() gave step_type {step_type}, expected FIRST"
        environment.step(actions())


def step_gives_no_first_time_step(constructor: Constructor) -> None:
    """A step within an episode gives MID or LAST; only a reset gives FIRST."""
    for time_step in _episodes(_built(constructor)):
        assert time_step.step_type in (_MID, _LAST), "step() gave a FIRST within an episode"


def values_fit_the_specs(constructor: Constructor) -> None:
    """Structure, shape and dtype of every time step are those of the specs, or cast safely."""
    environment = _built(constructor)
    layout, _ = _layouts(environment)
    views = layout.views(bytearray(layout.nbytes(1)), 1)
    try:
        layout.write(views, 0, environment.reset())
        for time_step in _episodes(environment):
            layout.write(views, 0, time_step)
    except SpecMismatch as mismatch:
        raise AssertionError(str(mismatch)) from mismatch


def discount_is_between_0_and_1(constructor: Constructor) -> None:
    """A discount of 0 is a termination and above 0 is none; nothing else has a meaning."""
    for time_step in _episodes(_built(constructor)):
        discount = np.asarray(time_step.discount)
        assert ((discount >= 0) & (discount <= 1)).all(), f"discount {discount} is not in [0, 1]"


def same_seed_gives_the_same_trajectory(constructor: Constructor) -> None:
    """Where it can be seeded, everything random in it follows from the seed."""
    runs: list[list[bytes]] = []
    for _ in range(2):
        environment = _built(constructor)
        try:
            environment.seed(7)
        except (TypeError, NotImplementedError):
            return
        layout, _ = _layouts(environment)
        block = bytearray(layout.nbytes(1))
        views = layout.views(block, 1)
        layout.write(views, 0, environment.reset())
        runs.append([bytes(block)])
        for time_step in _episodes(environment):
            layout.write(views, 0, time_step)
            runs[-1].append(bytes(block))
    assert runs[0] == runs[1], "the same seed and actions gave another trajectory"


ENVIRONMENT_CHECKS: tuple[Callable[[Constructor], None], ...] = (
    constructor_pickles,
    environment_is_recognised,
    specs_are_the_same_each_time,
    reset_gives_a_first_time_step,
    step_gives_no_first_time_step,
    values_fit_the_specs,
    discount_is_between_0_and_1,
    same_seed_gives_the_same_trajectory,
)
"""The contract of an environment, by rule."""


def _built(constructor: Constructor) -> Environment:
    return as_environment(constructor())


def _layouts(environment: Environment) -> tuple[Layout, Layout]:
    return Layout(environment.time_step_spec(), ""), Layout(environment.action_spec(), "action")


def _actions(environment: Environment) -> Callable[[], Any]:
    """A random policy by the action spec, the same at every run."""
    _, layout = _layouts(environment)
    random = np.random.default_rng(0)
    return lambda: layout.unflatten([column[0] for column in layout.sample(random, 1)])


def _episodes(environment: Environment) -> Any:
    """The time steps of some steps under a random policy; resets go unseen."""
    actions = _actions(environment)
    environment.reset()
    for _ in range(_STEPS):
        time_step = environment.step(actions())
        yield time_step
        if time_step.step_type == _LAST:
            environment.reset()


# -- the contract of a batch -----------------------------------------------------------------------


class ProbeOracle:
    """Knows what a batch of `ProbeEnv`s must give next, and compares.

    Args:
      episode_lengths: of each environment; environment i has the id i.
    """

    def __init__(self, episode_lengths: Sequence[int]) -> None:
        self.lengths = np.asarray(episode_lengths)
        self.ids = np.arange(len(self.lengths))
        self.episode = np.full(len(self.lengths), -1)
        self.at = self.lengths.copy()  # before the first reset each step is a reset
        self.action = np.full(len(self.lengths), -1)

    def reset(self, env_ids: Sequence[int] | None = None) -> None:
        """The given environments were reset."""
        which = self.ids if env_ids is None else np.asarray(env_ids, int)
        self.episode[which] += 1
        self.at[which] = 0
        self.action[which] = -1

    def step(self, actions: Any) -> None:
        """All environments were stepped with these actions."""
        over = self.at >= self.lengths
        self.at += 1
        self.action = np.array(actions)
        self.reset(list(self.ids[over]))

    def check(self, time_step: Any) -> None:
        """Raises `AssertionError` unless the batch is exactly where it must be."""
        seen = time_step.observation
        for name, expected in (
            ("env", self.ids),
            ("episode", self.episode),
            ("step", self.at),
            ("action", self.action),
        ):
            found = seen[name]
            assert np.array_equal(found, expected), f"{name}: {found}, expected {expected}"
        images = np.broadcast_to(self.ids[:, None, None], (len(self.ids), 2, 3))
        assert np.array_equal(seen["image"], images), "an image of another environment"
        last = self.at == self.lengths
        types = np.where(self.at == 0, _FIRST, np.where(last, _LAST, _MID))
        assert np.array_equal(time_step.step_type, types), f"step types {time_step.step_type}"
        assert np.array_equal(time_step.reward, self.at), f"rewards {time_step.reward}"
        terminated = last & (self.episode % 2 == 0)
        assert np.array_equal(time_step.discount, np.where(terminated, 0.0, 1.0)), "discounts"


_LENGTHS = (2, 3, 5)


def _probes() -> list[Constructor]:
    return [_Probe(i, length) for i, length in enumerate(_LENGTHS)]


class _Probe:
    """A constructor of a `ProbeEnv`."""

    def __init__(self, env_id: int, episode_length: int) -> None:
        self._args = env_id, episode_length

    def __call__(self) -> ProbeEnv:
        return ProbeEnv(*self._args)


def _raise_key_error() -> None:
    raise KeyError("arm")


class _Faulty:
    """A constructor of a `FaultyEnv` that raises in its second step."""

    def __init__(self, env_id: int, episode_length: int) -> None:
        self._env_id, self._episode_length = env_id, episode_length

    def __call__(self) -> FaultyEnv:
        return FaultyEnv(
            _raise_key_error, after=1, env_id=self._env_id, episode_length=self._episode_length
        )


def every_slot_shows_its_own_environment(make_batch: MakeBatch) -> None:
    """Environment, episode, step and last action are the slot's own, over many episodes."""
    with make_batch(_probes()) as batch:
        oracle = ProbeOracle(_LENGTHS)
        oracle.reset()
        oracle.check(batch.reset())
        for t in range(30):
            actions = np.arange(3) + 10 * t
            oracle.step(actions)
            oracle.check(batch.step(actions))
            oracle.check(batch.current_time_step())


def first_step_resets(make_batch: MakeBatch) -> None:
    """The first step resets all environments and ignores the actions."""
    with make_batch(_probes()) as batch:
        oracle = ProbeOracle(_LENGTHS)
        oracle.reset()
        oracle.check(batch.step(np.array([5, 6, 7])))


def reset_of_some_leaves_the_others(make_batch: MakeBatch) -> None:
    """`reset(env_ids=)` resets those alone; the others keep their episode and time step."""
    with make_batch(_probes()) as batch:
        oracle = ProbeOracle(_LENGTHS)
        oracle.reset()
        batch.reset()
        oracle.step([1, 2, 3])
        batch.step(np.array([1, 2, 3]))
        oracle.reset([2])
        oracle.check(batch.reset(env_ids=[2]))
        oracle.step([4, 5, 6])
        oracle.check(batch.step(np.array([4, 5, 6])))


def results_are_the_callers_own(make_batch: MakeBatch) -> None:
    """Leaves are fresh, writable and contiguous; writing to them changes nothing later."""
    for constructors in (_probes(), _probes()[:1]):
        with make_batch(constructors) as batch:
            first = batch.reset()
            leaves = [first.reward, first.discount, first.step_type, *first.observation.values()]
            for leaf in leaves:
                assert isinstance(leaf, np.ndarray), f"a {type(leaf).__name__}, expected an array"
                assert leaf.flags.writeable, "a read-only array"
                assert leaf.flags.c_contiguous, "an array that is not contiguous"
                assert leaf.flags.owndata, "an array in memory of another's"
                leaf[...] = 99
            oracle = ProbeOracle(_LENGTHS[: len(constructors)])
            oracle.reset()
            oracle.check(batch.current_time_step())


def wrong_actions_move_nothing(make_batch: MakeBatch) -> None:
    """Actions of another length, structure or dtype raise before any environment has moved."""
    with make_batch(_probes()) as batch:
        oracle = ProbeOracle(_LENGTHS)
        oracle.reset()
        batch.reset()
        for wrong in (np.zeros(2, int), np.zeros(4, int), np.zeros((3, 1), int), 1, [0.5] * 3):
            try:
                batch.step(wrong)
            except InvalidAction:
                pass
            else:
                raise AssertionError(f"step({wrong!r}) was accepted")
        oracle.check(batch.current_time_step())


def one_seed_gives_distinct_streams(make_batch: MakeBatch) -> None:
    """Every environment has a seed of its own, the same at every run."""
    runs = []
    for _ in range(2):
        with make_batch(_probes()) as batch:
            batch.seed(3)
            runs.append(batch.reset().observation["seed"])
    assert len(set(runs[0])) == len(runs[0]), f"environments share a seed: {runs[0]}"
    assert np.array_equal(*runs), f"the same seed gave other streams: {runs}"


def a_failure_is_the_environments_own(make_batch: MakeBatch) -> None:
    """Its exception comes as it was, the others finish the step, and `reset` goes on."""
    probes = _probes()
    with make_batch([probes[0], _Faulty(1, _LENGTHS[1]), probes[2]]) as batch:
        oracle = ProbeOracle(_LENGTHS)
        oracle.reset()
        batch.reset()
        oracle.step([1, 2, 3])
        oracle.check(batch.step(np.array([1, 2, 3])))
        try:
            batch.step(np.array([4, 5, 6]))
        except KeyError as error:
            raised = error
        else:
            raise AssertionError("the environment's KeyError did not come out")
        assert raised.args == ("arm",), f"args {raised.args}"
        indices = [failure.index for failure in getattr(raised, "env_failures", ())]
        assert indices == [1], f"env_failures of {indices}"
        try:
            batch.step(np.array([7, 8, 9]))
        except ResetNeeded:
            pass
        else:
            raise AssertionError("step() after a failure was accepted")
        oracle.step([4, 5, 6])
        oracle.reset([1])
        oracle.episode[1] = 0  # rebuilt
        oracle.check(batch.reset(env_ids=[1]))


def nothing_works_after_close(make_batch: MakeBatch) -> None:
    """`close` twice is fine; every other call raises `ClosedError`."""
    batch = make_batch(_probes())
    batch.close()
    batch.close()
    calls: dict[str, Callable[[], Any]] = {
        "reset": batch.reset,
        "step": lambda: batch.step(np.zeros(3, int)),
        "current_time_step": batch.current_time_step,
        "call": lambda: batch.call("add", 1),
        "get_attr": lambda: batch.get_attr("env_id"),
        "seed": lambda: batch.seed(1),
        "observation_spec": batch.observation_spec,
    }
    for name, call in calls.items():
        try:
            call()
        except ClosedError:
            continue
        except EnvFleetError as error:
            raise AssertionError(f"{name}() after close() raised {error!r}") from error
        raise AssertionError(f"{name}() after close() was accepted")


BATCH_CHECKS: tuple[Callable[[MakeBatch], None], ...] = (
    every_slot_shows_its_own_environment,
    first_step_resets,
    reset_of_some_leaves_the_others,
    results_are_the_callers_own,
    wrong_actions_move_nothing,
    one_seed_gives_distinct_streams,
    a_failure_is_the_environments_own,
    nothing_works_after_close,
)
"""The contract of a batch, by rule. `make_batch` starts a batch of the given constructors."""
