"""All processes of a session, whoever started them.

Ray's workers are in process groups of their own, but stay in the session; and 64 idle ones take
half a core. So a contender is a session, which is stopped while it is not its turn, and killed at
the end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def members(session: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone in the meantime
            # After the name, which may have any characters: state, parent, group, session.
            state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.add(int(entry.name))
    return found


def signal_all(session: int, number: signal.Signals) -> None:
    """Reaches those, too, that are started meanwhile."""
    reached: set[int] = set()
    while new := members(session) - reached:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        reached |= new


def kill_all(session: int, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while members(session) and time.monotonic() < until:
        signal_all(session, signal.SIGKILL)
        time.sleep(0.02)


class Reaper:
    """Kills the sessions that it was told of when the block is left, or this process is killed."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
        # In a session of its own, where no Ctrl-C reaches it.
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def add(self, session: int) -> None:
        self._sessions.add(session)
        self._tell()

    def remove(self, session: int) -> None:
        """Has to be told before the session's first process is waited for, which frees its id."""
        self._sessions.remove(session)
        self._tell()

    def _tell(self) -> None:
        self._process.stdin.write(f"{' '.join(map(str, self._sessions))}\n".encode())
        self._process.stdin.flush()

    def __enter__(self) -> "Reaper":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    sessions = ""
    for line in sys.stdin:  # which ends with the process that holds the other end
        sessions = line
    for session in sessions.split():
        kill_all(int(session))
