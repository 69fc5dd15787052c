"""Shards: the files of a dataset, each of which appears whole or not at all.

A shard is a Parquet file of whole episodes whose footer lists them; the shards in the directory
``data`` of a dataset, in which there is nothing else, are the truth about what is in it. A writer
has a directory of its own in ``_staging`` beside it: it writes there, syncs, and renames the file
into place. Whoever takes a writer's place first takes that directory away (`fence`): what the other
one may still write, alive on a node that was given up, then appears no more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from envfleet.collect.columns import CUT, Columns
from envfleet.collect.episodes import Episodes
from envfleet.time_steps import LAST

Array = np.ndarray[Any, Any]

_DATA, _STAGING = "data", "_staging"
_KEY = b"envfleet"
_ROW_GROUP_BYTES = 64 << 20


class Shard(NamedTuple):
    """A file, by its footer."""

    path: Path
    worker: int
    node: str
    episodes: Episodes

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """Its rows; of some columns, or all."""
        with pq.ParquetFile(self.path) as file:
            return file.read(columns=columns)


class ShardWriter:
    """Writes shards into a dataset's directory, in the place of the worker's earlier ones.

    Args:
      directory: of the dataset, on storage that all nodes share.
      worker: its number; of those with the same one only the last made can write.
      node: name of the machine, for the record.

    Raises:
      OSError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, columns: Columns, worker: int, node: str) -> None:
        self._directory, self._columns = directory, columns
        self._worker, self._node = worker, node
        self._name = f"{worker:04d}-{uuid.uuid4().hex[:12]}"
        self._staging = directory / _STAGING / self._name
        self._staging.mkdir(parents=True)
        (directory / _DATA).mkdir(exist_ok=True)
        fence(directory, worker, but=self._name)
        self._sequence = 0

    def write(self, table: pa.Table, episodes: Episodes) -> Path:
        """Writes a shard of these rows; when this returns, it is on disk.

        Raises:
          OSError: it could not be written. What stood before stands.
        """
        name = f"shard-{self._name}-{self._sequence:06d}.parquet"
        self._sequence += 1
        footer = _to_json(self._worker, self._node, episodes)
        final = self._directory / _DATA / name
        return _put(self._staging / name, final, table, footer, self._columns)

    def close(self) -> None:
        """Removes its directory."""
        shutil.rmtree(self._staging, ignore_errors=True)


def fence(directory: Path, worker: int | None = None, but: str = "") -> None:
    """Makes writers harmless that may be alive: those of one worker, or all."""
    pattern = "*" if worker is None else f"{worker:04d}-*"
    for found in sorted((directory / _STAGING).glob(pattern)):
        if found.name != but:
            gone = found.with_name(f"gone-{uuid.uuid4().hex}")
            with contextlib.suppress(FileNotFoundError):
                found.rename(gone)  # at once: what its writer does from here on fails
                shutil.rmtree(gone, ignore_errors=True)


def remove_staging(directory: Path) -> None:
    """Takes away what a finished run needs no more."""
    fence(directory)
    with contextlib.suppress(OSError):
        (directory / _STAGING).rmdir()


def paths(directory: Path) -> list[Path]:
    """The shards that stand in a dataset's directory, in the order of their names."""
    return sorted((directory / _DATA).glob("shard-*.parquet"))


def read(path: Path) -> Shard:
    """What a shard's footer says.

    Raises:
      ValueError: it is no shard of a dataset of envfleet's.
    """
    metadata = pq.read_metadata(path).metadata or {}
    if _KEY not in metadata:
        raise ValueError(f"{path} has no footer of envfleet's: a file of another origin?")
    return _from_json(path, json.loads(metadata[_KEY]))


def rewrite(
    shard: Shard, columns: Columns, kept: Array, steps: Mapping[int, int], reason: str
) -> None:
    """Leaves only some episodes in a shard, some of them shorter; without any, the file goes.

    Args:
      kept: a bool for each episode.
      steps: by the episode's id how many steps of it stay.
      reason: in the last row of those.
    """
    if not kept.any():
        shard.path.unlink()
        _sync(shard.path.parent)
        return
    before = shard.episodes
    after = before.selected(kept)
    lengths = [
        steps.get(number, length)
        for number, length in zip(after.episode_id.tolist(), after.length.tolist(), strict=True)
    ]
    after = after._replace(
        length=np.asarray(lengths, np.int64),
        cut={**after.cut, **dict.fromkeys(steps.keys() & {*after.episode_id.tolist()}, reason)},
    )
    stays = np.zeros(int(before.first_rows()[-1]), bool)
    begins = before.first_rows()[:-1][kept].tolist()
    for begin, length in zip(begins, lengths, strict=True):
        stays[begin : begin + length + 1] = True
    rows = columns.rows(shard.table())
    rows = {name: values[stays] for name, values in rows.items() if name != CUT}
    first = after.first_rows()
    for i, number in enumerate(after.episode_id.tolist()):
        if number in steps:
            end_at(rows, int(first[i + 1]) - 1, columns)
    after = after._replace(returns=sums(rows, first[:-1], columns))
    staging = shard.path.parents[1] / _STAGING / f"rewritten-{uuid.uuid4().hex}"
    staging.mkdir(parents=True)
    try:
        footer = _to_json(shard.worker, shard.node, after)
        table = columns.table(rows, reasons(after))
        _put(staging / shard.path.name, shard.path, table, footer, columns)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def reasons(episodes: Episodes) -> list[tuple[int, str]]:
    """(row, reason) of the last rows that say why their episode was cut."""
    if not episodes.cut:
        return []
    ends = (episodes.first_rows()[1:] - 1).tolist()
    return [
        (end, episodes.cut[number])
        for number, end in zip(episodes.episode_id.tolist(), ends, strict=True)
        if number in episodes.cut
    ]


def end_at(rows: Mapping[str, Array], row: int, columns: Columns) -> None:
    """Makes a row the last one of an episode that was cut short there by truncation."""
    rows["step_type"][row] = LAST
    for leaf in columns.leaves:
        if leaf.part != "observation":
            rows[leaf.name][row] = "" if leaf.dtype.hasobject else 0
    rows["terminated"][row - 1 : row + 1] = False
    rows["truncated"][row - 1 : row + 1] = True, False


def sums(rows: Mapping[str, Array], first: Any, columns: Columns) -> Array:
    """Returns of episodes that begin at these rows: float64 of shape ``(n,)``."""
    total = np.zeros(len(first))
    for leaf in columns.leaves:
        if leaf.part == "reward" and leaf.is_stored and len(first):
            each = np.asarray(rows[leaf.name], np.float64).reshape(len(rows["t"]), -1).sum(axis=1)
            total += np.add.reduceat(each, first)
    return total


# -- files -----------------------------------------------------------------------------------------


def _put(aside: Path, final: Path, table: pa.Table, footer: bytes, columns: Columns) -> Path:
    """Writes a file aside, syncs it and renames it into place."""
    try:
        with open(aside, "xb") as file:
            with pq.ParquetWriter(
                file,
                table.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=columns.repeating,
                write_statistics=["episode_id"],
            ) as writer:
                per_row = max(table.nbytes // max(len(table), 1), 1)
                writer.write_table(table, row_group_size=max(_ROW_GROUP_BYTES // per_row, 1))
                writer.add_key_value_metadata({_KEY: footer})
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, final)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    try:
        _sync(final.parent)
    except OSError:
        final.unlink(missing_ok=True)  # who is told that it is not written writes it again
        raise
    return final


def _sync(directory: Path) -> None:
    """Makes renames in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # storage that syncs no directories
            raise
    finally:
        os.close(descriptor)


def _to_json(worker: int, node: str, episodes: Episodes) -> bytes:
    ids = episodes.episode_id.tolist()
    footer = {
        "format": 1,
        "worker": worker,
        "node": node,
        "episode_id": ids,
        "env_id": episodes.env_id.tolist(),
        "length": episodes.length.tolist(),
        "return": [one if np.isfinite(one) else str(one) for one in episodes.returns.tolist()],
        "ended": np.round(episodes.ended, 2).tolist(),
        "cut": episodes.cut,
        "attempt": episodes.attempts,
    }
    return json.dumps(footer, separators=(",", ":")).encode()


def _from_json(path: Path, footer: Mapping[str, Any]) -> Shard:
    episodes = Episodes(
        episode_id=np.asarray(footer["episode_id"], np.int64),
        env_id=np.asarray(footer["env_id"], np.int64),
        length=np.asarray(footer["length"], np.int64),
        returns=np.asarray(footer["return"], np.float64),
        ended=np.asarray(footer["ended"], np.float64),
        cut={int(k): reason for k, reason in footer["cut"].items()},
        attempts={int(k): attempt for k, attempt in footer["attempt"].items()},
    )
    return Shard(path, footer["worker"], footer["node"], episodes)
