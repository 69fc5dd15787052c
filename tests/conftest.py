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
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import envfleet

TRANSPORTS = ["rpc", "shared_memory"]
BACKENDS = ["local", *TRANSPORTS]

BY_EITHER = {
    *("test_deaths", "test_faults", "test_first_ready", "test_parallel", "test_restarts"),
    *("test_leaving", "test_nested", "test_single"),
}
"""Tests of what a batch on Ray does: run by either transport."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "on_ray" in metafunc.fixturenames and metafunc.module.__name__ in BY_EITHER:
        metafunc.parametrize("on_ray", TRANSPORTS, indirect=True)


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
def on_ray(session_ray: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of the Ray backend: fails where an actor of ours outlives the test."""
    yield from by(getattr(request, "param", "rpc"))
    deadline = time.monotonic() + 20
    while left := live_actors():
        if time.monotonic() > deadline:
            pytest.fail(f"actors left running: {left}")
        time.sleep(0.05)


def by(transport: str) -> Iterator[None]:
    """Meanwhile that is the transport of whatever is made without naming one."""
    made = envfleet.ParallelPyEnvironment, envfleet.ActorPyEnvironment
    defaults = [inspect.unwrap(cls.__init__).__kwdefaults__ for cls in made]
    for one in defaults:
        one["transport"] = transport
    yield
    for one in defaults:
        one["transport"] = "rpc"


def live_actors() -> list[str]:
    """Ids of the Ray actors of ours that are not dead."""
    return [
        actor_id
        for actor_id, actor in ray._private.state.actors().items()
        if actor["ActorClassName"] == "RayEnvActor" and actor["State"] != "DEAD"
    ]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "local":
        yield "local"
    else:
        request.getfixturevalue("on_ray")
        for _ in by(request.param):
            yield "ray"


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
