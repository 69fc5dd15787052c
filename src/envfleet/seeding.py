"""One seed in; a distinct and reproducible seed for every environment and every rebuild out.

The rule is numpy's own for parallel streams: `numpy.random.SeedSequence` with a spawn key. Seeds
depend on the environment's index and on how often it was rebuilt, and on nothing else: not on how
many environments there are, where they run or which started first.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np


class Seeds:
    """The seeds of a batch.

    Args:
      seed: an int gives every environment its own stream; None draws one from the operating
        system; a sequence gives environment i its i-th element exactly.
      num_envs: size of the batch.

    Raises:
      ValueError: a sequence of another length, or a negative seed.
      TypeError: not an int.
    """

    def __init__(self, seed: int | Sequence[int] | None, num_envs: int) -> None:
        self._given: list[int] | None = None
        if seed is None:
            entropy = np.random.SeedSequence().entropy
            assert isinstance(entropy, int)
            self._roots = [entropy] * num_envs
        elif isinstance(seed, numbers.Integral):
            self._roots = [_checked(seed, "seed")] * num_envs
        else:
            if isinstance(seed, str | bytes) or not isinstance(seed, Sequence | np.ndarray):
                raise TypeError(f"seed is a {type(seed).__name__}, expected an int, a list or None")
            if len(seed) != num_envs:
                raise ValueError(
                    f"seed has {len(seed)} elements, expected one for each of the {num_envs} "
                    "environments"
                )
            self._given = [_checked(value, f"seed[{i}]") for i, value in enumerate(seed)]
            self._roots = self._given

    def of(self, env_id: int, rebuilds: int = 0) -> int:
        """The seed (an int below 2**32 unless given) of an environment rebuilt so many times."""
        if self._given is not None and rebuilds == 0:
            return self._given[env_id]
        sequence = np.random.SeedSequence(self._roots[env_id], spawn_key=(env_id, rebuilds))
        return int(sequence.generate_state(1)[0])


def root(seed: int | None) -> int:
    """The seed of a run: the one that is given, or one of the operating system's.

    Raises:
      TypeError, ValueError: no int, or a negative one.
    """
    if seed is not None:
        return _checked(seed, "seed")
    return int(np.random.SeedSequence().generate_state(1)[0])


def of_episode(seed: int, episode: int, attempt: int = 0) -> tuple[int, int]:
    """The seed of an episode's environment, below 2**32, and the key of its policy, below 2**64.

    They depend on the run's seed, on the episode's number and on how often it was begun anew, and
    on nothing else.
    """
    env_seeds, keys = of_episodes(seed, np.array([episode]), np.array([attempt]))
    return int(env_seeds[0]), int(keys[0])


def of_episodes(
    seed: int, episodes: np.ndarray[Any, Any], attempts: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`of_episode` of many: int64 and uint64, of their shape."""
    first, second = _words(seed)
    bits = mixed(np.asarray(first + _GOLDEN * episodes.astype(np.uint64)))
    bits = mixed(np.asarray((bits ^ second) + _GOLDEN * attempts.astype(np.uint64)))
    return (mixed(bits) >> _32).astype(np.int64), mixed(np.asarray(bits + _GOLDEN))


@functools.cache
def _words(seed: int) -> np.ndarray[Any, Any]:
    return np.random.SeedSequence(seed).generate_state(2, np.uint64)


def of_steps(keys: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A seed for each step of episodes: uint64, by the episodes' keys and how far they are."""
    return mixed(np.asarray(keys + _GOLDEN * steps.astype(np.uint64)))


def mixed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Uniform bits from a counter: SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    bits = (bits ^ (bits >> _30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> _27)) * _SECOND_FACTOR
    return np.asarray(bits ^ (bits >> _31))


def draws(seeds: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    """So many uniform uint64 from each seed: shape ``(len(seeds), number)``."""
    counters = _GOLDEN * np.arange(1, number + 1, dtype=np.uint64)
    return mixed(np.asarray(seeds[:, np.newaxis] + counters))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


def _checked(value: object, name: str) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected an int")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected a seed of at least 0")
    return int(value)
