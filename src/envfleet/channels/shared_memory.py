"""Actors as Ray actors, of which those on the caller's machine are stepped without Ray.

Ray places, starts, watches and ends them, and carries all but resets and steps. An actor whose
caller is on its machine is kept in one long call, `serve`, in which it answers what comes by its
lane. For any other call the caller has it leave that first, and serve again before the next step;
an actor works through Ray's calls in their order, so calls run in the order of posting whatever
carries them. A lane carries one call at a time, since there is one block: what is posted behind
that goes by Ray, as does what is too large, and all that goes to actors elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from envfleet.channels import Died, Gone
from envfleet.channels.lane import CallerEnd, Memory, Sizes
from envfleet.channels.remote import GONE, Place, RayBackend, RayChannel, death

_log = logging.getLogger("envfleet")


class LaneCall:
    """A call that went by a lane.

    Attributes:
      outcome: its reply, or a `Died`; None while it is on its way.
      served: of the `serve` in which it is answered.
    """

    __slots__ = ("outcome", "served")

    def __init__(self, served: concurrent.futures.Future[None]) -> None:
        self.outcome: Any = None
        self.served = served


class SharedMemoryChannel(RayChannel):
    """A handle on one Ray actor, and the lane to it where it is on this machine."""

    def __init__(self, backend: SharedMemoryBackend, first: int, handle: Any) -> None:
        super().__init__(backend, first, handle)
        self._lanes = backend.lanes
        self._end: CallerEnd | None = None
        """None where the actor is not on this machine, or has ended."""
        self._is_granted = False
        """Whether it knows its blocks."""
        self._serving: concurrent.futures.Future[None] | None = None
        """Of the `serve` in which it waits for calls, or will; None once it was told to leave."""
        self._moving: LaneCall | None = None
        """The call that is on its way by the lane, if one is."""

    @property
    def transport(self) -> str:
        return "rpc" if self._end is None else "shared_memory"

    def watch(self, place: Place) -> str | None:
        problem = super().watch(place)
        if problem is None and self.is_here and place.lane:
            try:
                self._end = CallerEnd(place.lane, place.pid)
            except OSError as cause:
                _log.info("%s is not reached by shared memory: %s", place.lane[1:], cause)
            else:
                self._lanes.add(self._end.socket.fileno(), self)
        return problem

    def post(self, limit: float | None, method: str, *args: Any) -> Any:
        end = self._end
        if end is None:
            return super().post(limit, method, *args)
        if method in ("step", "reset") and self._moving is None and self._lanes.memory is not None:
            if not ray.is_initialized():
                raise Gone(GONE)
            if self._serving is None or self._serving.done():
                self._serving = self._lanes.bell.future(super().post(None, "serve"))
            call = LaneCall(self._serving)
            try:
                if not self._is_granted:
                    end.grant(self._lanes.memory, self.first)
                    self._is_granted = True
                if end.send(method, args):
                    self._moving = call
                    return call
            except OSError:  # it is gone: Ray tells how
                self._disconnect()
                return super().post(limit, method, *args)
        if self._serving is not None:
            end.leave()
            self._serving = None
        return super().post(limit, method, *args)

    def take(self) -> None:
        """Takes what has come by the lane."""
        assert self._end is not None
        try:
            reply = self._end.receive()
        except EOFError:
            self._disconnect()
            return
        if reply is not None:
            self._arrived(reply)

    def look(self) -> None:
        """Looks whether Ray has told the end of the actor, or of its `serve`, in the meantime."""
        if self._moving is None or not self._moving.served.done():
            return
        outcome = outcome_of(self._moving.served)
        if isinstance(outcome, Died):
            self._arrived(outcome)
        elif self._end is None:
            self._arrived(Died("something in its process closed the connection to the caller"))

    def _arrived(self, outcome: Any) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.outcome = outcome

    def _disconnect(self) -> None:
        """The socket has ended: the actor has, too, and Ray will tell how."""
        end, self._end = self._end, None
        if end is not None:
            self._lanes.remove(end.socket.fileno())
            end.close()
        self._serving = None
        if not self._backend.is_there():
            self._arrived(Gone(GONE))
        self._lanes.broken.add(self)
        self.look()

    def kill(self) -> None:
        super().kill()
        self._disconnect()


def outcome_of(done: concurrent.futures.Future[Any]) -> Any:
    """What a call by Ray gave, or a `Died`."""
    try:
        return done.result()
    except RayError as error:
        return death(error)


class Bell:
    """Rings when a call by Ray is done, where a lane is waited for."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def future(self, ref: Any) -> concurrent.futures.Future[Any]:
        """A call by Ray; the bell rings when it is done."""
        future: concurrent.futures.Future[Any] = ref.future()
        future.add_done_callback(self._ring)
        return future

    def _ring(self, _: object) -> None:
        with self._lock:  # (in a thread of Ray's)
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class Lanes:
    """Those of a batch.

    Attributes:
      memory: what calls carry lies there, as soon as it is known how large that is.
      broken: channels whose lane has ended.
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.bell = Bell()
        self._poll = select.epoll()
        self._poll.register(self.bell.fileno(), select.EPOLLIN)
        # (Weakly: a batch that is dropped without being closed lets go of its actors.)
        self._channels: weakref.WeakValueDictionary[int, SharedMemoryChannel]
        self._channels = weakref.WeakValueDictionary()
        self.broken: weakref.WeakSet[SharedMemoryChannel] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._channels)

    def add(self, fd: int, channel: SharedMemoryChannel) -> None:
        self._channels[fd] = channel
        self._poll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        # Not by closing it alone, which a copy in a forked child would keep from having effect.
        self._poll.unregister(fd)
        self._channels.pop(fd, None)

    def wait(self, timeout: float | None) -> None:
        """Waits until something has come on any lane, or Ray's bell rings; takes it."""
        for fd, _ in self._poll.poll(timeout):
            channel = self._channels.get(fd)
            if channel is not None:
                channel.take()
            elif fd == self.bell.fileno():
                self.bell.hush()
                for one in [*self._channels.values(), *self.broken]:
                    one.look()

    def close(self) -> None:
        self._poll.close()
        self.bell.close()
        if self.memory is not None:
            self.memory.close()


class SharedMemoryBackend(RayBackend):
    """Opens `SharedMemoryChannel`s; its arguments are those of `RayBackend`."""

    has_lane = True

    def __init__(self, ray_init: Mapping[str, Any] | None, placement: Any = None) -> None:
        super().__init__(ray_init, placement)
        self.lanes = Lanes()
        self._futures: dict[Any, concurrent.futures.Future[Any]] = {}

    def channel(self, first: int, handle: Any) -> SharedMemoryChannel:
        return SharedMemoryChannel(self, first, handle)

    def reserve(self, sizes: Mapping[int, Sizes]) -> None:
        here, total = len(self.lanes), len(sizes)
        level = logging.INFO if here == total else logging.WARNING
        words = "%d of %d actors are stepped by shared memory, %d by remote calls"
        _log.log(level, words, here, total, total - here)
        if here:
            self.lanes.memory = Memory(sizes)

    def settle(
        self, calls: Sequence[Any], timeout: float | None, at_least: int | None = None
    ) -> list[Any]:
        by_lane = [call for call in calls if type(call) is LaneCall]
        if not by_lane:
            return super().settle(calls, timeout, at_least)
        refs = [call for call in calls if type(call) is not LaneCall]
        known, bell = self._futures, self.lanes.bell
        self._futures = {ref: known.get(ref) or bell.future(ref) for ref in refs}
        number = len(calls) if at_least is None else min(at_least, len(calls))
        until = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            missing = number - sum(call.outcome is not None for call in by_lane)
            missing -= sum(future.done() for future in self._futures.values())
            if missing <= 0:
                break
            self.lanes.wait(left)
            if until is not None:
                if left == 0.0:
                    break
                left = max(0.0, until - time.monotonic())
        return [self._outcome(call) for call in calls]

    def _outcome(self, call: Any) -> Any:
        if type(call) is LaneCall:
            return call.outcome
        future = self._futures[call]
        return outcome_of(future) if future.done() else None

    def close(self) -> None:
        super().close()
        self._futures.clear()
        self.lanes.close()
