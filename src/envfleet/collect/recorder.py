"""Recorder: how a worker's rows become whole episodes, and these the shards of a dataset."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.collect.columns import Columns
from envfleet.collect.episodes import Episodes, NotWritten, Recording
from envfleet.collect.rollout import Chunk
from envfleet.collect.shards import ShardWriter, end_at, reasons, sums
from envfleet.layout import Layout
from envfleet.time_steps import LAST

Array = np.ndarray[Any, Any]
Rows = dict[str, Array]

FAILURE = "failure"
"""Why an episode was cut: its environment failed and was restarted."""


class Recorder:
    """Puts the rows of chunks together to whole episodes, and these to shards.

    The rows of an episode that goes on are kept until it ends.

    Args:
      recording: how to write.
      time_step_spec, action_spec: of the environments.
      worker, node: as for `ShardWriter`.
      first_env: number of the worker's first environment.

    Raises:
      TypeError, ValueError: a dataset cannot hold these specs; says which leaf.
      OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        time_step_spec: Any,
        action_spec: Any,
        worker: int,
        node: str,
        first_env: int,
    ) -> None:
        self.columns = Columns.of(time_step_spec, action_spec)
        self._recording, self._first_env = recording, first_env
        self._writer = ShardWriter(Path(recording.directory), self.columns, worker, node)
        self._layouts = {
            "observation": Layout(time_step_spec.observation, "observation"),
            "action": Layout(action_spec, "actions"),
            "reward": Layout(time_step_spec.reward, "reward"),
            "discount": Layout(time_step_spec.discount, "discount"),
        }
        self.attempts: dict[int, int] = {}
        self._going_on: dict[int, list[Rows]] = {}
        """By the environment the rows, in parts, of the episode that goes on."""
        self._whole: list[tuple[Rows, Episodes]] = []
        self._bytes = 0
        self._since = time.monotonic()
        self._cut: set[int] = set()

    # -- taking rows -------------------------------------------------------------------------------

    def add(self, chunk: Chunk) -> Episodes:
        """Takes a chunk; gives the episodes that ended in it."""
        rows, failed = self._by_env(chunk)
        ended: list[tuple[Rows, Array]] = []
        is_last = rows["step_type"] == LAST
        env = rows["env_id"]
        bounds = [0, *(np.flatnonzero(env[1:] != env[:-1]) + 1).tolist(), len(env)]
        for first, end in itertools.pairwise(bounds):
            if first == end:
                continue
            parts = self._going_on.setdefault(int(env[first]), [])
            over = np.flatnonzero(is_last[first:end])
            stop = first if not len(over) else first + int(over[-1]) + 1
            if stop > first:
                whole = _joined([*parts, {name: of[first:stop] for name, of in rows.items()}])
                parts.clear()
                ended.append((whole, failed[first:stop][over]))
            if stop < end:
                parts.append({name: of[stop:end] for name, of in rows.items()})
        if not ended:
            return Episodes.joined([])
        whole = _joined([rows for rows, _ in ended])
        return self._keep(whole, np.concatenate([which for _, which in ended]))

    def _by_env(self, chunk: Chunk) -> tuple[Rows, Array]:
        """The rows that mean something, of one environment after the other; and who failed."""
        mask, ticks = chunk.mask.T, len(chunk.mask)
        everything = bool(mask.all())

        def ordered(column: Array) -> Array:
            turned = np.swapaxes(column, 0, 1)
            if not everything:
                return np.asarray(turned[mask])
            return np.ascontiguousarray(turned).reshape(turned.shape[0] * ticks, *column.shape[2:])

        rows = {
            "episode_id": ordered(chunk.episode),
            "env_id": ordered(np.broadcast_to(chunk.env_ids.astype(np.int32), (ticks, len(mask)))),
            "t": ordered(chunk.t),
            "step_type": ordered(chunk.step_type.astype(np.int8)),
        }
        leaves = [
            leaf
            for part, layout in self._layouts.items()
            for leaf in layout.flatten(getattr(chunk, part))
        ]
        for column, leaf in zip(self.columns.leaves, leaves, strict=True):
            rows[column.name] = ordered(leaf)
        rows["terminated"], rows["truncated"] = ordered(chunk.terminated), ordered(chunk.truncated)
        rows["policy_version"] = np.full(len(rows["t"]), chunk.policy_version, np.int32)
        return rows, ordered(chunk.failed)

    def _keep(self, rows: Rows, failed: Array) -> Episodes:
        """Keeps whole episodes for the next shard."""
        last = np.flatnonzero(rows["step_type"] == LAST)
        first = np.concatenate([[0], last[:-1] + 1])
        ids = rows["episode_id"][last]
        episodes = Episodes(
            episode_id=ids,
            env_id=rows["env_id"][last].astype(np.int64),
            length=rows["t"][last].astype(np.int64),
            returns=sums(rows, first, self.columns),
            ended=np.full(len(last), time.time()),
            cut=dict.fromkeys(ids[failed].tolist(), FAILURE) if failed.any() else {},
            attempts={},
        )
        if self.attempts:
            episodes.attempts.update(
                {k: self.attempts.pop(k) for k in ids.tolist() if k in self.attempts}
            )
        if self._cut and not self._cut.isdisjoint(ids.tolist()):  # it stands in the dataset
            kept = ~np.isin(ids, [*self._cut])
            rows = {name: of[np.repeat(kept, episodes.length + 1)] for name, of in rows.items()}
            episodes = episodes.selected(kept)
        if len(episodes.length):
            self._whole.append((rows, episodes))
            self._bytes += sum(column.nbytes for column in rows.values())
        return episodes

    # -- giving them away --------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there is a shard to write."""
        if not self._whole:
            self._since = time.monotonic()
            return False
        is_large = self._bytes >= self._recording.shard_bytes
        return is_large or time.monotonic() - self._since >= self._recording.shard_seconds

    def flush(self) -> Episodes:
        """Writes the whole episodes that are there; gives them, when they are on disk.

        Raises:
          NotWritten: they are still there.
        """
        if not self._whole:
            return Episodes.joined([])
        episodes = Episodes.joined([episodes for _, episodes in self._whole])
        rows = _joined([rows for rows, _ in self._whole])
        self._whole = [(rows, episodes)]
        table = self.columns.table(rows, reasons(episodes))
        try:
            self._writer.write(table, episodes)
        except OSError as problem:
            raise NotWritten(problem.errno, str(problem), self._recording.directory) from problem
        self._whole, self._bytes, self._since = [], 0, time.monotonic()
        return episodes

    def cut(self, steps: Mapping[int, int], reason: str, observation: Any) -> Episodes:
        """Ends episodes that go on, after so many steps; flush() writes them.

        Args:
          steps: by the episode's number how many of its steps are kept, at least one.
          reason: in their last row.
          observation: what the environments show now, leaves of shape ``(B, *shape)``.
        """
        leaves = self._layouts["observation"].flatten(observation)
        made = [Episodes.joined([])]
        for env_id, parts in self._going_on.items():
            number = int(parts[-1]["episode_id"][-1]) if parts else -1
            if number not in steps:
                continue
            rows = _joined([*parts, self._shown(parts[-1], leaves, env_id - self._first_env)])
            rows = {name: of[: steps[number] + 1].copy() for name, of in rows.items()}
            end_at(rows, steps[number], self.columns)
            episodes = self._keep(rows, np.zeros(1, bool))
            episodes.cut[number] = reason
            self._cut.add(number)
            made.append(episodes)
        return Episodes.joined(made)

    def _shown(self, last: Rows, leaves: Sequence[Any], place: int) -> Rows:
        """One row more, with what an environment shows now."""
        row = {name: of[-1:].copy() for name, of in last.items()}
        row["t"] += 1
        observations = [leaf for leaf in self.columns.leaves if leaf.part == "observation"]
        for leaf, values in zip(observations, leaves, strict=True):
            row[leaf.name][0] = values[place]
        return row

    def close(self) -> None:
        """Takes away what the writer has aside."""
        self._writer.close()


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
