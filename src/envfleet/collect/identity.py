"""Identity: what the episodes of a dataset depend on, in words that another process finds, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    *("actor_options", "ray_init", "backend", "seed"),
}
"""Arguments that may differ when a dataset is gone on with: its episodes do not depend on them."""


def identity(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What episodes depend on, in words: the collector's arguments, and gin's bindings."""
    given = {name: words(value) for name, value in arguments.items() if name not in _OF_THE_RUN}
    bound = {
        key: text
        for key, text in gin_state.bindings().items()
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
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


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
