"""Gymnasium environments that tests step: importable, so that actors find them too."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-2.0, 2.0, (2, 3), np.float32),
    "scalar box": spaces.Box(-1.0, 1.0, (), np.float64),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(5, start=-2),
    "small discrete": spaces.Discrete(3, start=1, dtype=np.int32),
    "multi-discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi-discrete from 2": spaces.MultiDiscrete([3, 4], start=[2, -7]),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary square": spaces.MultiBinary((2, 2)),
    "text": spaces.Text(8, min_length=1),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
    "dict": spaces.Dict({"b": spaces.Discrete(4, start=7), "a": spaces.Box(-1, 1, (3,))}),
    "nested": spaces.Dict(
        {
            "words": spaces.Tuple([spaces.Text(4), spaces.MultiBinary(2)]),
            "inner": spaces.Dict({"z": spaces.Discrete(2), "y": spaces.Box(0, 1, (1,))}),
        }
    ),
    "sequence": spaces.Sequence(spaces.Discrete(5)),
    "stacked sequence": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
    "sequence in a dict": spaces.Dict(
        {
            "steps": spaces.Sequence(spaces.Box(0, 1, (1,))),
            "goal": spaces.Tuple([spaces.OneOf([spaces.Discrete(2)]), spaces.Discrete(3)]),
        }
    ),
}
"""One of every kind that Gymnasium has."""


class AnySpace(gymnasium.Env[Any, Any]):
    """Gives samples of one of `SPACES`, and tells the actions that it was given in the info."""

    def __init__(self, name: str) -> None:
        self.observation_space = copy.deepcopy(SPACES[name])  # it has a random state of its own
        self.action_space = copy.deepcopy(SPACES[name])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        self._steps += 1
        draw = self.np_random.random()
        observation = self.observation_space.sample()
        return observation, draw, self._steps >= 3 and draw < 0.3, draw > 0.8, {"action": (action,)}


class Told(gymnasium.Env[Any, Any]):
    """Remembers what it was told: seeds, options, attributes. An episode has `length` steps."""

    observation_space = spaces.Box(0, 1000, (2,), np.int64)
    action_space = spaces.Discrete(3)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, length: int = 3, render_mode: str | None = None, index: int = 0) -> None:
        self.length, self.render_mode, self.index = length, render_mode, index
        self.resets: list[tuple[Any, Any]] = []
        self.level = 1
        self._seen = np.zeros(2, np.int64)  # its one buffer: what it gave before changes with it

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self._seen[:] = len(self.resets), 0
        return self._seen, {"options": options} if options else {}

    def step(self, action: Any) -> Any:
        assert type(action) in (int, np.int64)
        self._seen[1] += 1
        over = bool(self._seen[1] >= self.length)
        return self._seen, float(action), over, False, {"over": over} if over else {}

    def render(self) -> Any:
        return np.full((2, 3, 3), self.index, np.uint8)

    def add(self, value: int, times: int = 1) -> int:
        return self.index + value * times

    def fail(self) -> None:
        raise KeyError("arm")


class Fragile(Told):
    """Fails when it is told to: by action 1 with an exception, by action 2 for good."""

    def step(self, action: Any) -> Any:
        if action == 1:
            raise KeyError("arm")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Unused(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does nothing."""
