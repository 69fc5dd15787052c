"""Steps CartPole environments in parallel under a random policy, and says where the time went.

python examples/cartpole.py --steps 1000 --num_envs 8 --backend ray
"""

import argparse
import logging
import time

import gymnasium
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import envfleet

FIRST, LAST = 0, 2  # of dm_env.StepType


def make_env() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


class Episodes:
    """Return and length of every episode that has ended."""

    def __init__(self, num_envs: int) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, int)

    def add(self, step_type: np.ndarray, reward: np.ndarray) -> None:
        moved = step_type != FIRST  # which is a reset: no step, and its reward is 0
        self._return += reward
        self._length += moved
        ended = step_type == LAST
        self.returns += self._return[ended].tolist()
        self.lengths += self._length[ended].tolist()
        self._return[ended] = self._length[ended] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="batched steps (1000)")
    parser.add_argument("--num_envs", type=int, default=8, help="environments (8)")
    parser.add_argument(
        "--envs_per_actor",
        type=lambda text: text if text == "auto" else int(text),
        default=1,
        help="how many share an actor (1), or auto",
    )
    parser.add_argument("--backend", choices=["ray", "local"], default="ray")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.steps, options.num_envs) < 1:
        parser.error("--steps and --num_envs are at least 1")
    console = Console()
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("envfleet").setLevel(logging.INFO)  # what "auto" measures, and advice
    console.print(f"starting {options.num_envs} environments, backend {options.backend} ...")
    began = time.perf_counter()
    env = envfleet.ParallelPyEnvironment(
        make_env,
        num_envs=options.num_envs,
        envs_per_actor=options.envs_per_actor,
        backend=options.backend,
        seed=options.seed,
        ray_init={"include_dashboard": False, "logging_level": "ERROR"},
    )
    with env:
        env.reset()
        start_seconds = time.perf_counter() - began
        episodes = Episodes(options.num_envs)
        random = np.random.default_rng(options.seed)
        num_actions = env.action_spec().num_values
        env_steps, policy_seconds, batcher_seconds = 0, 0.0, 0.0
        before = env.stats()
        columns = TextColumn("stepping"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        began = time.perf_counter()
        # Without a terminal there is no bar: only what is printed at the end.
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            for _ in progress.track(range(options.steps)):
                t0 = time.perf_counter()
                actions = random.integers(num_actions, size=options.num_envs)
                t1 = time.perf_counter()
                time_step = env.step(actions)
                t2 = time.perf_counter()
                policy_seconds += t1 - t0
                batcher_seconds += t2 - t1
                episodes.add(time_step.step_type, time_step.reward)
                env_steps += int(np.count_nonzero(time_step.step_type))
        total = time.perf_counter() - began
        after = env.stats()

    results = Table("random policy on CartPole-v1", "", show_edge=False)
    results.add_row("episodes", f"{len(episodes.returns)}")
    if episodes.returns:
        results.add_row("mean return", f"{np.mean(episodes.returns):.1f}")
        results.add_row("mean episode length", f"{np.mean(episodes.lengths):.1f}")
    results.add_row("environment steps/s", f"{env_steps / total:,.0f}")
    results.add_row("batched steps/s", f"{options.steps / total:,.0f}")
    results.add_row("start and first reset", f"{start_seconds:.2f} s")
    results.add_row("stepping", f"{total:.2f} s")

    waited = after.waited - before.waited
    in_envs = sum(after.env_seconds) - sum(before.env_seconds)
    # In actors they run side by side while the caller waits; in this process, in its own time.
    in_caller = in_envs if options.backend == "local" else 0.0
    where = Table("where the time went", "", show_edge=False)
    for name, seconds in {
        "policy": policy_seconds,
        "environments, in this process": in_caller,
        "waiting for actors": waited,
        "rest of the batcher": batcher_seconds - in_caller - waited,
        "this script": total - policy_seconds - batcher_seconds,
    }.items():
        where.add_row(name, f"{seconds / total:6.1%}")
    console.print("", results, "", where, "")
    console.print(f"Inside the environments, all added up: {in_envs:.2f} s on their own clocks.")
    if options.backend == "ray":
        console.print(f"A remote call costs about {1e3 * after.call_overhead:.2f} ms.")
        console.print(
            "The same in fewer calls: --envs_per_actor auto; without Ray: --backend local"
        )


if __name__ == "__main__":
    main()
