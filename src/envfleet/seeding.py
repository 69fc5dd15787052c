"""One seed in; a distinct and reproducible seed for every environment and every rebuild out.

The rule is numpy's own for parallel streams: `numpy.random.SeedSequence` with a spawn key. Seeds
depend on the environment's index and on how often it was rebuilt, and on nothing else: not on how
many environments there are, where they run or which started first.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

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


def _checked(value: object, name: str) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected an int")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected a seed of at least 0")
    return int(value)
