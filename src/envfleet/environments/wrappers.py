"""Attributes of an environment that may sit under wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_INNER = ("env", "_env", "environment", "_environment")
"""Where Gymnasium's, TF-Agents', dm_control's and acme's wrappers keep what they wrap."""


def layers(env: Any) -> Iterator[Any]:
    """The environment as given, then what it wraps, outermost first."""
    seen: list[Any] = []
    while env is not None and not any(env is layer for layer in seen):
        seen.append(env)
        yield env
        attributes = getattr(env, "__dict__", {})
        inner = [attributes[name] for name in _INNER if name in attributes]
        env = next((e for e in inner if hasattr(e, "reset") and hasattr(e, "step")), None)


def find_attr(env: Any, name: str) -> Any:
    """The attribute of the outermost layer that has it.

    Raises:
      AttributeError: no layer has it; names them.
    """
    for layer in layers(env):
        # `getattr` with a default would also hide an AttributeError from inside a property.
        if name in dir(layer) or _forwards(layer, name):
            return getattr(layer, name)
    raise AttributeError(f"{_names(env)} has no attribute {name!r}")


def assign_attr(env: Any, name: str, value: Any) -> None:
    """Sets the attribute on the outermost layer that has it; a new one on the innermost layer."""
    chain = list(layers(env))
    owner = next((layer for layer in chain if name in dir(layer)), chain[-1])
    setattr(owner, name, value)


def _forwards(layer: Any, name: str) -> bool:
    """Whether a ``__getattr__`` of the layer's own answers for the name."""
    if not hasattr(type(layer), "__getattr__"):
        return False
    try:
        layer.__getattr__(name)
    except AttributeError:
        return False
    return True


def _names(env: Any) -> str:
    return " > ".join(type(layer).__qualname__ for layer in layers(env))
