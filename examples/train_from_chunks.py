"""REINFORCE on CartPole in plain numpy: actors collect, the loop below learns from their chunks.

    python examples/train_from_chunks.py

With ``max_policy_lag=0`` the actors wait for the new weights: every chunk is of the latest ones.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator

import numpy as np
from policies import LinearPolicy  # of this directory, which Ray's workers are told of

from envfleet.collect import Chunk, Collector

LAST = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120_000)
    parser.add_argument("--num_actors", type=int, default=2)
    parser.add_argument("--envs_per_actor", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    weights = np.zeros((4, 2))  # from an observation to the scores of both actions
    optimizer = Adam(weights.shape, rate=0.1)
    finished = Returns()
    with Collector(
        "CartPole-v1",
        LinearPolicy,
        num_actors=args.num_actors,
        envs_per_actor=args.envs_per_actor,
        chunk_length=128,
        max_policy_lag=0,
        seed=args.seed,
        ray_init={"include_dashboard": False, "logging_level": "ERROR"},
    ) as collector:
        for i, chunk in enumerate(collector.collect(max_steps=args.steps)):
            finished.add(chunk)
            weights += optimizer.step(gradient(weights, chunk))
            collector.set_policy(weights)
            if i % 10 == 0:
                print(f"{collector.stats().num_steps:7,} steps: return {finished}", flush=True)
        print(f"mean return {finished}, {collector.stats().steps_per_second:,.0f} steps/s")


def gradient(weights: np.ndarray, chunk: Chunk, discount: float = 0.98) -> np.ndarray:
    """Of the expected return, by the rows of a chunk that have an action."""
    is_step = chunk.mask & (chunk.step_type != LAST)
    returns = np.zeros(is_step.shape)
    after = np.zeros(is_step.shape[1])
    for tick in reversed(range(len(returns))):  # what comes after the chunk is not known: nothing
        after = chunk.reward[tick] + discount * chunk.discount[tick] * after
        returns[tick] = after
    advantage = returns[is_step]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    observation, action = chunk.observation[is_step], chunk.action[is_step]
    scores = observation @ weights
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    toward = np.eye(2)[action] - chances  # the gradient of the action's log-probability
    return observation.T @ (toward * advantage[:, np.newaxis]) / len(advantage)


class Adam:
    """Steps of about the same size in every weight."""

    def __init__(self, shape: tuple[int, ...], rate: float) -> None:
        self._mean, self._square = np.zeros(shape), np.zeros(shape)
        self._rate, self._steps = rate, 0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self._steps += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.001 * (gradient**2 - self._square)
        mean = self._mean / (1 - 0.9**self._steps)
        square = self._square / (1 - 0.999**self._steps)
        return self._rate * mean / (np.sqrt(square) + 1e-8)


class Returns:
    """Of the latest episodes that ended. An episode may go on from chunk to chunk."""

    def __init__(self) -> None:
        self._running: collections.Counter[int] = collections.Counter()
        self._latest: collections.deque[float] = collections.deque(maxlen=50)

    def add(self, chunk: Chunk) -> None:
        for episode, reward, is_last in self._rows(chunk):
            self._running[episode] += reward
            if is_last:
                self._latest.append(self._running.pop(episode))

    @staticmethod
    def _rows(chunk: Chunk) -> Iterator[tuple[int, float, bool]]:
        parts = chunk.episode, chunk.reward, chunk.step_type == LAST
        return zip(*(part[chunk.mask].tolist() for part in parts), strict=True)

    def __str__(self) -> str:
        return f"{np.mean(self._latest):.1f}" if self._latest else "-"


if __name__ == "__main__":
    main()
