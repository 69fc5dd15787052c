"""A Gymnasium environment as one of TF-Agents', whose own wrapper (0.19) is for the old gym."""

import numpy as np
from gymnasium import spaces
from tf_agents.environments import py_environment
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts


class TfEnvironment(py_environment.PyEnvironment):
    """Does no more than it has to, so that what is measured is the batcher."""

    def __init__(self, constructor):
        super().__init__()
        self._env = constructor()
        self._is_discrete = isinstance(self._env.action_space, spaces.Discrete)

    def observation_spec(self):
        return _spec(self._env.observation_space)

    def action_spec(self):
        return _spec(self._env.action_space)

    def _reset(self):
        observation, _ = self._env.reset()
        return ts.restart(observation)

    def _step(self, action):
        if self._is_discrete:
            action = int(action)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        if terminated:
            return ts.termination(observation, reward)
        if truncated:
            return ts.truncation(observation, reward)
        return ts.transition(observation, reward)

    def close(self):
        self._env.close()


def _spec(space):
    if isinstance(space, spaces.Discrete):
        return array_spec.BoundedArraySpec((), np.int64, 0, space.n - 1)
    return array_spec.BoundedArraySpec(space.shape, space.dtype, space.low, space.high)
