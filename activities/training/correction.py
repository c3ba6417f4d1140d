"""Off-policy correction: how much a token counts that other weights made. Pure torch; called by the update.

`behaviour` are the weights that made a token, `proximal` those that the update begins with: both are constants of the
update, so a correction has no gradient. Shapes as in logprobs.py.
"""

from __future__ import annotations

import torch

from activities.training.logprobs import bounded_exp, k3, length_by_row, mean_by_row, ratio
from workflows.contracts import Correction


def correction_weights(
    kind: Correction,
    proximal_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    rows_N: torch.Tensor,
    *,
    cap: float,
    low: float,
    high: float,
) -> torch.Tensor:
    """Weights [N] by r = p_proximal / p_behaviour.

    token: min(r, cap): truncated importance sampling (Ionides 2008), per token as Yao et al. 2025 use it between
    engine and trainer. sequence: min(product of r over the sequence, cap). geometric: min(geometric mean of r over the
    sequence, cap), normalised by length as GSPO's ratio is. masked: r where low <= r <= high, 0 elsewhere (Ling Team
    2025, "Every Step Evolves", IcePop). none: 1.
    """
    match kind:
        case Correction.TOKEN:
            return ratio(proximal_N, behaviour_N).clamp(max=cap)
        case Correction.SEQUENCE:
            total_N = mean_by_row(proximal_N - behaviour_N, rows_N) * length_by_row(rows_N)
            return bounded_exp(total_N).clamp(max=cap)
        case Correction.GEOMETRIC:
            return bounded_exp(mean_by_row(proximal_N - behaviour_N, rows_N)).clamp(max=cap)
        case Correction.MASKED:
            ratio_N = ratio(proximal_N, behaviour_N)
            return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, torch.zeros_like(ratio_N))
        case Correction.NONE:
            return torch.ones_like(proximal_N)


def off_policy_metrics(policy_N: torch.Tensor, behaviour_N: torch.Tensor, weights_N: torch.Tensor) -> dict[str, float]:
    """How far the tokens' policy is from today's: divergence, the spread of r = p_today / p_then, what the correction
    does with it.

    The effective sample size is Kish's, (sum w)^2 / sum w^2, as a share of N: of r itself, and, as `_corrected`, of the
    weights in force.
    """
    ratio_N, kl_N = ratio(policy_N.double(), behaviour_N.double()), k3(policy_N, behaviour_N)
    low, median, high = quantiles(ratio_N, 0.01, 0.5, 0.99)
    return {
        "off_policy/divergence": float(kl_N.mean()),
        "off_policy/divergence_max": float(kl_N.max()),
        "off_policy/ratio_p01": low,
        "off_policy/ratio_p50": median,
        "off_policy/ratio_p99": high,
        "off_policy/ratio_max": float(ratio_N.max()),
        "off_policy/effective_sample_size": effective_sample_size(ratio_N),
        "off_policy/effective_sample_size_corrected": effective_sample_size(weights_N.double()),
    }


def correction_shares(kind: Correction, weights_N: torch.Tensor, *, cap: float) -> dict[str, float]:
    """Shares of the tokens whose weight the cap cut, and whose weight is zero."""
    capped = kind in (Correction.TOKEN, Correction.SEQUENCE, Correction.GEOMETRIC)
    truncated = float((weights_N >= cap).double().mean()) if capped else 0.0
    return {
        "off_policy/truncated_share": truncated,
        "off_policy/masked_share": float((weights_N == 0).double().mean()),
    }


def effective_sample_size(weights_N: torch.Tensor) -> float:
    """Kish's, as a share of N; 0 where all weights are 0."""
    squares = float((weights_N**2).sum())
    return float(weights_N.sum() ** 2) / squares / len(weights_N) if squares else 0.0


def quantiles(values_N: torch.Tensor, *shares: float) -> list[float]:
    """Of float64 values; of every k-th where there are millions, since torch.quantile refuses more than 16 of them."""
    thinned_N = values_N[:: max(1, len(values_N) // 1_000_000)]
    found: list[float] = torch.quantile(thinned_N, torch.tensor(shares, dtype=torch.float64)).tolist()
    return found
