"""The loss and what is measured about it. Pure torch; called by the update.

Promises: log-probabilities are taken at the temperature that each token was sampled with, so an unchanged policy has
ratio 1; one denominator for the whole optimizer step, so any split into micro-batches gives the same gradient; mask,
loss and metrics see the same tokens.

Shapes: B rows, T columns, V vocabulary, N sampled tokens in row-major order of the mask. Log-probabilities are natural.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Ratios are cut at e^20 before they are multiplied, so that no product is infinite."""


def sampled_logprobs(
    logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, temperature_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs [N], entropy [N], without gradient) of the tokens under the mask, each given those before it.

    float32 at least, whatever the logits are. Raises ValueError where the mask holds a first token.
    """
    rows, columns = mask_BT.nonzero(as_tuple=True)
    if bool((columns == 0).any()):
        raise ValueError("the first token of a sequence can't be a sampled one")
    precise = torch.promote_types(logits_BTV.dtype, torch.float32)
    logits_NV = logits_BTV[rows, columns - 1].to(precise) / temperature_BT[rows, columns, None].to(precise)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, token_ids_BT[rows, columns, None]).squeeze(-1), entropy_N


def importance_weights(proximal_N: torch.Tensor, behaviour_N: torch.Tensor, cap: float) -> torch.Tensor:
    """min(p_proximal / p_behaviour, cap) [N]: truncated importance sampling (Ionides 2008; per token, as Yao et al.
    2025 use it between engine and trainer)."""
    return _ratio(proximal_N, behaviour_N).clamp(max=cap)


def policy_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    denominator: int,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> torch.Tensor:
    """This part's share of the loss, a scalar: the shares of all micro-batches add up to the loss of the step.

    -1/denominator * sum of w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_proximal,
    w = min(p_proximal / p_behaviour, importance_cap). The clipped objective of PPO (Schulman et al. 2017, eq. 7) with
    separate bounds (Yu et al. 2025, DAPO), around the weights that the update began with, which are decoupled from
    those that made the tokens (Hilton et al. 2022). `denominator`: sampled tokens of the whole optimizer step.
    """
    ratio_N = _ratio(logprobs_N, proximal_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    return -(objective_N * importance_weights(proximal_N, behaviour_N, importance_cap)).sum() / denominator


def clipped_share(
    logprobs_N: torch.Tensor, proximal_N: torch.Tensor, advantages_N: torch.Tensor, *, clip_low: float, clip_high: float
) -> int:
    """Tokens whose gradient the clip took away."""
    ratio_N = _ratio(logprobs_N, proximal_N)
    high = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    return int((high | ((ratio_N < 1 - clip_low) & (advantages_N < 0))).sum())


def k3(policy_N: torch.Tensor, behaviour_N: torch.Tensor) -> torch.Tensor:
    """r - log r - 1 [N] in float64, r = p_policy / p_behaviour: an unbiased, never negative estimate of
    KL(behaviour || policy) from tokens of `behaviour` (Schulman 2020, "Approximating KL divergence")."""
    log_ratio_N = (policy_N.double() - behaviour_N.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_N) - log_ratio_N


def mismatch_metrics(policy_N: torch.Tensor, behaviour_N: torch.Tensor) -> dict[str, float]:
    """Trainer against engine on tokens of the trainer's own weights: numerics alone. Zeros where there is no token."""
    if not len(policy_N):
        return {name: 0.0 for name in ("mismatch_kl/mean", "mismatch_kl/max", "mismatch_abs/mean", "mismatch_abs/max")}
    kl_N, gap_N = k3(policy_N, behaviour_N), (policy_N.double() - behaviour_N.double()).abs()
    return {
        "mismatch_kl/mean": float(kl_N.mean()),
        "mismatch_kl/max": float(kl_N.max()),
        "mismatch_abs/mean": float(gap_N.mean()),
        "mismatch_abs/max": float(gap_N.max()),
    }


def off_policy_metrics(policy_N: torch.Tensor, behaviour_N: torch.Tensor, cap: float) -> dict[str, float]:
    """How far the tokens' policy is from today's: divergence, the spread of p_today / p_then, what the cap does.

    The effective sample size is Kish's, (sum w)^2 / sum w^2, as a share of N, of the weights before the cap.
    """
    ratio_N, kl_N = _ratio(policy_N.double(), behaviour_N.double()), k3(policy_N, behaviour_N)
    low, median, high = torch.quantile(_thinned(ratio_N), torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)).tolist()
    return {
        "off_policy/divergence": float(kl_N.mean()),
        "off_policy/divergence_max": float(kl_N.max()),
        "off_policy/ratio_p01": low,
        "off_policy/ratio_p50": median,
        "off_policy/ratio_p99": high,
        "off_policy/ratio_max": float(ratio_N.max()),
        "off_policy/truncated_share": float((ratio_N > cap).double().mean()),
        "off_policy/effective_sample_size": float(ratio_N.sum() ** 2 / (ratio_N**2).sum() / len(ratio_N)),
    }


def _ratio(numerator_N: torch.Tensor, denominator_N: torch.Tensor) -> torch.Tensor:
    return (numerator_N - denominator_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _thinned(values_N: torch.Tensor, limit: int = 1_000_000) -> torch.Tensor:
    """Every k-th value: torch.quantile refuses more than 16 million."""
    return values_N[:: max(1, len(values_N) // limit)]
