"""Log-probabilities of sampled tokens, and what ratios of them are made of. Pure torch; called by the update.

Promises: log-probabilities are taken at the temperature that each token was sampled with, so an unchanged policy has
ratio 1.

Shapes: B rows, T columns, V vocabulary, N sampled tokens in row-major order of the mask; `rows_N` is each token's row.
Log-probabilities are natural.
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


def ratio(numerator_N: torch.Tensor, denominator_N: torch.Tensor) -> torch.Tensor:
    """p_numerator / p_denominator [N]."""
    return bounded_exp(numerator_N - denominator_N)


def bounded_exp(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """exp, of at most e^20 either way."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(policy_N: torch.Tensor, behaviour_N: torch.Tensor) -> torch.Tensor:
    """r - log r - 1 [N] in float64, r = p_policy / p_behaviour: an unbiased, never negative estimate of
    KL(behaviour || policy) from tokens of `behaviour` (Schulman 2020, "Approximating KL divergence")."""
    return k3_of(policy_N.double() - behaviour_N.double())


def k3_of(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """r - log r - 1 [N] of log r, in its dtype; keeps the gradient."""
    bounded_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded_N) - bounded_N


def mean_by_row(values_N: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of a token's row, for each token [N]; keeps the gradient."""
    counts_S = torch.bincount(rows_N)
    sums_S = torch.zeros(len(counts_S), dtype=values_N.dtype, device=values_N.device).index_add(0, rows_N, values_N)
    return (sums_S / counts_S.clamp(min=1))[rows_N]


def length_by_row(rows_N: torch.Tensor) -> torch.Tensor:
    """Sampled tokens of a token's row, for each token [N]."""
    return torch.bincount(rows_N)[rows_N]
