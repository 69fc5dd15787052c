"""Placement: on which node an actor goes, and whether there is room for it before it is waited for.

Ray's ``SPREAD`` passes over nodes whose CPUs are taken while actors start, so that what is on which
node is a matter of luck. ``"spread"`` and ``"pack"`` choose a node for every actor here and ask for
it by its label; should it have no room any more, Ray puts the actor where there is some.
"""

from __future__ import annotations

import collections
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node, state
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from envfleet.channels import pulse
from envfleet.errors import FleetStartError

_log = logging.getLogger("envfleet")

NODE_LABEL = "ray.io/node-id"
"""Ray gives it to every node."""

_CHOSEN = frozenset(
    {"scheduling_strategy", "label_selector", "fallback_strategy", "placement_group"}
)
"""Options by which the user has chosen where an actor goes."""

_REPORTED = 15.0
"""Seconds after the start of a cluster in which its autoscaler has reported, if it has one."""

_NODE_GROUP = "ray.io/node-group"
"""Ray's label for the type that a node was started as."""

_DOUBT = 90.0
"""Seconds for which a node is avoided whose actor fell silent. After a SIGSTOP of a whole node Ray
took 64 s until it called it dead, after a SIGKILL 13 s; until then it puts new actors there."""

FRESH = 1.0
"""Seconds for which a node need not be asked again whether it answers."""


class Node(NamedTuple):
    """A node that Ray believes to be alive, and what it has; `free` is kept up while planning."""

    node_id: str
    total: Mapping[str, float]
    free: dict[str, float]
    address: tuple[str, int] = ("", 0)
    """Of its raylet."""

    @property
    def cpus(self) -> float:
        return self.total.get("CPU", 0.0)


class Placement:
    """Where the actors of one batch are, and where the next one goes.

    Args:
      kind: ``"spread"``, ``"pack"``, ``"strict_spread"``, a placement group, or whatever else Ray
        takes as a ``scheduling_strategy``; None for the caller's own placement group if its actors
        belong there (Ray Tune, Ray Train), and ``"spread"`` otherwise.
    """

    def __init__(self, kind: Any) -> None:
        self._is_callers_group = False
        if kind is None:
            kind = _callers_group() or "spread"
            self._is_callers_group = kind != "spread"
        self._kind = kind
        self._group = kind if isinstance(kind, PlacementGroup) else None
        self._bundles: dict[int, int] = {}
        self._on: dict[int, str] = {}
        """By its first environment the node on which an actor is, or is to be."""
        self._wanted: dict[int, str] = {}
        """The same of actors that move."""
        self._doubted: dict[str, float] = {}
        self._known: dict[str, Node] = {}
        self._asked: dict[str, tuple[float, bool]] = {}
        """By node when it was asked, by `time.monotonic`, and whether it has answered."""

    # -- before anything starts --------------------------------------------------------------------

    def prepare(self, actors: Mapping[int, Mapping[str, Any]], timeout: float | None) -> None:
        """Looks whether the actors fit, and says what will have to wait.

        Args:
          actors: by their first environment, Ray's options.
          timeout: seconds for which it will be waited.

        Raises:
          FleetStartError: they never fit: no node could hold one of them, or all nodes together
            could not hold all, and there is no autoscaler that would bring enough.
        """
        if self._group is not None:
            self._check_group(actors)
            return
        nodes = [node for node in _nodes() if node.node_id not in self._avoided()]
        one_each = self._kind == "strict_spread"
        waiting = _left_over(nodes, actors.values(), one_each)
        if waiting:
            empty = [node._replace(free=dict(node.total)) for node in nodes]
            never = _left_over(empty, actors.values(), one_each)
            _say(nodes, [*actors.values()], waiting, never, one_each, timeout)
        if one_each:
            self._bundles = {first: n for n, first in enumerate(actors)}
            bundles = [_needs(options) or {"CPU": 0.001} for options in actors.values()]
            self._group = placement_group(bundles, strategy="STRICT_SPREAD")

    def _check_group(self, actors: Mapping[int, Mapping[str, Any]]) -> None:
        """Raises `FleetStartError` where a placement group can never hold the actors."""
        assert self._group is not None
        bundles = self._group.bundle_specs
        left: collections.Counter[str] = collections.Counter()
        for bundle in bundles:
            left.update(bundle)
        own = ray.get_runtime_context().get_assigned_resources() if self._is_callers_group else {}
        left.subtract({name: own.get(name, 0.0) for name in left})
        held: collections.Counter[str] = collections.Counter()
        for options in actors.values():
            needs = _needs(options)
            fits = any(_has(bundle, needs) for bundle in bundles)
            if not fits or not _has({name: left[name] - held[name] for name in needs}, needs):
                taken = f", of which {_words(own)} are this worker's own" if own else ""
                whose = "this worker's placement group" if own else "the placement group"
                raise FleetStartError(
                    f"{len(actors)} actors of {asked(options)} cannot be placed in {whose}: it has "
                    f"the bundles {bundles}{taken}. Give it more bundles (of a Tune trial: "
                    f"tune.PlacementGroupFactory([{{'CPU': 1}}] + [{{'CPU': 1}}] * "
                    f'{len(actors)})), or say placement="spread" for actors outside of it'
                )
            held.update(_held(options))

    # -- one actor ---------------------------------------------------------------------------------

    def options(self, first: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Ray's options that bring an actor where it belongs; first is its first environment."""
        if self._group is not None and not _CHOSEN & options.keys():
            bundle = self._bundles.get(first, -1)
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}
        nodes = _nodes()
        avoided = self._avoided()
        able = {node.node_id for node in nodes if _has(node.total, _needs(options))}
        if able <= avoided:
            avoided = set()  # there is no other one
        if _CHOSEN & options.keys():
            if "scheduling_strategy" in options or "placement_group" in options:
                return {}
            labels = {**_but(avoided), **(options.get("label_selector") or {})}
            return {"scheduling_strategy": "SPREAD", "label_selector": labels}
        if self._kind not in ("spread", "pack"):
            return {"scheduling_strategy": self._kind}
        strategy: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if len(nodes) == 1:
            return strategy
        node = self._choose(first, [n for n in nodes if n.node_id not in avoided], options)
        silent = self._avoided()  # which may have been found out just now
        others = {} if able <= silent else _but(silent)
        if node is None:
            return {**strategy, **({"label_selector": others} if others else {})}
        self._on[first] = node.node_id
        strategy["label_selector"] = {NODE_LABEL: node.node_id}
        strategy["fallback_strategy"] = [{"label_selector": others}]
        if "CPU" not in _held(options):
            # By default an actor needs a CPU while it is placed, and none afterwards. That there
            # is one has been looked at; the others that are placed now must not take it.
            strategy["num_cpus"] = 0
        return strategy

    def _choose(self, first: int, nodes: Sequence[Node], options: Mapping[str, Any]) -> Node | None:
        """The best of the nodes that answers; those that were asked and do not are doubted."""
        needs = _needs(options)
        fitting = [node for node in nodes if _has(node.free, needs)]
        wanted = self._wanted.pop(first, None)
        counts, own = self._counts(but=first), ray.get_runtime_context().get_node_id()

        def rank(node: Node) -> tuple[float, ...]:
            count = counts[node.node_id]
            if node.node_id == wanted:
                return (0,)
            if self._kind == "pack" and count < node.cpus:
                return 1, -count, node.node_id != own
            return 2, _load(node, count + 1)

        return next(filter(self._answers, sorted(fitting, key=rank)), None)

    def _counts(self, but: int | None = None) -> collections.Counter[str]:
        return collections.Counter(node for first, node in self._on.items() if first != but)

    def met(self, first: int, node_id: str) -> None:
        """An actor is there, on this node."""
        self._on[first] = node_id

    def left(self, first: int) -> None:
        """An actor is there no more."""
        self._on.pop(first, None)

    # -- nodes that fell silent --------------------------------------------------------------------

    def doubt(self, first: int) -> None:
        """An actor fell silent: for a while others do not go where it is, if they can."""
        if first in self._on:
            self._doubt(self._on[first])

    def _doubt(self, node_id: str) -> None:
        self._doubted[node_id] = time.monotonic() + _DOUBT

    def is_cut_off(self, first: int, node_id: str | None = None, may_be: float = FRESH) -> bool:
        """Whether a node does not answer: where an actor is, or is to be; then it is doubted.

        Of an actor whose node is not known it is not known. What Ray holds for dead it tells of.

        Args:
          first: environment of the actor.
          node_id: where it is, if it is there.
          may_be: so many seconds old may an answer be.
        """
        node_id = node_id or self._on.get(first)
        if node_id is None:
            return False
        node = self._known.get(node_id) or {one.node_id: one for one in _nodes()}.get(node_id)
        return node is not None and not self._answers(node, may_be)

    def _answers(self, node: Node, may_be: float = FRESH) -> bool:
        """Whether it does, or did just now; it is doubted if not."""
        node_id = node.node_id
        self._known[node_id] = node
        if node_id == ray.get_runtime_context().get_node_id():
            return True
        at, answered = self._asked.get(node_id, (-FRESH, False))
        if time.monotonic() >= at + (may_be if answered else FRESH):
            answered = pulse.answers(node.address)
            self._asked[node_id] = time.monotonic(), answered
            if not answered:
                _log.warning("node %s (%s) does not answer", node_id[:8], node.address[0])
                self._doubt(node_id)
        return answered

    def _avoided(self) -> set[str]:
        now = time.monotonic()
        self._doubted = {node: until for node, until in self._doubted.items() if until > now}
        return {*self._doubted}

    # -- moving ------------------------------------------------------------------------------------

    def moves(self, actors: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Which actors should move, by their first environment, so that nodes are evenly loaded.

        The next `options` for each of them bring it where it should be.
        """
        if self._kind != "spread":
            return []
        self._wanted.clear()
        avoided = self._avoided()
        nodes = {node.node_id: node for node in _nodes() if node.node_id not in avoided}
        counts, moving = self._counts(), []
        for first in sorted(actors, reverse=True):
            home = nodes.get(self._on.get(first, ""))
            if home is None or _CHOSEN & actors[first].keys():
                continue
            fitting = [n for n in nodes.values() if _has(n.free, _needs(actors[first]))]
            best = min(fitting, key=lambda n: _load(n, counts[n.node_id] + 1), default=home)
            there = _load(best, counts[best.node_id] + 1)
            if best is not home and there < _load(home, counts[home.node_id]):
                if not self._answers(best) or not self._answers(home):
                    nodes = {n: node for n, node in nodes.items() if n not in self._avoided()}
                    continue
                moving.append(first)
                self._wanted[first] = best.node_id
                counts[home.node_id] -= 1
                counts[best.node_id] += 1
                _take(best.free, _held(actors[first]))
        return moving

    def close(self) -> None:
        """Gives back what was reserved."""
        if self._kind == "strict_spread" and self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


# -- what there is ---------------------------------------------------------------------------------


def _nodes() -> list[Node]:
    free = available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            node["Resources"],
            dict(free.get(node["NodeID"], {})),
            (node["NodeManagerAddress"], node["NodeManagerPort"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _but(avoided: Collection[str]) -> dict[str, str]:
    """Labels of any node but these."""
    return {NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else {}


def _callers_group() -> PlacementGroup | None:
    """The placement group in which the caller's actors have to be: of a trial, or a worker."""
    if not ray._private.worker.global_worker.should_capture_child_tasks_in_placement_group:
        return None
    return get_current_placement_group()


def _autoscaler(patience: float) -> dict[str, float] | bool:
    """What the cluster may grow to; True where that is not known, False where it does not grow.

    Args:
      patience: seconds to wait for Ray's first autoscaler, which on a new cluster has not reported
        yet. A Ray that this process has started grows by nobody.
    """
    most = state.get_max_resources_from_cluster_config()
    if most is not None:
        return dict(most)
    if any(_NODE_GROUP in node.get("Labels", {}) for node in ray.nodes() if node["Alive"]):
        return True  # `ray up` or KubeRay has started them as nodes of some type
    own = ray._private.worker._global_node
    if _internal_kv_get(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1" or (
        own is not None and own.is_head()
    ):
        patience = 0.0
    until = time.monotonic() + patience
    while True:
        report = json.loads(_internal_kv_get(b"__autoscaling_status") or "{}")
        if "autoscaler_report" in report or time.monotonic() >= until:
            break
        time.sleep(0.1)
    # Where nobody starts nodes, a node is its own type: "node_" and its id.
    found = report.get("autoscaler_report") or {}
    types = {*(found.get("active_nodes") or {}), *(found.get("node_type_mapping") or {}).values()}
    return any(not kind.startswith("node_") for kind in types)


# -- what actors need ------------------------------------------------------------------------------


def _needs(options: Mapping[str, Any]) -> dict[str, float]:
    """What has to be free where an actor is placed. Ray's default: a CPU, and none afterwards."""
    return {"CPU": 1.0, **_held(options)}


def _held(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor holds while it lives."""
    given = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus"),
        "memory": options.get("memory"),
        **(options.get("resources") or {}),
    }
    held = {name: float(amount) for name, amount in given.items() if amount is not None}
    # Ray's default: nothing, but a CPU as soon as anything but memory is asked for.
    is_default = not held.keys() - {"memory"} and "accelerator_type" not in options
    return held if is_default else {"CPU": 1.0, **held}


def _has(there: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in needs.items())


def _take(free: dict[str, float], held: Mapping[str, float]) -> None:
    for name, amount in held.items():
        free[name] = free.get(name, 0.0) - amount


def _load(node: Node, count: int) -> float:
    """Actors for each core; what has none is the last to be chosen."""
    return count / node.cpus if node.cpus else float("inf")


def _left_over(
    nodes: Sequence[Node], actors: Iterable[Mapping[str, Any]], one_each: bool
) -> list[Mapping[str, Any]]:
    """Those that find no place, one after another; takes what the others hold from the nodes."""
    left, nodes = [], [node._replace(free=dict(node.free)) for node in nodes]
    for options in actors:
        node = next((n for n in nodes if _has(n.free, _needs(options))), None)
        if node is None:
            left.append(options)
        elif one_each:
            nodes.remove(node)
        else:
            _take(node.free, _held(options))
    return left


# -- words -----------------------------------------------------------------------------------------


def asked(options: Mapping[str, Any]) -> str:
    """What an actor asks for."""
    held = _held(options)
    words = [f"{held['CPU']:g} CPU" if "CPU" in held else "1 CPU (to be placed; none afterwards)"]
    words += [f"{options['num_gpus']:g} GPU"] if options.get("num_gpus") else []
    words += [f"{options['memory'] / 2**30:.3g} GiB"] if options.get("memory") else []
    words += [f"{amount:g} {name}" for name, amount in (options.get("resources") or {}).items()]
    words += [f"labels {options['label_selector']}"] if options.get("label_selector") else []
    return " + ".join(words)


def cluster_words(options: Sequence[Mapping[str, Any]]) -> str:
    """What actors ask for, and what the cluster has of it."""
    kinds = collections.Counter(map(asked, options))
    words = ", ".join(f"{count} x {what}" for what, count in kinds.items())
    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    names = {"CPU"} | {name for chosen in options for name in _held(chosen)}
    have = ", ".join(
        f"{total.get(name, 0):g} {name} of which {free.get(name, 0):g} free"
        for name in sorted(names)
    )
    return f"asked for {words}; the cluster ({nodes} nodes) has {have}"


def _say(
    nodes: Sequence[Node],
    actors: Sequence[Mapping[str, Any]],
    waiting: Sequence[Mapping[str, Any]],
    never: Sequence[Mapping[str, Any]],
    one_each: bool,
    timeout: float | None,
) -> None:
    """Says who will wait and what for, or that it would be in vain."""
    limit = _autoscaler(_REPORTED if never else 0.0)
    have = cluster_words(actors) + (", each on a node of its own" if one_each else "")
    if isinstance(limit, dict):
        total: collections.Counter[str] = collections.Counter()
        for options in actors:
            total.update(_held(options) or {"CPU": 0.0})
        beyond = {name: most for name, most in limit.items() if total[name] > most}
        # (Memory may be left out of a node type's resources, and is there.)
        known = {*limit, "memory"}
        beyond |= {name: 0 for name in total if name not in known and total[name] > 0}
        if beyond:
            raise FleetStartError(
                f"{have}, and its autoscaler ends at {_words(beyond)}: it can never be enough"
            )
    if never and limit is False:
        raise FleetStartError(
            f"{len(never)} of {len(actors)} actors could never be placed: {have}, and no "
            f"autoscaler ({_largest(nodes)}). Ask for less (actor_options), put several "
            "environments into an actor (envs_per_actor), or add nodes first"
        )
    whom = "what others hold" if limit is False or not never else "the autoscaler"
    _log.warning(
        "%s; %d of %d actors will wait for %s%s",
        have,
        len(waiting),
        len(actors),
        whom,
        "" if timeout is None else f", up to {timeout:g} s (start_timeout)",
    )


def _largest(nodes: Sequence[Node]) -> str:
    names = sorted({name for node in nodes for name in node.total if name in ("CPU", "GPU")})
    most = {name: max(node.total.get(name, 0.0) for node in nodes) for name in names}
    return f"the largest node has {_words(most)}"


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
