from __future__ import annotations

from bench.sampled_group import stride_of


def test_a_runs_name_says_of_how_many_groups_one_is_played() -> None:
    assert stride_of("scale-65536-1in64") == 64
    assert stride_of("warm-up") == 1
    assert stride_of("run-1inx") == 1
