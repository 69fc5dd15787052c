"""Report: a page about a run of data collection, as one HTML file that needs nothing else.

The page has no script and asks for nothing from outside; its charts are SVG, drawn here. Its size
does not grow with the number of episodes: above 500 of them a chart shows what is typical of the
episodes that ended at about the same time, not each of them.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_MOST_POINTS = 500
"""How many episodes a chart shows one by one."""
_MOST_GROUPS = 150
_MOST_LINE_POINTS = 200
_MOST_BARS = 40
_MOST_RATES = 100
_MOST_ACTORS = 50
_MOST_CAUSES = 50
_MOST_LINES = 200
_MOST_CHARACTERS = 400
"""Of a name, a fact, or a line about a failure."""

_TOO_LARGE = 1e300
"""Numbers beyond it are left out of charts, like those that are not finite."""

_WIDTH, _HEIGHT = 400, 230
_TOP, _BOTTOM, _RIGHT = 24, 40, 14
_CHARACTER = 6.3
"""Width of a digit, in the units of the chart."""


class Report(NamedTuple):
    """What a page says about a run of n episodes.

    Attributes:
      title: such as the name of the output directory.
      facts: shown as a table at the top, in their order.
      ended: float64, shape (n,): when each episode ended, in seconds since the run began, in any
        order; NaN where it is not known.
      returns: float64, shape (n,): sums of rewards, whether finite or not.
      lengths: int64, shape (n,): steps.
      writers: n names, of the actor that collected each episode.
      cuts: n reasons why an episode was cut short, None where it ended by itself.
      failures: lines about environments that failed.
      configuration: text, such as gin's.
    """

    title: str
    facts: Mapping[str, str]
    ended: np.ndarray[Any, Any]
    returns: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    writers: Sequence[str]
    cuts: Sequence[str | None]
    failures: Sequence[str]
    configuration: str


def render(report: Report) -> str:
    """The page, as the text of an HTML file to be written as UTF-8.

    Raises:
      ValueError: `ended`, `returns`, `lengths`, `writers` and `cuts` are not of one length.
    """
    _check(report)
    ended = np.asarray(report.ended, np.float64)
    returns = np.asarray(report.returns, np.float64)
    lengths = np.asarray(report.lengths, np.int64)
    title = _escaped(report.title)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{title}</h1>",
        _facts(report.facts),
        "<h2>Episodes</h2>",
        '<div class="charts">',
        _over_time("Return over time", "return", ended, returns),
        _over_time("Episode length over time", "steps", ended, lengths.astype(np.float64)),
        _histogram("Returns", "return", returns),
        _histogram("Episode lengths", "steps", lengths.astype(np.float64)),
        _speed(ended, lengths),
        "</div>",
        "<h2>Actors</h2>",
        _actors(report.writers, lengths),
        "<h2>Episodes cut short</h2>",
        _cuts(report.cuts),
        "<h2>Failures</h2>",
        _failures(report.failures),
        "<h2>Configuration</h2>",
        _block(report.configuration) if report.configuration.strip() else _note("None was kept."),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _check(report: Report) -> None:
    sizes = {
        name: len(getattr(report, name))
        for name in ("ended", "returns", "lengths", "writers", "cuts")
    }
    if len(set(sizes.values())) > 1:
        raise ValueError(f"expected one entry per episode in each, got {sizes}")


# Tables and text.


def _facts(facts: Mapping[str, str]) -> str:
    rows = [
        f'<tr><th scope="row">{_short(name)}</th><td>{_short(value)}</td></tr>'
        for name, value in facts.items()
    ]
    if not rows:
        return ""
    return _table("facts", "The run", [], rows)


def _actors(writers: Sequence[str], lengths: Array) -> str:
    numbers: dict[str, int] = {}
    writer_ids = np.fromiter(
        (numbers.setdefault(name, len(numbers)) for name in writers), np.int64, len(writers)
    )
    if not numbers:
        return _note("No episode was collected.")
    names = list(numbers)
    episodes = np.bincount(writer_ids, minlength=len(names))
    steps = np.bincount(writer_ids, lengths.astype(np.float64), len(names))
    largest_first = np.lexsort((-episodes, -steps))
    shown, others = largest_first[:_MOST_ACTORS], largest_first[_MOST_ACTORS:]
    all_steps, all_episodes = int(steps.sum()), int(episodes.sum())
    rows = [
        f'<tr><th scope="row">{_short(names[i])}</th>'
        f"{_share(int(steps[i]), all_steps)}{_share(int(episodes[i]), all_episodes)}</tr>"
        for i in shown
    ]
    caption = f"{_counted(len(names), 'actor')}, by steps: share of all steps and episodes"
    table = _table("shares", caption, ["actor", "steps", "episodes"], rows)
    if not others.size:
        return table
    return table + _note(
        f"and {others.size:,} more {'actors' if others.size > 1 else 'actor'}, with "
        f"{_counted(int(steps[others].sum()), 'step')} and "
        f"{_counted(int(episodes[others].sum()), 'episode')}."
    )


def _cuts(cuts: Sequence[str | None]) -> str:
    counts = Counter(cuts)
    by_themselves = counts.pop(None, 0)
    if not counts:
        return _note("None was cut short." if by_themselves else "No episode was collected.")
    causes = counts.most_common()
    rows = [
        f'<tr><th scope="row">{_short(str(cause))}</th>{_share(count, len(cuts))}</tr>'
        for cause, count in causes[:_MOST_CAUSES]
    ]
    caption = (
        f"{len(cuts) - by_themselves:,} of {_counted(len(cuts), 'episode')}; "
        f"{by_themselves:,} ended by themselves"
    )
    table = _table("shares", caption, ["cause", "episodes"], rows)
    left = causes[_MOST_CAUSES:]
    if not left:
        return table
    return table + _note(
        f"and {len(left):,} more {'causes' if len(left) > 1 else 'cause'}, of "
        f"{_counted(sum(count for _, count in left), 'episode')}."
    )


def _failures(failures: Sequence[str]) -> str:
    lines = [line for failure in failures for line in failure.splitlines() or [""]]
    if not lines:
        return _note("No environment failed.")
    block = _block("\n".join(_cropped(line) for line in lines[:_MOST_LINES]))
    more = len(lines) - _MOST_LINES
    return block if more <= 0 else block + _note(f"and {_counted(more, 'more line')}.")


def _table(kind: str, caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{_escaped(head)}</th>' for head in heads)
    return (
        f'<table class="{kind}">\n<caption>{_escaped(caption)}</caption>\n'
        + (f"<thead><tr>{head}</tr></thead>\n" if head else "")
        + "<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>"
    )


def _share(part: int, whole: int) -> str:
    """A cell of a table: a bar, and the numbers behind it."""
    percent = 100 * part / whole if whole else 0.0
    return (
        f'<td><span class="bar"><span style="width:{percent:.1f}%"></span></span>'
        f"{part:,} ({percent:.1f}%)</td>"
    )


def _block(text: str) -> str:
    # A line break at the start of <pre> is not part of the text, so this one is for the parser.
    return f'<pre tabindex="0">\n{_escaped(text)}</pre>'


def _note(text: str) -> str:
    return f'<p class="note">{_escaped(text)}</p>'


def _escaped(text: str) -> str:
    """For HTML and UTF-8: what neither can hold (control characters, surrogates) is replaced."""
    return html.escape(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\ufffd", text))


def _cropped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _short(text: str) -> str:
    return _escaped(_cropped(str(text)))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _number(value: float) -> str:
    """Four digits or more, thousands separated."""
    if abs(value) >= 1e12:
        return f"{value:.4g}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value + 0.0:,.0f}"
    return f"{value:.4g}"


# Charts.


def _over_time(title: str, unit: str, ended: Array, values: Array) -> str:
    """Values of episodes by when they ended, and a running mean of them."""
    timed = _drawable(ended)
    shown = timed & _drawable(values)
    notes = [
        _left_out(int((~timed).sum()), "whose end is not known"),
        _left_out(int((timed & ~shown).sum()), f"whose {unit} is not finite or too large to draw"),
    ]
    if not shown.any():
        return _empty_chart(title, "No episode to show.", notes)
    order = np.argsort(ended[shown], kind="stable")
    seconds, values = ended[shown][order], values[shown][order]
    times, time_unit, x = _time_axis(seconds)
    whole = unit == "steps"
    low = min(0.0, float(values.min())) if whole else float(values.min())
    y = _axis(low, float(values.max()), whole=whole, rounded=True)

    count = len(values)
    window = max(10, count // 50)
    if count <= _MOST_POINTS:
        said = ["A mark is an episode"]
    else:
        width = float(seconds[-1] - seconds[0]) / _MOST_GROUPS
        said = [
            f"A bar stands for the episodes that ended in {_duration(width)}: thin from "
            "the lowest to the highest, thick for the middle half"
        ]
    if count > 1:
        said.append(f"the line is the mean of the last {window:,} episodes")

    def marks(frame: _Frame) -> str:
        if count <= _MOST_POINTS:
            marks = _path("points", [f"M{at}h0" for at in frame.pairs(times, values)])
        else:
            at, *levels = _groups(times, values)
            marks = _bars("range", frame, at, levels[0], levels[3])
            marks += _bars("half", frame, at, levels[1], levels[2])
        if count == 1:
            return marks
        line = frame.pairs(*_running_mean(times, values, window))
        return marks + _path("mean", ["M" + "L".join(line)])

    return _chart(
        title,
        marks,
        x,
        y,
        f"time since the run began ({time_unit})",
        unit,
        ["; ".join(said), *notes],
    )


def _histogram(title: str, unit: str, values: Array) -> str:
    shown = _drawable(values)
    notes = [_left_out(int((~shown).sum()), f"whose {unit} is not finite or too large to draw")]
    if not shown.any():
        return _empty_chart(title, "No episode to show.", notes)
    values = values[shown]
    edges, counts, names = _bins(values)
    x = _axis(float(edges[0]), float(edges[-1]), whole=_are_whole(values), across=True)
    y = _axis(0.0, float(counts.max()), whole=True, rounded=True)
    said = (
        f"Mean {_number(_mean(values))}, median {_number(float(np.median(values)))}, "
        f"from {_number(float(values.min()))} to {_number(float(values.max()))}"
    )

    def marks(frame: _Frame) -> str:
        tips = [
            f"{name}: {_counted(int(count), 'episode')}"
            for name, count in zip(names, counts, strict=True)
        ]
        return _columns(frame, edges, counts, tips)

    return _chart(title, marks, x, y, unit, "episodes", [said, *notes])


def _speed(ended: Array, lengths: Array) -> str:
    """Steps per second; the steps of an episode count where it ended."""
    title = "Steps per second over time"
    timed = _drawable(ended)
    notes = [_left_out(int((~timed).sum()), "whose end is not known")]
    if not timed.any():
        return _empty_chart(title, "No episode to show.", notes)
    seconds, steps = np.sort(ended[timed]), lengths[timed][np.argsort(ended[timed])]
    start, end = min(0.0, float(seconds[0])), float(seconds[-1])
    if _same(start, end):
        return _empty_chart(title, "All episodes ended as the run began.", notes)
    bins = min(_MOST_RATES, max(1, math.isqrt(len(seconds))))
    counts = np.bincount(_slots(seconds, start, end, bins), steps.astype(np.float64), bins)
    width = (end - start) / bins
    rates = counts / width
    divisor, time_unit = _time_unit(end - start)
    edges = np.linspace(start, end, bins + 1) / divisor
    x = _axis(float(edges[0]), float(edges[-1]), across=True)
    y = _axis(0.0, float(rates.max()) or 1.0, rounded=True)
    said = (
        f"Mean {_number(float(steps.sum()) / (end - start))} steps/s; a column is "
        f"{_duration(width)}, and has the steps of episodes that ended in it"
    )

    def marks(frame: _Frame) -> str:
        tips = [
            f"{_number(at)} to {_number(at + width / divisor)} {time_unit}: {_number(rate)} steps/s"
            for at, rate in zip(edges[:-1].tolist(), rates.tolist(), strict=True)
        ]
        return _columns(frame, edges, rates, tips)

    return _chart(
        title, marks, x, y, f"time since the run began ({time_unit})", "steps/s", [said, *notes]
    )


class _Axis(NamedTuple):
    """From where to where a chart shows, and what is written along it."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]


class _Frame(NamedTuple):
    """The rectangle that a chart draws in: from data to the units of the SVG."""

    x_axis: _Axis
    y_axis: _Axis
    left: float

    def x(self, values: Any) -> Any:
        low, high = self.x_axis.low, self.x_axis.high
        return self.left + (np.asarray(values) - low) / (high - low) * (_WIDTH - _RIGHT - self.left)

    def y(self, values: Any) -> Any:
        low, high = self.y_axis.low, self.y_axis.high
        return _TOP + (high - np.asarray(values)) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def pairs(self, xs: Array, ys: Array) -> list[str]:
        pairs = zip(self.x(xs).tolist(), self.y(ys).tolist(), strict=True)
        return [f"{x:.1f},{y:.1f}" for x, y in pairs]


def _chart(
    title: str,
    marks: Callable[[_Frame], str],
    x_axis: _Axis,
    y_axis: _Axis,
    x_label: str,
    y_label: str,
    notes: Sequence[str],
) -> str:
    left = 10 + _CHARACTER * max(len(label) for label in y_axis.labels)
    frame = _Frame(x_axis, y_axis, left)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    name = _escaped(title)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">',
        f"<title>{name}</title>",
    ]
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = float(frame.y(tick))
        parts.append(f'<path class="grid" d="M{left:.1f},{y:.1f}H{right}"/>')
        parts.append(_text(left - 5, y + 4, "end", label))
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = float(frame.x(tick))
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v4"/>')
        overhang = max(0.0, x + _CHARACTER * len(label) / 2 - _WIDTH)
        parts.append(_text(x - overhang, bottom + 16, "middle", label))
    parts += [
        marks(frame),
        f'<path class="axis" d="M{left:.1f},{bottom}H{right}"/>',
        _text(2, 12, "start", y_label),
        _text((left + right) / 2, _HEIGHT - 6, "middle", x_label),
        "</svg>",
    ]
    return _figure(name, "\n".join(part for part in parts if part), notes)


def _empty_chart(title: str, why: str, notes: Sequence[str]) -> str:
    return _figure(_escaped(title), _note(why), notes)


def _figure(name: str, content: str, notes: Sequence[str]) -> str:
    said = "".join(f"<p>{_escaped(note)}.</p>" for note in notes if note)
    return f"<figure>\n<figcaption><h3>{name}</h3>{said}</figcaption>\n{content}\n</figure>"


def _left_out(count: int, why: str) -> str:
    if not count:
        return ""
    return f"{_counted(count, 'episode')} {'is' if count == 1 else 'are'} left out, {why}"


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(text)}</text>'


def _path(kind: str, pieces: Sequence[str]) -> str:
    return f'<path class="{kind}" d="{"".join(pieces)}"/>'


def _bars(kind: str, frame: _Frame, at: Array, low: Array, high: Array) -> str:
    starts, ends = frame.pairs(at, low), frame.y(high).tolist()
    return _path(kind, [f"M{start}V{end:.1f}" for start, end in zip(starts, ends, strict=True)])


def _columns(frame: _Frame, edges: Array, heights: Array, tips: Sequence[str]) -> str:
    """A column for each bin that is not empty, with words that show when it is pointed at."""
    xs, tops = frame.x(edges).tolist(), frame.y(heights).tolist()
    bottom = _HEIGHT - _BOTTOM
    return "\n".join(
        f'<rect class="column" x="{xs[i]:.1f}" y="{tops[i]:.1f}" '
        f'width="{max(0.8, xs[i + 1] - xs[i] - 0.6):.1f}" height="{bottom - tops[i]:.1f}">'
        f"<title>{_escaped(tip)}</title></rect>"
        for i, tip in enumerate(tips)
        if heights[i] > 0
    )


# Numbers.


def _drawable(values: Array) -> Array:
    return np.abs(values) < _TOO_LARGE  # False for NaN


def _are_whole(values: Array) -> bool:
    return bool((np.abs(values) < 1e15).all() and (values == np.rint(values)).all())


def _mean(values: Array) -> float:
    """The mean of numbers whose sum may be too large for a float."""
    scale = float(np.abs(values).max()) or 1.0
    return float((values / scale).mean()) * scale


def _running_mean(times: Array, values: Array, window: int) -> tuple[Array, Array]:
    """Means of the last `window` values, or of fewer at the start, at 200 places or fewer.

    It begins at half a window, since the mean of very few would say little.
    """
    begin = (min(window, len(values)) - 1) // 2
    at = np.unique(np.linspace(begin, len(values) - 1, _MOST_LINE_POINTS).round().astype(np.int64))
    first = np.maximum(at + 1 - window, 0)
    scale = float(np.abs(values).max()) or 1.0
    sums = np.concatenate([[0.0], np.cumsum(values / scale)])
    return times[at], (sums[at + 1] - sums[first]) / (at + 1 - first) * scale


def _groups(times: Array, values: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Sorted times in 150 slots: the middle of each that has values, and of these the lowest,
    the quartiles, and the highest."""
    start, end = float(times[0]), float(times[-1])
    slots = _slots(times, start, end, _MOST_GROUPS)
    counts = np.bincount(slots, minlength=_MOST_GROUPS)
    filled = np.flatnonzero(counts)
    ordered = values[np.lexsort((values, slots))]
    firsts = (np.cumsum(counts) - counts)[filled]
    low, below, above, high = (
        ordered[firsts + np.rint(q * (counts[filled] - 1)).astype(np.int64)]
        for q in (0.0, 0.25, 0.75, 1.0)
    )
    return start + (filled + 0.5) / _MOST_GROUPS * (end - start), low, below, above, high


def _slots(values: Array, start: float, end: float, number: int) -> Array:
    """Which of `number` equal parts from `start` to `end` each value is in; the ends included."""
    if end <= start:
        return np.zeros(len(values), np.int64)
    return np.clip((values - start) / (end - start) * number, 0, number - 1).astype(np.int64)


def _bins(values: Array) -> tuple[Array, Array, list[str]]:
    """At most about 40 bins of a round width: edges (k + 1,), counts (k,), and what to call them.

    Where all values are whole numbers, the edges lie between them.
    """
    low, high = float(values.min()), float(values.max())
    whole = _are_whole(values)
    if _same(low, high):
        padding = 0.5 if whole and high - low < 1 else _padding(low, high)
        name = _number(low) if low == high else f"about {_number(low)}"
        return np.array([low - padding, high + padding]), np.array([len(values)]), [name]
    bars = min(_MOST_BARS, max(5, math.isqrt(len(values))))
    step = _round_step((high - low) / bars, whole)
    places = np.floor(values / step + 1e-9)
    first = int(places.min())
    counts = np.bincount((places - first).astype(np.int64))
    edges = (first + np.arange(len(counts) + 1)) * step
    labels = _labels(edges.tolist(), step)
    if not whole:
        return edges, counts, [f"{a} to {b}" for a, b in itertools.pairwise(labels)]
    if step == 1:
        return edges - 0.5, counts, labels[:-1]
    last_ones = _labels((edges[1:] - 1).tolist(), 1.0)
    names = [f"{a} to {b}" for a, b in zip(labels[:-1], last_ones, strict=True)]
    return edges - 0.5, counts, names


def _time_axis(seconds: Array) -> tuple[Array, str, _Axis]:
    """Sorted times in a unit that suits them, the unit, and an axis from 0 on."""
    start, end = min(0.0, float(seconds[0])), float(seconds[-1])
    if end <= start:
        end = start + 1
    divisor, unit = _time_unit(end - start)
    return seconds / divisor, unit, _axis(start / divisor, end / divisor, across=True)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds <= 600:
        return 1.0, "s"
    if seconds <= 4 * 3600:
        return 60.0, "min"
    return 3600.0, "h"


def _duration(seconds: float) -> str:
    divisor, unit = _time_unit(seconds)
    return f"{seconds / divisor:.3g} {unit}"


def _axis(
    low: float, high: float, *, whole: bool = False, rounded: bool = False, across: bool = False
) -> _Axis:
    """An axis with ticks at multiples of 1, 2 or 5.

    Args:
      low, high: of the data.
      whole: whether ticks are whole numbers.
      rounded: whether the axis begins and ends with a tick.
      across: whether labels stand beside one another, so that long ones leave room for fewer.
    """
    if _same(low, high):
        padding = _padding(low, high)
        low = 0.0 if low == 0 and whole else low - padding
        high += padding
    for most in (6, 5, 4, 3, 2, 1):
        step = _round_step((high - low) / most, whole)
        if rounded:
            start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        else:
            start, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [place * step for place in range(start, end + 1)]
        labels = _labels(ticks, step)
        if not across or sum(len(label) + 2 for label in labels) * _CHARACTER < 300:
            break
    if rounded:
        low, high = ticks[0], ticks[-1]
    return _Axis(low, high, ticks, labels)


def _labels(values: Sequence[float], step: float) -> list[str]:
    """Numbers that are multiples of `step`, all with the same decimals, thousands separated."""
    largest = max(map(abs, values), default=0.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if largest < 1e9 and decimals <= 6:
        return [f"{value + 0.0:,.{decimals}f}" for value in values]
    digits = max(1, math.ceil(math.log10(max(largest, step) / step)) + 1)
    return [f"{value + 0.0:.{digits}g}" for value in values]


def _round_step(at_least: float, whole: bool = False) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below."""
    if whole and at_least <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(at_least))
    return next((n * power for n in (1, 2, 5) if n * power >= at_least * (1 - 1e-9)), 10 * power)


def _same(low: float, high: float) -> bool:
    """Whether two numbers are too close to be told apart in a chart."""
    return high - low <= max(1e-6 * max(abs(low), abs(high)), 1e-280)


def _padding(low: float, high: float) -> float:
    """By how much to widen an axis that would have no extent."""
    largest = max(abs(low), abs(high))
    return 0.1 * largest if largest > 1e-270 else 1.0


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2126; --soft: #5b6570; --line: #dfe3e8;
  --mark: #2f6fb3; --mean: #c2500a; --panel: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e6e9ec; --soft: #9aa4af;
  --line: #333a42; --mark: #6ea8e6; --mean: #f2995a; --panel: #1d2126; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 16px; }
h1, th, td, caption, p { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; }
.charts { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; padding: 12px; background: var(--panel); border-radius: 6px; }
figcaption p { margin: .1rem 0; }
figcaption p, .note, caption { color: var(--soft); font-size: .85rem; }
svg { display: block; width: 100%; height: auto; margin-top: 6px; }
svg text { font-size: 11px; fill: var(--soft); }
svg path { fill: none; }
.grid { stroke: var(--line); }
.axis { stroke: var(--soft); }
.points { stroke: var(--mark); stroke-width: 3.4; stroke-linecap: round; stroke-opacity: .6; }
.range { stroke: var(--mark); stroke-linecap: square; stroke-opacity: .45; stroke-width: .8; }
.half { stroke: var(--mark); stroke-linecap: square; stroke-width: 2; }
.mean { stroke: var(--mean); stroke-width: 1.8; stroke-linejoin: round; }
.column { fill: var(--mark); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
table.facts { width: auto; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); font-weight: normal; }
tbody th, thead th { color: var(--soft); }
.shares th { width: 30%; }
.bar { display: block; height: 6px; margin: .45rem 0 .1rem; background: var(--line);
  border-radius: 3px; }
.bar span { display: block; height: 100%; background: var(--mark); border-radius: 3px; }
pre { margin: 0; padding: 12px; background: var(--panel); border-radius: 6px; overflow: auto;
  max-height: 32rem; font: .8rem/1.4 ui-monospace, monospace; }
"""
