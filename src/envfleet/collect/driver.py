"""collect: from a configuration to a dataset on disk, whatever happens on the way."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from envfleet import gin_state
from envfleet.collect.collector import Collector, check_limits
from envfleet.collect.crew import Crew
from envfleet.collect.episodes import NotWritten, Recording
from envfleet.collect.ledger import End, Ledger
from envfleet.collect.policies import RandomPolicy

if TYPE_CHECKING:
    from envfleet.collect.columns import Columns
    from envfleet.collect.dataset import Dataset
    from envfleet.collect.progress import Progress

_OWN = frozenset(
    {
        *("output_dir", "max_steps", "max_episodes", "max_seconds", "resume", "progress"),
        *("shard_megabytes", "shard_seconds"),
    }
)
"""What `collect` takes itself; all else is the collector's."""

_OF_THE_RUN = _OWN | {
    *("num_actors", "envs_per_actor", "inference", "min_ready", "chunk_length", "max_policy_lag"),
    *("on_failure", "max_restarts", "step_timeout", "reset_timeout", "start_timeout"),
    *("actor_options", "ray_init", "backend", "seed"),
}
"""Arguments that may differ when a dataset is gone on with: its episodes do not depend on them."""

_COLLECT, _COLLECTOR = "envfleet.collect", "envfleet.Collector"
"""Their names to gin."""


_RUN = "run.json"


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
      shard_seconds: how long whole episodes wait at most until they are written. What is lost with
        a process is what was not, and is collected again.
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
    from envfleet.collect.columns import Columns
    from envfleet.collect.dataset import load
    from envfleet.collect.run import Run, take_stock

    check_limits(max_steps=max_steps, max_episodes=max_episodes, max_seconds=max_seconds)
    _check_arguments(collector, shard_megabytes=shard_megabytes, shard_seconds=shard_seconds)
    directory = Path(output_dir).absolute()
    with _made(directory), _locked(directory), _display(progress) as display:
        identity = _identity(collector)
        ledger = Ledger(max_steps, max_episodes)
        before = _before(directory, resume, identity, collector)
        if before is not None:
            _check_limits_of(directory, max_steps=max_steps, max_episodes=max_episodes)
            stored = Columns.from_json(before["columns"])
            ledger = take_stock(directory, stored, max_steps, max_episodes)
            if (end := ledger.end()) is not None and not end.steps:
                return _result(_tidied(directory, stored, end), end.rule, 0.0, 0, 0)
        _write_run(directory, max_steps=max_steps, max_episodes=max_episodes, stopped_by=None)
        with Collector(**collector) as made:
            columns = _columns_of(made)
            if before is None:
                _write_manifest(directory, identity, made, columns)
            elif differences := _differences(before["columns"], columns):
                raise ValueError(_refusal(directory, differences))
            recording = Recording(
                str(directory), int(shard_megabytes * 2**20), float(shard_seconds)
            )
            run = Run(
                made.crew,
                recording,
                Columns.from_json(columns),
                ledger,
                ticks=made.chunk_length,
                max_seconds=max_seconds,
                show=None if display is None else display.show,
            )
            try:
                stopped_by = run.go()
            except NotWritten as problem:
                raise NotWritten(problem.errno, _what_stands(directory, problem)) from problem
            finally:
                with contextlib.suppress(OSError):  # what else failed is the news
                    _write_configuration(directory, made)
            seconds = run.seconds
        _write_run(directory, max_steps=max_steps, max_episodes=max_episodes, stopped_by=stopped_by)
        dataset = load(directory)
        _write_report(dataset)
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


def plan(**arguments: Any) -> str:
    """What `collect` would do with these arguments, and by which configuration, as text.

    Builds one environment and the policy, in this process, and takes a few steps; starts no actor
    and writes nothing.

    Raises:
      Exception: what `collect` would raise about its arguments, an environment or the policy.
    """
    given = {**gin_state.arguments(_COLLECT), **arguments}
    own = {name: given.pop(name) for name in [*given] if name in _OWN}
    limits = {name: own.get(name) for name in ("max_steps", "max_episodes", "max_seconds")}
    check_limits(**limits)
    sizes = {name: own[name] for name in ("shard_megabytes", "shard_seconds") if name in own}
    _check_arguments(given, **sizes)
    with _Planned(**given) as planned:
        assert isinstance(planned, _Planned)
        for _ in planned.collect(max_steps=2):
            pass
        size = planned.crew.ask("bytes_per_step", worker=0)[0]
        told = {("", _COLLECT): {name: repr(value) for name, value in own.items()}}
        used = gin_state.operative_text([gin_state.operative(), told])
        actors, each = planned.asked["num_actors"], planned.asked["envs_per_actor"]
        where = "here" if planned.asked["inference"] == "central" else "in each actor"
        address = os.environ.get("RAY_ADDRESS")
        lines = {
            "to": f"{Path(own['output_dir']).absolute()}",
            "until": ", ".join(f"{k} = {v:,}" for k, v in limits.items() if v is not None),
            "actors": f"{actors}, each with {each} environments: {actors * each} in all",
            "policy": f"{words(planned.crew.policy or RandomPolicy)}, {where}",
            "resources": f"of each actor: {planned.asked['actor_options'] or '1 CPU'}",
            "nodes": f"those of the Ray at {address}"
            if address
            else f"this machine, {len(os.sched_getaffinity(0))} CPUs, unless a Ray runs here",
            "bytes per step": f"{size} of an environment, {size * actors * each:,} of all",
        }
        return used + "\n" + "\n".join(f"{name + ':':16}{text}" for name, text in lines.items())


class _Planned(Collector):
    """One environment of a collector, here; and how many there would be."""

    def _hire(self, **arguments: Any) -> Crew:
        self.asked = dict(arguments)
        one = {
            "num_actors": 1,
            "envs_per_actor": 1,
            "inference": "actors",
            "backend": "local",
            "min_ready": None,
        }
        if isinstance(arguments["env_constructor"], list | tuple):
            one["env_constructor"] = arguments["env_constructor"][0]
        return super()._hire(**{**arguments, **one})


def _check_arguments(collector: Mapping[str, Any], **sizes: Any) -> None:
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


def _tidied(directory: Path, columns: Columns, end: End) -> Dataset:
    """A dataset that is complete, when what a run that was killed then left undone is done."""
    from envfleet.collect import shards
    from envfleet.collect.dataset import load
    from envfleet.collect.run import trim

    trim(directory, columns, end)
    shards.remove_staging(directory)
    said, dataset = _read_run(directory), load(directory)
    if said.get("stopped_by") is None:
        _write_run(directory, **{**said, "stopped_by": end.rule})
        _write_report(dataset)
    return dataset


# -- the directory ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Makes the directory; takes it away again where the run ends before it has a dataset.

    Raises:
      OSError: it cannot be made, or not be written to.
    """
    from envfleet.collect.dataset import MANIFEST

    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(directory))
    try:
        yield
    finally:
        if not (directory / MANIFEST).exists():
            (directory / _RUN).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for path in new:
                    path.rmdir()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other callers out, until this process ends in whatever way."""
    path = directory / "_lock"
    with contextlib.ExitStack() as held:
        while True:
            file = held.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    errno.EAGAIN, "another process is writing a dataset here", str(directory)
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    break  # else its holder has taken the file away meanwhile
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _before(
    directory: Path, resume: bool, identity: Mapping[str, str], collector: dict[str, Any]
) -> dict[str, Any] | None:
    """What ``dataset.json`` says, of a dataset that is to be gone on with; None for a new one."""
    from envfleet.collect import shards
    from envfleet.collect.dataset import MANIFEST, read_manifest

    if not (directory / MANIFEST).exists():
        if shards.paths(directory):
            raise FileExistsError(
                errno.EEXIST, f"there are shards, but no {MANIFEST}", str(directory)
            )
        return None
    if not resume:
        raise FileExistsError(
            errno.EEXIST,
            "there is a dataset: name another directory, or go on with it by resume",
            str(directory),
        )
    manifest = read_manifest(directory)
    if collector.get("seed") is None and gin_state.bound(_COLLECTOR, "seed") is None:
        collector["seed"] = manifest["seed"]
    seed = collector.get("seed", gin_state.bound(_COLLECTOR, "seed"))
    differences = _differences(
        {**manifest["identity"], "seed": manifest["seed"]}, {**identity, "seed": seed}
    )
    if differences:
        raise ValueError(_refusal(directory, differences))
    return manifest


def _differences(before: Any, now: Any) -> list[str]:
    """One line for each thing that is not as it was."""
    if isinstance(before, list):
        before, now = ({one["column"]: one for one in each} for each in (before, now))
    absent = "not there"
    return [
        f"{key}: {before.get(key, absent)} in the dataset, {now.get(key, absent)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent)
    ]


def _refusal(directory: Path, differences: list[str]) -> str:
    return "\n  ".join([f"{directory} holds a dataset of another configuration:", *differences])


def _check_limits_of(directory: Path, **limits: int | None) -> None:
    """Raises `ValueError` where less is asked for than is there: nothing is thrown away."""
    from envfleet.collect.dataset import load

    earlier, dataset = _read_run(directory), load(directory)
    there = {"max_steps": dataset.num_steps, "max_episodes": len(dataset)}
    for name, limit in limits.items():
        before = earlier.get(name)
        if limit is not None and there[name] > limit and (before is None or before > limit):
            raise ValueError(
                f"{directory} holds {there[name]:,} {name[4:]}, more than {name} = {limit:,}"
            )


def _read_run(directory: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((directory / _RUN).read_text()))
    return {}


def _write_run(directory: Path, **said: Any) -> None:
    """What the latest run was asked for, and how it ended."""
    from envfleet.collect.dataset import write_aside

    write_aside(directory / _RUN, json.dumps(said, indent=1) + "\n")


# -- what is collected -----------------------------------------------------------------------------


def _identity(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What episodes depend on, in words: arguments, and gin's bindings."""
    given = {name: words(value) for name, value in arguments.items() if name not in _OF_THE_RUN}
    bound = {
        key: text
        for key, text in gin_state.bindings().items()
        if not (
            (parameter := key.rpartition("."))[2] in _OF_THE_RUN
            and parameter[0].rpartition("/")[2] in (_COLLECT, _COLLECTOR)
        )
    }
    return {**given, **bound}


def words(value: Any) -> str:
    """What stands for an argument in ``dataset.json``, in any process."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(words, value))}]"
    if isinstance(value, str):
        return value
    if hasattr(value, "func"):  # functools.partial
        keywords = [f"{name}={words(one)}" for name, one in value.keywords.items()]
        return f"{words(value.func)}({', '.join([*map(words, value.args), *keywords])})"
    if (reference := gin_state.reference(value)) is not None:
        return reference
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _write_manifest(
    directory: Path, identity: Mapping[str, str], made: Collector, columns: list[dict[str, Any]]
) -> None:
    from envfleet.collect.dataset import MANIFEST, write_aside

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
    write_aside(directory / MANIFEST, json.dumps(said, indent=1) + "\n", anew=True)


def _write_configuration(directory: Path, made: Collector) -> None:
    """gin's configuration, and what of it was used, here and in actors."""
    from envfleet.collect.dataset import write_aside

    write_aside(directory / "config.gin", gin_state.config_text())
    used: list[gin_state.Operative] = [gin_state.operative()]
    with contextlib.suppress(Exception):  # of actors that are gone
        used += made.crew.ask("operative")
    write_aside(directory / "operative_config.gin", gin_state.operative_text(used))


def _write_report(dataset: Dataset) -> None:
    from envfleet.collect.dataset import write_aside
    from envfleet.collect.report import render
    from envfleet.collect.summary import report_of

    configuration = ""
    with contextlib.suppress(FileNotFoundError):  # of a run that was killed
        configuration = (dataset.path / "operative_config.gin").read_text()
    write_aside(dataset.path / "report.html", render(report_of(dataset, configuration)))


def _what_stands(directory: Path, problem: OSError) -> str:
    from envfleet.collect.dataset import load

    dataset = load(directory)
    return (
        f"{problem.strerror}; {len(dataset):,} episodes with {dataset.num_steps:,} steps stand in "
        f"{directory} and can be read, resume goes on from there"
    )


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
    from envfleet.collect.progress import Progress

    with Progress(sys.stderr) as progress:
        yield progress
