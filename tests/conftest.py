"""One Ray for the whole session, and after each test nothing of ours left on it."""

from __future__ import annotations

import os
import time

# Before Ray is imported: no token file in the home directory, no statistics.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Workers import what the tests define (faults.py) from here.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import envfleet

BACKENDS = ["local", "ray"]


@pytest.fixture(scope="session")
def session_ray() -> Iterator[None]:
    """Few CPUs and a small object store; `address="local"` attaches to nobody's cluster."""
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def on_ray(session_ray: None) -> Iterator[None]:
    """For tests of the Ray backend: fails where an actor of ours outlives the test."""
    yield
    deadline = time.monotonic() + 20
    while left := live_actors():
        if time.monotonic() > deadline:
            pytest.fail(f"actors left running: {left}")
        time.sleep(0.05)


def live_actors() -> list[str]:
    """Ids of the Ray actors of ours that are not dead."""
    return [
        actor_id
        for actor_id, actor in ray._private.state.actors().items()
        if actor["ActorClassName"] == "RayEnvActor" and actor["State"] != "DEAD"
    ]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("on_ray")
    return request.param


@pytest.fixture
def make_batch(backend: str) -> Callable[..., envfleet.ParallelPyEnvironment]:
    """`ParallelPyEnvironment` on either backend."""
    return functools.partial(envfleet.ParallelPyEnvironment, backend=backend)


@pytest.fixture
def make_single(backend: str) -> Callable[..., Any]:
    """A started `ActorPyEnvironment` on either backend."""

    def make(constructor: Callable[[], Any], **kwargs: Any) -> envfleet.ActorPyEnvironment:
        env = envfleet.ActorPyEnvironment(constructor, backend=backend, **kwargs)
        env.start()
        return env

    return make
