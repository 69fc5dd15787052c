"""How a call reaches an `EnvActor` and how its reply comes back.

A `Backend` opens one `Channel` per actor and waits on calls of any of its channels at once. Where
the actors live is known here and nowhere above: `local` (the caller's process) and `remote` (Ray).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from envfleet.errors import EnvFleetError

Call = Any
"""A posted call, as its backend knows it."""


Array = np.ndarray[Any, Any]


class Counted(NamedTuple):
    """What a batch has counted since it told last.

    Attributes:
      steps: per environment, resets and steps that gave a time step.
      seconds: (env_id, seconds) of some of them.
      waited: seconds that the caller waited for actors.
      failures: how many by (cause, phase). A cause is ``died``, ``timeout`` or ``raised``.
      restarts: how many by cause; ``moved`` where nothing had failed.
      alive: per environment, whether it works.
    """

    steps: Array
    seconds: list[tuple[int, float]]
    waited: float
    failures: Mapping[tuple[str, str], int]
    restarts: Mapping[str, int]
    alive: Array


class Late:
    """The outcome of a call that took longer than its limit, where that was judged afterwards."""


class Died(EnvFleetError):
    """The outcome of a call whose actor is gone; the text says what the backend knows of it."""


class Gone(Died):
    """All that the actors lived on is gone: a new actor could not be opened either."""


class NodeLost(Died):
    """The node is gone with it, or may be."""


class Room(NamedTuple):
    """What there is for actors of some kind to run on."""

    cpus: float
    """Cores."""
    actors: float
    """How many of them fit at once, by the resources that they hold."""
    is_callers: bool
    """Whether all of it is the caller's own machine."""


class Channel(Protocol):
    """The way to one actor.

    Attributes:
      transport: what carries its calls, in a word.
      actor_id: of Ray; empty where there is none.
    """

    @property
    def transport(self) -> str: ...

    @property
    def actor_id(self) -> str: ...

    def post(self, limit: float | None, method: str, *args: Any) -> Call:
        """Sends a call and does not wait. Calls on one channel run in the order of posting.

        Args:
          limit: seconds that the call may take. Waiting no longer is up to who waits; a backend
            that runs the call at once judges by it afterwards.
          method: of `EnvActor`.

        Raises:
          Died: the actor cannot be called any more.
        """
        ...

    def watch(self, place: Any) -> str | None:
        """What the actor's `hello` gave, when it is there: its end can be told from now on.

        Gives words for why it cannot be used, if so.
        """
        ...

    def doubt(self) -> None:
        """It fell silent: what is opened next should not share its fate."""
        ...

    def is_cut_off(self) -> bool:
        """Whether there is no way to where it is, or was to be opened, though nobody says so."""
        ...

    def obituary(self, died: Died) -> str:
        """All that is known of the actor's end, in words."""
        ...

    def kill(self) -> None:
        """Ends the actor at once, whatever it is doing. Twice is fine."""
        ...


class Backend(Protocol):
    """Where actors live."""

    def prepare(self, actors: Mapping[int, Mapping[str, Any]], timeout: float | None) -> None:
        """Looks at what is to be opened, before it is: by its first environment, Ray's options.

        Says what will have to wait, up to a timeout (seconds).

        Raises:
          FleetStartError: there will never be room for it.
          ValueError: an option that is not for the caller.
        """
        ...

    def open(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> Channel:
        """Starts the actor for some environments and does not wait for it.

        Raises:
          Gone: there is nothing any more that it could live on.
        """
        ...

    def reserve(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        """All actors have built their environments, and it is known what calls carry.

        Args:
          sizes: by their first environment, bytes of the block of actions and of that of time
            steps.

        Raises:
          FleetStartError: there is no memory for it.
        """
        ...

    def settle(
        self, calls: Sequence[Call], timeout: float | None, at_least: int | None = None
    ) -> list[Any]:
        """Waits until so many calls (by default all) are done, or the timeout (seconds) is over.

        Gives for each call its reply, None where it is not done, `Late`, or a `Died`.
        """
        ...

    def share(self, payload: bytes) -> Any:
        """What stands for a payload in several posts, put where actors find it; None if small."""
        ...

    def kill_orphans(self, channels: Sequence[Any]) -> None:
        """Ends processes that actors which were killed, or have died, leave behind."""
        ...

    def room(self, options: Mapping[str, Any], num_actors: int) -> Room:
        """What there is for actors with these options, of which the caller has so many."""
        ...

    def resources(self, options: Sequence[Mapping[str, Any]]) -> str:
        """Words for a start that fails: what such actors ask for, and what there is."""
        ...

    def moves(self, actors: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Which actors, by their first environment, are to be opened anew for an even load."""
        ...

    def publish(self, counted: Counted, nodes: Sequence[str]) -> None:
        """Tells whoever watches; by env_id the nodes on which environments are."""
        ...

    def close(self) -> None:
        """Gives back what the backend itself started."""
        ...


PLACEMENTS = ("spread", "pack", "strict_spread")
"""What `placement` may be by a word of ours; "SPREAD" and "DEFAULT" are Ray's own."""


TRANSPORTS = ("rpc", "shared_memory")
"""What carries resets and steps to actors in other processes."""


def connector(
    backend: str,
    ray_init: Mapping[str, Any] | None,
    placement: Any = None,
    transport: str = "rpc",
) -> Callable[[], Backend]:
    """What connects to the backend of that name, which starts Ray where it has to.

    Raises:
      ValueError: there is no backend, placement or transport of that name.
    """
    if transport not in TRANSPORTS:
        words = " or ".join(map(repr, TRANSPORTS))
        raise ValueError(f"transport is {transport!r}, expected {words}")
    if isinstance(placement, str) and placement not in (*PLACEMENTS, "SPREAD", "DEFAULT"):
        words = ", ".join(map(repr, PLACEMENTS))
        raise ValueError(
            f"placement is {placement!r}, expected one of {words}, a placement group, or one of "
            "Ray's scheduling strategies"
        )

    def ray_backend() -> Backend:
        # These import Ray.
        if transport == "shared_memory" and sys.platform == "linux":
            from envfleet.channels.shared_memory import SharedMemoryBackend

            return SharedMemoryBackend(ray_init, placement)
        from envfleet.channels.remote import RayBackend

        return RayBackend(ray_init, placement)

    def local_backend() -> Backend:
        from envfleet.channels.local import LocalBackend

        return LocalBackend()

    known = {"ray": ray_backend, "local": local_backend}
    if backend not in known:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, known))}")
    return known[backend]
