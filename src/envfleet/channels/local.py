"""Actors in the caller's process: the same calls without Ray, one after another.

A call runs when it is posted. It cannot be interrupted, so its limit is judged afterwards, by how
long the call itself took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.actor import EnvActor
from envfleet.channels import Counted, Died, Late, Room


class LocalChannel:
    """An `EnvActor` that is called directly."""

    transport, actor_id = "in process", ""

    def __init__(self, env_ids: Sequence[int]) -> None:
        self._actor: EnvActor | None = EnvActor(env_ids, in_process=True)

    def post(self, limit: float | None, method: str, *args: Any) -> Any:
        if self._actor is None:
            raise Died("it was ended")
        started = time.perf_counter()
        reply = getattr(self._actor, method)(*args)
        return Late() if limit is not None and time.perf_counter() - started > limit else reply

    def watch(self, place: Any) -> str | None:
        del place
        return None

    def doubt(self) -> None:
        pass

    def is_cut_off(self) -> bool:
        return False

    def obituary(self, died: Died) -> str:
        return str(died)

    def kill(self) -> None:
        """Closes what the actor hosts: there is no process whose end would do it."""
        actor, self._actor = self._actor, None
        if actor is not None:
            actor.close()


class LocalBackend:
    """Opens `LocalChannel`s; `actor_options` mean nothing here and are ignored."""

    def prepare(self, actors: Mapping[int, Mapping[str, Any]], timeout: float | None) -> None:
        pass

    def open(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> LocalChannel:
        del options
        return LocalChannel(env_ids)

    def reserve(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        pass

    def settle(
        self, calls: Sequence[Any], timeout: float | None, at_least: int | None = None
    ) -> list[Any]:
        del timeout, at_least
        return list(calls)

    def share(self, payload: bytes) -> Any:
        del payload
        return None

    def kill_orphans(self, channels: Sequence[Any]) -> None:
        pass

    def room(self, options: Mapping[str, Any], num_actors: int) -> Room:
        del options, num_actors
        return Room(cpus=1, actors=1, is_callers=True)

    def resources(self, options: Sequence[Mapping[str, Any]]) -> str:
        del options
        return "environments are built in this process, one after another"

    def moves(self, actors: Mapping[int, Mapping[str, Any]]) -> list[int]:
        del actors
        return []

    def publish(self, counted: Counted, nodes: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass
