"""Timings: how long environments take, and what it costs to reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_KEPT = 1000
"""Of how many resets and steps quantiles are formed: the last ones."""


class Timings:
    """Seconds of the environments of a batch, and of its lockstep calls.

    Attributes:
      num_calls, env_seconds: per environment, resets and steps since the start that gave a time
        step, and the seconds spent in them.
      num_batches: lockstep calls so far.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_calls = np.zeros(num_envs, np.int64)
        self.env_seconds = np.zeros(num_envs, np.float64)
        self.num_batches = 0
        self._all = np.arange(num_envs)
        self._recent = np.full((_KEPT, num_envs), np.nan, np.float32)
        self._batches = np.full((_KEPT, 2), np.nan)

    def keep(self, env_ids: slice | Sequence[int], seconds: np.ndarray[Any, Any]) -> None:
        """One reset or step of each of some environments; NaN where it gave no time step."""
        missing = np.isnan(seconds)
        if np.count_nonzero(missing):
            env_ids, seconds = self._all[env_ids][~missing], seconds[~missing]
        self._recent[self.num_calls[env_ids] % _KEPT, self._all[env_ids]] = seconds
        self.num_calls[env_ids] += 1
        self.env_seconds[env_ids] += seconds

    def keep_batch(self, seconds: float, busy: float) -> None:
        """A lockstep call, and how long the actor was busy whose environments took longest."""
        self._batches[self.num_batches % _KEPT] = seconds, busy
        self.num_batches += 1

    def latest(self, numbers: np.ndarray[Any, Any]) -> list[tuple[int, float]]:
        """(env_id, seconds) of the last resets and steps, so many of each environment."""
        return [
            (i, float(self._recent[(self.num_calls[i] - 1 - back) % _KEPT, i]))
            for i, number in enumerate(numbers.tolist())
            for back in range(min(number, _KEPT))
        ]

    def quantile(self, q: float) -> list[float]:
        """Per environment, of the last 1000 resets and steps; NaN where there was none."""
        return self.quantiles(q)[0]

    def quantiles(self, *qs: float) -> list[list[float]]:
        """Several of them."""
        rows = min(_KEPT, int(self.num_calls.max(initial=0)))
        ordered = np.sort(self._recent[:rows].astype(np.float64), axis=0)  # NaN at the end
        known = np.flatnonzero(self.num_calls)
        last = np.minimum(self.num_calls[known], _KEPT) - 1
        found = np.full((len(qs), len(self.num_calls)), np.nan)
        for row, q in zip(found, qs, strict=True):
            at = q * last
            low, high = np.floor(at).astype(int), np.ceil(at).astype(int)
            below, above = ordered[low, known], ordered[high, known]
            row[known] = below + (above - below) * (at - low)
        return found.tolist()

    def slowest(self, medians: Sequence[float]) -> int | None:
        """The environment with the largest of these medians."""
        known = np.asarray(medians)
        return None if np.isnan(known).all() else int(np.nanargmax(known))

    @property
    def batch_seconds(self) -> float:
        """Median of the last 1000 lockstep steps; NaN where there was none."""
        return _quantile(self._known[:, 0], 0.5)

    @property
    def overhead(self) -> float:
        """Median seconds of them beyond those of the busiest actor's environments."""
        return _quantile(self._known[:, 0] - self._known[:, 1], 0.5)

    @property
    def _known(self) -> np.ndarray[Any, Any]:
        return self._batches[: min(_KEPT, self.num_batches)]


def _quantile(values: np.ndarray[Any, Any], q: float) -> float:
    return float(np.quantile(values, q)) if values.size else float("nan")
