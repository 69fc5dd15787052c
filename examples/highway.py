"""Driving among other cars (highway-env, about 30 ms a step): a loop in this process, then actors.

    python examples/highway.py --num_envs 4 --steps 40

Needs highway-env: pip install highway-env
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # nothing is shown

from envfleet.interop.gymnasium import RayVectorEnv

ENV_ID = "highway_env:highway-fast-v0"  # the module in front registers it, in actors too


def rate(make: Callable[[], gymnasium.vector.VectorEnv[Any, Any, Any]], num_steps: int) -> float:
    """Environment steps a second, after a first step."""
    envs = make()
    envs.reset(seed=0)
    actions = np.ones(envs.num_envs, int)  # stay in the lane
    envs.step(actions)
    began = time.perf_counter()
    for _ in range(num_steps):
        envs.step(actions)
    seconds = time.perf_counter() - began
    envs.close()
    return num_steps * envs.num_envs / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    env_fns = [lambda: gymnasium.make(ENV_ID)] * args.num_envs
    alone = rate(lambda: gymnasium.vector.SyncVectorEnv(env_fns), args.steps)
    actors = rate(lambda: RayVectorEnv([ENV_ID] * args.num_envs), args.steps)
    print(f"{alone:8.1f} steps/s in this process")
    print(f"{actors:8.1f} steps/s in {args.num_envs} actors, {actors / alone:.2f} times as many")
    print(f"({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
