"""A plain dm_env environment as bsuite has them; importable, so that actors find it too."""

from __future__ import annotations

import dm_env
import numpy as np
from dm_env import specs


class Catch(dm_env.Environment):
    """A ball falls, and a paddle at the bottom is to catch it."""

    def __init__(self, seed: int, rows: int = 6, columns: int = 4, fails_at: int = 0) -> None:
        self._rows, self._columns = rows, columns
        self._random = np.random.RandomState(seed)
        self._fails_at, self._num_steps = fails_at, 0
        self._is_over = True

    def reset(self) -> dm_env.TimeStep:
        self._is_over = False
        self._ball = [0, self._random.randint(self._columns)]
        self._paddle = self._columns // 2
        return dm_env.restart(self._observation())

    def step(self, action: int) -> dm_env.TimeStep:
        if self._is_over:
            return self.reset()
        self._num_steps += 1
        if self._num_steps == self._fails_at:
            raise KeyError("ball")
        self._paddle = int(np.clip(self._paddle + action - 1, 0, self._columns - 1))
        self._ball[0] += 1
        if self._ball[0] == self._rows - 1:
            self._is_over = True
            caught = self._ball[1] == self._paddle
            return dm_env.termination(1.0 if caught else -1.0, self._observation())
        return dm_env.transition(0.0, self._observation())

    def _observation(self) -> np.ndarray:
        board = np.zeros((self._rows, self._columns), np.float32)
        board[tuple(self._ball)] = 1
        board[-1, self._paddle] = 1
        return board

    def observation_spec(self) -> specs.BoundedArray:
        return specs.BoundedArray((self._rows, self._columns), np.float32, 0, 1, "board")

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(3, name="action")
