"""The loss against an independent float64 reference, and what must not change it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.training import loss
from activities.training.batch import Trajectory, pad, split_micro_batches, trajectory
from activities.training.engine import Trainer
from activities.training.update import make_update
from activities.training.work import Work
from tests.training.worlds import segments_of
from workflows.config import RunConfig, TrainingConfig

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 2.0}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_an_unchanged_policy_has_ratio_1_at_the_temperature_it_sampled_with(temperature: float) -> None:
    """Logits [2, 1, 0] at 0.6: without the division the ratio of the first token would be 0.815."""
    scaled = [value / temperature for value in (2.0, 1.0, 0.0)]
    behaviour = [value - math.log(sum(map(math.exp, scaled))) for value in scaled]
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, 2, 3)
    token_ids = torch.tensor([[0, 0], [0, 1], [0, 2]])
    mask = torch.tensor([[False, True]] * 3)
    logprobs, entropy = loss.sampled_logprobs(logits, token_ids, mask, torch.full((3, 2), temperature))
    assert (logprobs - torch.tensor(behaviour)).exp().tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    assert float(entropy[0]) == pytest.approx(-sum(math.exp(value) * value for value in behaviour), abs=1e-6)


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        loss.sampled_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.ones(1, 2).bool(), torch.ones(1, 2))


def reference(new: float, proximal: float, behaviour: float, advantage: float) -> float:
    """One token's term in plain floats."""
    ratio = math.exp(new - proximal)
    weight = min(math.exp(proximal - behaviour), 2.0)
    return -weight * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


def test_the_loss_is_that_of_an_independent_reference() -> None:
    rng = np.random.default_rng(0)
    new, proximal, behaviour = (-np.abs(rng.normal(1, 0.5, 200)) for _ in range(3))
    advantages = rng.normal(0, 1, 200)
    expected = sum(map(reference, new, proximal, behaviour, advantages)) / 300
    tensors = [torch.from_numpy(item) for item in (new, proximal, behaviour, advantages)]
    assert float(loss.policy_loss(*tensors, denominator=300, **BOUNDS)) == pytest.approx(expected, abs=1e-12)


def test_a_mean_over_micro_batches_would_be_wrong_and_is_not_taken() -> None:
    """Rows of 8 and 2 tokens whose loss is 1 and 5: 1.8 over all tokens, not 3.0."""
    zeros = torch.zeros(10)
    advantages = -torch.tensor([1.0] * 8 + [5.0] * 2)
    parts = [
        loss.policy_loss(zeros[part], zeros[part], zeros[part], advantages[part], denominator=10, **BOUNDS)
        for part in (slice(0, 8), slice(8, 10))
    ]
    assert float(sum(parts)) == pytest.approx(1.8)


def test_an_absurd_ratio_neither_overflows_nor_passes_the_cap() -> None:
    values = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])
    assert loss.importance_weights(*values, 2.0).tolist() == pytest.approx([2.0, math.exp(-20)])
    share = loss.policy_loss(values[0], values[1], values[0], torch.tensor([-1.0, -1.0]), denominator=2, **BOUNDS)
    assert math.isfinite(float(share))


def test_k3_is_never_negative_and_exact_for_tiny_gaps() -> None:
    gap = torch.tensor([0.0, 1e-6, -1e-6, 0.5, -3.0], dtype=torch.float64)
    values = loss.k3(gap, torch.zeros(5))
    assert (values >= 0).all() and float(values[0]) == 0
    assert float(values[1]) == pytest.approx(5e-13, rel=1e-3)
    assert float(values[3]) == pytest.approx(math.exp(0.5) - 1.5)


def test_off_policy_metrics_of_an_unchanged_policy_are_those_of_on_policy_data() -> None:
    values = torch.linspace(-3, -0.1, 50)
    metrics = loss.off_policy_metrics(values, values, 2.0)
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(1.0)
    assert metrics["off_policy/divergence_max"] == metrics["off_policy/truncated_share"] == 0.0
    assert metrics["off_policy/ratio_p01"] == metrics["off_policy/ratio_max"] == 1.0


def test_the_effective_sample_size_is_kishs() -> None:
    ratios = torch.tensor([1.0, 3.0]).log()
    metrics = loss.off_policy_metrics(ratios, torch.zeros(2), 2.0)
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(16 / 10 / 2)
    assert metrics["off_policy/truncated_share"] == 0.5


def batch_of(groups: int = 2, size: int = 4) -> list[Trajectory]:
    rng = np.random.default_rng(5)
    return [
        trajectory(f"g{index // size}/e{index}", f"g{index // size}", float(index % 2), segments_of(rng))
        for index in range(groups * size)
    ]


def gradient(policy: Path, batch: list[Trajectory], parts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Gradient of the loss over `batch`, added up over `parts`, without DeepSpeed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).eval()
    denominator = sum(item.sampled_tokens for item in batch)
    for rows in parts:
        micro = pad(batch, rows)
        logits = model(
            input_ids=micro.token_ids_BT, attention_mask=micro.attention_mask_BT, position_ids=micro.position_ids_BT
        ).logits
        new, _ = loss.sampled_logprobs(logits, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)
        behaviour = torch.cat([torch.from_numpy(batch[row].logprobs[batch[row].loss_mask]) for row in rows]).to(new)
        advantages = torch.cat([torch.full((batch[row].sampled_tokens,), 2 * batch[row].reward - 1) for row in rows])
        loss.policy_loss(new, new.detach(), behaviour, advantages.to(new), denominator=denominator, **BOUNDS).backward()
    return torch.cat([item.grad.flatten() for item in model.parameters()]).double()


def test_the_gradient_is_the_same_for_any_split_and_that_of_float64(policy: Path) -> None:
    batch = batch_of()
    exact = gradient(policy, batch, [list(range(8))], torch.float64)
    lengths = [item.sequence_tokens for item in batch]
    splits = [
        [list(range(8))],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[row] for row in range(8)],
        [[0], [1, 2, 3, 4, 5], [6, 7]],
    ]
    for split in [*splits, split_micro_batches(lengths, 60)]:
        assert float((gradient(policy, batch, split, torch.float32) - exact).abs().max()) < 1e-6


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_under_deepspeed_does_not_depend_on_the_micro_batches_either(policy: Path, stage: int) -> None:
    """SGD, so that the weights move by the gradient itself."""
    norms, moved = [], []
    for budget in (32, 100_000):
        training = TrainingConfig(
            learning_rate=1.0,
            warmup_steps=0,
            max_grad_norm=1e6,
            micro_batch_tokens=budget,
            mismatch_limit=1e3,
            divergence_limit=1e3,
            deepspeed={"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {}}},
        )
        trainer = Trainer(policy, training, seed=0)
        before = {name: value.clone() for name, value in trainer.weights().items()}
        config = RunConfig(model=str(policy), training=training)
        metrics = make_update(trainer, batch_of(), config=config, step=1, policy_version=0, work=Work()).metrics
        after = trainer.weights()
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in before]))
        norms.append(metrics["grad_norm"])
        trainer.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert float(moved[0].norm()) == pytest.approx(norms[0], rel=1e-3)
    assert float((moved[0] - moved[1]).abs().max()) < 1e-6
