"""TimeSteps: the time step that every environment of a batch is at.

They stay in the blocks that their actors sent: the last block of an actor holds a row for each of
its environments. A slot whose environment has failed is *held*: it shows what it showed before,
or its end by truncation, until a rebuilt environment gives it a first time step.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from envfleet.actor import Reply
from envfleet.errors import ResetNeeded
from envfleet.layout import Layout

FIRST, MID, LAST = 0, 1, 2


class TimeSteps:
    """The current time steps.

    Args:
      env_ids: for each actor, the environments that it hosts.
      in_process: whether leaves beside the blocks come as they are instead of pickled.

    Attributes:
      layout: of one time step, known once the first environment has been built.
    """

    def __init__(self, env_ids: Sequence[range], in_process: bool) -> None:
        self.layout = Layout({}, "", timed=True)
        self._env_ids = env_ids
        self._in_process = in_process
        self._last: dict[int, tuple[int, Reply]] = {}
        self._held: dict[int, Reply] = {}
        self._missing = {i for ids in env_ids for i in ids}

    def keep(self, a: int, number: int, reply: Reply, env_ids: Iterable[int]) -> None:
        """Takes an actor's block, unless one of a later call is there already.

        `env_ids` are those that have a time step in it by this call.
        """
        self._missing.difference_update(env_ids)
        if a not in self._last or self._last[a][0] < number:
            self._last[a] = number, reply

    def hold(self, env_id: int) -> None:
        """The slot goes on to show what it shows, whatever its actor sends. Again is fine."""
        found = self._find(env_id)
        if found is None:
            return
        reply, row, rows = found
        block = bytearray(self.layout.nbytes(1))
        views = self.layout.views(reply.block, rows)
        for view, source in zip(self.layout.views(block, 1), views, strict=True):
            view[0] = source[row]
        self._held[env_id] = Reply(block, reply.objects[row : row + 1], [])

    def truncate(self, env_id: int) -> None:
        """A held slot shows the end of its episode by truncation, with the observation it has."""
        held = self._held[env_id]
        views = self.layout.views(held.block, 1)
        for view, path in zip(views, self.layout.paths, strict=True):
            if path[0] in _TRUNCATED:
                view[...] = _TRUNCATED[path[0]]

    def release(self, env_id: int) -> None:
        """The slot shows again what its actor sends."""
        self._held.pop(env_id, None)

    @property
    def held(self) -> set[int]:
        """Environments whose slots are held."""
        return set(self._held)

    def clear(self) -> None:
        """There are no environments any more."""
        self._last.clear()
        self._held.clear()
        self._missing = {i for ids in self._env_ids for i in ids}

    def step_type(self, env_id: int) -> int | None:
        """FIRST, MID or LAST; None where the slot has no time step yet."""
        found = self._find(env_id)
        if found is None:
            return None
        reply, row, rows = found
        return int(self.layout.views(reply.block, rows)[0][row])

    def is_over(self, env_id: int) -> bool:
        """Whether the next step of the slot has to be a reset."""
        return self.step_type(env_id) in (None, LAST)

    def columns(self, env_ids: Sequence[int] | None = None) -> list[np.ndarray[Any, Any]]:
        """The current time steps of environments: fresh arrays, one for each leaf.

        Args:
          env_ids: which, in ascending order; by default all.

        Raises:
          ResetNeeded: one of them has no time step.
        """
        if self._missing:
            missing = self._missing if env_ids is None else self._missing.intersection(env_ids)
            if missing:
                raise ResetNeeded(f"env {min(missing)} has no time step yet: call reset() first")
        if env_ids is None:
            columns = self.layout.empty(self._env_ids[-1][-1] + 1)
            for a, ids in enumerate(self._env_ids):
                self._fill(columns, ids[0], len(ids), self._last[a][1])
        else:
            columns = self.layout.empty(len(env_ids))
            start = 0
            for a, rows in itertools.groupby(env_ids, self._host):
                taken = [i - self._env_ids[a][0] for i in rows]
                whole = len(taken) == len(self._env_ids[a])
                reply, size = self._last[a][1], len(self._env_ids[a])
                self._fill(columns, start, size, reply, None if whole else taken)
                start += len(taken)
        for env_id, held in self._held.items():
            if env_ids is None:
                self._fill(columns, env_id, 1, held)
            elif env_id in env_ids:
                self._fill(columns, env_ids.index(env_id), 1, held)
        return columns

    def _host(self, env_id: int) -> int:
        return env_id // len(self._env_ids[0])

    def _fill(
        self,
        columns: Sequence[np.ndarray[Any, Any]],
        start: int,
        rows: int,
        reply: Reply,
        taken: Sequence[int] | None = None,
    ) -> None:
        beside: list[Any] = reply.objects
        if self.layout.has_objects and not self._in_process:
            # Empty where a new actor has not reset an environment yet: that slot is held.
            beside = [pickle.loads(objects) if objects else () for objects in beside]
        self.layout.fill(columns, start, rows, reply.block, beside, taken)

    def _find(self, env_id: int) -> tuple[Reply, int, int] | None:
        """The reply that holds a slot's time step, its row there, and how many rows there are."""
        if env_id in self._held:
            return self._held[env_id], 0, 1
        if env_id in self._missing:
            return None
        a = self._host(env_id)
        ids = self._env_ids[a]
        return self._last[a][1], env_id - ids[0], len(ids)


_TRUNCATED = {"step_type": LAST, "reward": 0, "discount": 1}
