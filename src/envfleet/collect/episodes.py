"""What is known of episodes without their rows, and how they are to be written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Episodes(NamedTuple):
    """Episodes that have ended, in the order of their rows.

    Attributes:
      episode_id, env_id, length: int64 of shape ``(n,)``; the length in steps, one row less than
        the episode has.
      returns: float64 of shape ``(n,)``; the sum of the rewards, of all their leaves.
      ended: float64 of shape ``(n,)``; seconds since the epoch.
      cut: by the episode's id why it was cut short, of those that were.
      attempts: by the episode's id which one it was, of those that are not of their first seed.
    """

    episode_id: Array
    env_id: Array
    length: Array
    returns: Array
    ended: Array
    cut: dict[int, str]
    attempts: dict[int, int]

    @classmethod
    def joined(cls, parts: list[Episodes]) -> Episodes:
        """Those of all parts."""
        if not parts:
            none = np.zeros(0, np.int64)
            return cls(none, none, none, np.zeros(0), np.zeros(0), {}, {})
        ids, env_ids, lengths, returns, ended = (
            np.concatenate([part[i] for part in parts]) for i in range(5)
        )
        cut = {k: reason for part in parts for k, reason in part.cut.items()}
        attempts = {k: attempt for part in parts for k, attempt in part.attempts.items()}
        return cls(ids, env_ids, lengths, returns, ended, cut, attempts)

    def selected(self, chosen: Array) -> Episodes:
        """Those at the places that are chosen, or true."""
        ids, env_ids, lengths, returns, ended = (
            column[chosen] for column in (self.episode_id, self.env_id, *self[2:5])
        )
        kept = {*ids.tolist()} if self.cut or self.attempts else set()
        cut = {k: reason for k, reason in self.cut.items() if k in kept}
        attempts = {k: attempt for k, attempt in self.attempts.items() if k in kept}
        return Episodes(ids, env_ids, lengths, returns, ended, cut, attempts)

    @property
    def num_steps(self) -> int:
        """Of all of them."""
        return int(self.length.sum())

    def first_rows(self) -> Array:
        """Where each begins in the shard, and where the last one ends: shape ``(n + 1,)``."""
        return np.concatenate([[0], np.cumsum(self.length + 1)])


class Recording(NamedTuple):
    """How workers write.

    Attributes:
      directory: of the dataset.
      shard_bytes: of rows in memory, after which a shard is written.
      shard_seconds: after which one is written that holds less.
    """

    directory: str
    shard_bytes: int
    shard_seconds: float


class NotWritten(OSError):
    """A shard could not be written. Those before it stand."""
