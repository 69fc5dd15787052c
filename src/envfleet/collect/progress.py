"""Progress: how a run of data collection is getting on, on a terminal or as lines of a log.

On a terminal it is a block of two lines that is drawn anew in its place, by rich. What is logged or
printed meanwhile to the same terminal goes through rich and stands above the block: for so long
`sys.stdout` and `sys.stderr` are rich's where they are that terminal, and so are the streams of
logging's handlers that hold one of these. What goes to a file or a pipe is left alone. There is no
thread: nothing is drawn but in `show` and `close`, in the thread that calls them.

Elsewhere, and without rich, it is a whole line now and then, which disturbs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TextIO, cast

_BETWEEN_DRAWINGS = 0.25


class Snapshot(NamedTuple):
    """Where a run stands.

    Attributes:
      num_steps, num_episodes: collected so far.
      seconds: of this run.
      steps_per_second: of late.
      mean_return: of the latest episodes; None before there is one.
      num_failures: environments that failed.
      fraction: of the way to the nearest of what ends the run, 0 to 1; None where nothing does.
      seconds_left: None where it is not known.
      num_shards: written.
    """

    num_steps: int
    num_episodes: int
    seconds: float
    steps_per_second: float
    mean_return: float | None
    num_failures: int
    fraction: float | None
    seconds_left: float | None
    num_shards: int


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows where a run stands. That it cannot be shown, on a closed file say, is never an error.

    Args:
      file: where; standard error by default.
      every: seconds between two lines, where it is no terminal.
    """

    def __init__(self, file: TextIO | None = None, every: float = 10.0) -> None:
        out = _Out(sys.stderr if file is None else file)
        self._display: _Display | None = None
        if out.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
            with contextlib.suppress(ImportError):
                self._display = _Block(out)
        self._display = self._display or _Lines(out, every)
        self._newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Shows it if it is time to; to be called as often as one likes."""
        self._newest = snapshot
        if self._display is not None and time.monotonic() >= self._display.due:
            with contextlib.suppress(OSError, ValueError):
                self._display.draw(snapshot)

    def close(self, snapshot: Snapshot | None = None) -> None:
        """Shows how the run has ended: this, or what `show` was given last."""
        display, self._display = self._display, None
        if display is not None:
            with contextlib.suppress(OSError, ValueError):
                display.end(snapshot or self._newest)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Display(Protocol):
    due: float
    """When there is something to draw again, by `time.monotonic`."""

    def draw(self, snapshot: Snapshot) -> None: ...

    def end(self, snapshot: Snapshot | None) -> None: ...


# -- lines of a log --------------------------------------------------------------------------------


class _Lines:
    def __init__(self, out: _Out, every: float) -> None:
        self._out, self._every = out, every
        self.due = time.monotonic() + every

    def draw(self, snapshot: Snapshot) -> None:
        self.due = time.monotonic() + self._every
        left = _left(snapshot)
        self._write([*_words(snapshot), *([left] if left else [])])

    def end(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._write([*_words(snapshot), f"{clock(snapshot.seconds)} in all"])

    def _write(self, words: list[str]) -> None:
        self._out.write(" | ".join(words) + "\n")
        self._out.flush()


def _words(snapshot: Snapshot) -> list[str]:
    mean = snapshot.mean_return
    return [
        f"{counted(snapshot.num_steps, 'step')} ({_rate(snapshot.steps_per_second)}/s)",
        counted(snapshot.num_episodes, "episode")
        + ("" if mean is None else f", return {number(mean)}"),
        counted(snapshot.num_failures, "failure"),
        counted(snapshot.num_shards, "shard"),
    ]


def _left(snapshot: Snapshot) -> str:
    seconds = snapshot.seconds_left
    return "" if seconds is None or not math.isfinite(seconds) else f"{clock(seconds)} left"


def _rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:,.0f}"


def counted(count: int, what: str) -> str:
    """``1 step``, ``12,400 steps``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def clock(seconds: float) -> str:
    """``4:05``, ``1:02:03``."""
    whole = round(max(seconds, 0.0)) if math.isfinite(seconds) else 0
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Three digits or more, thousands separated."""
    if 99.95 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value + 0.0:.3g}"  # no -0


# -- a block on a terminal -------------------------------------------------------------------------


class _Block:
    """Raises ImportError where rich is not installed."""

    def __init__(self, out: _Out) -> None:
        from rich.console import Console
        from rich.live import Live

        terminal = out.terminal()
        # soft_wrap: what others print is not broken into lines of the terminal's width.
        console = Console(file=cast(TextIO, out), force_terminal=True, soft_wrap=True)
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=terminal is not None and _Out(sys.stdout).terminal() == terminal,
            redirect_stderr=terminal is not None and _Out(sys.stderr).terminal() == terminal,
        )
        self._handlers: list[tuple[logging.StreamHandler[Any], Any, Any]] = []
        self.due = -math.inf

    def draw(self, snapshot: Snapshot) -> None:
        self._start()
        lines = [
            _bar_line(snapshot.fraction, [clock(snapshot.seconds), _left(snapshot)]),
            _text_line(snapshot),
        ]
        self._live.update(_stacked(lines), refresh=True)
        self.due = time.monotonic() + _BETWEEN_DRAWINGS

    def end(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        self._start()
        in_all = f"{clock(snapshot.seconds)} in all"
        lines = [_text_line(snapshot, in_all)]
        if snapshot.fraction is not None:
            lines.insert(0, _bar_line(snapshot.fraction, []))
        try:
            self._live.update(_stacked(lines))
        finally:
            self._live.stop()
            for handler, before, now in self._handlers:
                if handler.stream is now:
                    handler.setStream(before)

    def _start(self) -> None:
        if self._live.is_started:
            return
        before = (sys.stdout, sys.stderr)
        self._live.start()
        for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
            if new is not old:
                for handler in _handlers_on(old):
                    handler.setStream(new)
                    self._handlers.append((handler, old, new))


def _bar_line(fraction: float | None, times: list[str]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done = 0.0 if fraction is None or math.isnan(fraction) else min(max(fraction, 0.0), 1.0)
    cells: list[Any] = [ProgressBar(total=1.0, completed=done, pulse=fraction is None)]
    if fraction is not None:
        cells.append(Text(f"{math.floor(100 * done):3}%", style="bold"))
    cells += [Text(words) for words in times if words]
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=1)
    for _ in cells[1:]:
        table.add_column(no_wrap=True)
    table.add_row(*cells)
    return table


def _text_line(snapshot: Snapshot, *more: str) -> Any:
    from rich.text import Text

    steps, episodes, failures, shards = _words(snapshot)
    line = Text(steps, overflow="fold", no_wrap=False)  # whatever is done with others' lines
    for words in (episodes, failures, shards, *more):
        line.append(" | ", style="dim")
        is_bad = words is failures and snapshot.num_failures > 0
        line.append(words, style="bold red" if is_bad else None)
    return line


def _stacked(lines: list[Any]) -> Any:
    from rich.console import Group

    return Group(*lines)


def _handlers_on(stream: Any) -> Iterator[logging.StreamHandler[Any]]:
    """Those of all loggers that write to it."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            own = getattr(handler, "python_handler", handler)  # absl's handler has another one
            if isinstance(own, logging.StreamHandler) and own.stream is stream:
                yield own


class _Out:
    """A file to show something on, which may be closed, or gone, at any time.

    The errors end here, since rich would leave the process upon a broken pipe.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return self._file is not None and self._file.isatty()
        return False

    def terminal(self) -> int | None:
        """The terminal's device."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._file is not None and self._file.isatty():
                return os.fstat(self._file.fileno()).st_rdev
        return None
