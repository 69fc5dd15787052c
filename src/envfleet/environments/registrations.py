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
    """What is registered here and does not come with Gymnasium itself."""
    registry: dict[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    found: dict[str, bytes | str] = {}
    for name, spec in registry.items():
        if str(spec.entry_point).startswith("gymnasium.") and not callable(spec.entry_point):
            continue
        try:
            found[name] = gin_state.dumps(spec)
        except Exception as problem:
            found[name] = f"does not pickle ({type(problem).__name__}: {problem})"
    return found


def apply(registered: Pickled) -> None:
    """Registers it in this process, an actor's; what was registered here already stays."""
    if not registered:
        return
    try:
        import gymnasium
    except ImportError as problem:  # told to whoever asks for it: others may not need it
        _problems.update(dict.fromkeys(registered, f"{type(problem).__name__}: {problem}"))
        return
    for name, pickled in registered.items():
        if name in gymnasium.registry:
            continue
        try:
            if isinstance(pickled, str):
                raise TypeError(pickled)
            gymnasium.registry[name] = cloudpickle.loads(pickled)
        except Exception as problem:
            _problems[name] = f"{type(problem).__name__}: {problem}"


def problem(name: str) -> str | None:
    """Why a registration of the caller's is not in force here, if so."""
    return _problems.get(name)
