"""How sure a mean over held-out tasks is: intervals, paired differences, pass@k. Pure functions of lists of numbers.

Tasks are the sample: samples of one task resemble each other, so that the spread between tasks decides, never the
number of episodes (Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640, sections 2.2 and 4.2). Every task
weighs the same, whatever its samples. Intervals are two-sided, of 95 %.

Scores from 0 to 1 get Wilson's score interval (Wilson 1927), which stays within 0 and 1 and has a width where all
tasks agree. With one 0/1 score per task it is the plain one; otherwise its sample size is the effective one, p(1-p)
over the variance of the mean of the tasks' means, and its quantile is Student's of tasks - 1 degrees of freedom (Korn &
Graubard 1998). Other scores get Student's interval over the tasks' means. Called by storage/evaluations.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

LEVEL = 0.95
_TAIL = 1 - (1 - LEVEL) / 2

WILSON = "Wilson score, one sample per task"
WILSON_TASKS = "Wilson score, effective sample size of the tasks"
STUDENT = "Student's t over tasks"
STUDENT_PAIRED = "Student's t over the paired differences of tasks"
ALL_TIED = "bound on the share of tasks that differ, none of which was seen"


class Interval(NamedTuple):
    """A mean with its 95 % interval. `low` and `high` are None where one task says nothing of others."""

    mean: float
    low: float | None
    high: float | None
    method: str
    tasks: int

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


class Paired(NamedTuple):
    """Differences of two results, task by task: the second less the first."""

    interval: Interval
    better: int
    """Tasks whose mean is higher in the second."""
    worse: int
    tied: int
    p_value: float
    """Two-sided exact sign test over the tasks that differ; with one 0/1 score per task it is McNemar's exact test."""


def mean_interval(scores: Sequence[Sequence[float]]) -> Interval:
    """The mean over tasks of `scores`, per task the scores of its samples, at least one. Raises ValueError without a
    task."""
    if not scores:
        raise ValueError("no task has a score")
    if all(len(task) == 1 and task[0] in (0.0, 1.0) for task in scores):
        successes = sum(round(task[0]) for task in scores)
        low, high = wilson(successes, len(scores))
        return Interval(successes / len(scores), low, high, WILSON, len(scores))
    return interval_over([fmean(task) for task in scores])


def interval_over(values: Sequence[float]) -> Interval:
    """The mean of one number per task. Raises ValueError without one."""
    count, mean = len(values), fmean(values)
    bounded = all(0 <= value <= 1 for value in values)
    method = WILSON_TASKS if bounded else STUDENT
    if count < 2:
        return Interval(mean, None, None, method, count)
    squared_error, quantile = variance(values, mean) / count, student_quantile(_TAIL, count - 1)
    if not bounded:
        half = quantile * math.sqrt(squared_error)
        return Interval(mean, mean - half, mean + half, method, count)
    size = mean * (1 - mean) / squared_error if squared_error > 0 and 0 < mean < 1 else float(count)
    low, high = _score_interval(mean, size, quantile)
    return Interval(mean, low, high, method, count)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion: eq. 4 of Brown, Cai & DasGupta 2001, "Interval Estimation for a Binomial
    Proportion". Raises ValueError unless 0 <= successes <= count and count > 0."""
    if not 0 <= successes <= count or not count:
        raise ValueError(f"{successes} of {count} is no proportion")
    return _score_interval(successes / count, float(count), NormalDist().inv_cdf(_TAIL))


def _score_interval(share: float, size: float, quantile: float) -> tuple[float, float]:
    squared = quantile**2
    centre = (share + squared / (2 * size)) / (1 + squared / size)
    half = quantile / (1 + squared / size) * math.sqrt(share * (1 - share) / size + squared / (4 * size**2))
    # The bounds of 0 of n and of n of n are 0 and 1; rounding must not say otherwise.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes: 1 - C(n-c, k) / C(n, k), eq. 1 of Chen et al.
    2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374. Raises ValueError where k is above n."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} of {samples} samples is not defined")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def paired(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Paired:
    """Compare the tasks that both have, by the means of their scores. Raises ValueError without such a task.

    The interval is Student's over the tasks' differences (Miller 2024, section 4.2): what makes a task hard for both
    cancels. Where no task differs it is the bound that n agreeing tasks put on the share of those that would not,
    1 - 0.025^(1/n), times the range of the scores."""
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("they have no task in common")
    differences = [fmean(second[task]) - fmean(first[task]) for task in common]
    better = sum(difference > 0 for difference in differences)
    worse = sum(difference < 0 for difference in differences)
    tied = len(common) - better - worse
    return Paired(_difference(differences, first, second, common), better, worse, tied, sign_test(better, worse))


def _difference(
    differences: list[float],
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    common: list[str],
) -> Interval:
    count, mean = len(differences), fmean(differences)
    if not any(differences):
        scores = [score for task in common for score in (*first[task], *second[task])]
        reach = ((max(scores) - min(scores)) or 1.0) * (1 - (1 - _TAIL) ** (1 / count))
        return Interval(0.0, -reach, reach, ALL_TIED, count)
    if count < 2:
        return Interval(mean, None, None, STUDENT_PAIRED, count)
    half = student_quantile(_TAIL, count - 1) * math.sqrt(variance(differences, mean) / count)
    # Scores from 0 to 1 can't differ by more than 1.
    bounded = all(0 <= score <= 1 for task in common for score in (*first[task], *second[task]))
    most = 1.0 if bounded else math.inf
    return Interval(mean, max(-most, mean - half), min(most, mean + half), STUDENT_PAIRED, count)


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value that so uneven a split comes from a fair coin; 1.0 without a difference."""
    count, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(count, number) for number in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << count))


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` degrees, for probabilities from 0.5 up to, and not, 1. Found by
    bisection of its distribution function, 1 - I_x(v/2, 1/2)/2 with x = v/(v + t^2) (Abramowitz & Stegun 26.7.1)."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"no quantile {probability} of Student's t with {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(value: float, freedom: int) -> float:
    return 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value**2)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), by its continued fraction where that converges fast (Numerical Recipes 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    return front * _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method; far fewer than 500 terms are needed for degrees of freedom up to some 100,000."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    found = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            found *= d * c
        if abs(d * c - 1) < 1e-15:
            return found
    return found
