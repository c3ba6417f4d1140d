"""What an update trains on and what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from activities.training.batch import Trajectory, pad
from activities.training.deepspeed_config import deepspeed_config
from activities.training.engine import Trainer
from activities.training.scoring import stale_weights
from activities.training.update import UpdateResult, decay, make_update, warmed_up
from activities.training.work import Work
from tests.training.test_loss import batch_of
from workflows.config import RunConfig, TrainingConfig
from workflows.errors import InvalidConfig, TrainerError


@pytest.fixture
def trainer(policy: Path) -> Iterator[Trainer]:
    made = Trainer(policy, TrainingConfig(learning_rate=1e-2), seed=0)
    yield made
    made.close()


def update(trainer: Trainer, batch: list[Trajectory], version: int = 0, **training: object) -> UpdateResult:
    limits = {"max_mismatch_kl": 1e3, "max_divergence": 1e3, "learning_rate": 1e-2}
    config = RunConfig.model_validate({"model": str(trainer.folder), "training": limits | training})
    return make_update(trainer, batch, config=config, step=1, policy_version=version, work=Work())


def as_sampled_now(trainer: Trainer, batch: list[Trajectory], shift: float = 0.0) -> list[Trajectory]:
    """The same tokens with the trainer's own log-probabilities, plus `shift`."""
    out = []
    for row, item in enumerate(batch):
        with torch.no_grad():
            logprobs, _ = trainer.logprobs(pad(batch, [row]))
        recorded = item.logprobs.copy()
        recorded[item.loss_mask] = logprobs.numpy() + shift
        out.append(replace(item, logprobs=recorded))
    return out


def test_tokens_of_the_trainers_own_weights_agree_and_count_fully(trainer: Trainer) -> None:
    metrics = update(trainer, as_sampled_now(trainer, batch_of())).metrics
    assert metrics["mismatch_kl/mean"] < 1e-10
    assert metrics["mismatch_abs/max"] < 1e-4
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["off_policy/steps"] == metrics["clip_share"] == 0.0


def test_a_stale_group_is_dropped_or_counts_in_proportion(trainer: Trainer) -> None:
    batch = batch_of()
    near, far = as_sampled_now(trainer, batch[:4]), as_sampled_now(trainer, batch[4:], shift=-1.0)
    divergence = math.exp(1.0) - 1 - 1.0
    dropped = update(trainer, near + far, version=1, max_divergence=0.5).metrics
    assert (dropped["off_policy/dropped_groups"], dropped["off_policy/downweighted_groups"]) == (1.0, 0.0)
    counts = stale_weights({"g0": 0.0, "g1": divergence}, TrainingConfig(max_divergence=0.5, on_stale="downweight"))
    assert counts == {"g0": 1.0, "g1": pytest.approx(0.5 / divergence)}
    near, far = as_sampled_now(trainer, batch[:4]), as_sampled_now(trainer, batch[4:], shift=-1.0)
    weighed = update(trainer, near + far, version=2, max_divergence=0.5, on_stale="downweight").metrics
    assert (weighed["off_policy/dropped_groups"], weighed["off_policy/downweighted_groups"]) == (0.0, 1.0)
    assert weighed["trained_tokens"] == sum(item.sampled_tokens for item in batch)


def test_activations_that_are_computed_again_change_neither_logprobs_nor_gradient(policy: Path) -> None:
    """The policy of the tests has attention dropout, which must be off in training mode too."""
    batch, found = batch_of(), []
    for again in (False, True):
        training = TrainingConfig(activation_checkpointing=again, learning_rate=1e-2, warmup_steps=0)
        trainer = Trainer(policy, training, seed=0)
        scores = [as_sampled_now(trainer, batch)[0].logprobs.sum() for _ in range(2)]
        metrics = update(trainer, as_sampled_now(trainer, batch), activation_checkpointing=again).metrics
        found.append((scores, metrics["grad_norm"], trainer.weights()["model.embed_tokens.weight"].clone()))
        trainer.close()
    (plain, norm, weights), (recomputed, same_norm, same) = found
    assert plain[0] == plain[1] == recomputed[0] == recomputed[1]
    assert same_norm == pytest.approx(norm, rel=1e-6) and torch.allclose(same, weights, atol=1e-7)


def test_the_kl_term_pulls_back_to_the_model_that_the_run_began_with(policy: Path) -> None:
    """No reward differs from another by much: with a large coefficient the policy returns towards the reference."""
    training = {"learning_rate": 3e-3, "warmup_steps": 0, "max_mismatch_kl": 1e3, "max_divergence": 1e3}
    trainer = Trainer(policy, TrainingConfig(kl_coefficient=10.0, **training), seed=0)
    distances = []
    for step in range(6):
        batch = as_sampled_now(trainer, batch_of())
        made = update(trainer, batch, **training, kl_coefficient=0.0 if step < 3 else 10.0)
        distances.append(made.metrics["reference_kl"] if step >= 3 else 0.0)
    trainer.close()
    assert distances[3] > 0 and distances[-1] < distances[3]


def test_staleness_and_numerics_are_two_numbers(trainer: Trainer) -> None:
    """All tokens are of version 0; at version 2 none is the trainer's own."""
    metrics = update(trainer, as_sampled_now(trainer, batch_of(), shift=-0.3), version=2).metrics
    assert metrics["mismatch_kl/tokens"] == metrics["mismatch_kl/mean"] == 0.0
    assert metrics["off_policy/divergence"] > 0.01
    assert metrics["off_policy/steps"] == metrics["off_policy/in_pool"] == 2.0
    assert metrics["off_policy/in_flight"] == 0.0


def test_a_group_without_a_signal_is_outside_loss_and_denominator(policy: Path) -> None:
    moved = []
    for extra in (False, True):
        trainer = Trainer(policy, TrainingConfig(learning_rate=1e-2), seed=0)
        batch = batch_of()
        silent = [replace(item, group_id="silent", attempt_id=f"s{item.attempt_id}", reward=1.0) for item in batch]
        result = update(trainer, batch + silent if extra else batch)
        moved.append(trainer.weights())
        assert result.metrics["groups/no_signal"] == float(extra)
        assert result.metrics["trained_tokens"] == sum(item.sampled_tokens for item in batch)
        trainer.close()
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


def test_a_group_too_far_from_todays_policy_is_left_out_and_counted(trainer: Trainer) -> None:
    near = as_sampled_now(trainer, batch_of())
    far = [
        replace(item, group_id="far", attempt_id=f"f{item.attempt_id}")
        for item in as_sampled_now(trainer, batch_of(), shift=-3.0)
    ]
    metrics = update(trainer, near + far, version=1, max_divergence=0.5).metrics
    assert metrics["off_policy/dropped_groups"] == 1.0
    assert metrics["trained_tokens"] == sum(item.sampled_tokens for item in near)


def test_a_batch_that_teaches_nothing_is_void_says_why_and_leaves_the_trainer_as_it_was(trainer: Trainer) -> None:
    before = {name: value.clone() for name, value in trainer.weights().items()}
    silent = update(trainer, [replace(item, reward=1.0) for item in batch_of()])
    assert silent.void == "no group has two different rewards"
    assert silent.metrics["groups/no_signal"] == 2.0 and set(silent.advantages.values()) == {0.0}
    far = update(trainer, as_sampled_now(trainer, batch_of(), shift=-3.0), max_divergence=0.5)
    assert far.void == "all 2 groups with a signal are beyond training.max_divergence 0.5"
    assert far.metrics["off_policy/dropped_groups"] == 2.0 and far.metrics["off_policy/divergence"] > 0.5
    assert not trainer.half_done and trainer.updates == 0
    assert all(torch.equal(before[name], value) for name, value in trainer.weights().items())


def test_a_batch_of_far_groups_and_groups_without_a_signal_is_void_and_counts_both(trainer: Trainer) -> None:
    far = as_sampled_now(trainer, batch_of(), shift=-3.0)
    batch = [replace(item, reward=1.0) if item.group_id == "g1" else item for item in far]
    result = update(trainer, batch, max_divergence=0.5)
    assert result.void.startswith("all 1 groups with a signal are beyond")
    assert (result.metrics["off_policy/dropped_groups"], result.metrics["groups/no_signal"]) == (1.0, 1.0)


def test_a_group_of_one_is_refused(trainer: Trainer) -> None:
    with pytest.raises(TrainerError, match="g1: a group needs at least two"):
        update(trainer, batch_of()[:5])


def test_the_reward_rises_on_what_is_rewarded(trainer: Trainer) -> None:
    """After updates on it, the tokens of the better siblings are likelier and those of the others less so."""
    batch = batch_of()

    def mean_logprob(reward: float) -> float:
        chosen = [item for item in batch if item.reward == reward]
        with torch.no_grad():
            return float(trainer.logprobs(pad(chosen, list(range(len(chosen)))))[0].mean())

    better, worse = mean_logprob(1.0), mean_logprob(0.0)
    for _ in range(4):
        update(trainer, as_sampled_now(trainer, batch), minibatches=2, warmup_steps=0)
    assert mean_logprob(1.0) > better + 0.1 and mean_logprob(0.0) < worse - 0.1


def test_a_gradient_that_is_not_finite_ends_the_update_and_leaves_it_half_done(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer._engine, "get_global_grad_norm", lambda: float("nan"))
    with pytest.raises(TrainerError, match="gradient norm is nan"):
        update(trainer, batch_of())
    assert trainer.half_done
    with pytest.raises(TrainerError, match="half a step"):
        trainer.weights()


def test_the_learning_rate_warms_up_over_updates_and_then_stays() -> None:
    assert [warmed_up(3.0, 2, done) for done in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert warmed_up(3.0, 0, 0) == 3.0


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ({"gradient_clipping": 2}, "training.max_grad_norm"),
        ({"optimizer": {"params": {"lr": 1}}}, "training.learning_rate"),
        ({"bf16": {"enabled": True}}, "training.dtype"),
    ],
)
def test_a_deepspeed_key_that_the_run_decides_is_refused_with_its_field(
    override: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidConfig, match=field):
        deepspeed_config(TrainingConfig(deepspeed=override), bfloat16=False)


def test_the_deepspeed_json_is_merged_over_the_defaults() -> None:
    over = {"zero_optimization": {"stage": 3}, "optimizer": {"params": {"betas": [0.8, 0.9]}}}
    merged = deepspeed_config(TrainingConfig(deepspeed=over), bfloat16=True)
    assert merged["zero_optimization"] == {"stage": 3}
    assert merged["optimizer"]["params"] == {"lr": 1e-6, "weight_decay": 0.0, "betas": [0.8, 0.9], "torch_adam": True}
    assert merged["bf16"] == {"enabled": True}


def test_the_learning_rate_falls_linearly_to_its_share_at_the_last_update() -> None:
    assert [round(decay(0.1, step, 4), 3) for step in (1, 2, 3, 4, 9)] == [1.0, 0.7, 0.4, 0.1, 0.1]
    assert decay(1.0, 3, 4) == 1.0 and decay(0.5, 1, 1) == 1.0
