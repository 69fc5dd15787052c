"""Counters: what a batch tells whoever watches a cluster, every few seconds.

Nothing is counted for it at a step: what steps and failures leave behind is looked at in between.
"""

from __future__ import annotations

import collections

import numpy as np

from envfleet.channels import Array, Counted
from envfleet.restarts import Restarts
from envfleet.timings import Timings

_SAMPLE = 256
"""So many durations of steps are told at most, each time."""


class Counters:
    """What has been counted since it was asked last.

    Args:
      timings, restarts: of the batch.
    """

    def __init__(self, timings: Timings, restarts: Restarts) -> None:
        self._timings, self._restarts = timings, restarts
        self._num_calls = timings.num_calls.copy()
        self._failed: collections.Counter[tuple[str, str]] = collections.Counter()
        self._restarted: collections.Counter[str] = collections.Counter()
        self._waited = 0.0

    def since(self, waited: float) -> Counted:
        """The news, of a batch whose caller has waited for so many seconds in all."""
        timings, restarts = self._timings, self._restarts
        before, self._num_calls = self._num_calls, timings.num_calls.copy()
        steps = self._num_calls - before
        told = Counted(
            steps=steps,
            seconds=timings.latest(np.minimum(steps, max(1, _SAMPLE // len(steps)))),
            waited=waited - self._waited,
            failures=restarts.causes - self._failed,
            restarts=restarts.restart_causes - self._restarted,
            alive=self._alive(),
        )
        self._waited = waited
        self._failed, self._restarted = +restarts.causes, +restarts.restart_causes
        return told

    def _alive(self) -> Array:
        alive = np.ones(len(self._num_calls), bool)
        alive[[*self._restarts.pending, *self._restarts.failed]] = False
        return alive
