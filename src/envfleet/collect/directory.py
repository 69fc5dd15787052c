"""Directory: where a run leaves its dataset, and what stands there beside the shards.

It is one run's at a time. What is in it is `envfleet.collect.dataset`'s to say; besides that there
is ``run.json``, what the latest run was asked for, and how it ended.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envfleet import gin_state
from envfleet.collect import shards
from envfleet.collect.collector import Collector
from envfleet.collect.columns import Columns
from envfleet.collect.dataset import MANIFEST, Dataset, load, read_manifest, write_aside
from envfleet.collect.identity import COLLECTOR, check_same, words
from envfleet.collect.ledger import End, Ledger
from envfleet.collect.policies import RandomPolicy
from envfleet.collect.report import render
from envfleet.collect.run import take_stock, trim
from envfleet.collect.summary import report_of

_RUN = "run.json"


class Directory:
    """A directory that a run writes its dataset into.

    Args:
      path: absolute, on storage that all nodes see.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[str, Any] | None = None

    # -- who may write -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Made, and this run's alone; taken away again where that ends before it has a dataset.

        Raises:
          OSError: it cannot be made, or not be written to.
          BlockingIOError: another process writes there.
        """
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "cannot be written to", str(self.path))
        try:
            with self._locked():
                yield
        finally:
            if not (self.path / MANIFEST).exists():
                (self.path / _RUN).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for path in new:
                        path.rmdir()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other callers out, until this process ends in whatever way."""
        path = self.path / "_lock"
        with contextlib.ExitStack() as held:
            while True:
                file = held.enter_context(open(path, "w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise BlockingIOError(
                        errno.EAGAIN, "another process is writing a dataset here", str(self.path)
                    ) from None
                with contextlib.suppress(FileNotFoundError):
                    if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                        break  # else its holder has taken the file away meanwhile
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    # -- what stands there -------------------------------------------------------------------------

    def has_dataset(
        self, resume: bool, identity: Mapping[str, str], collector: dict[str, Any]
    ) -> bool:
        """Whether there is a dataset, which is then to be gone on with.

        Puts the seed that was drawn for it into the collector's arguments, where none is given.

        Raises:
          FileExistsError: there is a dataset, and it is not to be resumed.
          ValueError: another configuration made it, with all differences.
        """
        if not (self.path / MANIFEST).exists():
            if shards.paths(self.path):
                raise FileExistsError(
                    errno.EEXIST, f"there are shards, but no {MANIFEST}", str(self.path)
                )
            return False
        if not resume:
            raise FileExistsError(
                errno.EEXIST,
                "there is a dataset: name another directory, or go on with it by resume",
                str(self.path),
            )
        manifest = read_manifest(self.path)
        if collector.get("seed") is None and gin_state.bound(COLLECTOR, "seed") is None:
            collector["seed"] = manifest["seed"]
        seed = collector.get("seed", gin_state.bound(COLLECTOR, "seed"))
        check_same(
            self.path,
            {**manifest["identity"], "seed": manifest["seed"]},
            {**identity, "seed": seed},
        )
        self._before = manifest
        return True

    def check_limits(self, *, max_steps: int | None, max_episodes: int | None) -> None:
        """Raises `ValueError` where less is asked for than is there: nothing is thrown away."""
        limits = {"max_steps": max_steps, "max_episodes": max_episodes}
        earlier, dataset = self._read_run(), self.dataset()
        there = {"max_steps": dataset.num_steps, "max_episodes": len(dataset)}
        for name, limit in limits.items():
            before = earlier.get(name)
            if limit is not None and there[name] > limit and (before is None or before > limit):
                raise ValueError(
                    f"{self.path} holds {there[name]:,} {name[4:]}, more than {name} = {limit:,}"
                )

    def stock(self, *, max_steps: int | None, max_episodes: int | None) -> Ledger:
        """What stands there, by `take_stock`, of a dataset that is gone on with."""
        return take_stock(self.path, self._columns(), max_steps, max_episodes)

    def tidied(self, end: End) -> Dataset:
        """A dataset that is complete, when what a run that was killed left undone is done."""
        trim(self.path, self._columns(), end)
        shards.remove_staging(self.path)
        said, dataset = self._read_run(), self.dataset()
        if said.get("stopped_by") is None:
            self.write_run(**{**said, "stopped_by": end.rule})
            self.write_report(dataset)
        return dataset

    def dataset(self) -> Dataset:
        """What can be read there."""
        return load(self.path)

    def _columns(self) -> Columns:
        assert self._before is not None
        return Columns.from_json(self._before["columns"])

    def what_stands(self, problem: OSError) -> str:
        """A problem with a shard, and what there is in spite of it, in words."""
        dataset = self.dataset()
        return (
            f"{problem.strerror}; {len(dataset):,} episodes with {dataset.num_steps:,} steps stand "
            f"in {self.path} and can be read, resume goes on from there"
        )

    # -- what is written ---------------------------------------------------------------------------

    def begin(
        self, identity: Mapping[str, str], made: Collector, columns: list[dict[str, Any]]
    ) -> Columns:
        """From here on there is a dataset, of these columns.

        Raises:
          ValueError: the one that is gone on with has others, with all differences.
        """
        if self._before is None:
            self._write_manifest(identity, made, columns)
        else:
            check_same(self.path, _by_name(self._before["columns"]), _by_name(columns))
        return Columns.from_json(columns)

    def _write_manifest(
        self, identity: Mapping[str, str], made: Collector, columns: list[dict[str, Any]]
    ) -> None:
        said = {
            "format": 1,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "seed": made.seed,
            "environment": [words(one) for one in made.crew.env_constructors],
            "policy": words(made.crew.policy or RandomPolicy),
            "identity": dict(identity),
            "columns": columns,
            "run": {"num_actors": len(made.crew), "num_envs": made.num_envs},
            "versions": {
                "python": platform.python_version(),
                **{
                    package: importlib.metadata.version(package)
                    for package in ("envfleet", "ray", "numpy", "pyarrow")
                },
            },
        }
        write_aside(self.path / MANIFEST, json.dumps(said, indent=1) + "\n", anew=True)

    def write_run(self, **said: Any) -> None:
        """What the latest run was asked for, and how it ended."""
        write_aside(self.path / _RUN, json.dumps(said, indent=1) + "\n")

    def _read_run(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.path / _RUN).read_text()))
        return {}

    def write_configuration(self, made: Collector) -> None:
        """gin's configuration, and what of it was used, here and in actors."""
        write_aside(self.path / "config.gin", gin_state.config_text())
        used: list[gin_state.Operative] = [gin_state.operative()]
        with contextlib.suppress(Exception):  # of actors that are gone
            used += made.crew.ask("operative")
        write_aside(self.path / "operative_config.gin", gin_state.operative_text(used))

    def write_report(self, dataset: Dataset) -> None:
        """The page on what was collected."""
        configuration = ""
        with contextlib.suppress(FileNotFoundError):  # of a run that was killed
            configuration = (self.path / "operative_config.gin").read_text()
        write_aside(self.path / "report.html", render(report_of(dataset, configuration)))


def _by_name(columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {column["column"]: column for column in columns}
