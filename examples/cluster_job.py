"""A job for a cluster: steps environments on all nodes, and says where they were.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
  python examples/cluster_job.py --gin_file=examples/cluster_job.gin

On a laptop the same without Ray's job: python examples/cluster_job.py. Environments of this script,
of a module beside it (envs.py) and lambdas reach every node: the first and the last travel in the
call, and the module is in the working directory, which Ray brings to the nodes.
"""

import argparse
import logging
import time

import envs
import gin
import numpy as np

import envfleet


class LazyWalk(envs.Walk):
    """Stays where it is, half of the time."""

    def reset(self):
        self._is_tired = False
        return super().reset()

    def step(self, action):
        self._is_tired = not self._is_tired
        return super().step(action) if self._is_tired else super().step(1 - action)


@gin.configurable
def run(num_envs: int = 6, num_steps: int = 200, start: int = 0, breaks_at: int | None = None):
    """Steps `num_envs` walks so often; `ParallelPyEnvironment` is gin's to configure."""
    kinds = [LazyWalk, envs.Walk, lambda: envs.Walk(start, breaks_at)]
    constructors = [kinds[i % len(kinds)] for i in range(num_envs)]
    rng = np.random.default_rng(0)
    with envfleet.ParallelPyEnvironment(constructors) as env:
        env.describe()
        env.reset()
        began, ended = time.perf_counter(), 0
        for _ in range(num_steps):
            time_step = env.step(rng.integers(2, size=num_envs))
            ended += np.count_nonzero(time_step.step_type == 2)
        rate = num_steps * num_envs / (time.perf_counter() - began)
        nodes = len({actor.node for actor in env.actors})
    print(
        f"{num_steps} steps of {num_envs} environments on {nodes} nodes, {ended} episodes, "
        f"{rate:,.0f} steps/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", action="append", default=[], help="a gin file, or several")
    parser.add_argument("--gin_bindings", action="append", default=[], help="a gin binding")
    options = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    gin.parse_config_files_and_bindings(options.gin_file, options.gin_bindings)
    run()


if __name__ == "__main__":
    main()
