"""Summary: what is in a dataset, in words for a terminal and as the `Report` of its page.

Everything is taken from ``dataset.json``, the footers of the shards, and ``failures.jsonl``; no row
is read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from envfleet.collect.columns import Column
from envfleet.collect.dataset import FAILURES, Dataset
from envfleet.collect.episodes import Episodes
from envfleet.collect.progress import clock, number
from envfleet.collect.report import Report

Array = np.ndarray[Any, Any]

_WIDTH = 100
_GAP = "  "
_MOST_WORKERS = 20
_MOST_FAILURES = 10
_MOST_NAMES = 10
_MOST_REASONS = 10
_MOST_CHARACTERS = 300
"""Of a failure's line."""


def describe(dataset: Dataset) -> str:
    """What is in a dataset, as plain text of at most 100 characters a line."""
    episodes = dataset.episodes()
    failures = _failures(dataset)
    parts = [
        "\n".join(_broken(_printable(str(dataset.path)))),
        _table([[name, value] for name, value in _facts(dataset, episodes).items()]),
        _statistics(episodes),
        _endings(episodes),
        _shares(dataset, episodes),
        _table(
            [["failures", f"{len(failures):,}"]]
            + [["", _cropped(line)] for line in failures[-_MOST_FAILURES:]]
            + _more(len(failures) - _MOST_FAILURES, f"before these, in {FAILURES}", 1)
        ),
        _columns(dataset),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def report_of(dataset: Dataset, configuration: str) -> Report:
    """The page on a dataset's run, for `render`.

    Args:
      configuration: text, such as gin's.
    """
    episodes = dataset.episodes()
    writers = _writers(dataset)
    ids = episodes.episode_id.tolist()
    created = _created(dataset)
    known = episodes.ended[np.isfinite(episodes.ended)]
    began = created if created is not None else known.min(initial=np.inf)
    return Report(
        title=dataset.path.resolve().name or str(dataset.path),
        facts=_facts(dataset, episodes),
        ended=episodes.ended - began if np.isfinite(began) else episodes.ended,
        returns=episodes.returns,
        lengths=episodes.length,
        writers=[writers[k] for k in ids],
        cuts=[episodes.cut.get(k) for k in ids],
        failures=_failures(dataset),
        configuration=configuration,
    )


# -- what is known ---------------------------------------------------------------------------------


def _facts(dataset: Dataset, episodes: Episodes) -> dict[str, str]:
    manifest, num_bytes = dataset.manifest, _bytes(dataset)
    per_step = f", {num_bytes / episodes.num_steps:,.1f} bytes a step" if episodes.num_steps else ""
    facts = {
        "episodes": f"{len(episodes.length):,}",
        "steps": f"{episodes.num_steps:,}",
        "shards": f"{len(dataset.shards):,} of {_size(num_bytes)}{per_step}",
        "collected": _when(_created(dataset), episodes.ended),
        "seed": manifest.get("seed"),
        "environment": _names(manifest.get("environment")),
        "policy": manifest.get("policy"),
    }
    for group in ("run", "versions"):
        value = manifest.get(group)
        if isinstance(value, Mapping):
            words = [f"{name} {_word(one)}" for name, one in value.items() if one is not None]
            facts[group] = ", ".join(words)
        else:
            facts[group] = value
    return {name: _word(value) for name, value in facts.items() if value not in (None, "")}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _names(names: Any) -> str:
    """``CartPole-v1 (8), Pong (2)``."""
    counts = Counter([names] if isinstance(names, str) else map(_word, names or ()))
    shown = [
        name if count == 1 else f"{name} ({count:,})"
        for name, count in itertools.islice(counts.items(), _MOST_NAMES)
    ]
    more = len(counts) - len(shown)
    return ", ".join(shown + ([f"and {more:,} more"] if more else []))


def _bytes(dataset: Dataset) -> int:
    total = 0
    for shard in dataset.shards:
        with contextlib.suppress(OSError):
            total += shard.path.stat().st_size
    return total


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{number(size)} {unit}"


def _created(dataset: Dataset) -> float | None:
    """Seconds since the epoch; None where the manifest does not say."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(dataset.manifest["created"]).timestamp()
    return None


def _when(created: float | None, ended: Array) -> str:
    known = ended[np.isfinite(ended)]
    start = created if created is not None else known.min(initial=np.inf)
    end = max(float(known.max(initial=-np.inf)), start)
    if not np.isfinite(start):
        return ""
    began = datetime.fromtimestamp(start, UTC)
    over = datetime.fromtimestamp(end, UTC)
    if len(known) == 0:
        return f"{began:%Y-%m-%d %H:%M:%S} UTC"
    last = f"{over:%H:%M:%S}" if began.date() == over.date() else f"{over:%Y-%m-%d %H:%M:%S}"
    return f"{began:%Y-%m-%d %H:%M:%S} to {last} UTC ({clock(end - start)})"


def _failures(dataset: Dataset) -> list[str]:
    """The lines about them; one that was not written whole as it is."""
    lines = []
    with (
        contextlib.suppress(FileNotFoundError),
        open(dataset.path / FAILURES, encoding="utf-8", errors="replace") as file,
    ):
        for text in filter(None, map(str.strip, file)):
            line = text
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = str(json.loads(text)["line"])
            lines.append(line)
    return lines


def _writers(dataset: Dataset) -> dict[int, str]:
    """By the episode's id who wrote it."""
    writers: dict[int, str] = {}
    for shard in dataset.shards:
        name = f"worker {shard.worker}" + (f" on {shard.node}" if shard.node else "")
        writers.update(dict.fromkeys(shard.episodes.episode_id.tolist(), name))
    return writers


# -- in words --------------------------------------------------------------------------------------


def _statistics(episodes: Episodes) -> str:
    if not len(episodes.length):
        return ""
    rows = [["", "mean", "std", "min", "max", ""]]
    for name, values in (("return", episodes.returns), ("length", episodes.length)):
        values = np.asarray(values, np.float64)
        finite = values[np.isfinite(values)]
        left_out = len(values) - len(finite)
        note = f"{left_out:,} not finite, left out" if left_out else ""
        rows.append([name, *(_moments(finite) if len(finite) else ["-"] * 4), note])
    return _table(rows, right=(1, 2, 3, 4))


def _moments(values: Array) -> list[str]:
    scale = float(np.abs(values).max()) or 1.0  # squares of large ones would be infinite
    spread = values / scale
    moments = (spread.mean() * scale, spread.std() * scale, values.min(), values.max())
    return [number(float(one)) for one in moments]


def _endings(episodes: Episodes) -> str:
    if not len(episodes.length):
        return ""
    counts = Counter(episodes.cut.values())
    whole = len(episodes.length) - counts.total()
    rows = [
        [what, f"{count:,}", _percent(count, len(episodes.length))]
        for what, count in [
            ("ended by themselves", whole),
            *((f"cut by {reason}", count) for reason, count in counts.most_common(_MOST_REASONS)),
        ]
    ]
    rows += _more(len(counts) - _MOST_REASONS, "reasons")
    return _table([["", "episodes", ""], *rows], right=(1, 2))


def _shares(dataset: Dataset, episodes: Episodes) -> str:
    steps: Counter[str] = Counter()
    number_of: Counter[str] = Counter()
    writers = _writers(dataset)
    for k, length in zip(episodes.episode_id.tolist(), episodes.length.tolist(), strict=True):
        steps[writers[k]] += length
        number_of[writers[k]] += 1
    if not steps:
        return ""
    rows = [
        [name, f"{count:,}", _percent(count, episodes.num_steps), f"{number_of[name]:,}"]
        for name, count in steps.most_common(_MOST_WORKERS)
    ]
    rows += _more(len(steps) - _MOST_WORKERS, "workers")
    return _table([["", "steps", "", "episodes"], *rows], right=(1, 2, 3))


def _columns(dataset: Dataset) -> str:
    leaves = {leaf.name: leaf for leaf in dataset.columns.leaves}
    rows = [["column", "type", "shape", "bounds"]]
    for field in dataset.columns.schema:
        leaf = leaves.pop(field.name, None)
        if leaf is None:
            rows.append([field.name, _kind(str(field.type)), "()", ""])
        else:
            rows.append([leaf.name, _kind(leaf.dtype.name), str(leaf.shape), _bounds(leaf)])
    for leaf in leaves.values():
        rows.append([leaf.name, _kind(leaf.dtype.name), str(leaf.shape), "empty, not stored"])
    return _table(rows)


def _kind(name: str) -> str:
    return {"object": "str", "string": "str"}.get(name, name)


def _bounds(leaf: Column) -> str:
    low, high = _bound(leaf.minimum, min), _bound(leaf.maximum, max)
    if low and high:
        text = f"{low} to {high}"
    elif low or high:
        text = f"from {low}" if low else f"up to {high}"
    else:
        return ""
    vary = any(
        bound is not None and bool((bound != bound.flat[0]).any())
        for bound in (leaf.minimum, leaf.maximum)
    )
    return f"{text}, varying" if vary else text


def _bound(bound: Array | None, outermost: Any) -> str:
    if bound is None or not bound.size:
        return ""
    value = outermost(bound.flat).item()
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1e12 else f"{value:.4g}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""


def _more(count: int, what: str, column: int = 0) -> list[list[str]]:
    return [[*[""] * column, f"and {count:,} more {what}"]] if count > 0 else []


# -- text ------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Cells under each other, those of the columns `right` at the right.

    Where a line would be too long, the widest columns become narrower, and their cells of several
    lines.
    """
    number_of = max(map(len, rows))
    cells = [[*(" ".join(_printable(cell).split()) for cell in row)] for row in rows]
    cells = [[*row, *[""] * (number_of - len(row))] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) > _WIDTH - len(_GAP) * (number_of - 1):
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in cells:
        broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for pieces in itertools.zip_longest(*broken, fillvalue=""):
            aligned = [
                piece.rjust(width) if k in right else piece.ljust(width)
                for k, (piece, width) in enumerate(zip(pieces, widths, strict=True))
            ]
            lines.append(_GAP.join(aligned).rstrip())
    return "\n".join(lines)


def _broken(text: str, width: int = _WIDTH) -> list[str]:
    return textwrap.wrap(text, max(width, 1), break_on_hyphens=False)


def _cropped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 4] + " ..."


def _printable(text: str) -> str:
    """Without what a terminal would take for a command."""
    return "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text)
