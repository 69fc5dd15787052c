"""Metrics: what batches count, to Ray's own metrics, from where Prometheus takes it.

Their names begin with ``envfleet_``, and Ray puts ``ray_`` before that. Labels: ``batch``, a name
that every batch draws; ``node``, address and the beginning of Ray's id of the node.
"""

from __future__ import annotations

import collections
import uuid
from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from envfleet.channels import Counted

_BOUNDARIES = [1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
"""Seconds."""


class Metrics:
    """Those of one batch; to be made when Ray is there."""

    def __init__(self) -> None:
        own, there = ("batch",), ("batch", "node")
        self._batch = {"batch": uuid.uuid4().hex[:8]}
        self._steps = Counter("envfleet_steps", "Resets and steps of environments.", there)
        self._seconds = Histogram(
            "envfleet_step_seconds",
            "Seconds that they took in the actor: a sample of at most 256 in ten seconds.",
            _BOUNDARIES,
            there,
        )
        self._waited = Counter("envfleet_wait_seconds", "Seconds the caller waited.", own)
        self._failures = Counter(
            "envfleet_failures", "Failures of environments.", (*own, "cause", "phase")
        )
        self._restarts = Counter("envfleet_restarts", "Environments built anew.", (*own, "cause"))
        self._alive = Gauge("envfleet_environments_alive", "Environments that work.", there)
        self._nodes: set[str] = set()

    def publish(self, counted: Counted, nodes: Sequence[str]) -> None:
        """Adds what was counted; by env_id the nodes on which environments are."""
        steps: collections.Counter[str] = collections.Counter()
        alive: collections.Counter[str] = collections.Counter()
        for node, number, works in zip(
            nodes, counted.steps.tolist(), counted.alive.tolist(), strict=True
        ):
            steps[node] += number
            alive[node] += works
        self._nodes |= alive.keys()
        for node in self._nodes:  # also those that have none any more
            tags = {**self._batch, "node": node}
            self._alive.set(alive[node], tags)
            if steps[node]:
                self._steps.inc(steps[node], tags)
        for env_id, seconds in counted.seconds:
            self._seconds.observe(seconds, {**self._batch, "node": nodes[env_id]})
        if counted.waited > 0:
            self._waited.inc(counted.waited, self._batch)
        for (cause, phase), number in counted.failures.items():
            self._failures.inc(number, {**self._batch, "cause": cause, "phase": phase})
        for cause, number in counted.restarts.items():
            self._restarts.inc(number, {**self._batch, "cause": cause})

    def close(self) -> None:
        """None of them works any more."""
        for node in self._nodes:
            self._alive.set(0, {**self._batch, "node": node})
