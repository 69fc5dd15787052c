"""The live display of a run: whole lines in a log, a block in its place on a terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

from envfleet.collect.progress import Progress, Snapshot, clock

SOME = Snapshot(
    num_steps=12_400,
    num_episodes=86,
    seconds=62.4,
    steps_per_second=1240.4,
    mean_return=21.34,
    num_failures=0,
    fraction=0.439,
    seconds_left=80.2,
    num_shards=3,
)
MORE = SOME._replace(num_steps=20_000, num_failures=2, fraction=1.0, seconds_left=0.0)


class Terminal:
    """A pseudoterminal that something is written to, and all that came out of it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.file = os.fdopen(slave, "w", buffering=1, encoding="utf-8")
        self._received = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # what a terminal gives whose other side is closed
            while received := os.read(self._master, 1 << 16):
                self._received += received

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        self._reader.join()
        with contextlib.suppress(OSError):
            os.close(self._master)

    def text(self) -> str:
        self.close()
        return self._received.decode()

    def lines(self) -> list[str]:
        """What is to be seen in the end."""
        return screen(self.text())


def screen(text: str) -> list[str]:
    """The lines of a wide terminal that was sent this."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif match := re.fullmatch(r"\x1b\[(\d+)A", token):
            row -= int(match[1])
        elif token.startswith("\x1b"):
            assert token[-1] in "mhl", f"unknown to this terminal: {token!r}"
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def lines(*snapshots, every=0.0):
    """What a log gets of them; the last one is how the run ended."""
    file = io.StringIO()
    with Progress(file, every) as progress:
        for snapshot in snapshots[:-1]:
            progress.show(snapshot)
        progress.close(snapshots[-1])
    return file.getvalue().splitlines()


# -- a log -----------------------------------------------------------------------------------------


def test_a_file_gets_plain_lines(tmp_path):
    path = tmp_path / "log"
    with open(path, "w") as file, Progress(file, every=0.0) as progress:
        progress.show(SOME)
        assert path.read_text().endswith("left\n"), "a line waits to be written"
        progress.show(MORE)
    assert path.read_text().splitlines() == [
        "12,400 steps (1,240/s) | 86 episodes, return 21.3 | 0 failures | 3 shards | 1:20 left",
        "20,000 steps (1,240/s) | 86 episodes, return 21.3 | 2 failures | 3 shards | 0:00 left",
        "20,000 steps (1,240/s) | 86 episodes, return 21.3 | 2 failures | 3 shards | 1:02 in all",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 1}, "1 step "),
        ({"num_episodes": 0, "mean_return": None}, "| 0 episodes | "),
        ({"mean_return": float("nan")}, "return nan |"),
        ({"mean_return": float("-inf")}, "return -inf |"),
        ({"mean_return": -1234.56}, "return -1,235 |"),
        ({"mean_return": -0.0}, "return 0 |"),
        ({"mean_return": 1e12}, "return 1e+12 |"),
        ({"steps_per_second": 0.25}, "(0.2/s)"),
        ({"steps_per_second": 0.0}, "(0/s)"),
        ({"num_failures": 1, "num_shards": 1}, "| 1 failure | 1 shard |"),
        ({"seconds_left": None}, "3 shards\n"),
        ({"seconds_left": float("inf")}, "3 shards\n"),
    ],
)
def test_a_line_says_it_in_words(changes, words):
    first, _ = lines(SOME._replace(**changes), SOME)
    assert words in first + "\n"


def test_a_log_is_told_now_and_then_and_of_the_end():
    assert lines(*[SOME] * 1000, MORE, every=3600.0) == [
        "20,000 steps (1,240/s) | 86 episodes, return 21.3 | 2 failures | 3 shards | 1:02 in all"
    ]


def test_a_run_that_fails_leaves_where_it_stood():
    file = io.StringIO()

    def run():
        with Progress(file, 3600.0) as progress:
            progress.show(SOME)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert file.getvalue().startswith("12,400 steps")


def test_the_end_is_told_once():
    file = io.StringIO()
    with Progress(file, 0.0) as progress:
        progress.close(SOME)
        progress.show(SOME)
        progress.close(SOME)
    assert file.getvalue().count("\n") == 1


def test_nothing_is_shown_of_a_run_of_which_nothing_is_known():
    file = io.StringIO()
    with Progress(file, 0.0):
        pass
    assert file.getvalue() == ""


def test_standard_error_is_where_it_is_shown(capsys):
    with Progress() as progress:
        progress.show(SOME)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("12,400 steps")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (5.4, "0:05"),
        (59.6, "1:00"),
        (245, "4:05"),
        (3723, "1:02:03"),
        (3599.7, "1:00:00"),
        (360_000, "100:00:00"),
        (-3, "0:00"),
        (float("nan"), "0:00"),
    ],
)
def test_times_are_told_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


# -- a terminal ------------------------------------------------------------------------------------


def test_a_terminal_has_one_block_that_is_drawn_in_its_place(terminal):
    with Progress(terminal.file) as progress:
        progress.show(SOME)
        progress.close(MORE)
    text = terminal.text()
    assert "12,400 steps" in text
    assert "43%" in text, "rounded up?"
    assert "\x1b[1;31m2 failures" in text, "they do not stand out"
    bar, words, after = screen(text)
    assert re.fullmatch(r"━+  100%", bar)
    assert words == (
        "20,000 steps (1,240/s) | 86 episodes, return 21.3 | 2 failures | 3 shards | 1:02 in all"
    )
    assert after == ""


def test_a_block_says_how_far_it_is_and_what_is_left(terminal):
    Progress(terminal.file).show(SOME)
    bar, words = terminal.lines()
    assert re.fullmatch(r"━+[╸╺]?━+  +43%  1:02  1:20 left", bar)
    assert len(bar) <= 100
    assert words == "12,400 steps (1,240/s) | 86 episodes, return 21.3 | 0 failures | 3 shards"


def test_a_bar_without_an_end_pulses(terminal):
    with Progress(terminal.file) as progress:
        progress.show(SOME._replace(fraction=None, seconds_left=None))
    text = terminal.text()
    shown, _, _ = text.partition("in all")
    assert "%" not in shown
    assert len(set(re.findall(r"\x1b\[([\d;]*)m━", shown))) > 1, "all of one colour"
    assert len(screen(text)) == 2, "a bar that pulses no more is left"


@pytest.mark.parametrize("fraction", [-1.0, 2.0, float("nan"), float("inf")])
def test_a_fraction_that_is_none_is_no_error(terminal, fraction):
    with Progress(terminal.file) as progress:
        progress.show(SOME._replace(fraction=fraction))
    assert re.search(r" (0|100)%$", terminal.lines()[0])


def test_a_block_is_drawn_a_few_times_a_second_however_often_it_is_shown(terminal):
    began = time.monotonic()
    progress = Progress(terminal.file)
    while (seconds := time.monotonic() - began) < 1.0:
        for _ in range(100):
            progress.show(SOME)
    drawn = terminal.text().count("12,400 steps")
    assert 2 <= drawn <= 5 * seconds + 1


def test_a_narrow_terminal_loses_no_words(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with Progress(terminal.file) as progress:
        progress.show(SOME)
        progress.close(MORE)
    shown = terminal.lines()
    assert max(map(len, shown)) <= 40
    words = " ".join(shown[1:]).split()
    assert " ".join(words) == (
        "20,000 steps (1,240/s) | 86 episodes, return 21.3 | 2 failures | 3 shards | 1:02 in all"
    )


def test_what_is_logged_and_printed_meanwhile_stands_above_the_block(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.setattr(sys, "stdout", terminal.file)
    logger = logging.getLogger("envfleet.test_collect_progress")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    long = "a line that is longer than the terminal is wide " + "x" * 100
    with Progress() as progress:
        logger.warning("before it")
        progress.show(SOME)
        logger.warning("[a] warning of %s", 12)
        print(long)
        print("printed", "in parts", file=sys.stderr)
        progress.close(MORE)
        logger.warning("after it")
    assert terminal.file is sys.stderr is sys.stdout is handler.stream
    *above, bar, words, after, end = terminal.lines()
    assert above == ["before it", "[a] warning of 12", long, "printed in parts"]
    assert bar.endswith("100%")
    assert words.startswith("20,000 steps")
    assert [after, end] == ["after it", ""]


def test_what_is_printed_to_a_file_meanwhile_gets_there(terminal, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stderr", terminal.file)
        monkeypatch.setattr(sys, "stdout", out)
        with Progress() as progress:
            progress.show(SOME)
            print("a result")
    assert (tmp_path / "out").read_text() == "a result\n"
    assert "a result" not in terminal.text()


def test_another_terminal_is_left_alone(terminal, monkeypatch):
    other = Terminal()
    monkeypatch.setattr(sys, "stderr", other.file)
    with Progress(terminal.file) as progress:
        progress.show(SOME)
        print("there", file=sys.stderr)
    assert other.text().split() == ["there"]
    assert "there" not in terminal.text()


ABSL = """
import sys
import absl.app, absl.logging
from envfleet.collect.progress import Progress, Snapshot
def main(_):
    with Progress() as progress:
        progress.show(Snapshot(1, 0, 1.0, 1.0, None, 0, 0.5, None, 0))
        absl.logging.error("a line of absl's")
        print("printed")
    absl.logging.error("another line")
absl.app.run(main)
"""


def test_the_handler_of_absl_is_taken_along(terminal):
    pytest.importorskip("absl")
    out = terminal.file.fileno()
    subprocess.run([sys.executable, "-c", ABSL], stdout=out, stderr=out, check=True)
    shown = terminal.lines()
    assert [re.sub(r"^E\d.*\] ", "", line) for line in shown if "%" not in line] == [
        "a line of absl's",
        "printed",
        "1 step (1.0/s) | 0 episodes | 0 failures | 0 shards | 0:01 in all",
        "another line",
        "",
    ]


@pytest.mark.parametrize("why", ["dumb", "no rich"])
def test_a_terminal_that_can_have_no_block_gets_lines(terminal, monkeypatch, why):
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        for name in ("rich", "rich.console", "rich.live"):
            monkeypatch.setitem(sys.modules, name, None)
    with Progress(terminal.file, every=0.0) as progress:
        progress.show(SOME)
    text = terminal.text()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


# -- where nothing can be shown --------------------------------------------------------------------


class Gone(io.StringIO):
    """A file whose reader is gone; a terminal, where it is to be one."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_who_is_gone_ends_no_run(terminal, is_terminal):
    with Progress(Gone(is_terminal), every=0.0) as progress:
        progress.show(SOME)
        print("goes on")


def test_a_pipe_that_breaks_ends_no_run():
    read, write = os.pipe()
    file = os.fdopen(write, "w", buffering=1)
    with Progress(file, every=0.0) as progress:
        progress.show(SOME)
        os.close(read)
        for _ in range(100):
            progress.show(SOME)
    with contextlib.suppress(BrokenPipeError):
        file.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_closed_file_ends_no_run(tmp_path, when):
    with open(tmp_path / "log", "w") as file:
        if when == "before":
            file.close()
        with Progress(file, every=0.0) as progress:
            progress.show(SOME)
            file.close()
            progress.show(SOME)


def test_a_terminal_that_is_closed_ends_no_run(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.file)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, handler])
    with Progress() as progress:
        progress.show(SOME)
        terminal.file.close()
        progress.close(MORE)
    assert sys.stderr is terminal.file is handler.stream


def test_a_terminal_that_hangs_up_ends_no_run():
    pytest.importorskip("rich")
    master, slave = pty.openpty()
    file = os.fdopen(slave, "w", buffering=1)
    with Progress(file) as progress:
        os.close(master)
        progress.show(SOME)
        progress.close(MORE)
    with pytest.raises(OSError):
        print("is it gone?", file=file)
    with contextlib.suppress(OSError):
        file.close()


def test_a_process_without_standard_error_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(every=0.0) as progress:
        progress.show(SOME)
