"""Specs: what counts as a difference, and what fits."""

from __future__ import annotations

import numpy as np
import pytest
from dm_env import specs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envfleet.specs import Misfit, differences, fit

numbers = st.sampled_from([np.dtype(c) for c in "bBhHiIlLfd?"])
arrays = numbers.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(max_dims=2, max_side=3)))


@given(arrays, numbers)
def test_cast_is_exact_for_integers_and_never_makes_an_integer_of_a_float(array, dtype):
    try:
        found = fit(array, array.shape, dtype)
    except Misfit:
        return
    assert found.dtype == dtype
    if dtype.kind in "iub":
        assert array.dtype.kind in "iub"
        assert np.array_equal(found.astype(object), array.astype(object))


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (3, "u1", True),
        (300, "u1", False),
        (-1, "u1", False),
        (3, "f4", True),
        (0.5, "f4", True),
        (0.5, "i8", False),
        (True, "i8", True),
        (1, "?", False),
        ("abc", "<U3", True),
        ("abcd", "<U3", False),
        (1.0 + 2j, "f8", False),
        (object(), "f8", False),
        (None, "f8", False),
    ],
)
def test_scalar_fits_where_nothing_is_lost(value, dtype, fits):
    try:
        assert fit(value, (), np.dtype(dtype)).dtype == dtype
        assert fits
    except Misfit:
        assert not fits


@given(arrays)
def test_spec_does_not_differ_from_itself(array):
    spec = specs.Array(array.shape, array.dtype)
    assert differences({(): spec}, {(): spec.replace(name="other")}) == []


def test_bounds_that_are_the_dtypes_own_are_no_bounds():
    bounded = specs.BoundedArray((2,), np.uint8, 0, 255)
    assert differences({(): specs.Array((2,), np.uint8)}, {(): bounded}) == []


def test_bounds_are_compared_elementwise():
    one = specs.BoundedArray((2,), np.float32, [0, 0], [1, 1])
    two = specs.BoundedArray((2,), np.float32, 0, [1, 2])
    ((path, words),) = differences({("a",): one}, {("a",): two})
    assert path == ("a",)
    assert words == "maximum [1. 2.] against [1. 1.]"
