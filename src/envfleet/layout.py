"""How structures of arrays travel: compiled once from the specs, used at every step.

A structure of specs has *leaves*, in `tree`'s order. Leaves of fixed size travel in a *block*: one
run of bytes in which each leaf holds ``(rows, *shape)`` contiguously, so that one remote call
carries one buffer and nothing is pickled. Leaves of dtype object (strings) travel beside the block,
as a list with one entry a row. Both sides compile the same `Layout` from equal specs. A *timed*
block ends with the seconds that each row took.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import dm_env
import numpy as np
import tree

from envfleet import specs
from envfleet.errors import EnvFleetError, InvalidAction, SpecMismatch

Array = np.ndarray[Any, Any]
Buffer = bytes | bytearray | memoryview | Array

_ALIGNMENT = 16

_SECONDS = np.dtype(np.float32)

_ARRAYS = (np.ndarray, np.generic)


class Leaf(NamedTuple):
    """One array of a structure: where it stands and what it holds."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Layout:
    """The leaves of one structure of specs.

    Args:
      structure: nested dicts, tuples, lists, named tuples or attrs classes of specs.
      name: what the structure is called in an error ("actions"); empty where its own fields are
        the names (a time step: "observation['arm']").
      timed: whether blocks carry seconds.

    Attributes:
      has_objects: whether some leaves travel beside the block.

    Raises:
      TypeError: a leaf is not a spec; says where and what was found.
    """

    def __init__(self, structure: Any, name: str, timed: bool = False) -> None:
        self.structure = structure
        self.name = name
        self._timed = timed
        self.specs: dict[specs.Path, specs.Spec] = dict(tree.flatten_with_path(structure))
        self.leaves = [_leaf(path, spec, name) for path, spec in self.specs.items()]
        self._fixed = [i for i, leaf in enumerate(self.leaves) if not leaf.dtype.hasobject]
        self._beside = [i for i, leaf in enumerate(self.leaves) if leaf.dtype.hasobject]
        self.has_objects = bool(self._beside)
        self._blocks: dict[int, tuple[list[int], int]] = {}
        self._is_leaf = not tree.is_nested(structure)
        self._plan = _plan(structure)
        self._is_flat = self._plan is not None and self._plan.is_flat
        self._checks = [
            (i, self.leaves[i].dtype, self.leaves[i].shape, _scalars(self.leaves[i]))
            for i in self._fixed
        ]
        self._arrays = [
            (at, i, dtype, shape) for at, (i, dtype, shape, _) in enumerate(self._checks) if shape
        ]

    @property
    def paths(self) -> list[specs.Path]:
        """Where in the structure the leaves of a block stand, in the order of `views`."""
        paths = list(self.specs)
        return [paths[i] for i in self._fixed]

    # -- blocks -----------------------------------------------------------------------------------

    def _offsets(self, rows: int) -> tuple[list[int], int]:
        """Where each fixed leaf begins in a block of so many rows, and the block's size."""
        if rows not in self._blocks:
            offsets, end = [], 0
            for i in self._fixed:
                leaf = self.leaves[i]
                offsets.append(end)
                size = rows * leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            end += rows * _SECONDS.itemsize if self._timed else 0
            self._blocks[rows] = offsets, end
        return self._blocks[rows]

    def nbytes(self, rows: int) -> int:
        """Size of a block of so many rows, in bytes."""
        return self._offsets(rows)[1]

    def views(self, block: Buffer, rows: int) -> list[Array]:
        """The block's fixed leaves, ``(rows, *shape)`` each, sharing its memory."""
        offsets, size = self._offsets(rows)
        if len(block) != size:
            raise EnvFleetError(f"a block of {len(block)} bytes came in, expected {size}")
        views = []
        for i, offset in zip(self._fixed, offsets, strict=True):
            leaf = self.leaves[i]
            views.append(np.ndarray((rows, *leaf.shape), leaf.dtype, block, offset))
        return views

    def seconds(self, block: Buffer, rows: int) -> Array:
        """The seconds in a timed block: float32 of shape ``(rows,)``, sharing its memory."""
        size = rows * _SECONDS.itemsize
        return np.ndarray((rows,), _SECONDS, block, self._offsets(rows)[1] - size)

    # -- the batch's side: columns are arrays of shape (batch_size, *shape), one per leaf ---------

    def columns(self, values: Any, batch_size: int | None, axis: str = "batch_size") -> list[Array]:
        """Checks a batch of actions and gives its leaves as arrays.

        Without a `batch_size` it is one environment's action, and comes out as a batch of one.
        `axis` says in an error what the leading axis should have been.

        Raises:
          InvalidAction: wrong structure, leading axis, shape or dtype; says which leaf.
        """
        try:
            flat = self.flatten(values)
        except SpecMismatch as mismatch:
            raise InvalidAction(str(mismatch)) from None
        return [
            _action(value, batch_size, axis, leaf)
            for value, leaf in zip(flat, self.leaves, strict=True)
        ]

    def sample(self, random: np.random.Generator, batch_size: int) -> list[Array]:
        """Columns of random values within the specs' bounds."""
        return [specs.sample(spec, random, (batch_size,)) for spec in self.specs.values()]

    def rows(
        self, columns: Sequence[Array], taken: slice | Sequence[int], rows: int
    ) -> tuple[bytes, list[Any]]:
        """So many rows of a batch as one block, and per row the leaves that travel beside it."""
        if len(self._fixed) == 1:
            block = columns[self._fixed[0]][taken].tobytes().ljust(self.nbytes(rows), b"\0")
        else:
            buffer = bytearray(self.nbytes(rows))
            for view, i in zip(self.views(buffer, rows), self._fixed, strict=True):
                view[...] = columns[i][taken]
            block = bytes(buffer)
        if not self._beside:
            return block, []
        return block, [list(row) for row in zip(*(columns[i][taken] for i in self._beside))]  # noqa: B905

    def empty(self, batch_size: int) -> list[Array]:
        """Fresh columns for a batch."""
        return [np.empty((batch_size, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def fill(
        self,
        columns: Sequence[Array],
        start: int,
        rows: int,
        block: Buffer,
        objects: Sequence[Any],
        taken: Sequence[int] | None = None,
    ) -> None:
        """Copies a block of so many rows into the columns, and what came beside it.

        All rows of it, or those `taken`, go where the columns' row `start` is and behind.
        """
        for view, i in zip(self.views(block, rows), self._fixed, strict=True):
            if taken is None:
                columns[i][start : start + rows] = view
            else:
                np.take(view, taken, 0, columns[i][start : start + len(taken)], "clip")
        if objects:
            chosen = objects if taken is None else [objects[row] for row in taken]
            for at, beside in enumerate(chosen, start):
                for value, i in zip(beside, self._beside, strict=False):
                    columns[i][at, ...] = value

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Leaves in the structure's own types."""
        if self._is_leaf:
            return leaves[0]
        if self._plan is not None:
            return self._plan.put_together(iter(leaves))
        return tree.unflatten_as(self.structure, leaves)

    # -- the environment's side -------------------------------------------------------------------

    def read(self, views: Sequence[Array], objects: Sequence[Sequence[Any]]) -> list[Any]:
        """Every row as a structure: writable arrays, numpy scalars for shape ``()``."""
        columns: list[Any] = [None] * len(self.leaves)
        for view, i in zip(views, self._fixed, strict=True):
            columns[i] = list(view.copy())
        for i, values in zip(self._beside, zip(*objects, strict=True), strict=True):
            columns[i] = values
        if self._is_leaf:
            return list(columns[0])
        return [self.unflatten(leaves) for leaves in zip(*columns, strict=True)]

    def write_arrays(self, views: Sequence[Array], row: int, flat: Sequence[Any]) -> bool:
        """Writes the arrays among a value's leaves, where all are just as the spec has them.

        At once, since an environment may use their memory again. Where it gives False, `write` fits
        them, and says what is wrong.
        """
        for at, i, dtype, shape in self._arrays:
            item = flat[i]
            if type(item) is not np.ndarray or item.dtype != dtype or item.shape != shape:
                return False
            views[at][row] = item
        return not self._beside

    def write_scalars(
        self, views: Sequence[Array], rows: Sequence[int], flats: Sequence[Sequence[Any]]
    ) -> bool:
        """Writes the scalars of several values, likewise."""
        if not flats:
            return True
        at = slice(None) if len(rows) == len(views[0]) else rows
        columns = [*zip(*flats, strict=True)]
        for view, (i, _, shape, scalars) in zip(views, self._checks, strict=True):
            if shape == ():
                if not set(map(type, columns[i])) <= scalars:
                    return False
                view[at] = columns[i]
        return True

    def write(
        self, views: Sequence[Array], row: int, value: Any, only_scalars: bool = False
    ) -> list[Any]:
        """Writes one environment's value into its row; returns what travels beside the block.

        Raises:
          SpecMismatch: the value does not fit the spec; says which leaf, expected and found.
        """
        flat = self.flatten(value)
        for view, (i, dtype, shape, scalars) in zip(views, self._checks):  # noqa: B905  (hot)
            if only_scalars and shape:
                continue
            item = flat[i]
            kind = type(item)
            if kind is np.ndarray:
                fits = item.dtype == dtype and item.shape == shape
            else:
                fits = kind in scalars or _fits_at_once(item, self.leaves[i])
            view[row] = item if fits else self._fit(item, self.leaves[i])
        return [self._fit(flat[i], self.leaves[i]) for i in self._beside] if self._beside else []

    def _fit(self, value: Any, leaf: Leaf) -> Array:
        try:
            return specs.fit(value, leaf.shape, leaf.dtype)
        except specs.Misfit as misfit:
            raise SpecMismatch(f"{leaf.path} {misfit} by its spec") from None

    def flatten(self, value: Any) -> Sequence[Any]:
        if self._is_flat and isinstance(value, tuple) and len(value) == len(self.leaves):
            return value
        if self._is_leaf:
            return (value,)
        leaves: list[Any] = []
        if self._plan is not None and self._plan.take_apart(value, leaves):
            return leaves
        try:
            return tree.flatten_up_to(self.structure, value, check_types=False)  # type: ignore[no-any-return]
        except (TypeError, ValueError, KeyError) as problem:
            raise SpecMismatch(self._structure_words(value, problem)) from None

    def _structure_words(self, value: Any, problem: Exception) -> str:
        found = [_words(path, self.name) for path, _ in tree.flatten_with_path(value)]
        expected = [leaf.path for leaf in self.leaves]
        lacks = [path for path in expected if not any(p.startswith(path) for p in found)]
        beyond = [path for path in found if not any(path.startswith(p) for p in expected)]
        words = [f"lacks {', '.join(lacks)}"] if lacks else []
        words += [f"has unexpected {', '.join(beyond)}"] if beyond else []
        words = words or [str(problem)]
        name = self.name or "time step"
        return f"{name} {' and '.join(words)}; expected the leaves {', '.join(expected)}"


class _Plan(NamedTuple):
    """One dict, tuple or list of a structure: what `tree` does with it, worked out once.

    Attributes:
      keys: in `tree`'s order; None of a tuple or list.
      parts: of what stands there the plan, or None for a leaf.
      make: from the parts, in the structure's own order.
      order: where among `parts` those are.
    """

    keys: list[Any] | None
    parts: list[Any]
    make: Callable[[list[Any]], Any]
    order: list[int]

    @property
    def is_flat(self) -> bool:
        """Whether it is a tuple or list of leaves."""
        return self.keys is None and not any(self.parts)

    def take_apart(self, value: Any, leaves: list[Any]) -> bool:
        """Appends the leaves of a value; False where it is not plainly of this structure."""
        if self.keys is None:
            if not isinstance(value, tuple | list) or len(value) != len(self.parts):
                return False
            items: Iterable[Any] = value
        else:
            if not isinstance(value, dict) or len(value) != len(self.parts):
                return False
            try:
                items = [value[key] for key in self.keys]
            except KeyError:
                return False
        for part, item in zip(self.parts, items):  # noqa: B905  (their lengths were compared)
            if part is None:
                leaves.append(item)
            elif not part.take_apart(item, leaves):
                return False
        return True

    def put_together(self, leaves: Iterator[Any]) -> Any:
        """Takes its leaves off the iterator; gives them in the structure's own types."""
        parts = [next(leaves) if part is None else part.put_together(leaves) for part in self.parts]
        return self.make([parts[at] for at in self.order])


def _plan(structure: Any) -> _Plan | None:
    """The plan of a structure of plain dicts, tuples, named tuples and lists; else None."""
    kind = type(structure)
    if kind is dict:
        own, keys = list(structure), sorted(structure)
        children = [structure[key] for key in keys]
        order = [keys.index(key) for key in own]
        make: Callable[[list[Any]], Any] = functools.partial(_as_dict, own)
    elif kind in (tuple, list) or hasattr(kind, "_make"):
        keys, children, order = None, list(structure), list(range(len(structure)))
        make = getattr(kind, "_make", kind)
    else:
        return None
    parts = [_plan(child) for child in children]
    if any(part is None and tree.is_nested(child) for part, child in zip(parts, children)):  # noqa: B905
        return None
    return _Plan(keys, parts, make, order)


def _as_dict(keys: list[Any], parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """The same structure with what the function gives for each leaf, and for those of others."""
    return tree.map_structure(function, structure, *others)


def zeros_and_ones(reward_spec: Any, discount_spec: Any) -> tuple[Any, Any]:
    """No reward and the full discount: what a first time step has, by the specs."""
    reward = map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), reward_spec)
    discount = map_leaves(lambda spec: np.ones(spec.shape, spec.dtype), discount_spec)
    return reward, discount


def _scalars(leaf: Leaf) -> frozenset[type]:
    """The types whose every value the leaf holds as it is: numpy's own, and Python's beside it."""
    if leaf.shape != () or leaf.dtype.kind not in "iufb":
        return frozenset()
    beside = {"b": {bool}, "i": {dm_env.StepType}, "u": {dm_env.StepType}}
    python = {float} if leaf.dtype.type is np.float64 else beside.get(leaf.dtype.kind, set())
    return frozenset({leaf.dtype.type, *python})


def _fits_at_once(item: Any, leaf: Leaf) -> bool:
    """More common cases: arrays of that very kind, small integers."""
    if isinstance(item, _ARRAYS):
        return bool(item.dtype == leaf.dtype and item.shape == leaf.shape)
    # Every integer type holds a small one: a step type, an index.
    is_integer = leaf.shape == () and leaf.dtype.kind in "iu"
    return is_integer and isinstance(item, int) and type(item) is not bool and 0 <= item <= 127


def _action(value: Any, batch_size: int | None, axis: str, leaf: Leaf) -> Array:
    shape = leaf.shape if batch_size is None else (batch_size, *leaf.shape)
    if batch_size is not None:
        length = _length(value)
        if length != batch_size:
            found = "no leading axis" if length is None else f"leading axis {length}"
            raise InvalidAction(f"{leaf.path} has {found}, expected {axis} {batch_size}")
    try:
        array = specs.fit(value, shape, leaf.dtype)
    except specs.Misfit as misfit:
        raise InvalidAction(f"{leaf.path} {misfit}") from None
    return array if batch_size is not None else array[np.newaxis]


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:  # no sequence, or an array without axes
        return None


def _leaf(path: specs.Path, spec: Any, name: str) -> Leaf:
    where = _words(path, name)
    if not isinstance(spec, specs.Spec):
        raise TypeError(f"{where} is a {type(spec).__name__} ({spec!r}), expected a spec")
    return Leaf(where, tuple(spec.shape), np.dtype(spec.dtype))


def _words(path: specs.Path, name: str) -> str:
    """A leaf's path as one would write it: ``actions['arm'][0]``."""
    if not name and path:
        name, path = str(path[0]), path[1:]
    return name + "".join(f"[{part!r}]" for part in path)
