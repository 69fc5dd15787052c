"""Identity: what the episodes of a dataset depend on, in words that another process finds, too."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envfleet import gin_state

COLLECT, COLLECTOR = "envfleet.collect", "envfleet.Collector"
"""Their names to gin."""

OWN = frozenset(
    {
        *("output_dir", "max_steps", "max_episodes", "max_seconds", "resume", "progress"),
        *("shard_megabytes", "shard_seconds"),
    }
)
"""What `collect` takes itself; all else is the collector's."""

_OF_THE_RUN = OWN | {
    *("num_actors", "envs_per_actor", "inference", "min_ready", "chunk_length", "max_policy_lag"),
    *("on_failure", "max_restarts", "step_timeout", "reset_timeout", "start_timeout"),
    *("actor_options", "placement", "transport", "ray_init", "backend", "seed"),
}
"""Arguments that may differ when a dataset is gone on with: its episodes do not depend on them."""


def identity(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What episodes depend on, in words: the collector's arguments, and gin's bindings."""
    given = {name: words(value) for name, value in arguments.items() if name not in _OF_THE_RUN}
    bound = {
        key: text
        for key, text in gin_state.bindings(words).items()
        if not (
            (parameter := key.rpartition("."))[2] in _OF_THE_RUN
            and parameter[0].rpartition("/")[2] in (COLLECT, COLLECTOR)
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
        name = f"{value.__module__}.{value.__qualname__}"
        # Others may have the name of a lambda, or of a function that was made in another.
        has_namesakes = inspect.isfunction(value) and "<" in value.__qualname__
        return f"{name} (code {_digest(value)})" if has_namesakes else name
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _digest(function: types.FunctionType) -> str:
    """What a function does, as far as it can be told: the same in every process of one Python."""
    return hashlib.sha256(_plain(function, ()).encode()).hexdigest()[:12]


def _plain(value: Any, within: tuple[Any, ...]) -> str:
    """What a function does, or a value that it holds, without what differs between processes.

    Of a function that is its code and what it holds, not the lines that it stands in. Of what has
    no literal it is the name or the type alone.
    """
    if any(value is one for one in within):  # it holds itself
        return "..."
    within = *within, value

    def each(values: Iterable[Any]) -> list[str]:
        return [_plain(one, within) for one in values]

    if (reference := gin_state.reference(value)) is not None:
        return reference
    if inspect.isfunction(value) and "<" in value.__qualname__:
        cells = [_held(cell) for cell in value.__closure__ or ()]
        return f"function {each([value.__code__, cells, value.__defaults__, value.__kwdefaults__])}"
    if isinstance(value, functools.partial):
        return f"partial {each([value.func, value.args, value.keywords])}"
    if inspect.iscode(value):
        number = value.co_argcount + value.co_kwonlyargcount
        called = value.co_posonlyargcount, value.co_kwonlyargcount, value.co_varnames[:number]
        runs = value.co_code, value.co_exceptiontable, value.co_names, value.co_consts
        return f"code {each([value.co_flags, *called, *runs])}"
    if isinstance(value, set | frozenset):
        return f"set {sorted(each(value))}"  # whose order is another one in every process
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {each(value)}"
    if isinstance(value, dict):
        return f"dict {[each(pair) for pair in value.items()]}"
    if value is None or value is ... or isinstance(value, _LITERAL):
        return repr(value)
    return words(value) if callable(value) else type(value).__qualname__


_LITERAL = bool, int, float, complex, str, bytes, np.generic


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ...


def check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `ValueError` with every difference from what a dataset was made by."""
    absent = "not there"
    differences = [
        f"{key}: {before.get(key, absent)} in the dataset, {now.get(key, absent)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent)
    ]
    if differences:
        known = f"{directory} holds a dataset of another configuration:"
        raise ValueError("\n  ".join([known, *differences]))
