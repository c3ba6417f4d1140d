"""Advantages of a group: what each sibling earned against its siblings. Pure, float64; called by the update.

Promises: equal rewards give exactly zero, decided by comparison before any arithmetic; a group needs two valid
siblings; nothing here depends on other groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workflows.contracts import Baseline


def group_advantages(
    rewards_G: Sequence[float], *, scale_by_std: bool, std_floor: float, baseline: Baseline = Baseline.MEAN
) -> NDArray[np.float64]:
    """Advantages [G] of the valid siblings' rewards [G]: (r - baseline) / max(std, std_floor).

    mean: GRPO (Shao et al. 2024, DeepSeekMath, section 4.1). leave_one_out: the mean of the others, which a sibling's
    own reward does not move (Ahmadian et al. 2024, RLOO, eq. 8); G / (G - 1) times as large. The deviation is that of
    the sample (G - 1). Without `scale_by_std` the spread stays as it is (Liu et al. 2025, Dr. GRPO). `std_floor` is in
    units of reward: smaller spreads are noise of the verifier's arithmetic, which a division would blow up to the size
    of a real difference.

    Raises ValueError for fewer than two rewards and for a reward that is not finite.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size < 2:
        raise ValueError(f"a group needs at least two valid siblings, got {rewards.size}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward is not finite: {rewards.tolist()}")
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    advantages: NDArray[np.float64] = rewards - rewards.mean()
    if baseline is Baseline.LEAVE_ONE_OUT:
        advantages *= rewards.size / (rewards.size - 1)
    return advantages / max(float(rewards.std(ddof=1)), std_floor) if scale_by_std else advantages
