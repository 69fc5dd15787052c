"""Specs leaf by leaf: what one promises, how two differ, and whether a value fits.

A spec is anything with ``shape`` and ``dtype``, and ``minimum`` and ``maximum`` where it is
bounded: dm_env's `specs.Array` and its subclasses, TF-Agents' `ArraySpec` and `BoundedArraySpec`.
Names and spec classes do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

Path = tuple[str | int, ...]
"""Keys, fields and indices from the top of a structure to a leaf."""


@runtime_checkable
class Spec(Protocol):
    """The part of a spec that envfleet relies on."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


class Misfit(ValueError):
    """A value does not fit a spec; the text says how, the caller adds which and where."""


def differences(
    expected: Mapping[Path, Spec], found: Mapping[Path, Spec]
) -> list[tuple[Path, str]]:
    """Every difference between two flattened specs: at which leaf, and in words."""
    words: list[tuple[Path, str]] = []
    for path in [*expected, *(path for path in found if path not in expected)]:
        if path not in found:
            words.append((path, f"no such leaf against {_describe(expected[path])}"))
        elif path not in expected:
            words.append((path, f"{_describe(found[path])} against no such leaf"))
        else:
            words += [(path, w) for w in _leaf_differences(expected[path], found[path])]
    return words


def _leaf_differences(expected: Spec, found: Spec) -> list[str]:
    words = []
    if tuple(found.shape) != tuple(expected.shape):
        words.append(f"shape {tuple(found.shape)} against {tuple(expected.shape)}")
    if np.dtype(found.dtype) != np.dtype(expected.dtype):
        words.append(f"dtype {np.dtype(found.dtype)} against {np.dtype(expected.dtype)}")
    if words:
        return words  # bounds of another shape or dtype cannot be compared
    for field in ("minimum", "maximum"):
        mine, theirs = bound(found, field), bound(expected, field)
        if not np.all(mine == theirs):
            words.append(f"{field} {mine} against {theirs}")
    return words


def bound(spec: Spec, field: str) -> np.ndarray[Any, Any]:
    """``minimum`` or ``maximum`` as an array; what a spec leaves open is the dtype's own bound."""
    dtype = np.dtype(spec.dtype)
    given = getattr(spec, field, None)
    if dtype.kind not in "iufb":
        return np.asarray(None)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        widest: Any = limits.min if field == "minimum" else limits.max
    elif dtype.kind == "b":
        widest = field == "maximum"
    else:
        widest = -np.inf if field == "minimum" else np.inf
    return np.asarray(widest if given is None else given)


def _describe(spec: Spec) -> str:
    return f"shape {spec.shape} dtype {spec.dtype}"


def sample(
    spec: Spec, random: np.random.Generator, axes: tuple[int, ...] = ()
) -> np.ndarray[Any, Any]:
    """A random value by a spec, uniform within its bounds; from -1 to 1 where it has none.

    `axes` go before its shape. Strings are empty.
    """
    dtype, shape = np.dtype(spec.dtype), (*axes, *spec.shape)
    if dtype.kind not in "iufb":
        return np.full(shape, "" if dtype.hasobject else np.zeros((), dtype), dtype)
    low, high = sampled_range(spec)
    if dtype.kind in "iub":
        return random.integers(low, high, shape, np.int64, endpoint=True).astype(dtype)
    return random.uniform(low, high, shape).astype(dtype)


def sampled_range(spec: Spec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The least and the largest number that a random value of a spec has."""
    low, high = getattr(spec, "minimum", -1), getattr(spec, "maximum", 1)
    low = np.maximum(low, np.minimum(-1e6, high))  # no wider than needed, yet within the bounds
    return low, np.minimum(high, np.maximum(1e6, low))


def fit(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The value as an array of exactly this shape and dtype.

    A cast is made where it is safe: to a wider type, among floating-point types, from integers to
    floating point, and between integer types where every value fits. Floats never become integers.

    Raises:
      Misfit: says what was found and what was expected.
    """
    try:
        array = np.asarray(value, dtype=object if dtype.hasobject else None)
    except ValueError as ragged:
        raise Misfit(f"is ragged ({ragged}), expected shape {shape}") from None
    if array.shape != shape:
        raise Misfit(f"has shape {array.shape}, expected {shape}")
    if array.dtype == dtype:
        return array
    if np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise Misfit(
                f"has values from {array.min()} to {array.max()}, which {dtype} cannot hold"
            )
        return array.astype(dtype)
    if array.dtype.kind in "iuf" and dtype.kind in "fc":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if not np.array_equal(np.isinf(cast), np.isinf(array)):
            raise Misfit(f"has finite values that are infinite as {dtype}")
        return cast
    if array.dtype.kind == dtype.kind and dtype.kind in "US":
        raise Misfit(f"has dtype {array.dtype}, which {dtype} would cut short")
    raise Misfit(f"has dtype {array.dtype}, which does not cast safely to {dtype}")
