"""Columns: which leaf of an environment stands in which column of a dataset, and how.

One row is one time step. Scalars are plain columns, arrays Arrow's canonical `fixed_shape_tensor`,
texts strings. A leaf of size zero has no column: its shape, in `dataset.json`, is all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from envfleet import specs
from envfleet.layout import Layout

Array = np.ndarray[Any, Any]

PARTS = ("observation", "action", "reward", "discount")
"""What of a row an environment's specs describe; the rest is the same for all datasets."""

_BEFORE = {"episode_id": np.int64, "env_id": np.int32, "t": np.int32, "step_type": np.int8}
_AFTER = {"terminated": np.bool_, "truncated": np.bool_, "policy_version": np.int32}
CUT = "cut"
"""The last column: in the last row of an episode that was cut short, why; null elsewhere."""

_REPEATING = [*_BEFORE, *_AFTER, CUT, "reward", "discount"]


class Column(NamedTuple):
    """One leaf.

    Attributes:
      name: of the column: "observation.arm.angle".
      path: from the top of its part to the leaf: ("arm", "angle").
      shape, dtype: of one time step.
      minimum, maximum: its bounds; None where the spec says none.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    minimum: Array | None
    maximum: Array | None

    @property
    def part(self) -> str:
        """The one of `PARTS` that it belongs to."""
        return self.name.partition(".")[0]

    @property
    def is_stored(self) -> bool:
        """Whether it has a column."""
        return 0 not in self.shape

    def arrow_type(self) -> pa.DataType:
        """How it is stored."""
        if self.shape and self.dtype.kind == "b":
            return pa.fixed_shape_tensor(pa.uint8(), self.shape)  # Arrow reads none of booleans
        value = pa.string() if self.dtype.hasobject else pa.from_numpy_dtype(self.dtype)
        return pa.fixed_shape_tensor(value, self.shape) if self.shape else value


class Columns:
    """The columns of a dataset, in their order.

    Args:
      leaves: those of `PARTS`, in that order.
    """

    def __init__(self, leaves: Sequence[Column]) -> None:
        self.leaves = list(leaves)
        self.stored = [leaf for leaf in self.leaves if leaf.is_stored]
        self.schema = pa.schema(
            [
                *((name, pa.from_numpy_dtype(dtype)) for name, dtype in _BEFORE.items()),
                *((leaf.name, leaf.arrow_type()) for leaf in self.stored),
                *((name, pa.from_numpy_dtype(dtype)) for name, dtype in _AFTER.items()),
                (CUT, pa.string()),
            ]
        )
        self.repeating = [name for name in _REPEATING if name in self.schema.names]

    @classmethod
    def of(cls, time_step_spec: Any, action_spec: Any) -> Columns:
        """The columns for environments with these specs.

        Raises:
          TypeError: a leaf of a kind that no column holds; says which.
          ValueError: a name with a dot, or two leaves of one name.
        """
        leaves: list[Column] = []
        for part in PARTS:
            spec = action_spec if part == "action" else getattr(time_step_spec, part)
            leaves += [_column(part, path, leaf) for path, leaf in Layout(spec, part).specs.items()]
        names = [leaf.name for leaf in leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"a dataset would have two columns of the name {', '.join(twice)}")
        return cls(leaves)

    # -- rows -> a table -> rows -------------------------------------------------------------------

    def table(self, rows: Mapping[str, Array], cut: Sequence[tuple[int, str]]) -> pa.Table:
        """A table of so many rows.

        Args:
          rows: an array for each column but `CUT`, by its name; all of one length.
          cut: (row, reason) of the rows that say one.

        Raises:
          TypeError: a text column holds something else; says which.
        """
        arrays = [_arrow(rows[name], self.schema.field(name)) for name in self.schema.names[:-1]]
        return pa.Table.from_arrays([*arrays, _reasons(len(rows["t"]), cut)], schema=self.schema)

    def rows(self, table: pa.Table) -> dict[str, Array]:
        """Of each column of a table an array of shape ``(rows, *shape)``; `CUT` has None for null.

        Leaves without a column are there, too.
        """
        found = {name: numpy_of(table.column(name)) for name in self.schema.names}
        for leaf in self.leaves:
            if not leaf.is_stored:
                found[leaf.name] = np.zeros((len(table), *leaf.shape), leaf.dtype)
            elif leaf.shape and leaf.dtype.kind == "b":
                found[leaf.name] = found[leaf.name].astype(bool)
        return found

    def structure(self, part: str, leaves: Mapping[str, Any]) -> Any:
        """Nested dicts and tuples of what is given for the leaves of a part."""
        return nested([(leaf.path, leaves[leaf.name]) for leaf in self.leaves if leaf.part == part])

    # -- in dataset.json ---------------------------------------------------------------------------

    def to_json(self) -> list[dict[str, Any]]:
        """What `from_json` reads."""
        return [
            {
                "column": leaf.name,
                "path": list(leaf.path),
                "shape": list(leaf.shape),
                "dtype": "str" if leaf.dtype.hasobject else leaf.dtype.name,
                "minimum": _bound_to_json(leaf.minimum),
                "maximum": _bound_to_json(leaf.maximum),
            }
            for leaf in self.leaves
        ]

    @classmethod
    def from_json(cls, leaves: Iterable[Mapping[str, Any]]) -> Columns:
        """The columns that `to_json` described."""
        made = []
        for leaf in leaves:
            dtype = np.dtype(object if leaf["dtype"] == "str" else leaf["dtype"])
            shape = tuple(leaf["shape"])
            made.append(
                Column(
                    leaf["column"],
                    tuple(leaf["path"]),
                    shape,
                    dtype,
                    _bound_from_json(leaf["minimum"], shape, dtype),
                    _bound_from_json(leaf["maximum"], shape, dtype),
                )
            )
        return cls(made)


def _column(part: str, path: specs.Path, spec: specs.Spec) -> Column:
    for key in path:
        if "." in str(key):
            raise ValueError(
                f"{part} has a leaf at {path}: the dot in {key!r} would not stand apart from those "
                "of its column's name"
            )
    dtype, shape = np.dtype(spec.dtype), tuple(spec.shape)
    name = ".".join([part, *map(str, path)])
    is_text = dtype.kind in "OU" and not shape and part in ("observation", "action")
    if not is_text and dtype.kind not in "iufb":
        raise TypeError(
            f"{name} is of shape {shape} and dtype {dtype}: a dataset holds numbers, booleans and "
            "single texts"
        )
    bounds = [
        np.asarray(getattr(spec, field))
        if dtype.kind in "iuf" and getattr(spec, field, None) is not None
        else None
        for field in ("minimum", "maximum")
    ]
    return Column(name, path, shape, np.dtype(object) if is_text else dtype, *bounds)


def _arrow(values: Array, field: pa.Field) -> pa.Array:
    if values.dtype.hasobject:
        try:
            return pa.array(values.tolist(), pa.string())
        except (pa.ArrowException, UnicodeError) as problem:
            raise TypeError(f"{field.name} is no text: {problem}") from None
    if not isinstance(field.type, pa.FixedShapeTensorType):
        return pa.array(values, field.type)
    kept = values.astype(np.uint8) if values.dtype == bool else values
    flat = pa.array(np.ascontiguousarray(kept).reshape(-1))
    size = int(np.prod(field.type.shape))
    return pa.ExtensionArray.from_storage(field.type, pa.FixedSizeListArray.from_arrays(flat, size))


def _reasons(rows: int, cut: Sequence[tuple[int, str]]) -> pa.Array:
    if not cut:
        return pa.nulls(rows, pa.string())
    words = sorted({reason for _, reason in cut})
    indices, is_null = np.zeros(rows, np.int8), np.ones(rows, bool)
    for row, reason in cut:
        indices[row], is_null[row] = words.index(reason), False
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, mask=is_null), pa.array(words)
    ).dictionary_decode()


def numpy_of(column: pa.ChunkedArray) -> Array:
    """A column as an array of shape ``(rows, *shape)``; texts as objects, None for null."""
    kind = column.type
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks, by older pyarrow
        array = array.chunk(0) if array.num_chunks else pa.array([], kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        flat = array.storage.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat).reshape(len(array), *kind.shape)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def nested(leaves: Sequence[tuple[Sequence[str | int], Any]]) -> Any:
    """Dicts and tuples of leaves by their paths; a leaf alone as it is."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    parts = {
        key: nested([(path[1:], value) for path, value in group])
        for key, group in itertools.groupby(leaves, lambda leaf: leaf[0][0])
    }
    return tuple(parts.values()) if [*parts] == [*range(len(parts))] else parts


def _bound_to_json(bound: Array | None) -> Any:
    """A number where all are the same, else nested lists; infinities, which JSON lacks, as text."""
    if bound is None:
        return None
    if bound.size and (bound == bound.flat[0]).all():
        bound = bound.flat[0]
    return _finite(np.asarray(bound).tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if np.isfinite(value) else str(value)


def _bound_from_json(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    if value is None:
        return None
    if 0 in shape:
        return np.zeros(shape, dtype)
    kind = dtype if dtype.kind in "iu" else np.dtype(np.float64)  # which reads infinities, too
    return np.broadcast_to(np.asarray(value, kind).astype(dtype), shape)
