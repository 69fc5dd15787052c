"""Actors as Ray actors: `step.remote` and `ray.get`.

What was learnt of Ray 2.60 stands here, each as a comment where it is used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from envfleet.actor import EnvActor
from envfleet.channels import Counted, Died, Gone, NodeLost, Room
from envfleet.channels.importing import add_import_paths, import_paths
from envfleet.channels.lane import ActorEnd
from envfleet.channels.metrics import Metrics
from envfleet.channels.placement import FRESH, Placement, cluster_words
from envfleet.channels.processes import Watch, end_orphans, last_lines, prepare
from envfleet.version import __version__

_REFUSED = {
    "max_restarts": "a silent restart is a silent wrong answer",
    "max_task_retries": "a retried step moves an environment twice",
    "max_concurrency": "environments run on their process's main thread",
    "concurrency_groups": "environments run on their process's main thread",
    "name": "two actors of one batch cannot share a name",
    "lifetime": "an environment does not outlive its batch",
}

GONE = "the Ray that the actors were on was shut down"

_DEFAULTS = {
    # Ray records every call for its dashboard: too many of them, and a tenth slower.
    "enable_task_events": False,
}


class Place(NamedTuple):
    """Where an actor is."""

    pid: int
    node: str
    """For people."""
    node_id: str
    stderr: str
    """The file on that node into which its stderr goes."""
    version: str
    """Of envfleet."""
    lane: str = ""
    """Where the caller can connect to, if it is on the same machine."""


class RayEnvActor:
    """An `EnvActor` as a Ray actor.

    It holds one instead of being one: Ray wraps every method of an actor's class in its tracing,
    private ones too, which would cost time at every step and show in every traceback.
    """

    def __init__(
        self, env_ids: Sequence[int], import_paths: Sequence[str] = (), has_lane: bool = False
    ) -> None:
        add_import_paths(import_paths)
        self._node_id = ray.get_runtime_context().get_node_id()
        node = f"{ray.util.get_node_ip_address()} {self._node_id[:8]}"
        self._actor = EnvActor(env_ids, node=node)
        prepare(ray.get_runtime_context().get_actor_id())
        self._lane = ActorEnd() if has_lane else None

    def __repr__(self) -> str:
        """Ray puts this before every line that an environment prints."""
        return repr(self._actor)

    def hello(self) -> Place:
        stderr = os.path.realpath("/proc/self/fd/2")  # Ray has no public way to ask for it
        lane = self._lane.name if self._lane else ""
        return Place(*self._actor.hello(), self._node_id, stderr, __version__, lane)

    def build(self, *args: Any) -> Any:
        return self._actor.build(*args)

    def reset(self, *args: Any) -> Any:
        return self._actor.reset(*args)

    def step(self, *args: Any) -> Any:
        return self._actor.step(*args)

    def operate(self, *args: Any) -> Any:
        return self._actor.operate(*args)

    def drill(self, *args: Any) -> Any:
        return self._actor.drill(*args)

    def usage(self) -> float:
        return self._actor.usage()

    def serve(self) -> None:
        """Answers what comes by the lane, until the caller has other calls."""
        assert self._lane is not None
        self._lane.serve(self._actor)

    def __ray_shutdown__(self) -> None:
        """Ray's hook for an actor that nobody holds any more (not for a kill)."""
        self._actor.close()


# Not an `@ray.remote` on the class: the class stays importable, so it travels by reference.
_REMOTE = ray.remote(RayEnvActor)

_PATIENCE = 5.0
"""Seconds that it may take to ask another node for what a process wrote."""


class RayChannel:
    """A handle on one Ray actor, by its first environment."""

    def __init__(self, backend: RayBackend, first: int, handle: Any) -> None:
        self._backend = backend
        self.first = first
        self._handle = handle
        self._methods: dict[str, Any] = {}
        self.place: Place | None = None
        self._watch: Watch | None = None

    def post(self, limit: float | None, method: str, *args: Any) -> Any:
        del limit
        if not ray.is_initialized():  # or Ray would start itself, with arguments of its own
            raise Gone(GONE)
        try:
            bound = self._methods.get(method)
            if bound is None:
                bound = self._methods[method] = getattr(self._handle, method)
            return bound.remote(*args)
        except (RayError, TypeError):
            raise
        except Exception as problem:
            # A plain Exception: the handle is of a Ray that has been shut down since.
            raise (Died(str(problem)) if self._backend.is_there() else Gone(GONE)) from None

    def watch(self, place: Any) -> str | None:
        self.place = place
        self._backend.placement.met(self.first, place.node_id)
        if place.node_id == ray.get_runtime_context().get_node_id():
            self._watch = Watch(place.pid)
        if place.version != __version__:
            return (
                f"envfleet is {place.version} on node {place.node} and {__version__} in the "
                "caller: install the same one everywhere"
            )
        return None

    @property
    def transport(self) -> str:
        return "rpc"

    @property
    def is_here(self) -> bool:
        """Whether the actor is on the caller's own node, as far as it is known."""
        return self._watch is not None

    @property
    def actor_id(self) -> str:
        return str(self._handle._actor_id.hex())

    def obituary(self, died: Died) -> str:
        if isinstance(died, Gone):
            return str(died)
        words = "; ".join(filter(None, [str(died), self._watch.words() if self._watch else ""]))
        lines = ""
        place = self.place
        # (With its node it may have gone since that was asked last.)
        if place is not None and not isinstance(died, NodeLost) and not self.is_cut_off(0.0):
            try:
                lines = self._last_lines(place)
            except RayError:
                self.doubt()
        return f"{words}\nthe last lines of its stderr:\n{lines}" if lines else words

    def _last_lines(self, place: Place) -> str:
        if self.is_here:
            return last_lines(place.stderr)
        return str(ray.get(_there(place.node_id, last_lines, place.stderr), timeout=_PATIENCE))

    def doubt(self) -> None:
        if not self.is_here:
            self._backend.placement.doubt(self.first)

    def is_cut_off(self, may_be: float = FRESH) -> bool:
        if self.is_here or not self._backend.is_there():
            return False
        node_id = self.place and self.place.node_id
        return self._backend.placement.is_cut_off(self.first, node_id, may_be)

    def kill(self) -> None:
        self._backend.placement.left(self.first)
        if not self._backend.is_there():
            return
        with contextlib.suppress(Exception):  # not known any more: gone, which is what was wanted
            ray.kill(self._handle, no_restart=True)


def _there(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on some node, which it may be too late for."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*args)


_PUT_ABOVE = 100 * 1024
"""Bytes up to which Ray sends an argument with the call; a larger one it would put once a call."""


class RayBackend:
    """Opens Ray actors, on the Ray that is running or on one of our own.

    Args:
      ray_init: arguments of `ray.init`, which is called only if Ray is not initialised.
      placement: see `Placement`.
    """

    has_lane = False
    """Whether its actors have another way in than Ray's calls."""

    def __init__(self, ray_init: Mapping[str, Any] | None, placement: Any = None) -> None:
        self._lease = _Lease.take(ray_init)
        self._address = _address()
        self.placement = Placement(placement)
        self._metrics = Metrics()

    def is_there(self) -> bool:
        """Whether Ray still is the one that the actors are on: the user may have shut it down."""
        return ray.is_initialized() and _address() == self._address

    def prepare(
        self,
        actors: Mapping[int, Mapping[str, Any]],
        timeout: float | None,
    ) -> None:
        for options in actors.values():
            for name in options.keys() & _REFUSED.keys():
                raise ValueError(f"actor_options[{name!r}] is not for the caller: {_REFUSED[name]}")
            _REMOTE.options(**options)  # raises for what Ray does not know
        self.placement.prepare(actors, timeout)

    def open(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> RayChannel:
        if not self.is_there():
            raise Gone(f"{GONE}: make a new batch")
        there = self.placement.options(env_ids[0], options)
        chosen = {**_DEFAULTS, **options, **there, "max_restarts": 0, "max_task_retries": 0}
        handle = _REMOTE.options(**chosen).remote(list(env_ids), import_paths(), self.has_lane)
        return self.channel(env_ids[0], handle)

    def channel(self, first: int, handle: Any) -> RayChannel:
        """The way to a new actor, by its first environment."""
        return RayChannel(self, first, handle)

    def reserve(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        pass

    def settle(
        self, calls: Sequence[Any], timeout: float | None, at_least: int | None = None
    ) -> list[Any]:
        if not self.is_there():
            return [Gone(GONE)] * len(calls)
        started = time.monotonic()
        if at_least is None:
            try:
                return ray.get(list(calls), timeout=timeout)  # type: ignore[no-any-return]
            except RayError:
                # `ray.get` raises for the first ref that failed, or that is late, without a word
                # on which and without waiting for the others: so wait, and ask one by one.
                pass
        left = None if timeout is None else max(0.0, started + timeout - time.monotonic())
        number = len(calls) if at_least is None else min(at_least, len(calls))
        ray.wait(list(calls), num_returns=number, timeout=left)
        done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]
        return _outcomes(calls, done)

    def share(self, payload: bytes) -> Any:
        return ray.put(payload) if len(payload) > _PUT_ABOVE else None

    def kill_orphans(self, channels: Sequence[RayChannel]) -> None:
        if not self.is_there():
            return
        ids: dict[str | None, list[str]] = {}
        for channel in channels:
            if channel.place is not None:
                node_id = None if channel.is_here else channel.place.node_id
                ids.setdefault(node_id, []).append(channel.actor_id)
        for node_id, actor_ids in ids.items():
            if node_id is None:
                end_orphans(actor_ids)
            else:
                with contextlib.suppress(RayError):
                    _there(node_id, end_orphans, actor_ids)  # nobody waits for it

    def room(self, options: Mapping[str, Any], num_actors: int) -> Room:
        total = ray.cluster_resources()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        cpus = total.get("CPU", 0)
        is_callers = nodes == [ray.get_runtime_context().get_node_id()]
        if is_callers:  # what Ray was told it has may be more than there is
            cpus = min(cpus, len(os.sched_getaffinity(0)))
        held = {
            "CPU": options.get("num_cpus"),
            "GPU": options.get("num_gpus"),
            "memory": options.get("memory"),
            **(options.get("resources") or {}),
        }
        free = ray.available_resources()  # others of the caller's own would be given back
        fit = [
            (free.get(name, 0) + num_actors * amount) // amount
            for name, amount in held.items()
            if amount
        ]
        return Room(max(1, cpus), min(fit, default=float("inf")), is_callers)

    def resources(self, options: Sequence[Mapping[str, Any]]) -> str:
        return cluster_words(options)

    def publish(self, counted: Counted, nodes: Sequence[str]) -> None:
        if self.is_there():
            self._metrics.publish(counted, nodes)

    def moves(self, actors: Mapping[int, Mapping[str, Any]]) -> list[int]:
        return self.placement.moves(actors)

    def close(self) -> None:
        if self.is_there():
            self.placement.close()
            self._metrics.close()
        self._lease.give_back()


def _outcomes(calls: Sequence[Any], done: Sequence[Any]) -> list[Any]:
    """For each call what came of it, None where it is not among those done."""
    try:
        replies = dict(zip(done, ray.get(list(done)), strict=True))
    except RayError:
        replies = {call: _outcome(call) for call in done}
    return [replies.get(call) for call in calls]


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        # ActorDiedError or, for a lost node, ActorUnavailableError; OutOfMemoryError,
        # RuntimeEnvSetupError and the like say the same to us: there is no actor any more. The
        # actor itself lets nothing out.
        return death(error)


def death(error: RayError) -> Died:
    """How an actor ended, by what Ray raises for its calls."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return Died("out of memory: " + text.partition("\nObject store memory usage")[0].strip())
    if isinstance(error, ActorUnavailableError):
        # What Ray says of a lost node until it is sure of it, which takes more than ten seconds.
        return NodeLost(f"Ray lost the connection to it, perhaps its node: {text.strip()}")
    for marker in ("Worker exit detail: ", "The actor is dead because ", "The actor died because "):
        _, found, rest = text.rpartition(marker)
        if found:
            text = rest
            break
    # This "code" is the state of a socket, and no exit code.
    text = text.partition(" Some common causes include")[0].strip()
    text = text.replace(" with a connection error code 2. End of file.", "")
    return NodeLost(text) if "its node has died" in text else Died(text)


class _Lease:
    """Who uses a Ray that envfleet started: the last one to leave shuts it down."""

    _lock = threading.Lock()
    _address: str | None = None
    """Address of the Ray that we started; None where we have started none."""
    _holders = 0

    def __init__(self, address: str | None) -> None:
        self._held = address

    @classmethod
    def take(cls, ray_init: Mapping[str, Any] | None) -> _Lease:
        with cls._lock:
            if not ray.is_initialized():
                with _larger_replies():
                    ray.init(**(ray_init or {}))
                cls._address, cls._holders = _address(), 0
            if cls._address != _address():  # the user's own
                return cls(None)
            cls._holders += 1
            return cls(cls._address)

    def give_back(self) -> None:
        with self._lock:
            held, self._held = self._held, None
            if held is None or held != self._address:
                return
            type(self)._holders -= 1
            if self._holders == 0:
                type(self)._address = None
                if ray.is_initialized() and _address() == held:
                    ray.shutdown()


@contextlib.contextmanager
def _larger_replies() -> Iterator[None]:
    """Around the start of a Ray, for replies up to half a megabyte to come with the answer.

    Ray puts those above 100 KiB into its object store, which costs about 2 ms more (measured by
    benchmarks/replies.py with 110 to 450 kB: 4 to 5 ms, against 2 to 3 in the answer); from 800 kB
    on the store is as good. Ray's processes read this from their environment when they start. A
    cluster that runs already has its own setting (docs/benchmarks).
    """
    if _REPLY_LIMIT in os.environ:
        yield
        return
    os.environ[_REPLY_LIMIT] = str(512 * 1024)
    try:
        yield
    finally:
        del os.environ[_REPLY_LIMIT]


_REPLY_LIMIT = "RAY_max_direct_call_object_size"


def _address() -> str:
    """Which Ray we are on, and by which connection: what was made by another one is lost to us."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
