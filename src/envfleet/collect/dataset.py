"""Dataset: what a run of collection leaves in its directory, and how it is read again.

::

    dataset.json            written first and never changed: columns, seed, what was collected
    data/shard-....parquet  whole episodes; see `envfleet.collect.shards`
    config.gin              gin's configuration, and what of it was used
    operative_config.gin
    failures.jsonl          environments and actors that failed
    report.html             a page on the run

The shards alone are read by whatever reads Parquet; this is for reading whole episodes.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from envfleet import seeding
from envfleet.collect import shards
from envfleet.collect.columns import CUT, PARTS, Columns, numpy_of
from envfleet.collect.episodes import Episodes
from envfleet.collect.shards import Shard
from envfleet.time_steps import LAST

Array = np.ndarray[Any, Any]

MANIFEST = "dataset.json"
FAILURES = "failures.jsonl"


class Episode(NamedTuple):
    """An episode of T steps. Structures are nested dicts and tuples.

    Attributes:
      episode_id: its number, from 0 through the run.
      env_id: the environment that it is of: the number modulo the environments that there were.
      observation: leaves of shape ``(T + 1, *shape)``: the last one is the final observation.
      action, reward, discount: leaves of shape ``(T, *shape)``: what was done upon the observation
        of the same row, and what came of it.
      terminated, truncated: bool; how the last step ended it.
      cut: why it was cut short: None, ``"failure"`` (of the environment, which was restarted),
        ``"max_steps"`` or ``"max_seconds"``. What is cut is truncated.
      policy_version: int32 of shape ``(T,)``.
      seed: of the environment, for this episode.
    """

    episode_id: int
    env_id: int
    observation: Any
    action: Any
    reward: Any
    discount: Any
    terminated: bool
    truncated: bool
    cut: str | None
    policy_version: Array
    seed: int


class Dataset:
    """A dataset that is opened for reading. Iterating gives its episodes, shard by shard.

    Args:
      path: its directory.
      include_cut: whether there are episodes in it that were cut short by something else than
        their environment or `max_episode_steps`.

    Attributes:
      path: the directory.
      manifest: what ``dataset.json`` says.
      columns: what is in which column.
      shards: what the footers say.

    Raises:
      FileNotFoundError: there is no dataset.
      ValueError: it is of a format that this version does not know, or its shards list an episode
        twice.
    """

    def __init__(self, path: str | os.PathLike[str], *, include_cut: bool = True) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.columns = Columns.from_json(self.manifest["columns"])
        self.shards = [shards.read(path) for path in shards.paths(self.path)]
        self._include_cut = include_cut
        ids = Episodes.joined([shard.episodes for shard in self.shards]).episode_id
        if len(np.unique(ids)) < len(ids):
            found, number = np.unique(ids, return_counts=True)
            raise ValueError(f"{self.path} has episode {found[number > 1][0]} twice")

    def __repr__(self) -> str:
        return f"<Dataset of {len(self)} episodes, {self.num_steps} steps in {self.path}>"

    def episodes(self) -> Episodes:
        """What is known of the episodes without reading any, in the order of iteration."""
        return Episodes.joined([s.episodes.selected(self._chosen(s)) for s in self.shards])

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(self._chosen(shard))) for shard in self.shards)

    @property
    def num_steps(self) -> int:
        """Of all episodes."""
        return sum(int(shard.episodes.length[self._chosen(shard)].sum()) for shard in self.shards)

    def _chosen(self, shard: Shard) -> Array:
        if self._include_cut or not shard.episodes.cut:
            return np.ones(len(shard.episodes.length), bool)
        return ~np.isin(shard.episodes.episode_id, [*shard.episodes.cut])

    def __iter__(self) -> Iterator[Episode]:
        for shard in self.shards:
            rows = self.columns.rows(shard.table())
            first = shard.episodes.first_rows()
            for i in np.flatnonzero(self._chosen(shard)).tolist():
                yield self._episode(rows, slice(first[i], first[i + 1]), shard.episodes)

    def _episode(self, rows: Mapping[str, Array], own: slice, known: Episodes) -> Episode:
        steps = slice(own.start, own.stop - 1)
        number = int(rows["episode_id"][own.start])
        parts = {
            part: self.columns.structure(
                part, {k: v[own if part == "observation" else steps] for k, v in rows.items()}
            )
            for part in PARTS
        }
        return Episode(
            **parts,
            episode_id=number,
            env_id=int(rows["env_id"][own.start]),
            terminated=bool(rows["terminated"][steps.stop - 1]),
            truncated=bool(rows["truncated"][steps.stop - 1]),
            cut=known.cut.get(number),
            policy_version=rows["policy_version"][steps],
            seed=seeding.of_episode(self.manifest["seed"], number, known.attempts.get(number, 0))[
                0
            ],
        )

    def transitions(self) -> Iterator[pa.Table]:
        """A table a shard with a row for each step, and columns ``next_observation.<path>``.

        There are no last rows, and no column `cut`; everything else is as in the shards.
        """
        observations = [leaf for leaf in self.columns.stored if leaf.part == "observation"]
        for shard in self.shards:
            table = shard.table()
            chosen = np.repeat(self._chosen(shard), shard.episodes.length + 1)
            is_step = numpy_of(table.column("step_type")) != LAST
            steps = np.flatnonzero(is_step & chosen)
            view = table.take(pa.array(steps)).drop_columns([CUT])
            for leaf in observations:
                name = leaf.name.replace("observation", "next_observation", 1)
                view = view.append_column(name, table.column(leaf.name).take(pa.array(steps + 1)))
            yield view

    def write_transitions(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes `transitions` as Parquet files, as RLlib's offline reader takes them.

        Returns:
          The files.

        Raises:
          FileExistsError: the directory is there already.
        """
        target = Path(directory)
        target.mkdir(parents=True)
        files = []
        for shard, table in zip(self.shards, self.transitions(), strict=True):
            if len(table):
                files.append(target / shard.path.name.replace("shard", "transitions", 1))
                pq.write_table(table, files[-1], compression="zstd", row_group_size=len(table))
        return files


def load(path: str | os.PathLike[str], *, include_cut: bool = True) -> Dataset:
    """Opens a dataset; iterating over it gives an `Episode` after the other.

    Args:
      path: its directory.
      include_cut: False leaves out what was cut short, see `Episode.cut`.

    Raises:
      FileNotFoundError, ValueError: as `Dataset`.
    """
    return Dataset(path, include_cut=include_cut)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What ``dataset.json`` says.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is of another format.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} holds no dataset: no {MANIFEST} there") from None
    except ValueError as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from None
    if manifest.get("format") != 1:
        raise ValueError(
            f"{path} is of format {manifest.get('format')!r}, expected 1: written by a newer "
            "envfleet?"
        )
    return dict(manifest)


def write_aside(path: Path, text: str, *, anew: bool = False) -> None:
    """Writes a text file that appears whole or not at all.

    Raises:
      FileExistsError: it is there, and was to be made `anew`.
    """
    aside = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        with open(aside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if anew and path.exists():
            raise FileExistsError(errno.EEXIST, "is there already", str(path))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
