"""Layout: whatever the structure, what goes in comes out, and only that."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tree
from dm_env import specs
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import SpecMismatch
from envfleet.layout import Layout


class Pair(NamedTuple):
    left: Any
    right: Any


DTYPES = [np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64, "<U3"]
leaves = st.builds(
    specs.Array,
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
) | st.just(specs.StringArray(()))
structures = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def value_of(spec: Any, random: np.random.Generator, lead: tuple[int, ...] = ()) -> Any:
    shape = (*lead, *spec.shape)
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "OU":
        return np.asarray(random.integers(0, 999, shape)).astype("<U3").astype(dtype)
    return random.integers(0, 100, shape).astype(dtype)


def same(left: Any, right: Any) -> None:
    tree.assert_same_structure(left, right)
    for one, other in zip(tree.flatten(left), tree.flatten(right), strict=True):
        np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=150)
@given(structures, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_values_of_environments_come_out_as_a_batch(structure, rows, seed):
    """The environment's way: written row by row, sent as a block, filled into columns."""
    layout = Layout(structure, "values")
    random = np.random.default_rng(seed)
    values = [tree.map_structure(lambda s: value_of(s, random), structure) for _ in range(rows)]
    block = bytearray(layout.nbytes(rows))
    views = layout.views(block, rows)
    objects = [layout.write(views, row, value) for row, value in enumerate(values)]
    columns = layout.empty(rows + 1)
    layout.fill(columns, 1, rows, bytes(block), objects)
    batch = layout.unflatten(columns)
    for row, value in enumerate(values):
        same(tree.map_structure(lambda column, row=row: column[row + 1], batch), value)


@settings(deadline=None, max_examples=150)
@given(structures, st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_actions_of_a_batch_come_out_as_each_environments_own(structure, size, seed, data):
    """The batch's way: checked as columns, cut into rows, read by the environment."""
    layout = Layout(structure, "actions")
    random = np.random.default_rng(seed)
    actions = tree.map_structure(lambda s: value_of(s, random, (size,)), structure)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    block, objects = layout.rows(layout.columns(actions, size), slice(start, stop), stop - start)
    views = layout.views(block, stop - start)
    for row, found in enumerate(layout.read(views, objects)):
        expected = tree.map_structure(lambda a, row=row: a[start + row], actions)
        same(found, expected)
        for leaf in tree.flatten(found):
            assert not isinstance(leaf, np.ndarray) or leaf.flags.writeable


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": np.zeros(3), "b": 1}, r"observation\['a'\] has shape \(3,\), expected \(2,\)"),
        ({"a": [[1, 2], [3]], "b": 1}, r"observation\['a'\] is ragged"),
        ({"a": [1, 2], "b": 1.5}, r"observation\['b'\] has dtype float64, .* safely to int64"),
        ({"a": [1, 2]}, r"lacks observation\['b'\]"),
        ({"a": [1, 2], "b": 1, "c": 2}, r"has unexpected observation\['c'\]"),
        (3, r"expected the leaves observation\['a'\], observation\['b'\]"),
    ],
    ids=range(6),
)
def test_value_that_does_not_fit_says_which_leaf_and_why(value, words):
    spec = {"a": specs.Array((2,), np.float32), "b": specs.Array((), np.int64)}
    layout = Layout(spec, "observation")
    views = layout.views(bytearray(layout.nbytes(1)), 1)
    with pytest.raises(SpecMismatch, match=words):
        layout.write(views, 0, value)


def test_leaf_that_is_no_spec_says_where_it_stands():
    with pytest.raises(TypeError, match=r"actions\['a'\]\[1\] is a int \(3\), expected a spec"):
        Layout({"a": [specs.Array((), int), 3]}, "actions")


def test_block_of_another_size_is_refused():
    layout = Layout(specs.Array((3,), np.float32), "x")
    with pytest.raises(Exception, match="a block of 3 bytes came in, expected 16"):
        layout.views(b"abc", 1)


def test_leaves_are_aligned_and_contiguous():
    layout = Layout([specs.Array((3,), np.uint8), specs.Array((), np.float64)], "x")
    for rows in (1, 3):
        for view in layout.views(bytearray(layout.nbytes(rows)), rows):
            assert view.flags.c_contiguous
            assert view.flags.aligned
