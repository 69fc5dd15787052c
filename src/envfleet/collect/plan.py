"""plan: what `collect` would do, as text, where a step or two tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from envfleet import gin_state
from envfleet.collect.collector import Collector, check_limits
from envfleet.collect.crew import Crew
from envfleet.collect.driver import check_arguments
from envfleet.collect.identity import COLLECT, OWN, words
from envfleet.collect.policies import RandomPolicy


def plan(**arguments: Any) -> str:
    """What `collect` would do with these arguments, and by which configuration, as text.

    Builds one environment (of several names, one each) and the policy, in this process, and takes a
    few steps; starts no actor and writes nothing.

    Raises:
      Exception: what `collect` would raise about its arguments, an environment or the policy.
    """
    given = {**gin_state.arguments(COLLECT), **arguments}
    own = {name: given.pop(name) for name in [*given] if name in OWN}
    limits = {name: own.get(name) for name in ("max_steps", "max_episodes", "max_seconds")}
    check_limits(**limits)
    sizes = {name: own[name] for name in ("shard_megabytes", "shard_seconds") if name in own}
    check_arguments(given, **sizes)
    with _Planned(**given) as planned:
        assert isinstance(planned, _Planned)
        for _ in planned.collect(max_steps=2):
            pass
        size = planned.crew.ask("bytes_per_step", worker=0)[0]
        told = {("", COLLECT): {name: repr(value) for name, value in own.items()}}
        used = gin_state.operative_text([gin_state.operative(), told])
        actors, each = planned.asked["num_actors"], planned.asked["envs_per_actor"]
        where = "here" if planned.asked["inference"] == "central" else "in each actor"
        address = os.environ.get("RAY_ADDRESS")
        lines = {
            "to": f"{Path(own['output_dir']).absolute()}",
            "until": ", ".join(f"{k} = {v:,}" for k, v in limits.items() if v is not None),
            "actors": f"{actors}, each with {each} environments: {actors * each} in all",
            "policy": f"{words(planned.crew.policy or RandomPolicy)}, {where}",
            "resources": f"of each actor: {planned.asked['actor_options'] or '1 CPU'}",
            "nodes": f"those of the Ray at {address}"
            if address
            else f"this machine, {len(os.sched_getaffinity(0))} CPUs, unless a Ray runs here",
            "bytes per step": f"{size} of an environment, {size * actors * each:,} of all",
        }
        return used + "\n" + "\n".join(f"{name + ':':16}{text}" for name, text in lines.items())


class _Planned(Collector):
    """One environment of a collector, or of each name, here; and how many there would be."""

    def _hire(self, **arguments: Any) -> Crew:
        self.asked = dict(arguments)
        given = arguments["env_constructor"]
        if isinstance(given, list | tuple):
            names = dict.fromkeys(each for each in given[1:] if isinstance(each, str))
            given = [*given[:1], *(name for name in names if name != given[0])]
        here = {
            "env_constructor": given,
            "num_actors": 1,
            "envs_per_actor": len(given) if isinstance(given, list) else 1,
            "inference": "actors",
            "backend": "local",
            "min_ready": None,
        }
        return super()._hire(**{**arguments, **here})
