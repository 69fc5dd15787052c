"""The command: ``python -m envfleet.collect``, installed as ``envfleet-collect``."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envfleet import gin_state
from envfleet.collect.driver import CollectResult, check_pyarrow, collect
from envfleet.collect.episodes import NotWritten
from envfleet.collect.plan import plan

_HELP = """\
Collects a dataset as a gin configuration says.

  envfleet-collect --gin_file=run.gin --gin_bindings='collect.max_steps = 1_000_000'
  envfleet-collect inspect DIR
  envfleet-collect export DIR --format=minari --to=cartpole/random-v0
  envfleet-collect export DIR --format=transitions --to=OTHER_DIR

inspect prints what a dataset holds; export writes it as another kind: minari, a dataset of Minari's
(--to is its id), or transitions, Parquet files with a row for each step and its next observation,
for RLlib's offline reader (--to is a directory).
"""

_REFUSED = (
    *(TypeError, ValueError, ImportError, SyntaxError),
    *(FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError, BlockingIOError),
)
"""What makes no sense: said in one line, where no environment has raised it."""


class _Refused(Exception):
    """What was asked for cannot be done, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      The exit code: 0; 1 if collecting failed; 2 if what was asked for makes no sense, and nothing
      was written; 130 or 143 after SIGINT or SIGTERM, with what was complete on disk.
    """
    given = sys.argv[1:] if arguments is None else [*arguments]
    try:
        return _run(given)
    except _Refused as problem:
        return _say(str(problem), 2)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except Exception as problem:
        failures = getattr(problem, "env_failures", None)
        if failures and failures[0].unknown_name is not None:
            return _say(" ".join(failures[0].message.split()), 2)
        if failures is not None or not isinstance(problem, (*_REFUSED, OSError)):
            raise  # an environment's own, for one
        is_refused = isinstance(problem, _REFUSED) and not isinstance(problem, NotWritten)
        return _say(_in_one_line(problem), 2 if is_refused else 1)


def _say(line: str, code: int) -> int:
    print(f"envfleet-collect: {line}", file=sys.stderr)
    return code


def _in_one_line(problem: BaseException) -> str:
    if isinstance(problem, SyntaxError) and problem.text:
        return f"{problem.msg} In line {problem.lineno}: {problem.text.strip()}"
    return " ".join(str(problem).split()) or type(problem).__name__


def _run(given: list[str]) -> int:
    flags, names = _parsed(given)
    if flags.help:
        print(_HELP + "\n" + flags.get_help())
        return 0
    if not names:
        return _collect(flags)
    commands: dict[str, Callable[[Any, Path], str]] = {"inspect": _inspect, "export": _export}
    if names[0] not in commands or len(names) != 2:
        raise _Refused(f"expected flags, inspect DIR or export DIR, found {' '.join(names)!r}")
    check_pyarrow()
    print(commands[names[0]](flags, Path(names[1])))
    return 0


def _parsed(given: list[str]) -> tuple[Any, list[str]]:
    """The flags, and what is no flag."""
    if importlib.util.find_spec("absl") is None:
        raise _Refused(
            "this needs absl-py, which is not installed: pip install 'envfleet[collect]'"
        )
    from absl import flags

    values = flags.FlagValues()  # our own: absl's global flags are the user's modules'
    flags.DEFINE_multi_string(
        "gin_file", [], "a gin file; several are read in order", flag_values=values
    )
    flags.DEFINE_multi_string(
        "gin_bindings",
        [],
        "a gin binding, after the files; several in order; --gin_param is the same",
        flag_values=values,
    )
    flags.DEFINE_string("output_dir", None, "the dataset's directory", flag_values=values)
    flags.DEFINE_bool("resume", None, "go on with the dataset that is there", flag_values=values)
    flags.DEFINE_bool(
        "dry_run", False, "print the configuration and the plan, start nothing", flag_values=values
    )
    flags.DEFINE_enum(
        "format", None, ["minari", "transitions"], "what to export to", flag_values=values
    )
    flags.DEFINE_string("to", None, "where to export to", flag_values=values)
    flags.DEFINE_bool("help", False, "print this", short_name="h", flag_values=values)
    alias = [re.sub(r"^(--?)gin_param(?==|$)", r"\1gin_bindings", one) for one in given]
    try:
        return values, values(["envfleet-collect", *alias])[1:]
    except flags.Error as problem:
        raise _Refused(_in_one_line(problem)) from None


def _collect(flags: Any) -> int:
    check_pyarrow()
    if os.getcwd() not in sys.path:  # as python -m has it: modules that gin's files import
        sys.path.insert(0, os.getcwd())
    try:
        gin_state.parse(flags.gin_file, flags.gin_bindings)
    except Exception as problem:
        raise _Refused(_in_one_line(problem)) from problem
    if missing := gin_state.required():
        raise _Refused(f"gin: no value for {', '.join(missing)}")
    arguments: dict[str, Any] = {}
    if flags.output_dir is not None:
        arguments["output_dir"] = flags.output_dir
    elif gin_state.bound("envfleet.collect", "output_dir") is None:
        raise _Refused("where to? --output_dir=DIR, or bind collect.output_dir")
    if gin_state.bound("envfleet.Collector", "env_constructor") is None and (
        gin_state.bound("envfleet.collect", "env_constructor") is None
    ):
        raise _Refused("which environment? Bind Collector.env_constructor in a --gin_file")
    if flags.dry_run:
        print(plan(**arguments))
        return 0
    if flags.resume is not None:
        arguments["resume"] = flags.resume
    if gin_state.bound("envfleet.collect", "progress") is None:
        arguments["progress"] = True
    result = collect(**arguments)
    print(_summary(result))
    return {"SIGINT": 130, "SIGTERM": 143}.get(result.stopped_by, 0)


def _summary(result: CollectResult) -> str:
    rate = f", {result.steps_per_second:,.0f} steps/s" if result.seconds else ""
    failed = f"; {result.num_failures:,} failures" if result.num_failures else ""
    episodes = f"{result.num_episodes:,} episode{'' if result.num_episodes == 1 else 's'}"
    return (
        f"{result.num_steps:,} steps in {episodes}{rate}; stopped by "
        f"{result.stopped_by}{failed}\n{result.path}/report.html shows them"
    )


def _inspect(flags: Any, directory: Path) -> str:
    from envfleet.collect.dataset import load
    from envfleet.collect.summary import describe

    del flags
    return describe(load(directory))


def _export(flags: Any, directory: Path) -> str:
    from envfleet.collect.dataset import load

    if flags.format is None or flags.to is None:
        raise _Refused("export needs --format=minari or --format=transitions, and --to=...")
    dataset = load(directory)
    if flags.format == "transitions":
        files = dataset.write_transitions(flags.to)
        return f"{len(files)} files with {dataset.num_steps:,} transitions in {flags.to}"
    from envfleet.collect.minari import export_minari

    export_minari(dataset, flags.to)
    return f"{len(dataset):,} episodes in Minari's dataset {flags.to}"
