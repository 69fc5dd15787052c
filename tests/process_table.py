"""Processes that tests look for, and that have to be gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


def status(pid: int) -> list[str]:
    """What /proc tells of a process, from its state on; nothing if there is none any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


class Process(NamedTuple):
    """A process, and when it began: its number may be given to another one."""

    pid: int
    began: str

    def runs(self) -> bool:
        return status(self.pid)[19:20] == [self.began]


def marked(mark: str) -> list[Process]:
    """Processes that have inherited an environment variable of this value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(Process(int(entry.name), status(int(entry.name))[19]))
        except (OSError, IndexError):
            continue
    return found


def kill(processes: list[Process]) -> None:
    for process in processes:
        if process.runs():
            os.kill(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], until: float) -> Any:
    """What the condition gives, as soon as that is true or the time has come."""
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return value


def still_running(processes: list[Process], until: float) -> list[Process]:
    wait_for(lambda: not any(process.runs() for process in processes), until)
    return [process for process in processes if process.runs()]
