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
