"""What the caller sees when an environment raises in its actor: its KeyError, and where it was.

    python examples/remote_exception.py

Environment 2 of 4 raises at its third step. Nothing here catches it, so this ends with exit code 1.
"""

import functools

import numpy as np
from envs import Robot

import envfleet

env = envfleet.ParallelPyEnvironment(
    [functools.partial(Robot, faulty=i == 2) for i in range(4)],
    ray_init={"include_dashboard": False, "logging_level": "ERROR"},
)
env.reset()
for _ in range(3):
    env.step(np.ones(4, np.int32))
