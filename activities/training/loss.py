"""The losses of a policy update, each as its paper has it. Pure torch; called by the update.

Promises: a loss is a sum over tokens divided by one denominator of the whole optimizer step, so any split of its
sequences into micro-batches gives the same gradient; mask, loss and metrics see the same tokens.

Shapes as in logprobs.py; a row is a sequence, of which a micro-batch holds all tokens. `proximal` are the weights that
the update begins with.
"""

from __future__ import annotations

import torch

from activities.training.logprobs import bounded_exp, k3_of, length_by_row, mean_by_row, ratio
from workflows.contracts import Loss


def denominator_of(kind: Loss, *, tokens: int, sequences: int, max_tokens: int) -> float:
    """What the sum over the tokens of an optimizer step is divided by.

    grpo: its sampled tokens (the token mean over the whole step; Yu et al. 2025, DAPO, section 3.3). dr_grpo: its
    sequences times the most tokens that one may sample, a constant (Liu et al. 2025, "Understanding R1-Zero-Like
    Training", section 3.2). gspo: its sequences (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5).
    """
    match kind:
        case Loss.GRPO:
            return float(tokens)
        case Loss.DR_GRPO:
            return float(sequences * max_tokens)
        case Loss.GSPO:
            return float(sequences)


def policy_loss(
    kind: Loss,
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    rows_N: torch.Tensor,
    *,
    denominator: float,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """This micro-batch's share of the loss, a scalar: the shares of all micro-batches add up to the loss of the step.

    -1/denominator * sum of w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). The clipped objective of PPO (Schulman
    et al. 2017, eq. 7) with separate bounds (Yu et al. 2025, DAPO, eq. 10), around the weights that the update began
    with; those are decoupled from the weights that made the tokens (Hilton et al. 2022), whose distance is in the
    correction w [N]. `advantages_N` repeats a sequence's for each of its tokens.

    r is p / p_proximal of the token; with gspo the geometric mean of those of its sequence, and each token has
    1/length of the sequence's term (Zheng et al. 2025, eq. 7).
    """
    ratio_N = policy_ratio(kind, logprobs_N, proximal_N, rows_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    terms_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N) * weights_N
    if kind is Loss.GSPO:
        terms_N = terms_N / length_by_row(rows_N)
    return -terms_N.sum() / denominator


def policy_ratio(kind: Loss, logprobs_N: torch.Tensor, proximal_N: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
    """What the loss clips, for each token [N]."""
    if kind is Loss.GSPO:
        return bounded_exp(mean_by_row(logprobs_N - proximal_N, rows_N))
    return ratio(logprobs_N, proximal_N)


def kl_loss(
    kind: Loss, logprobs_N: torch.Tensor, reference_N: torch.Tensor, rows_N: torch.Tensor, *, denominator: float
) -> torch.Tensor:
    """This micro-batch's share of KL(policy || reference), a scalar: what GRPO adds to its loss, times a coefficient
    (Shao et al. 2024, DeepSeekMath, eq. 3 and 4). 1/denominator * sum of q - log q - 1, q = p_reference / p, which is
    an unbiased estimate where the policy itself made the tokens (k3 of Schulman 2020). With gspo a mean over
    each sequence, as its loss."""
    terms_N = k3_of(reference_N - logprobs_N)
    if kind is Loss.GSPO:
        terms_N = terms_N / length_by_row(rows_N)
    return terms_N.sum() / denominator


def clipped_share(ratio_N: torch.Tensor, advantages_N: torch.Tensor, *, clip_low: float, clip_high: float) -> int:
    """Tokens whose gradient the clip took away."""
    high = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    return int((high | ((ratio_N < 1 - clip_low) & (advantages_N < 0))).sum())
