"""Intervals, paired differences and pass@k against published values, and against other ways to the same numbers."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.intervals import (
    ALL_TIED,
    STUDENT,
    WILSON,
    WILSON_TASKS,
    interval_over,
    mean_interval,
    paired,
    pass_at_k,
    sign_test,
    student_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_has_the_values_of_newcombe_1998(successes: int, count: int, low: float, high: float) -> None:
    """Table I of "Two-sided confidence intervals for the single proportion", method 3."""
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(count - successes, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_bounds_are_where_the_score_test_turns(pair: tuple[int, int]) -> None:
    successes, count = pair
    share = successes / count
    for bound in wilson(successes, count):
        if 0 < bound < 1:
            assert abs(share - bound) / math.sqrt(bound * (1 - bound) / count) == pytest.approx(1.959964, abs=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (120, 1.9799), (10_000, 1.9602)],
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=6e-5)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(case: tuple[int, int, int]) -> None:
    count, passed, k = case
    subsets = list(itertools.combinations([index < passed for index in range(count)], k))
    assert pass_at_k(count, passed, k) == pytest.approx(fmean(any(subset) for subset in subsets))


@pytest.mark.parametrize("case", [(4, 2, 5), (4, 5, 1), (4, 2, 0)])
def test_pass_at_k_of_more_samples_than_there_are_is_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(*case)


def test_one_sample_per_task_is_a_plain_proportion() -> None:
    found = mean_interval([[1.0]] * 15 + [[0.0]] * 133)
    assert (found.mean, found.low, found.high) == pytest.approx((15 / 148, 0.0624, 0.1605), abs=5e-5)
    assert (found.method, found.tasks) == (WILSON, 148)


def test_samples_of_one_task_that_agree_count_as_one() -> None:
    """Ten copies of every sample tell nothing new: the interval may not shrink with them."""
    tasks = [[1.0]] * 12 + [[0.0]] * 28
    once, tenfold = mean_interval(tasks), mean_interval([task * 10 for task in tasks])
    assert tenfold.method == WILSON_TASKS and tenfold.mean == once.mean
    assert once.half_width is not None and tenfold.half_width is not None
    assert once.half_width <= tenfold.half_width < 1.1 * once.half_width


def test_an_interval_over_tasks_is_about_that_of_resampled_tasks() -> None:
    """The percentile bootstrap over tasks (Efron 1979), for tasks of unlike difficulty with eight samples each."""
    draw = random.Random(3)
    tasks = [[float(draw.random() < ease) for _ in range(8)] for ease in (draw.betavariate(2, 2) for _ in range(120))]
    means = [fmean(task) for task in tasks]
    cuts = quantiles([fmean(draw.choices(means, k=len(means))) for _ in range(4000)], n=40)
    found = mean_interval(tasks)
    assert (found.low, found.high) == pytest.approx((cuts[0], cuts[-1]), abs=0.006)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Of 400 evaluations with 40 tasks, 95 % hold the mean of all tasks, give or take three standard deviations."""
    draw, hits = random.Random(11), 0
    for _ in range(400):
        found = mean_interval(
            [
                [float(draw.random() < ease) for _ in range(4)]
                for ease in (draw.betavariate(1.2, 0.6) for _ in range(40))
            ]
        )
        assert found.low is not None and found.high is not None
        hits += found.low <= 1.2 / 1.8 <= found.high
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400) < hits / 400 <= 1


def test_where_all_tasks_agree_the_interval_still_has_a_width() -> None:
    every = mean_interval([[1.0, 1.0]] * 20)
    assert every.mean == every.high == 1.0 and every.low is not None and 0.7 < every.low < 0.9
    assert mean_interval([[0.0]] * 20).high == pytest.approx(0.1611, abs=5e-5)


def test_scores_beyond_zero_and_one_have_students_interval() -> None:
    found = interval_over([2.0, 4.0, 6.0, 8.0, 10.0])
    assert found.method == STUDENT
    assert (found.low, found.high) == pytest.approx((6 - 2.776445 * math.sqrt(2), 6 + 2.776445 * math.sqrt(2)))


def test_one_task_says_nothing_of_others() -> None:
    found = mean_interval([[1.0, 0.0, 1.0]])
    assert (found.low, found.high, found.half_width) == (None, None, None)
    with pytest.raises(ValueError, match="no task"):
        mean_interval([])


def test_what_makes_a_task_hard_for_both_cancels_in_a_paired_difference() -> None:
    draw = random.Random(2)
    ease = {f"t{number}": draw.random() for number in range(60)}
    first = {task: [value] for task, value in ease.items()}
    second = {task: [min(1.0, value + 0.05 + 0.01 * draw.random())] for task, value in ease.items()}
    found = paired(first, second)
    apart = [interval_over([scores[0] for scores in side.values()]).half_width for side in (first, second)]
    assert found.interval.low is not None and found.interval.low > 0 and found.worse == 0
    assert found.interval.half_width is not None and all(found.interval.half_width < half / 4 for half in apart if half)


def test_a_paired_difference_is_students_of_the_differences() -> None:
    """Student 1908, the sleep of ten patients under two drugs: t = 4.0621, 95 % interval 0.70 to 2.46."""
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    first, second = ({f"p{index}": [hours] for index, hours in enumerate(drug)} for drug in (one, two))
    found = paired(first, second)
    assert found.interval.mean == pytest.approx(1.58)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert (found.better, found.worse, found.tied) == (9, 0, 1)
    assert found.p_value == pytest.approx(2 / 2**9)


def test_only_common_tasks_are_compared() -> None:
    found = paired({"a": [1.0], "b": [0.0]}, {"b": [1.0], "c": [0.0]})
    assert (found.interval.tasks, found.better) == (1, 1)
    with pytest.raises(ValueError, match="no task in common"):
        paired({"a": [1.0]}, {"b": [1.0]})


def test_that_no_task_differs_is_no_proof_that_none_would() -> None:
    found = paired(*({f"t{number}": [float(number % 2)] for number in range(30)} for _ in range(2)))
    assert found.interval.method == ALL_TIED and found.p_value == 1.0
    assert found.interval.high == pytest.approx(1 - 0.025 ** (1 / 30)) == -(found.interval.low or 0)


@pytest.mark.parametrize(
    ("better", "worse", "p_value"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (8, 1, 0.0390625), (5, 5, 1.0)]
)
def test_the_sign_test_is_exact(better: int, worse: int, p_value: float) -> None:
    assert sign_test(better, worse) == sign_test(worse, better) == p_value


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=2, max_size=12))
def test_an_interval_of_scores_in_bounds_stays_in_bounds_and_holds_the_mean(scores: list[list[float]]) -> None:
    found = mean_interval(scores)
    assert found.low is not None and found.high is not None
    assert 0 <= found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high <= 1
