"""Environments that the caller has registered with Gymnasium, carried into actors.

An actor is a fresh process: what the caller's script has registered, or a module that only the
caller imports, is unknown to it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle

from envfleet import gin_state

Pickled = Mapping[str, bytes | str]
"""By id Gymnasium's pickled `EnvSpec`, or in words why it does not pickle."""

_problems: dict[str, str] = {}


def capture() -> Pickled:
    """What is registered here.

    All of it: what comes with Gymnasium may have been registered anew or changed.
    """
    registry: dict[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    found: dict[str, bytes | str] = {}
    for name, spec in registry.items():
        try:
            found[name] = gin_state.dumps(spec)
        except Exception as problem:
            found[name] = f"does not pickle ({type(problem).__name__}: {problem})"
    return found


def apply(registered: Pickled) -> None:
    """Registers it in this process, an actor's, in place of what was registered here."""
    if not registered:
        return
    try:
        import gymnasium
    except ImportError as problem:  # told to whoever asks for it: others may not need it
        _problems.update(dict.fromkeys(registered, f"{type(problem).__name__}: {problem}"))
        return
    for name, pickled in registered.items():
        try:
            if isinstance(pickled, str):
                raise TypeError(pickled)
            gymnasium.registry[name] = cloudpickle.loads(pickled)
        except Exception as problem:
            _problems[name] = f"{type(problem).__name__}: {problem}"
            gymnasium.registry.pop(name, None)  # another one of that name would pass for it


def problem(name: str) -> str | None:
    """Why a registration of the caller's is not in force here, if so; a module in front is fine."""
    return _problems.get(name.rpartition(":")[2])
