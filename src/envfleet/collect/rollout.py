"""Rollout: a policy acting in a batch of environments, episode after episode, written down.

The environments are numbered through the run; the batch has those from `first_env` on. Episode k
belongs to environment k mod `num_envs` and has seeds of its own (`seeding.of_episode`), so that an
episode is the same whatever the number of environments, and whoever steps them.

Each environment gives one row a tick: what it observed, what it was told to do, and what came of
it. The row of a last time step has the final observation and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from envfleet import seeding
from envfleet.collect.policies import BatchedPolicy
from envfleet.layout import Layout
from envfleet.parallel import ParallelPyEnvironment
from envfleet.time_steps import FIRST, LAST, MID

Array = np.ndarray[Any, Any]

_NO_LIMIT = np.iinfo(np.int64).max

_log = logging.getLogger("envfleet")


class Chunk(NamedTuple):
    """Rows of several environments, time-major: T ticks of B environments, shape ``(T, B, ...)``.

    Attributes:
      step_type: int32; FIRST, MID, or LAST of a row that has the final observation of an episode
        and no action: its action, reward and discount are zeros.
      observation: a structure like the observation spec.
      action: a structure like the action spec: what was done upon that observation.
      reward, discount: what came of it.
      terminated, truncated: bool; whether that action ended the episode, and how. One that an
        environment's failure cut short is truncated.
      failed: bool; in a LAST row, whether a failure of the environment cut the episode short.
      episode: int64; number of the episode, from 0 through the run.
      t: int32; steps into the episode.
      mask: bool; False where an environment had nothing to do any more: such a row means nothing.
      env_ids: int64 of shape ``(B,)``.
      next_time_step: the time step after the last row, without the axis T, to bootstrap from. Of
        an environment whose last row is LAST it means nothing.
      policy_version: of the weights that chose the actions.
      num_steps: rows with an action.
    """

    step_type: Array
    observation: Any
    action: Any
    reward: Any
    discount: Any
    terminated: Array
    truncated: Array
    failed: Array
    episode: Array
    t: Array
    mask: Array
    env_ids: Array
    next_time_step: Any
    policy_version: int
    num_steps: int


class Rollout:
    """A policy in a batch of environments.

    Args:
      batch: the environments; the first `run` resets them.
      policy: acts in all of them at once.
      seed: of the run.
      first_env: number of the batch's first environment.
      num_envs: how many environments the run has in all.
      max_episode_steps: after so many an episode is truncated; None for no limit.
      min_ready: the policy acts as soon as so many environments are ready; None for all of them.
    """

    def __init__(
        self,
        batch: ParallelPyEnvironment,
        policy: BatchedPolicy,
        *,
        seed: int,
        first_env: int,
        num_envs: int,
        max_episode_steps: int | None = None,
        min_ready: int | None = None,
    ) -> None:
        size = batch.batch_size
        self._batch, self._policy = batch, policy
        self._seed, self._num_envs = seed, num_envs
        self._max_episode_steps, self._min_ready = max_episode_steps, min_ready
        self._env_ids = np.arange(first_env, first_env + size)
        spec = batch.time_step_spec()
        self._observations = Layout(spec.observation, "observation")
        self._rewards = Layout(spec.reward, "reward")
        self._discounts = Layout(spec.discount, "discount")
        self._actions = Layout(batch.action_spec(), "actions")
        self._now: Any = None
        self._horizon: int | None = None
        self._done: Set[int] = frozenset()
        self._attempts: dict[int, int] = {}
        self._episode = np.full(size, -1)
        self._next = self._env_ids.copy()  # of each environment, the number of its next episode
        self._t = np.zeros(size, np.int32)
        self._keys = np.zeros(size, np.uint64)
        self._seeds = np.zeros(size, np.int64)
        self._left = np.full(size, _NO_LIMIT)  # steps that each environment may still take
        self._failures = np.zeros(size, np.int64)  # of each environment, as far as they are known
        self._failed = np.zeros(size, bool)  # whose episode a failure has cut short
        self._needs_reset = np.zeros(size, bool)  # a step would not reset it
        self._is_seedable = True
        self._flying = np.zeros(size, bool)  # under way, which only `min_ready` leaves over
        self._acted = np.zeros(size, bool)  # whose action has not shown yet what comes of it
        self._tick = np.zeros(size, np.int64)  # of that action

    # -- what there is to do -----------------------------------------------------------------------

    def plan(
        self,
        horizon: int | None,
        steps: Array | None,
        begin: Array | None = None,
        done: Set[int] = frozenset(),
        attempts: Mapping[int, int] | None = None,
    ) -> None:
        """Says what is wanted from now on.

        Args:
          horizon: no episode from this number on is begun; None for no such number.
          steps: how many more steps each environment may take, int64 of shape ``(B,)``; None for
            no limit.
          begin: of each environment the first episode, where others before it are done: for one
            that has not run yet. The next ones count on from there.
          done: episodes that are done, too, and not begun.
          attempts: of episodes that are tried with another seed than their first, which.
        """
        self._done |= done
        self._attempts.update(attempts or {})
        self._horizon = horizon
        if begin is not None and self._now is None:
            self._next = begin.copy()
        self._left = np.full(len(self._env_ids), _NO_LIMIT) if steps is None else steps.copy()
        if self._now is not None:
            waiting = np.flatnonzero(self._episode < 0)
            self._begin(waiting)
            begun = waiting[self._episode[waiting] >= 0]
            if len(begun):
                self._needs_reset[begun] = False
                self._now = self._batch.reset(begun.tolist())

    def _present(self) -> Array:
        """Who has a row in the next tick: who may act, and who shows the end of an episode."""
        is_last = self._now.step_type == LAST
        can_act = (self._left > 0) | is_last
        return np.asarray((self._episode >= 0) & can_act & ~self._flying)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do by the plan."""
        return self._now is not None and not self._present().any()

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def running(self) -> dict[int, int]:
        """The episodes that go on, and how many steps each has."""
        if self._now is None:
            return {}
        begun = self._episode >= 0
        return dict(zip(self._episode[begun].tolist(), self._t[begun].tolist(), strict=True))

    @property
    def observation(self) -> Any:
        """What the environments show now: leaves of shape ``(B, *shape)``."""
        return self._now.observation

    def run(self, ticks: int, until: float = float("inf")) -> Chunk:
        """Goes on for so many ticks; less where nothing is left to do, or time is up.

        Args:
          until: by `time.monotonic`; the tick in which it passes is the last one.

        Raises:
          Exception: what an environment or the policy raised.
        """
        if self._now is None:
            self._begin(np.arange(len(self._env_ids)))
            self._now = self._batch.reset()
            self._reset_again(self._have_failed(np.ones(len(self._env_ids), bool)))
        rows = _Rows(self, ticks)
        tick = 0
        while tick < ticks and self._go_on(rows, tick):
            tick += 1
            if time.monotonic() >= until:
                break
        while _any(self._flying):
            self._take(rows, self._landed(self._batch.batch_size))
        return rows.chunk(tick)

    def _go_on(self, rows: _Rows, tick: int) -> bool:
        """Every environment that has to gives a row, and goes on; False where none is left."""
        now, present = self._now, self._present()
        if not (_any(present) or _any(self._flying)):
            return False
        is_last = now.step_type == LAST
        acting = present & ~is_last
        seeds = seeding.of_steps(self._keys, self._t) if self._policy.takes_seeds else None
        actions = self._policy.actions(now, seeds, None if self._min_ready is None else acting)
        columns = self._actions.columns(actions, len(present))
        rows.put_before(tick, now, columns, present, acting)
        moving = acting
        if _any(is_last):
            over = np.flatnonzero(is_last & present)
            self._begin(over)
            moving = acting | (is_last & present & (self._episode >= 0))
        self._acted |= acting
        self._tick[acting] = tick
        self._take(rows, self._moved(moving, columns))
        return True

    def _take(self, rows: _Rows, landed: tuple[Any, Array]) -> None:
        """Writes what came of actions, of those that have landed."""
        after, who = landed
        acting = self._acted & who
        self._acted &= ~acting
        if self._max_episode_steps is not None:
            is_long = acting & (self._t + 1 >= self._max_episode_steps)
            is_long &= after.step_type != LAST
            after.step_type[is_long] = LAST
            self._needs_reset |= is_long
        self._now = after
        if _any(after.step_type != MID):
            self._note_failures(after, acting, who)
        rows.put_after(self._tick, after, acting)
        self._t[acting] += 1
        self._left[acting] -= 1

    def _moved(self, moving: Array, columns: list[Array]) -> tuple[Any, Array]:
        """Steps, or resets, those that move; as `_landed`."""
        resetting = moving & self._needs_reset
        stepping = moving & ~self._needs_reset
        if self._min_ready is None and np.count_nonzero(stepping) == len(stepping):
            return self._batch.step(self._actions.unflatten(columns)), moving
        if stepping.any():
            ids = np.flatnonzero(stepping)
            self._batch.send(self._actions.unflatten([column[ids] for column in columns]), ids)
        if resetting.any():
            self._batch.async_reset(np.flatnonzero(resetting).tolist())
            self._needs_reset[resetting] = False
        self._flying |= moving
        return self._landed(self._min_ready or len(moving))

    def _landed(self, at_least: int) -> tuple[Any, Array]:
        """The time step of the whole batch when so many have landed; and who has."""
        who = np.zeros(len(self._flying), bool)
        number = min(at_least, int(np.count_nonzero(self._flying)))
        if number:
            who[self._batch.recv(number)[1]] = True
        self._flying &= ~who
        return self._batch.current_time_step(), who

    # -- episodes ----------------------------------------------------------------------------------

    def _begin(self, rows: Array) -> None:
        """Gives environments their next episode, and its seed; -1 where there is none for them."""
        begun: list[int] = []
        for row in rows.tolist():
            number = int(self._next[row])
            while number in self._done:
                number += self._num_envs
            self._next[row] = number
            if self._horizon is not None and number >= self._horizon:
                self._episode[row] = -1
                continue
            self._episode[row] = number
            self._next[row] += self._num_envs
            begun.append(row)
        if not begun:
            return
        numbers = self._episode[begun]
        attempts = np.zeros_like(numbers)
        if self._attempts:
            attempts[:] = [self._attempts.get(number, 0) for number in numbers.tolist()]
        env_seeds, self._keys[begun] = seeding.of_episodes(self._seed, numbers, attempts)
        self._seeds[begun] = env_seeds
        self._t[begun], self._failed[begun] = 0, False
        self._seed_episodes(
            {row: (seed,) for row, seed in zip(begun, env_seeds.tolist(), strict=True)}
        )

    def _seed_episodes(self, told: dict[int, tuple[int]]) -> None:
        if not told or not self._is_seedable:
            return
        try:
            self._batch.operate_each("seed", told)
        except TypeError as problem:  # dm_env has no rule for seeding
            self._is_seedable = False
            _log.warning("episodes are not reproducible: %s", problem)

    def _note_failures(self, after: Any, acting: Array, who: Array) -> None:
        """Whose episode was cut by a failure, and whose first time step is not the seed's."""
        changed = self._have_failed(who)
        if not changed.any():
            return
        cut = changed & acting & (after.step_type == LAST)
        self._failed |= cut
        self._needs_reset |= cut  # a step would show what the restart began with, by another seed
        self._reset_again(changed & (after.step_type == FIRST))

    def _have_failed(self, who: Array) -> Array:
        """Which of those that have landed failed since this was asked last."""
        failures = np.asarray(self._batch.num_failures)
        changed = who & (failures != self._failures)
        self._failures[who] = failures[who]
        return np.asarray(changed)

    def _reset_again(self, again: Array) -> None:
        """Resets those that failed in their reset: what was rebuilt has another seed."""
        while again.any():
            rows = np.flatnonzero(again).tolist()
            self._seed_episodes({row: (int(self._seeds[row]),) for row in rows})
            if self._min_ready is not None:
                self._batch.async_reset(rows)
                self._flying |= again
                return
            self._now = self._batch.reset(rows)
            again = self._have_failed(again)


class _Rows:
    """The rows of a chunk while they are written."""

    def __init__(self, rollout: Rollout, ticks: int) -> None:
        self._rollout = rollout
        shape = ticks, len(rollout._env_ids)
        self._observation = _columns(rollout._observations, shape)
        self._action = _columns(rollout._actions, shape)
        self._reward = _columns(rollout._rewards, shape)
        self._discount = _columns(rollout._discounts, shape)
        self._step_type = np.zeros(shape, np.int32)
        self._episode = np.full(shape, -1)
        self._t = np.zeros(shape, np.int32)
        self._terminated = np.zeros(shape, bool)
        self._truncated = np.zeros(shape, bool)
        self._failed = np.zeros(shape, bool)
        self._mask = np.zeros(shape, bool)
        self._num_steps = 0

    def put_before(
        self, tick: int, now: Any, actions: list[Array], present: Array, acting: Array
    ) -> None:
        """What there was to see, and what is done."""
        rollout = self._rollout
        self._step_type[tick] = now.step_type
        _put(self._observation, tick, rollout._observations.flatten(now.observation))
        _put(self._action, tick, actions)
        self._episode[tick], self._t[tick], self._mask[tick] = rollout._episode, rollout._t, present
        number = int(np.count_nonzero(acting))
        self._num_steps += number
        if number < len(acting):
            _clear(self._action, tick, ~acting)
            self._failed[tick] = rollout._failed & present & ~acting

    def put_after(self, ticks: Array, after: Any, acting: Array) -> None:
        """What came of actions, in the ticks in which they were chosen."""
        rollout = self._rollout
        rewards = rollout._rewards.flatten(after.reward)
        discounts = rollout._discounts.flatten(after.discount)
        if np.count_nonzero(acting & (ticks == ticks[0])) == len(acting):
            _put(self._reward, ticks[0], rewards)
            _put(self._discount, ticks[0], discounts)
        else:
            at = ticks[acting], np.flatnonzero(acting)
            for columns, leaves in (self._reward, rewards), (self._discount, discounts):
                for column, leaf in zip(columns, leaves, strict=True):
                    column[at] = leaf[acting]
        is_over = acting & (after.step_type == LAST)
        if _any(is_over):
            flat = np.concatenate([np.reshape(d, (len(acting), -1)) for d in discounts], axis=1)
            is_final = (flat == 0).all(axis=1)
            rows = np.flatnonzero(is_over)
            self._terminated[ticks[rows], rows] = is_final[rows]
            self._truncated[ticks[rows], rows] = ~is_final[rows]

    def chunk(self, ticks: int) -> Chunk:
        """The rows of so many ticks."""
        rollout = self._rollout
        return Chunk(
            step_type=self._step_type[:ticks],
            observation=rollout._observations.unflatten([c[:ticks] for c in self._observation]),
            action=rollout._actions.unflatten([c[:ticks] for c in self._action]),
            reward=rollout._rewards.unflatten([c[:ticks] for c in self._reward]),
            discount=rollout._discounts.unflatten([c[:ticks] for c in self._discount]),
            terminated=self._terminated[:ticks],
            truncated=self._truncated[:ticks],
            failed=self._failed[:ticks],
            episode=self._episode[:ticks],
            t=self._t[:ticks],
            mask=self._mask[:ticks],
            env_ids=rollout._env_ids,
            next_time_step=rollout._now,
            policy_version=rollout._policy.version,
            num_steps=self._num_steps,
        )


_any = np.count_nonzero
"""Of an array of bool: several times as fast as its method of that name."""


def _columns(layout: Layout, shape: tuple[int, int]) -> list[Array]:
    return [
        np.full((*shape, *leaf.shape), _nothing(leaf.dtype), leaf.dtype) for leaf in layout.leaves
    ]


def _put(columns: list[Array], tick: int, leaves: Sequence[Any]) -> None:
    for column, leaf in zip(columns, leaves):  # noqa: B905  (the hot path)
        column[tick] = leaf


def _clear(columns: list[Array], tick: int, rows: Array) -> None:
    for column in columns:
        column[tick, rows] = _nothing(column.dtype)


def _nothing(dtype: np.dtype[Any]) -> Any:
    """What stands in a row that has no action: zero, or an empty text."""
    return "" if dtype.hasobject else 0
