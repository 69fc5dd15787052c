"""How a call reaches an `EnvActor` and how its reply comes back.

A `Backend` opens one `Channel` per actor and waits on calls of any of its channels at once. Where
the actors live is known here and nowhere above: `local` (the caller's process) and `remote` (Ray).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from envfleet.errors import EnvFleetError

Call = Any
"""A posted call, as its backend knows it."""


class Late:
    """The outcome of a call that took longer than its limit, where that was judged afterwards."""


class Died(EnvFleetError):
    """The outcome of a call whose actor is gone; the text says what the backend knows of it."""


class Gone(Died):
    """All that the actors lived on is gone: a new actor could not be opened either."""


class Room(NamedTuple):
    """What there is for actors of some kind to run on."""

    cpus: float
    """Cores."""
    actors: float
    """How many of them fit at once, by the resources that they hold."""
    is_callers: bool
    """Whether all of it is the caller's own machine."""


class Channel(Protocol):
    """The way to one actor."""

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

    def watch(self, place: Any) -> None:
        """What the actor's `hello` gave, when it is there: its end can be told from now on."""
        ...

    def obituary(self, died: Died) -> str:
        """All that is known of the actor's end, in words."""
        ...

    def kill(self) -> None:
        """Ends the actor at once, whatever it is doing. Twice is fine."""
        ...


class Backend(Protocol):
    """Where actors live."""

    def open(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> Channel:
        """Starts the actor for some environments and does not wait for it.

        Raises:
          Gone: there is nothing any more that it could live on.
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

    def close(self) -> None:
        """Gives back what the backend itself started."""
        ...


def connector(backend: str, ray_init: Mapping[str, Any] | None) -> Callable[[], Backend]:
    """What connects to the backend of that name, which starts Ray where it has to.

    Raises:
      ValueError: there is no backend of that name.
    """

    def ray_backend() -> Backend:
        from envfleet.channels.remote import RayBackend  # imports Ray

        return RayBackend(ray_init)

    def local_backend() -> Backend:
        from envfleet.channels.local import LocalBackend

        return LocalBackend()

    known = {"ray": ray_backend, "local": local_backend}
    if backend not in known:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, known))}")
    return known[backend]
