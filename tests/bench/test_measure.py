from __future__ import annotations

import os

import pytest

from bench.measure import TICKS_PER_S, cpu_s, median_of, overhead_pct, parse_cpu_s, positive_ints, table


def test_processor_time_counts_user_system_and_ended_children_whatever_the_name_is() -> None:
    fields = ["S", *map(str, range(4, 14)), "100", "20", "3", "7", "20", "0"]
    assert parse_cpu_s(f"42 (a ) b(c) {' '.join(fields)}") == pytest.approx(130 / TICKS_PER_S)


def test_processor_time_of_a_process_that_is_gone_is_none_and_of_this_one_rises() -> None:
    before = cpu_s(os.getpid())
    while cpu_s(os.getpid()) == before:
        sum(range(10_000))
    assert cpu_s(2**22 + 1) == 0.0


def test_medians_are_taken_per_figure_of_the_rounds_that_have_it() -> None:
    assert median_of([{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]) == {"a": 3.0, "b": 2.0}


def test_overhead_is_what_comes_on_top() -> None:
    assert overhead_pct(10.2, 10.0) == pytest.approx(2.0)


def test_a_table_shows_three_digits_and_a_dash_for_nothing() -> None:
    assert table(["a", "b"], [["x", 1234.5], [None, 0.12345]]).splitlines()[2:] == ["| x | 1234 |", "| - | 0.123 |"]


@pytest.mark.parametrize("text", ["", "0", "16,-1", "16,x"])
def test_sizes_are_whole_numbers_above_zero(text: str) -> None:
    assert positive_ints("16,256") == [16, 256]
    with pytest.raises(ValueError):
        positive_ints(text)
