"""The fast lane between a caller and an actor of one machine: memory and a socket, no Ray.

A `Memory` holds two blocks for each actor of a batch, its actions and its time steps. It has no
name, so nothing of it is left whatever way either side ends; an actor gets it as a file descriptor.
The socket carries the signals, one message each way for a call: a byte where the blocks say it
all, and otherwise what goes beside them, pickled. A message is whole or not there (SOCK_SEQPACKET),
and the end of either side shows at the other as the end of the socket: there is no lock that could
be left held.

The actor listens, and tells its name by Ray; the caller connects. Both look who the other one is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from envfleet.actor import EnvActor, Reply
from envfleet.errors import FleetStartError

Sizes = tuple[int, int]
"""Bytes of an actor's block of actions and of its block of time steps."""

_STEP, _LEAVE, _DONE, _LONG = b"s", b"l", b"d", b"L"
"""Step all rows; let the actor do something else; the block says it all; a long message follows."""

_MESSAGE = 64 * 1024
"""Bytes that a message has at most; the kernel holds some of that size for each socket."""

_ALIGNMENT = 64

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")


class Memory:
    """The blocks of a batch, one after another.

    Args:
      sizes: by an actor's first environment.

    Attributes:
      nbytes: how many bytes there are.

    Raises:
      FleetStartError: there is not so much memory; says how much was needed.
    """

    def __init__(self, sizes: Mapping[int, Sizes]) -> None:
        self._fd = -1
        self._slices: dict[int, tuple[int, int, int, int]] = {}
        end = 0
        for first, (actions, time_steps) in sizes.items():
            at, behind = end, _aligned(end + actions)
            self._slices[first] = at, actions, behind, time_steps
            end = _aligned(behind + time_steps)
        self.nbytes = max(end, 1)
        try:
            self._fd = os.memfd_create("envfleet", os.MFD_CLOEXEC)
            # Now, since a write for which there is no room any more would end the process.
            os.posix_fallocate(self._fd, 0, self.nbytes)
            self._map = mmap.mmap(self._fd, self.nbytes)
        except (OSError, OverflowError) as problem:
            raise FleetStartError(
                f"{self.nbytes:,} bytes of shared memory are needed for the actions and time steps "
                f"of {len(sizes)} actors, and were not to be had: {problem}. "
                'transport="rpc" needs none'
            ) from problem

    def blocks(self, first: int) -> tuple[memoryview, memoryview]:
        """An actor's two blocks."""
        at, actions, behind, time_steps = self._slices[first]
        view = memoryview(self._map)
        return view[at : at + actions], view[behind : behind + time_steps]

    def grant(self, to: socket.socket, first: int) -> None:
        """Sends an actor what it needs to find its blocks."""
        socket.send_fds(to, [pickle.dumps((self.nbytes, self._slices[first]))], [self._fd])

    def close(self) -> None:
        """Gives it up; it is there until everybody has."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- the actor's end -------------------------------------------------------------------------------


class ActorEnd:
    """Where an actor waits for its caller.

    Attributes:
      name: what the caller connects to.
    """

    def __init__(self) -> None:
        # In the kernel's own name space: no file is left of it.
        self.name = f"\0envfleet-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.name)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._actions = memoryview(b"")
        self._buffer = bytearray(_MESSAGE)
        # A forked child's copy would hide from the caller that the actor has died.
        os.register_at_fork(after_in_child=self._close)

    def serve(self, actor: EnvActor) -> None:
        """Does what comes, until the caller has something else, or is gone."""
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = self._accept(actor)
            while self._answer(self._socket, actor):
                pass

    def _accept(self, actor: EnvActor) -> socket.socket:
        """The connection to the caller, who says at once where the blocks are."""
        with contextlib.closing(self._listener):
            while True:
                connection = self._listener.accept()[0]
                if _peer(connection)[1] == os.getuid():
                    message, fds, *_ = socket.recv_fds(connection, _MESSAGE, 1)
                    if fds:
                        break
                connection.close()
        nbytes, (at, actions, behind, time_steps) = pickle.loads(message)
        view = memoryview(mmap.mmap(fds[0], nbytes))
        os.close(fds[0])
        self._actions = view[at : at + actions]
        actor.place(np.frombuffer(view[behind : behind + time_steps], np.uint8))
        return connection

    def _answer(self, caller: socket.socket, actor: EnvActor) -> bool:
        """Waits for a call and answers it; False where that was none."""
        size = caller.recv_into(self._buffer)
        kind = self._buffer[:1]
        if size == 0 or kind == _LEAVE:
            return False
        if kind == _STEP:
            reply = actor.step(self._actions)
        else:
            method, nbytes, args = pickle.loads(memoryview(self._buffer)[:size])
            block = (self._actions[:nbytes],) if method == "step" else ()
            reply = getattr(actor, method)(*block, *args)
        if isinstance(reply, Reply):
            _send_all(caller, pickle.dumps((reply.objects, reply.failures)))
        else:
            caller.send(_DONE)
        return True

    def _close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


def _send_all(to: socket.socket, data: bytes) -> None:
    if len(data) > _MESSAGE:
        to.send(_LONG + _LENGTH.pack(len(data)))
    for start in range(0, len(data), _MESSAGE):
        to.send(data[start : start + _MESSAGE])


# -- the caller's end ------------------------------------------------------------------------------


class CallerEnd:
    """A connection to the `ActorEnd` of that name.

    Args:
      name: of it.
      pid: of the process that has to be behind it.

    Raises:
      OSError: it cannot be reached, as in a container with a network of its own.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.setblocking(False)
            self.socket.connect(name)
            if _peer(self.socket)[:2] != (pid, os.getuid()):
                raise PermissionError(f"another process than {pid} answers")
        except BaseException:
            self.socket.close()
            raise
        self._actions = self._time_steps = memoryview(b"")
        self._buffer = bytearray(_MESSAGE)
        self._missing = 0
        self._parts: list[bytes] = []

    def grant(self, memory: Memory, first: int) -> None:
        """Gives the actor of that first environment its blocks."""
        self._actions, self._time_steps = memory.blocks(first)
        memory.grant(self.socket, first)

    def send(self, method: str, args: Sequence[Any]) -> bool:
        """Sends a step or a reset; False where it is too large for that.

        Raises:
          OSError: the actor is gone.
        """
        nbytes = 0
        if method == "step":
            block, *args = args
            nbytes = len(block)
            self._actions[:nbytes] = block
            if not any(args):  # neither objects nor rows
                self.socket.send(_STEP)
                return True
        has_objects = method == "step" and args[0]
        message = (cloudpickle if has_objects else pickle).dumps((method, nbytes, args))
        if len(message) > _MESSAGE:
            return False
        self.socket.send(message)
        return True

    def leave(self) -> None:
        """Lets the actor do something else."""
        with contextlib.suppress(OSError):  # Ray tells how it ended
            self.socket.send(_LEAVE)

    def receive(self) -> Reply | bytes | None:
        """What has come, as `EnvActor` gives it; None where it has not come in whole.

        Raises:
          EOFError: the actor is gone.
        """
        try:
            size = self.socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if size == 0:
            raise EOFError
        if not self._missing:
            kind = self._buffer[:1]
            if kind == _DONE:
                return bytes(self._time_steps)
            if kind == _LONG:
                self._missing = _LENGTH.unpack_from(self._buffer, 1)[0]
                return None
            data: bytes | bytearray = self._buffer
        else:
            self._parts.append(bytes(memoryview(self._buffer)[:size]))
            self._missing -= size
            if self._missing:
                return None
            data = b"".join(self._parts)
            self._parts.clear()
        return Reply(bytes(self._time_steps), *pickle.loads(data))

    def close(self) -> None:
        self.socket.close()

    __del__ = close


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)
