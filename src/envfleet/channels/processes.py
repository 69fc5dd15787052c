"""The processes behind actors, as far as Ray does not look after them: Linux only.

How one ended: Ray's words for a crash are the same for every cause. On the caller's own machine
the kernel knows exit code or signal (from 6.15 on, by a pidfd opened while the process lived), and
what the process wrote to its stderr stands in a file of Ray's.

What one leaves behind: of an actor that is killed Ray ends all child processes, of one that crashes
those in its process group. An environment's process that has left the group would go on for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Collection
from pathlib import Path

_LINES, _CHARACTERS = 20, 4000
"""How much of a process's stderr is shown: its last lines."""

_NO_NEWS = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")
"""Lines for Ray's log monitor, and the long last one of Python's own report of a crash."""

_PATIENCE = 300
"""Milliseconds that a process may take to end when Ray has lost it: a core is written, say."""

# linux/pidfd.h: a struct pidfd_info whose first word asks for, and tells of, what is known.
_PIDFD_GET_INFO = 0xC050FF0B
_PIDFD_INFO_SIZE = 80
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


class Watch:
    """A process of this machine whose exit can be told afterwards; nothing where that is unknown.

    Args:
      pid: of a process that runs.
    """

    def __init__(self, pid: int) -> None:
        self._pidfd = -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    def words(self) -> str:
        """``"exit code 3"`` or ``"killed by SIGKILL"``; empty where it is not known."""
        status = self._exit_status()
        if not status:  # 0 is what Ray's own ways to exit give; its words say more
            return ""
        if status > 0:
            return f"exit code {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"

    def _exit_status(self) -> int | None:
        if self._pidfd < 0 or sys.platform != "linux":
            return None
        import fcntl

        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(_PATIENCE)
        info = bytearray(_PIDFD_INFO_SIZE)
        struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
        except OSError:  # an older kernel
            return None
        if not struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
            return None
        return os.waitstatus_to_exitcode(struct.unpack_from("<i", info, _EXIT_CODE_OFFSET)[0])

    def close(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    __del__ = close


def last_lines(path: str) -> str:
    """The end of a process's stderr; empty where there is none."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _CHARACTERS))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if not line.startswith(_NO_NEWS)]
    return "\n".join(lines[-_LINES:]).strip()


# -- what an actor starts --------------------------------------------------------------------------

_MARK = "ENVFLEET_ACTOR"
"""Environment variable by which the processes that an actor has started can be found."""


def prepare(actor_id: str) -> None:
    """To be called in an actor's process, before there is an environment."""
    os.environ[_MARK] = actor_id
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=_let_go_of_ray)
        threading.Thread(target=_outlive_no_raylet, args=(actor_id,), daemon=True).start()


def _outlive_no_raylet(actor_id: str) -> None:
    """Ends all that the actor has started, and the actor, when Ray's own daemon has gone.

    It is the raylet that cleans up after an actor. On a Ray of the caller's own that is killed with
    the caller, what an environment's child processes have started would go on for ever.
    """
    try:
        raylet = os.pidfd_open(os.getppid())
    except OSError:
        return
    with contextlib.suppress(OSError):
        select.select([raylet], [], [])
    end_orphans([actor_id])
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _let_go_of_ray() -> None:
    """Closes a forked child's copies of the connections by which Ray sees that the actor lives.

    With a copy open the actor's death would go unnoticed for as long as the child lives, and Ray
    would not end the child either.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                peer = copy.getpeername()
        except OSError:  # no connection (any more)
            continue
        if isinstance(peer, str) and peer.endswith(("/raylet", "/plasma_store")):
            os.close(fd)


def end_orphans(actor_ids: Collection[str]) -> None:
    """Kills what actors that are gone have started on this machine, and what that has started."""
    marks = {f"{_MARK}={actor_id}".encode() for actor_id in actor_ids}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not marks.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                os.kill(int(entry.name), signal.SIGKILL)
