"""Reinforcement-learning environments in parallel, each in a Ray actor, as one batch."""

from envfleet.errors import (
    ActorDied,
    ClosedError,
    EnvBusy,
    EnvFailure,
    EnvFleetError,
    EnvTimeout,
    FleetStartError,
    InvalidAction,
    RemoteEnvError,
    RemoteTraceback,
    ResetNeeded,
    SpecMismatch,
)
from envfleet.parallel import ParallelPyEnvironment
from envfleet.single import ActorPyEnvironment, EnvHandle, Promise
from envfleet.version import __version__ as __version__

__all__ = [
    "ActorDied",
    "ActorPyEnvironment",
    "ClosedError",
    "EnvBusy",
    "EnvFailure",
    "EnvFleetError",
    "EnvHandle",
    "EnvTimeout",
    "FleetStartError",
    "InvalidAction",
    "ParallelPyEnvironment",
    "Promise",
    "RemoteEnvError",
    "RemoteTraceback",
    "ResetNeeded",
    "SpecMismatch",
]
