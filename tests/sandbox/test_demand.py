"""How many sandboxes wait, and which of them go: the rules."""

from __future__ import annotations

import pytest

from activities.sandbox.demand import FLOOR, Water, peak, waters
from activities.sandbox.members import Member
from activities.sandbox.pool import MOST_AGE_S, outdated


@pytest.mark.parametrize(
    ("arrivals", "most"), [([], 0), ([5.0], 1), ([0.0, 0.1, 0.2, 9.0], 3), ([0.0, 0.6, 1.2, 1.8], 2), ([1.0] * 8, 8)]
)
def test_the_peak_is_the_most_that_came_within_the_window(arrivals: list[float], most: int) -> None:
    assert peak(arrivals, 1.0) == most


def test_the_low_water_is_the_peak_but_never_less_than_a_group() -> None:
    assert waters({"a": 0}, 64) == {"a": Water(FLOOR, 2 * FLOOR)}
    assert waters({"a": 20}, 64) == {"a": Water(20, 40)}


def test_what_was_asked_for_last_is_served_first_and_all_stay_within_the_bound() -> None:
    found = waters({"new": 10, "old": 10, "older": 10}, 16)
    assert found == {"new": Water(10, 16), "old": Water(6, 12), "older": Water(0, 0)}


def test_a_pool_of_none_starts_none() -> None:
    assert waters({"a": 9}, 0) == {"a": Water(0, 0)}


def test_what_is_too_old_goes_whoever_keeps_it_and_the_oldest_of_our_own_above_the_high_water() -> None:
    young = [Member(f"m{age}", float(age)) for age in (1, 2, 3)]
    ready = {"mine": young, "others": [*young, Member("old", MOST_AGE_S)]}
    assert outdated(ready, {"mine": Water(1, 2)}, {"m1", "m2", "m3"}) == ["m3", "old"]
    assert outdated(ready, {"mine": Water(0, 0)}, {"m2"}) == ["m2", "old"]
