"""One update of the policy on one batch of trajectories. Called by the `update` activity, in the trainer's thread.

Promises: what trains is decided once, before the first gradient, from the weights that the update begins with (groups
without a signal and groups too far from today's policy are left out of loss and denominators, and counted); where that
leaves nothing, the weights stay and the result says why; the same batch on the same weights makes the same step, to the
bit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from activities.training import loss
from activities.training.advantage import group_advantages
from activities.training.batch import Trajectory, optimizer_steps, pad, split_micro_batches, split_minibatches
from activities.training.engine import Trainer
from activities.training.ranks import everywhere, gathered, shares
from activities.training.scoring import (
    Scored,
    agreement,
    correction_of,
    distance,
    divergence_of,
    group_divergences,
    score,
    score_reference,
    stale_weights,
)
from activities.training.work import Work
from workflows.config import RunConfig, TrainingConfig
from workflows.errors import TrainerError


@dataclass
class UpdateResult:
    """Metrics of the update and the advantage of every trajectory by attempt id (0.0 for a group without a signal).

    `void`: why the batch teaches nothing, in which case the trainer is as it was; empty when it was trained.
    `scores`: log-probabilities of the sampled tokens under the weights that the update began with, by attempt id and
    branch, of groups with a signal.
    """

    metrics: dict[str, float]
    advantages: dict[str, float] = field(default_factory=dict)
    void: str = ""
    scores: dict[str, list[list[float]]] = field(default_factory=dict)


def make_update(
    trainer: Trainer, batch: list[Trajectory], *, config: RunConfig, step: int, policy_version: int, work: Work
) -> UpdateResult:
    """Make the optimizer steps of update `step` on `batch`. `policy_version`: version of the weights it begins with.

    Raises TrainerError (final): trainer and engine disagree on the same weights beyond `training.max_mismatch_kl`, or a
    number is not finite.
    """
    training, started = config.training, time.monotonic()
    advantages = advantages_of(batch, config)
    signal = {item.group_id for item in batch if advantages[item.attempt_id] != 0.0}
    trained = [item for item in batch if item.group_id in signal]
    metrics = _batch_metrics(batch, advantages) | _routing_metrics(trainer, batch)
    metrics["groups/no_signal"] = float(len(_groups(batch) - signal))
    if not trained:
        return UpdateResult(metrics, advantages, void="no group has two different rewards")
    proximal, entropy = everywhere(score, trainer, trained, training.micro_batch_tokens, work)
    scores = _by_attempt(trained, proximal)
    weights = [correction_of(item, proximal_N, training) for item, proximal_N in zip(trained, proximal, strict=True)]
    metrics |= distance(trained, proximal, weights, training)
    # Archived successes are old by design: they say nothing of what admission lets in.
    own = [index for index, item in enumerate(trained) if not item.replayed]
    own_items, own_proximal = [trained[index] for index in own], [proximal[index] for index in own]
    metrics |= agreement(own_items, own_proximal, policy_version)
    if len(own) < len(trained):
        metrics |= divergence_of(own_items, own_proximal)
    metrics["entropy"] = float(torch.cat(entropy).mean())
    if metrics["mismatch_kl/mean"] > training.max_mismatch_kl:
        raise TrainerError(
            f"step {step}: engine and trainer disagree on the same weights: mismatch_kl "
            f"{metrics['mismatch_kl/mean']:.2e} is above training.max_mismatch_kl {training.max_mismatch_kl:.2e}",
            retryable=False,
        )
    counts = stale_weights(group_divergences(trained, proximal), training)
    kept = [index for index, item in enumerate(trained) if counts[item.group_id] > 0]
    metrics["off_policy/dropped_groups"] = float(sum(value == 0 for value in counts.values()))
    metrics["off_policy/downweighted_groups"] = float(sum(0 < value < 1 for value in counts.values()))
    if not kept:
        why = f"all {len(counts)} groups with a signal are beyond training.max_divergence {training.max_divergence}"
        return UpdateResult(metrics, advantages, void=why, scores=scores)
    scored = [
        Scored(trained[index], proximal[index], weights[index] * counts[trained[index].group_id]) for index in kept
    ]
    if training.kl_coefficient:
        items, budget = [one.item for one in scored], training.micro_batch_tokens
        references = everywhere(score_reference, trainer, items, budget, work)
        scored = [replace(one, reference_N=found) for one, found in zip(scored, references, strict=True)]
    scoring_s = time.monotonic() - started
    metrics |= everywhere(optimize, trainer, scored, advantages, config, step, work)
    everywhere(Trainer.end_update, trainer)
    seconds = time.monotonic() - started
    metrics |= {
        "tokens_per_s": metrics["sampled_tokens"] / seconds,
        "seconds/score": scoring_s,
        "seconds/train": seconds - scoring_s,
    }
    return UpdateResult(metrics=metrics, advantages=advantages, scores=scores)


def require_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raises TrainerError (final) naming the metrics that are no numbers: JSON has no word for them, and a limit
    that is compared with one never trips."""
    if broken := {name: value for name, value in metrics.items() if not np.isfinite(value)}:
        named = ", ".join(f"{name} is {value}" for name, value in sorted(broken.items()))
        raise TrainerError(f"step {step}: {named}; the step is not kept", retryable=False)


def warning_of(metrics: Mapping[str, float], training: TrainingConfig) -> str:
    """What a person should know of an update's metrics before it becomes an error; empty for a good one."""
    mismatch = metrics.get("mismatch_kl/mean", 0.0)
    if mismatch <= training.warn_mismatch_kl:
        return ""
    return (
        f"mismatch_kl {mismatch:.2e} is above training.warn_mismatch_kl {training.warn_mismatch_kl:.2e}; the run stops"
        f" at {training.max_mismatch_kl:.2e}: compare dtype and attention of engine and trainer"
    )


def _groups(batch: list[Trajectory]) -> set[str]:
    return {item.group_id for item in batch}


def _by_attempt(batch: list[Trajectory], proximal: list[torch.Tensor]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = defaultdict(list)
    for item, proximal_N in zip(batch, proximal, strict=True):
        found[item.attempt_id].append(proximal_N.tolist())
    return dict(found)


def _episodes(batch: list[Trajectory]) -> list[Trajectory]:
    """One trajectory of each episode: what is a sibling's and not a branch's is the same in all of them."""
    return list({item.attempt_id: item for item in batch}.values())


def advantages_of(batch: list[Trajectory], config: RunConfig) -> dict[str, float]:
    """Advantage by attempt id. Raises TrainerError (final) for a group of one."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for item in _episodes(batch):
        groups[item.group_id].append(item)
    out: dict[str, float] = {}
    for group_id, members in groups.items():
        try:
            values_G = group_advantages(
                [item.reward for item in members],
                scale_by_std=config.training.scale_by_std,
                std_floor=config.training.std_floor,
                baseline=config.training.baseline,
            )
        except ValueError as error:
            raise TrainerError(f"{group_id}: {error}", retryable=False) from error
        out |= {item.attempt_id: float(value) for item, value in zip(members, values_G, strict=True)}
    return out


def optimize(
    trainer: Trainer, batch: list[Scored], advantages: dict[str, float], config: RunConfig, step: int, work: Work
) -> dict[str, float]:
    """The optimizer steps of an update: one for each minibatch, of which a short batch has fewer. On all ranks, each of
    which takes its share of the micro-batches."""
    training = config.training
    kind, bounds = training.loss, {"clip_low": training.clip_low, "clip_high": training.clip_high}
    rate = warmed_up(training.learning_rate, training.warmup_steps, trainer.updates)
    rate *= decay(training.final_learning_rate, step, training.steps)
    items = [one.item for one in batch]
    sums: dict[str, float] = defaultdict(float)
    norms: list[float] = []
    full = config.rollout.groups_per_batch
    steps = optimizer_steps(len(_groups(items)), full=full, minibatches=training.minibatches)
    minibatches = split_minibatches(len(batch), steps, seed=config.seed, step=step)
    for number, members in enumerate(minibatches):
        denominator = loss.denominator_of(
            kind,
            tokens=sum(items[index].sampled_tokens for index in members),
            sequences=len(members),
            max_tokens=config.rollout.max_tokens,
        )
        parts = split_micro_batches([items[index].sequence_tokens for index in members], training.micro_batch_tokens)
        mine = shares(len(parts))[trainer.rank]
        here: dict[str, float] = defaultdict(float)
        for count, index in enumerate(mine, start=1):
            work.check(f"minibatch {number + 1}/{len(minibatches)}, part {count}/{len(mine)}")
            rows = [members[row] for row in parts[max(index, 0)]]
            micro = pad(items, rows, trainer.device)
            logprobs_N, _ = trainer.logprobs(micro)
            proximal_N = torch.cat([batch[row].proximal_N for row in rows]).to(logprobs_N)
            weights_N = torch.cat([batch[row].weights_N for row in rows]).to(logprobs_N)
            advantages_N = torch.cat(
                [torch.full((items[row].sampled_tokens,), advantages[items[row].attempt_id]) for row in rows]
            ).to(logprobs_N)
            share = loss.policy_loss(
                kind, logprobs_N, proximal_N, advantages_N, weights_N, micro.rows_N, denominator=denominator, **bounds
            )
            counts = float(index >= 0)
            if training.kl_coefficient:
                reference_N = torch.cat([batch[row].reference for row in rows]).to(logprobs_N)
                kl = loss.kl_loss(kind, logprobs_N, reference_N, micro.rows_N, denominator=denominator)
                share = share + training.kl_coefficient * kl
                here["reference_kl"] += counts * float(kl.detach())
            # DeepSpeed takes the mean over ranks; the loss is the sum over all parts.
            trainer.accumulate(share * (counts * trainer.world_size), last=count == len(mine))
            ratio_N = loss.policy_ratio(kind, logprobs_N.detach(), proximal_N, micro.rows_N)
            here["loss"] += counts * float(share.detach())
            here["clipped"] += counts * loss.clipped_share(ratio_N, advantages_N, **bounds)
            here["padded"] += counts * micro.padded_tokens
        together = gathered(dict(here))
        total = sum(one.get("loss", 0.0) for one in together)
        if not np.isfinite(total):
            raise TrainerError(f"step {step}: the loss is {total}", retryable=False)
        norms.append(trainer.optimizer_step(learning_rate=rate, weight_decay=training.weight_decay))
        for one in together:
            for name, value in one.items():
                sums[name] += value
    tokens = sum(item.sampled_tokens for item in items)
    return {
        "loss": sums["loss"] / len(minibatches),
        "reference_kl": sums["reference_kl"] / len(minibatches),
        "grad_norm": float(np.mean(norms)),
        "grad_norm_max": float(np.max(norms)),
        "learning_rate": rate,
        "clip_share": sums["clipped"] / tokens,
        "optimizer_steps": float(len(minibatches)),
        "padded_tokens": sums["padded"],
        "trained_tokens": float(tokens),
    }


def warmed_up(peak: float, warmup_updates: int, updates_done: int) -> float:
    """Learning rate of the next update: linear from peak / (warmup_updates + 1) to the peak, then constant."""
    return peak * min(1.0, (updates_done + 1) / (warmup_updates + 1))


def decay(final: float, step: int, steps: int) -> float:
    """Share of the peak learning rate at `step` of `steps`: linear from 1 at the first to `final` at the last."""
    return 1 - (1 - final) * min(1.0, (step - 1) / max(1, steps - 1))


def _batch_metrics(batch: list[Trajectory], advantages: dict[str, float]) -> dict[str, float]:
    episodes = _episodes(batch)
    rewards = np.array([item.reward for item in episodes if not item.replayed])
    values = np.array([advantages[item.attempt_id] for item in episodes])
    return {
        "episodes": float(len(episodes)),
        "groups": float(len(_groups(batch))),
        "replayed": float(sum(item.replayed for item in episodes)),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage/mean": float(values.mean()),
        "advantage/abs_mean": float(np.abs(values).mean()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
        "tokens": float(sum(item.sequence_tokens for item in batch)),
        "sampled_tokens": float(sum(item.sampled_tokens for item in batch)),
    }


def _routing_metrics(trainer: Trainer, batch: list[Trajectory]) -> dict[str, float]:
    """Of a mixture-of-experts policy, the share of the trajectories whose experts are those of the engine."""
    if trainer.routing is None or not trainer.routing.layers:
        return {}
    return {"routing/replayed_share": float(np.mean([item.experts is not None for item in batch]))}
