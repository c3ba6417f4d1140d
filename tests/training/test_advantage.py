"""Advantages: equal rewards, near-equal rewards, small groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.advantage import group_advantages
from workflows.contracts import Baseline


def advantages(
    rewards: list[float],
    *,
    scale_by_std: bool = True,
    std_floor: float = 1e-3,
    baseline: Baseline = Baseline.MEAN,
) -> list[float]:
    values: list[float] = group_advantages(
        rewards, scale_by_std=scale_by_std, std_floor=std_floor, baseline=baseline
    ).tolist()
    return values


def test_the_values_are_those_of_the_paper_with_the_sample_deviation() -> None:
    assert advantages([1, 1, 1, 0]) == pytest.approx([0.5, 0.5, 0.5, -1.5])
    assert advantages([1, 0, 0, 1], scale_by_std=False) == [0.5, -0.5, -0.5, 0.5]


@given(st.lists(st.integers(0, 8).map(lambda value: value / 8), min_size=2, max_size=16))
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    found = advantages(rewards, scale_by_std=False, baseline=Baseline.LEAVE_ONE_OUT)
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    assert found == pytest.approx([reward - other for reward, other in zip(rewards, others, strict=True)], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.35, -1e-9, 1e30])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    assert advantages([reward] * 8) == [0.0] * 8
    assert advantages([float(np.float32(reward))] * 8) == [0.0] * 8


def test_noise_in_the_last_digit_is_not_blown_up() -> None:
    noisy = advantages([0.35] * 7 + [np.nextafter(0.35, 1)])
    assert max(map(abs, noisy)) < 1e-12


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_siblings_are_no_group(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        advantages(rewards)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, float("nan")])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_are_finite_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    values = np.array(advantages(rewards))
    assert np.isfinite(values).all()
    assert abs(values.sum()) < 1e-6
    assert (np.diff(values[np.argsort(rewards)]) >= 0).all()
