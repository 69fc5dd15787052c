"""Seeds: distinct, reproducible, and independent of everything but the environment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envfleet.seeding import Seeds


@given(st.integers(0, 2**128), st.integers(1, 50), st.integers(1, 50))
def test_seed_of_an_environment_does_not_depend_on_how_many_there_are(seed, few, many):
    one, other = Seeds(seed, few), Seeds(seed, many)
    assert all(one.of(i) == other.of(i) for i in range(min(few, many)))


@given(st.integers(0, 2**64))
def test_environments_and_rebuilds_have_seeds_of_their_own(seed):
    seeds = Seeds(seed, 20)
    found = [seeds.of(i, rebuilds) for i in range(20) for rebuilds in range(3)]
    assert len(set(found)) == len(found)
    assert all(0 <= s < 2**32 for s in found)


def test_neighbouring_seeds_share_no_stream():
    found = [Seeds(seed, 10).of(i) for seed in range(10) for i in range(10)]
    assert len(set(found)) == len(found)


def test_list_holds_for_the_first_build_and_rebuilds_go_on_from_it():
    seeds = Seeds([5, 5], 2)
    assert (seeds.of(0), seeds.of(1)) == (5, 5)
    assert len({seeds.of(0, 1), seeds.of(1, 1), 5}) == 3
