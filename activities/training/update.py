"""One update of the policy on one batch of trajectories. Called by the `update` activity, in the trainer's thread.

Promises: what trains is decided once, before the first gradient, from the weights that the update begins with (groups
without a signal and groups too far from today's policy are left out of loss and denominators, and counted); the same
batch on the same weights makes the same step, to the bit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

from activities.training import loss
from activities.training.advantage import group_advantages
from activities.training.batch import Trajectory, pad, split_micro_batches, split_minibatches
from activities.training.engine import Trainer
from activities.training.work import Work
from workflows.config import RunConfig
from workflows.errors import TrainerError


@dataclass
class UpdateResult:
    """Metrics of the update and the advantage of every trajectory by attempt id (0.0 for a group without a signal)."""

    metrics: dict[str, float]
    advantages: dict[str, float] = field(default_factory=dict)


def make_update(
    trainer: Trainer, batch: list[Trajectory], *, config: RunConfig, step: int, policy_version: int, work: Work
) -> UpdateResult:
    """Make the optimizer steps of update `step` on `batch`. `policy_version`: version of the weights it begins with.

    Raises TrainerError (final): nothing to learn from, trainer and engine disagree on the same weights beyond
    `training.mismatch_limit`, or a number is not finite.
    """
    training, started = config.training, time.monotonic()
    advantages = advantages_of(batch, config)
    signal = {item.group_id for item in batch if advantages[item.attempt_id] != 0.0}
    trained = [item for item in batch if item.group_id in signal]
    if not trained:
        raise TrainerError(f"step {step}: no group has two different rewards", retryable=False)
    proximal, entropy = _score(trainer, trained, training.micro_batch_tokens, work)
    metrics = _agreement(trained, proximal, policy_version, training.importance_cap)
    if metrics["mismatch_kl/mean"] > training.mismatch_limit:
        raise TrainerError(
            f"step {step}: engine and trainer disagree on the same weights: mismatch_kl "
            f"{metrics['mismatch_kl/mean']:.2e} is above training.mismatch_limit {training.mismatch_limit:.2e}",
            retryable=False,
        )
    far = _far_groups(trained, proximal, training.divergence_limit)
    kept = [index for index, item in enumerate(trained) if item.group_id not in far]
    if not kept:
        raise TrainerError(
            f"step {step}: all {len(far)} groups are beyond training.divergence_limit {training.divergence_limit}",
            retryable=False,
        )
    scored = time.monotonic()
    metrics |= _optimize(
        trainer,
        [trained[index] for index in kept],
        [proximal[index] for index in kept],
        advantages,
        config=config,
        step=step,
        work=work,
    )
    trainer.end_update()
    ended = time.monotonic()
    sampled = sum(item.sampled_tokens for item in batch)
    metrics |= _batch_metrics(batch, advantages)
    metrics |= {
        "entropy": float(torch.cat(entropy).mean()),
        "groups": float(len({item.group_id for item in batch})),
        "groups/no_signal": float(len({item.group_id for item in batch} - signal)),
        "off_policy/dropped_groups": float(len(far)),
        "tokens_per_s": sampled / (ended - started),
        "seconds/score": scored - started,
        "seconds/train": ended - scored,
    }
    return UpdateResult(metrics=metrics, advantages=advantages)


def advantages_of(batch: list[Trajectory], config: RunConfig) -> dict[str, float]:
    """Advantage by attempt id. Raises TrainerError (final) for a group of one."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for item in batch:
        groups[item.group_id].append(item)
    out: dict[str, float] = {}
    for group_id, members in groups.items():
        try:
            values_G = group_advantages(
                [item.reward for item in members],
                scale_by_std=config.training.scale_by_std,
                std_floor=config.training.std_floor,
            )
        except ValueError as error:
            raise TrainerError(f"{group_id}: {error}", retryable=False) from error
        out |= {item.attempt_id: float(value) for item, value in zip(members, values_G, strict=True)}
    return out


def _score(
    trainer: Trainer, batch: list[Trajectory], budget: int, work: Work
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(logprobs, entropy) of each trajectory's sampled tokens under the present weights, on the CPU."""
    logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    entropy: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    parts = split_micro_batches([item.sequence_tokens for item in batch], budget)
    for number, rows in enumerate(parts):
        work.check(f"scoring {number + 1}/{len(parts)}")
        with torch.no_grad():
            logprobs_N, entropy_N = trainer.logprobs(pad(batch, rows, trainer.device))
        sizes = [batch[row].sampled_tokens for row in rows]
        for row, one, other in zip(
            rows, torch.split(logprobs_N.cpu(), sizes), torch.split(entropy_N.cpu(), sizes), strict=True
        ):
            logprobs[row], entropy[row] = one, other
    return logprobs, entropy


def _behaviour(item: Trajectory) -> torch.Tensor:
    return torch.from_numpy(item.logprobs[item.loss_mask])


def _agreement(
    batch: list[Trajectory], proximal: list[torch.Tensor], policy_version: int, cap: float
) -> dict[str, float]:
    """Numerics and staleness as two numbers: the same estimate on tokens of these weights, and on all."""
    policy_N = torch.cat(proximal)
    behaviour_N = torch.cat([_behaviour(item) for item in batch])
    versions_N = np.concatenate([item.versions[item.loss_mask] for item in batch])
    own_N = torch.from_numpy(versions_N == policy_version)
    last_N = np.concatenate([np.full(item.sampled_tokens, item.versions.max()) for item in batch])
    lag_N = policy_version - versions_N
    return {
        **loss.mismatch_metrics(policy_N[own_N], behaviour_N[own_N]),
        **loss.off_policy_metrics(policy_N, behaviour_N, cap),
        "mismatch_kl/tokens": float(own_N.sum()),
        "off_policy/steps": float(lag_N.mean()),
        "off_policy/steps_max": float(lag_N.max()),
        "off_policy/in_flight": float((last_N - versions_N).mean()),
        "off_policy/in_pool": float((policy_version - last_N).mean()),
    }


def _far_groups(batch: list[Trajectory], proximal: list[torch.Tensor], limit: float) -> set[str]:
    """Groups whose tokens' mean divergence from the present weights is above `limit`."""
    by_group: dict[str, list[torch.Tensor]] = defaultdict(list)
    for item, policy_N in zip(batch, proximal, strict=True):
        by_group[item.group_id].append(loss.k3(policy_N, _behaviour(item)))
    return {group_id for group_id, parts in by_group.items() if float(torch.cat(parts).mean()) > limit}


def _optimize(
    trainer: Trainer,
    batch: list[Trajectory],
    proximal: list[torch.Tensor],
    advantages: dict[str, float],
    *,
    config: RunConfig,
    step: int,
    work: Work,
) -> dict[str, float]:
    """The optimizer steps of an update: one for each minibatch."""
    training = config.training
    bounds = {"clip_low": training.clip_low, "clip_high": training.clip_high}
    rate = warmed_up(training.learning_rate, training.warmup_steps, trainer.updates)
    rate *= decay(training.final_learning_rate, step, training.steps)
    losses, norms, clipped, padded = [], [], 0, 0
    minibatches = split_minibatches(len(batch), training.minibatches, seed=config.seed, step=step)
    for number, members in enumerate(minibatches):
        denominator = sum(batch[index].sampled_tokens for index in members)
        parts = split_micro_batches([batch[index].sequence_tokens for index in members], training.micro_batch_tokens)
        total = 0.0
        for count, part in enumerate(parts, start=1):
            work.check(f"minibatch {number + 1}/{len(minibatches)}, part {count}/{len(parts)}")
            rows = [members[index] for index in part]
            micro = pad(batch, rows, trainer.device)
            logprobs_N, _ = trainer.logprobs(micro)
            proximal_N = torch.cat([proximal[row] for row in rows]).to(logprobs_N)
            behaviour_N = torch.cat([_behaviour(batch[row]) for row in rows]).to(logprobs_N)
            advantages_N = torch.cat(
                [torch.full((batch[row].sampled_tokens,), advantages[batch[row].attempt_id]) for row in rows]
            ).to(logprobs_N)
            share = loss.policy_loss(
                logprobs_N,
                proximal_N,
                behaviour_N,
                advantages_N,
                denominator=denominator,
                importance_cap=training.importance_cap,
                **bounds,
            )
            trainer.accumulate(share, last=count == len(parts))
            total += float(share.detach())
            clipped += loss.clipped_share(logprobs_N.detach(), proximal_N, advantages_N, **bounds)
            padded += micro.padded_tokens
        if not np.isfinite(total):
            raise TrainerError(f"step {step}: the loss is {total}", retryable=False)
        norms.append(trainer.optimizer_step(learning_rate=rate, weight_decay=training.weight_decay))
        losses.append(total)
    return {
        "loss": float(np.mean(losses)),
        "grad_norm": float(np.mean(norms)),
        "grad_norm_max": float(np.max(norms)),
        "learning_rate": rate,
        "clip_share": clipped / sum(item.sampled_tokens for item in batch),
        "optimizer_steps": float(len(minibatches)),
        "padded_tokens": float(padded),
        "trained_tokens": float(sum(item.sampled_tokens for item in batch)),
    }


def warmed_up(peak: float, warmup_updates: int, updates_done: int) -> float:
    """Learning rate of the next update: linear from peak / (warmup_updates + 1) to the peak, then constant."""
    return peak * min(1.0, (updates_done + 1) / (warmup_updates + 1))


def decay(final: float, step: int, steps: int) -> float:
    """Share of the peak learning rate at `step` of `steps`: linear from 1 at the first to `final` at the last."""
    return 1 - (1 - final) * min(1.0, (step - 1) / max(1, steps - 1))


def _batch_metrics(batch: list[Trajectory], advantages: dict[str, float]) -> dict[str, float]:
    rewards = np.array([item.reward for item in batch])
    values = np.array([advantages[item.attempt_id] for item in batch])
    return {
        "episodes": float(len(batch)),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage/mean": float(values.mean()),
        "advantage/abs_mean": float(np.abs(values).mean()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
        "tokens": float(sum(item.sequence_tokens for item in batch)),
        "sampled_tokens": float(sum(item.sampled_tokens for item in batch)),
    }
