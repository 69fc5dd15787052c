"""Flights: which environments are under way, from being sent until their time step is handed over.

An environment takes off with a step or a reset. It has landed when its call has given a time step,
or the end of its episode by truncation; where a restart has to give it a first one, it is awaited.
A lockstep call sends all and takes all; first-ready stepping takes those that have landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from envfleet.actors import Sent


class Flights:
    """The environments under way.

    Attributes:
      calls: the calls that move them, until what they gave has been kept.
      landed: environments whose time step is there to be handed over.
      awaited: environments whose restart has to give it.
      is_lockstep: whether they were sent by a call that takes all of them.
    """

    def __init__(self) -> None:
        self.calls: list[Sent] = []
        self.landed: set[int] = set()
        self.awaited: set[int] = set()
        self.is_lockstep = False
        self._num_recvs = 0
        self._sent_before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sent_before)

    def __contains__(self, env_id: int) -> bool:
        return env_id in self._sent_before

    def __iter__(self) -> Iterator[int]:
        return iter(self._sent_before)

    def take_off(self, env_ids: Iterable[int]) -> None:
        """They are under way."""
        self._sent_before.update(dict.fromkeys(env_ids, self._num_recvs))

    def end(self, env_ids: Iterable[int]) -> None:
        """They are no longer under way: their time step was handed over, or there is none."""
        for i in env_ids:
            self._sent_before.pop(i, None)
            self.landed.discard(i)
            self.awaited.discard(i)

    def clear(self) -> None:
        """None is under way."""
        self.calls = []
        self.landed.clear()
        self.awaited.clear()
        self._sent_before.clear()

    def receive(self, max_staleness: int | None) -> set[int]:
        """Counts one more `recv`; gives those that it has to wait for, for they are that old."""
        self._num_recvs += 1
        if max_staleness is None:
            return set()
        oldest = self._num_recvs - max_staleness
        return {i for i, before in self._sent_before.items() if before <= oldest}
