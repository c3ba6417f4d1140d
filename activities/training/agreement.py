"""Numerics apart from staleness: trainer against engine on the same weights. Pure torch; called by the update.

Shapes: N sampled tokens; log-probabilities are natural. The tokens are those whose weights the trainer holds.
"""

from __future__ import annotations

import torch

from activities.training.correction import quantiles
from activities.training.logprobs import k3

FAR = 0.1
"""nats: tokens whose log-probability differs by more are counted apart. bfloat16 moves one by a few hundredths."""


def mismatch_metrics(policy_N: torch.Tensor, behaviour_N: torch.Tensor) -> dict[str, float]:
    """mismatch_kl (the k3 estimate) and the distance of log-probabilities: mean, quantiles, the largest, and the share
    of tokens further apart than FAR. Zeros where there is no token."""
    if not len(policy_N):
        policy_N = behaviour_N = torch.zeros(1)
    kl_N, gap_N = k3(policy_N, behaviour_N), (policy_N.double() - behaviour_N.double()).abs()
    kl_median, kl_high = quantiles(kl_N, 0.5, 0.99)
    gap_median, gap_high = quantiles(gap_N, 0.5, 0.99)
    return {
        "mismatch_kl/mean": float(kl_N.mean()),
        "mismatch_kl/p50": kl_median,
        "mismatch_kl/p99": kl_high,
        "mismatch_kl/max": float(kl_N.max()),
        "mismatch_abs/mean": float(gap_N.mean()),
        "mismatch_abs/p50": gap_median,
        "mismatch_abs/p99": gap_high,
        "mismatch_abs/max": float(gap_N.max()),
        "mismatch_abs/far_share": float((gap_N > FAR).double().mean()),
    }
