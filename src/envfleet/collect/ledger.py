"""Ledger: which episodes there are, on disk and elsewhere, and whether they are enough.

What was asked for is a number of episodes, the first ones, or of steps: the first ones of episodes
0, 1, 2, ... one after the other. So the data do not depend on who was fast. Memory does not grow
with the run: below `prefix` all episodes are on disk, and only those beyond are known one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from envfleet.collect.episodes import Episodes


class End(NamedTuple):
    """Where a dataset that was asked for ends.

    Attributes:
      episode: all before this one are whole.
      steps: how many steps of this one belong to it; 0 for none.
      rule: the one that it ends by, ``"max_steps"`` or ``"max_episodes"``.
    """

    episode: int
    steps: int
    rule: str


class Ledger:
    """What is known of the episodes of a run.

    Args:
      max_steps, max_episodes: what was asked for; None for no limit.
    """

    def __init__(self, max_steps: int | None, max_episodes: int | None) -> None:
        self.max_steps, self.max_episodes = max_steps, max_episodes
        self.prefix = self.prefix_steps = 0
        self.ahead: dict[int, int] = {}
        """Steps of episodes on disk beyond the prefix, by their number."""
        self.waiting: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Of each worker those that ended and are not on disk yet."""
        self.running: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.written_steps = self.num_written = 0
        self._losses: Counter[int] = Counter()
        self._horizon = self._floor = 0

    # -- what came in ------------------------------------------------------------------------------

    def add_written(self, episodes: Episodes, worker: int | None = None) -> None:
        """Episodes that are on disk; some may be known to be."""
        numbers = episodes.episode_id.tolist()
        new = np.array([k >= self.prefix and k not in self.ahead for k in numbers], bool)
        added = episodes.selected(new)
        for number, length in zip(added.episode_id.tolist(), added.length.tolist(), strict=True):
            self.ahead[number] = length
        if worker is not None:
            for number in numbers:
                self.waiting[worker].pop(number, None)
        self.num_written += len(added.length)
        self.written_steps += added.num_steps
        while self.prefix in self.ahead:
            steps = self.prefix_steps + self.ahead[self.prefix]
            if self.max_steps is not None and steps > self.max_steps:
                break  # the dataset ends in this one
            if self.max_episodes is not None and self.prefix >= self.max_episodes:
                break
            del self.ahead[self.prefix]
            self.prefix_steps = steps
            self._losses.pop(self.prefix, None)
            self.prefix += 1

    def add_ended(self, worker: int, episodes: Episodes) -> None:
        """Episodes that a worker has in memory."""
        numbers = zip(episodes.episode_id.tolist(), episodes.length.tolist(), strict=True)
        self.waiting[worker].update(numbers)

    def lose(self, worker: int) -> None:
        """A worker is gone, with what it had in memory."""
        self._losses.update([*self.running[worker]])
        self.waiting[worker], self.running[worker] = {}, {}

    def attempts(self) -> dict[int, int]:
        """Of episodes that took their worker with them time and again, another attempt's number."""
        return {k: n - _SAME_SEED for k, n in self._losses.items() if n > _SAME_SEED}

    def begin(self, num_envs: int) -> tuple[np.ndarray[Any, Any], frozenset[int]]:
        """Of each environment an episode before which all are done; and which are, after those."""
        envs = np.arange(num_envs)
        return self.prefix + (envs - self.prefix) % num_envs, frozenset(self.ahead)

    # -- what is to be done ------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """That there are, on disk or in memory, of whole episodes and others."""
        return self.written_steps + sum(
            sum(one.values()) for one in (*self.waiting.values(), *self.running.values())
        )

    @property
    def num_ended(self) -> int:
        """Episodes, on disk or in memory."""
        return self.num_written + sum(map(len, self.waiting.values()))

    def horizon(self, num_envs: int, is_stuck: bool) -> int | None:
        """No episode from this one on needs to be begun, as far as can be told; None for no limit.

        Args:
          num_envs: how many environments there are.
          is_stuck: whether none of them has anything to do.
        """
        if self.max_steps is None:
            return self.max_episodes
        ended = self.num_ended
        steps = self.written_steps + sum(sum(one.values()) for one in self.waiting.values())
        if ended and steps:
            needed = ended + -(-(self.max_steps - steps) * ended // steps)
        else:
            needed = min(num_envs, self.max_steps)
        if is_stuck:  # those that are ahead were longer than what is missing
            self._floor = max(needed, self._floor, self._horizon) + 1 + num_envs // 8
        self._horizon = needed = max(needed, self._floor)
        return needed if self.max_episodes is None else min(needed, self.max_episodes)

    def budgets(self, envs: range, num_envs: int) -> np.ndarray[Any, Any] | None:
        """How many more steps each of some environments may take: what is beyond is of no use."""
        if self.max_steps is None:
            return None
        left = self.max_steps - self.prefix_steps
        of_env = dict.fromkeys(envs, left)
        for number, steps in sorted(k for one in self.running.values() for k in one.items()):
            left -= steps
            if number % num_envs in of_env:
                of_env[number % num_envs] = left
        return np.maximum(np.fromiter(of_env.values(), np.int64, len(of_env)), 0)

    def end(self) -> End | None:
        """Where the dataset ends, if what it needs is there; None if it is not.

        The episode at the end may go on in its worker; all before it have ended.
        """
        has_steps = self.max_steps is not None and self.num_steps >= self.max_steps
        has_episodes = self.max_episodes is not None and self.num_ended >= self.max_episodes
        return self._end_of(self._whole()) if has_steps or has_episodes else None

    def is_on_disk(self, end: End) -> bool:
        """Whether a dataset that ends there can be read."""
        return self.prefix == end.episode and self.ahead.get(end.episode, 0) >= end.steps

    def _whole(self) -> Mapping[int, int]:
        whole = dict(self.ahead)
        for one in self.waiting.values():
            whole.update(one)
        return whole

    def _end_of(self, whole: Mapping[int, int]) -> End | None:
        number, steps = self.prefix, self.prefix_steps
        while True:
            if self.max_steps is not None and steps >= self.max_steps:
                return End(number, 0, "max_steps")
            if self.max_episodes is not None and number >= self.max_episodes:
                return End(number, 0, "max_episodes")
            length = whole.get(number)
            if length is None:
                break
            if self.max_steps is not None and steps + length > self.max_steps:
                return End(number, self.max_steps - steps, "max_steps")
            steps, number = steps + length, number + 1
        if self.max_steps is None:
            return None
        missing = self.max_steps - steps
        for one in self.running.values():
            if one.get(number, 0) >= missing:
                return End(number, missing, "max_steps")
        return None


_SAME_SEED = 2
"""How often an episode is tried again with its own seed after its worker was lost."""
