"""An environment for the examples. In a module of its own, so that actors import it, and a remote
traceback shows its lines: of what a script defines itself, an actor has no source."""

import dm_env
import numpy as np
from dm_env import specs

JOINTS = {"wrist": 0.1, "elbow": 0.2, "shoulder": 0.3}


class Robot(dm_env.Environment):
    """Moves one joint a step. A faulty one looks for a joint that is not there at its third."""

    def __init__(self, faulty: bool) -> None:
        self._plan = ["wrist", "elbow", "arm" if faulty else "shoulder"]

    def observation_spec(self) -> specs.Array:
        return specs.Array((), np.float32, "angle")

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(2, name="direction")

    def reset(self) -> dm_env.TimeStep:
        self._joints = iter(self._plan)
        return dm_env.restart(np.float32(0))

    def step(self, action: np.ndarray) -> dm_env.TimeStep:
        angle = self._move(next(self._joints))
        return dm_env.transition(reward=0.0, observation=np.float32(angle if action else -angle))

    def _move(self, joint: str) -> float:
        return JOINTS[joint]


class Walk(dm_env.Environment):
    """A walk on a line, one step to the right or left; an episode ends ten steps from its start."""

    def __init__(self, start: int = 0, breaks_at: int | None = None) -> None:
        self._start, self._breaks_at = start, breaks_at

    def observation_spec(self) -> specs.Array:
        return specs.Array((), np.int64, "place")

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(2, name="right")

    def reset(self) -> dm_env.TimeStep:
        self._place = self._start
        return dm_env.restart(np.int64(self._place))

    def step(self, action: np.ndarray) -> dm_env.TimeStep:
        self._place += 1 if action else -1
        if self._place == self._breaks_at:
            raise RuntimeError(f"the ice breaks at {self._place}")
        end = dm_env.termination if abs(self._place - self._start) == 10 else dm_env.transition
        return end(float(action), np.int64(self._place))
