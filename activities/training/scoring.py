"""Before the first gradient: what a batch's tokens are worth under the weights that an update begins with.

Staleness (how far the policies that made them are from those weights) and numerics (engine against trainer on the same
weights) are measured apart. Called by the update and by the `score` activity, in the trainer's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from activities.training.agreement import mismatch_metrics
from activities.training.batch import MicroBatch, Trajectory, pad, split_micro_batches
from activities.training.correction import correction_shares, correction_weights, off_policy_metrics
from activities.training.engine import Trainer
from activities.training.logprobs import k3
from activities.training.ranks import everywhere, gathered, shares
from activities.training.work import Work
from workflows.config import RunConfig, TrainingConfig
from workflows.contracts import OnStale


@dataclass
class Scored:
    """A trajectory that trains, with what is known of its N sampled tokens before the first gradient."""

    item: Trajectory
    proximal_N: torch.Tensor
    weights_N: torch.Tensor
    """The correction, times what its group counts."""
    reference_N: torch.Tensor | None = None

    @property
    def reference(self) -> torch.Tensor:
        assert self.reference_N is not None
        return self.reference_N


def divergences(trainer: Trainer, batch: list[Trajectory], *, config: RunConfig, work: Work) -> dict[str, float]:
    """By group, how far the policies of its tokens are from the trainer's present weights; changes nothing."""
    proximal, _ = everywhere(score, trainer, batch, config.training.micro_batch_tokens, work)
    return group_divergences(batch, proximal)


def score(
    trainer: Trainer, batch: list[Trajectory], budget: int, work: Work
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(logprobs, entropy) of each trajectory's sampled tokens under the present weights, on the CPU."""
    return _scores(trainer.logprobs, trainer, batch, budget, work, "scoring")


def _scores(
    score: Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]],
    trainer: Trainer,
    batch: list[Trajectory],
    budget: int,
    work: Work,
    what: str,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    entropy: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    parts = split_micro_batches([item.sequence_tokens for item in batch], budget)
    mine = shares(len(parts))[trainer.rank]
    here: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for number, index in enumerate(mine, start=1):
        work.check(f"{what} {number}/{len(mine)}")
        rows = parts[max(index, 0)]
        with torch.no_grad():
            logprobs_N, entropy_N = score(pad(batch, rows, trainer.device))
        if index >= 0:
            sizes = [batch[row].sampled_tokens for row in rows]
            here += zip(rows, torch.split(logprobs_N.cpu(), sizes), torch.split(entropy_N.cpu(), sizes), strict=True)
    for found in gathered(here):
        for row, one, other in found:
            logprobs[row], entropy[row] = one, other
    return logprobs, entropy


def group_divergences(batch: list[Trajectory], proximal: list[torch.Tensor]) -> dict[str, float]:
    """By group, the mean k3 divergence in nats between the policy that made its tokens and the present weights; that of
    an archived success which joined it where that is larger."""
    by_group: dict[tuple[str, bool], list[torch.Tensor]] = defaultdict(list)
    for item, policy_N in zip(batch, proximal, strict=True):
        by_group[item.group_id, item.replayed].append(k3(policy_N, behaviour_of(item)))
    found: dict[str, float] = {}
    for (group_id, _), parts in by_group.items():
        found[group_id] = max(float(torch.cat(parts).mean()), found.get(group_id, 0.0))
    return found


def stale_weights(divergences: dict[str, float], training: TrainingConfig) -> dict[str, float]:
    """By group, what it counts: 1 within max_divergence; beyond it 0 (drop), or max_divergence / divergence."""
    limit, drop = training.max_divergence, training.on_stale is OnStale.DROP
    return {
        group_id: 1.0 if value <= limit else 0.0 if drop else limit / value for group_id, value in divergences.items()
    }


def agreement(batch: list[Trajectory], proximal: list[torch.Tensor], policy_version: int) -> dict[str, float]:
    """Numerics on tokens of these weights, and how old the tokens of the batch are."""
    policy_N = torch.cat(proximal)
    behaviour_N = torch.cat([behaviour_of(item) for item in batch])
    versions_N = np.concatenate([item.versions[item.loss_mask] for item in batch])
    own_N = torch.from_numpy(versions_N == policy_version)
    last_N = np.concatenate([np.full(item.sampled_tokens, item.versions.max()) for item in batch])
    lag_N = policy_version - versions_N
    return {
        **mismatch_metrics(policy_N[own_N], behaviour_N[own_N]),
        "mismatch_kl/tokens": float(own_N.sum()),
        "off_policy/steps": float(lag_N.mean()),
        "off_policy/steps_max": float(lag_N.max()),
        "off_policy/in_flight": float((last_N - versions_N).mean()),
        "off_policy/in_pool": float((policy_version - last_N).mean()),
    }


def correction_of(item: Trajectory, proximal_N: torch.Tensor, training: TrainingConfig) -> torch.Tensor:
    return correction_weights(
        training.correction,
        proximal_N,
        behaviour_of(item).to(proximal_N),
        torch.zeros(len(proximal_N), dtype=torch.long),
        cap=training.importance_cap,
        low=training.importance_low,
        high=training.importance_high,
    )


def distance(
    batch: list[Trajectory], proximal: list[torch.Tensor], weights: list[torch.Tensor], training: TrainingConfig
) -> dict[str, float]:
    """How far the policies of the batch's tokens are from the present weights, and what the correction does."""
    proximal_N, behaviour_N = torch.cat(proximal), torch.cat([behaviour_of(item) for item in batch])
    weights_N = torch.cat(weights)
    return {
        **off_policy_metrics(proximal_N, behaviour_N, weights_N),
        **correction_shares(training.correction, weights_N, cap=training.importance_cap),
    }


def divergence_of(batch: list[Trajectory], proximal: list[torch.Tensor]) -> dict[str, float]:
    """The divergences of `distance` alone."""
    kl_N = k3(torch.cat(proximal), torch.cat([behaviour_of(item) for item in batch]))
    return {"off_policy/divergence": float(kl_N.mean()), "off_policy/divergence_max": float(kl_N.max())}


def score_reference(trainer: Trainer, batch: list[Trajectory], budget: int, work: Work) -> list[torch.Tensor]:
    """Log-probabilities of each trajectory's sampled tokens under the reference policy, on the CPU."""
    return _scores(trainer.reference_logprobs, trainer, batch, budget, work, "reference")[0]


def behaviour_of(item: Trajectory) -> torch.Tensor:
    return torch.from_numpy(item.logprobs[item.loss_mask])
