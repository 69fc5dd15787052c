"""collect: from a configuration to a dataset on disk, whatever happens on the way."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from envfleet import gin_state
from envfleet.collect.collector import Collector, check_limits
from envfleet.collect.episodes import NotWritten, Recording
from envfleet.collect.identity import identity
from envfleet.collect.ledger import Ledger
from envfleet.collect.progress import Progress

if TYPE_CHECKING:
    from envfleet.collect.dataset import Dataset


class CollectResult(NamedTuple):
    """What a run of `collect` did.

    Attributes:
      path: the dataset's directory.
      stopped_by: ``"max_steps"``, ``"max_episodes"``, ``"max_seconds"``, or the name of the signal
        that ended the run: ``"SIGINT"``, ``"SIGTERM"``.
      num_steps, num_episodes: in the dataset, those of earlier runs included.
      seconds: of this run, without the start of the actors.
      steps_per_second: of this run, those steps included that were not needed in the end.
      num_failures: of environments and actors, in this run, after which they were restarted.
    """

    path: Path
    stopped_by: str
    num_steps: int
    num_episodes: int
    seconds: float
    steps_per_second: float
    num_failures: int


@gin_state.configurable
def collect(
    output_dir: str | os.PathLike[str],
    *,
    max_steps: int | None = None,
    max_episodes: int | None = None,
    max_seconds: float | None = None,
    resume: bool = False,
    shard_megabytes: float = 64.0,
    shard_seconds: float = 60.0,
    progress: bool = False,
    **collector: Any,
) -> CollectResult:
    """Collects whole episodes into a dataset, see `envfleet.collect.dataset`.

    The dataset is the first `max_episodes` episodes, or the first `max_steps` steps of episodes
    0, 1, 2, ... one after the other, of which the last is cut short there. Which these are follows
    from the seed: not from how many environments there are, nor from how fast each one is.

    Args:
      output_dir: where; on storage that all nodes see under this path. Made if it is not there.
      max_steps, max_episodes: of the dataset.
      max_seconds: of this run, from the first step on. Episodes that go on then are cut short, kept
        and marked; a run that resumes takes them again.
      resume: goes on with the dataset that is there, if there is one.
      shard_megabytes: size of a shard's rows in memory, about.
      shard_seconds: how long whole episodes wait at most until they are written; where their actor
        is in a step, until that ends. What is lost with a process is what was not written, and is
        collected again.
      progress: whether to show on stderr how far it is.
      collector: arguments of `Collector`, where gin does not say them.

    Raises:
      ModuleNotFoundError: pyarrow is not installed.
      ValueError: no limit; an argument that is wrong; a dataset that another configuration made,
        with all differences.
      FileExistsError: there is a dataset, and it is not to be resumed.
      BlockingIOError: another process writes it.
      NotWritten (OSError): a shard could not be written; those that stand can be read.
      Exception: what an environment or the policy raised, as `Collector`. What was complete is on
        disk.
    """
    check_pyarrow()
    from envfleet.collect.directory import Directory  # which needs pyarrow, as what it imports does
    from envfleet.collect.run import Run

    check_limits(max_steps=max_steps, max_episodes=max_episodes, max_seconds=max_seconds)
    check_arguments(collector, shard_megabytes=shard_megabytes, shard_seconds=shard_seconds)
    directory = Directory(Path(output_dir).absolute())
    with directory.held(), _display(progress) as display:
        made_by = identity(collector)
        ledger = Ledger(max_steps, max_episodes)
        limits = {"max_steps": max_steps, "max_episodes": max_episodes}
        if directory.has_dataset(resume, made_by, collector):
            directory.check_limits(**limits)
            ledger = directory.stock(**limits)
            if (end := ledger.end()) is not None and not end.steps:
                return _result(directory.tidied(end), end.rule, 0.0, 0, 0)
        directory.write_run(**limits, stopped_by=None)
        with Collector(**collector) as made:
            columns = directory.begin(made_by, made, _columns_of(made))
            run = Run(
                made.crew,
                Recording(str(directory.path), int(shard_megabytes * 2**20), float(shard_seconds)),
                columns,
                ledger,
                ticks=made.chunk_length,
                max_seconds=max_seconds,
                show=None if display is None else display.show,
            )
            try:
                stopped_by = run.go()
            except NotWritten as problem:
                raise NotWritten(problem.errno, directory.what_stands(problem)) from problem
            finally:
                with contextlib.suppress(OSError):  # what else failed is the news
                    directory.write_configuration(made)
            seconds = run.seconds
        directory.write_run(**limits, stopped_by=stopped_by)
        dataset = directory.dataset()
        directory.write_report(dataset)
        result = _result(dataset, stopped_by, seconds, run.num_steps, run.num_failures)
        if display is not None:
            display.close(
                run.snapshot()._replace(
                    num_steps=result.num_steps,
                    num_episodes=result.num_episodes,
                    seconds=seconds,
                    steps_per_second=result.steps_per_second,
                )
            )
        return result


def check_arguments(collector: Mapping[str, Any], **sizes: Any) -> None:
    """Raises `TypeError` or `ValueError` for what nobody takes, and sizes that are none."""
    unknown = collector.keys() - inspect.signature(Collector).parameters.keys()
    if unknown:
        raise TypeError(f"collect() got an unknown argument: {', '.join(sorted(unknown))}")
    for name, size in sizes.items():
        if not isinstance(size, int | float):
            raise TypeError(f"{name} is {size!r}, expected a number")
        if not size > 0:
            raise ValueError(f"{name} is {size}, expected more than 0")


def check_pyarrow() -> None:
    """Raises `ModuleNotFoundError` where datasets cannot be written."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ModuleNotFoundError(
            "datasets are written with pyarrow, which is not installed: "
            "pip install 'envfleet[collect]'",
            name="pyarrow",
        )


def _columns_of(made: Collector) -> list[dict[str, Any]]:
    """What a dataset of it has for columns.

    Raises:
      TypeError, ValueError: it cannot hold these environments' specs; says which leaf.
    """
    try:
        return list(made.crew.ask("columns", worker=0)[0])
    except (TypeError, ValueError) as problem:
        raise type(problem)(*problem.args) from None  # no failure of an environment's


def _result(
    dataset: Dataset, stopped_by: str, seconds: float, num_steps: int, num_failures: int
) -> CollectResult:
    return CollectResult(
        path=dataset.path,
        stopped_by=stopped_by,
        num_steps=dataset.num_steps,
        num_episodes=len(dataset),
        seconds=seconds,
        steps_per_second=num_steps / seconds if seconds else 0.0,
        num_failures=num_failures,
    )


@contextlib.contextmanager
def _display(wanted: bool) -> Iterator[Progress | None]:
    if not wanted:
        yield None
        return
    with Progress(sys.stderr) as progress:
        yield progress
