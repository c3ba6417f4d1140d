"""The loss against an independent float64 reference, and what must not change it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.training import loss
from activities.training.batch import Trajectory, pad, split_micro_batches, trajectory
from activities.training.correction import correction_shares, correction_weights, off_policy_metrics
from activities.training.engine import Trainer
from activities.training.logprobs import k3, sampled_logprobs
from activities.training.update import make_update
from activities.training.work import Work
from tests.training.worlds import segments_of
from workflows.config import RunConfig, TrainingConfig
from workflows.contracts import Correction, Loss

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
CORRECTION = {"cap": 2.0, "low": 0.5, "high": 5.0}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_an_unchanged_policy_has_ratio_1_at_the_temperature_it_sampled_with(temperature: float) -> None:
    """Logits [2, 1, 0] at 0.6: without the division the ratio of the first token would be 0.815."""
    scaled = [value / temperature for value in (2.0, 1.0, 0.0)]
    behaviour = [value - math.log(sum(map(math.exp, scaled))) for value in scaled]
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, 2, 3)
    token_ids = torch.tensor([[0, 0], [0, 1], [0, 2]])
    mask = torch.tensor([[False, True]] * 3)
    logprobs, entropy = sampled_logprobs(logits, token_ids, mask, torch.full((3, 2), temperature))
    assert (logprobs - torch.tensor(behaviour)).exp().tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    assert float(entropy[0]) == pytest.approx(-sum(math.exp(value) * value for value in behaviour), abs=1e-6)


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        sampled_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.ones(1, 2).bool(), torch.ones(1, 2))


# --- an independent reference, in plain floats and loops ----------------------------------------------------------

Row = dict[str, list[float] | float]


def rows_of(seed: int, lengths: tuple[int, ...] = (3, 1, 7, 2)) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        {
            **{name: (-np.abs(rng.normal(1, 0.5, length))).tolist() for name in ("new", "proximal", "behaviour")},
            "advantage": float(rng.normal()),
        }
        for length in lengths
    ]


def clipped(ratio: float, advantage: float) -> float:
    return min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


def expected_weights(kind: Correction, row: Row) -> list[float]:
    logs = [p - b for p, b in zip(row["proximal"], row["behaviour"], strict=True)]
    match kind:
        case Correction.TOKEN:
            return [min(math.exp(value), 2.0) for value in logs]
        case Correction.SEQUENCE:
            return [min(math.prod(math.exp(value) for value in logs), 2.0)] * len(logs)
        case Correction.GEOMETRIC:
            return [min(math.prod(math.exp(value) for value in logs) ** (1 / len(logs)), 2.0)] * len(logs)
        case Correction.MASKED:
            return [math.exp(value) if 0.5 <= math.exp(value) <= 5.0 else 0.0 for value in logs]
        case Correction.NONE:
            return [1.0] * len(logs)


def expected_loss(kind: Loss, correction: Correction, rows: list[Row], *, max_tokens: int) -> float:
    total, tokens = 0.0, 0
    for row in rows:
        weights = expected_weights(correction, row)
        ratios = [math.exp(n - p) for n, p in zip(row["new"], row["proximal"], strict=True)]
        length = len(ratios)
        if kind is Loss.GSPO:
            ratio = math.prod(ratios) ** (1 / length)
            total += sum(weight * clipped(ratio, row["advantage"]) for weight in weights) / length
        else:
            total += sum(weight * clipped(r, row["advantage"]) for weight, r in zip(weights, ratios, strict=True))
        tokens += length
    return -total / {Loss.GRPO: tokens, Loss.DR_GRPO: len(rows) * max_tokens, Loss.GSPO: len(rows)}[kind]


def tensors(rows: list[Row]) -> dict[str, torch.Tensor]:
    """float64 [N], and the row of each token."""
    flat = {name: [value for row in rows for value in row[name]] for name in ("new", "proximal", "behaviour")}
    numbers = [index for index, row in enumerate(rows) for _ in row["new"]]
    advantages = [rows[index]["advantage"] for index in numbers]
    found = {name: torch.tensor(values, dtype=torch.float64) for name, values in flat.items()}
    return found | {"rows": torch.tensor(numbers), "advantages": torch.tensor(advantages, dtype=torch.float64)}


def loss_of(kind: Loss, correction: Correction, rows: list[Row], denominator: float) -> torch.Tensor:
    given = tensors(rows)
    weights = correction_weights(correction, given["proximal"], given["behaviour"], given["rows"], **CORRECTION)
    return loss.policy_loss(
        kind,
        given["new"],
        given["proximal"],
        given["advantages"],
        weights,
        given["rows"],
        denominator=denominator,
        **BOUNDS,
    )


@pytest.mark.parametrize("correction", Correction)
@pytest.mark.parametrize("kind", Loss)
def test_every_loss_and_correction_is_that_of_an_independent_reference_however_it_is_split(
    kind: Loss, correction: Correction
) -> None:
    for seed in range(20):
        rows = rows_of(seed)
        denominator = loss.denominator_of(kind, tokens=13, sequences=4, max_tokens=16)
        whole = float(loss_of(kind, correction, rows, denominator))
        split = sum(float(loss_of(kind, correction, part, denominator)) for part in (rows[:1], rows[1:3], rows[3:]))
        assert whole == pytest.approx(expected_loss(kind, correction, rows, max_tokens=16), abs=1e-12)
        assert split == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("kind", Loss)
def test_the_kl_to_a_reference_is_never_negative_and_zero_for_the_reference_itself(kind: Loss) -> None:
    given = tensors(rows_of(3))
    denominator = loss.denominator_of(kind, tokens=13, sequences=4, max_tokens=16)
    new, rows = given["new"].requires_grad_(), given["rows"]
    share = loss.kl_loss(kind, new, given["behaviour"], rows, denominator=denominator)
    q = [math.exp(r - p) for r, p in zip(given["behaviour"].tolist(), new.tolist(), strict=True)]
    lengths = torch.bincount(rows)[rows].tolist() if kind is Loss.GSPO else [1.0] * 13
    terms = [(value - math.log(value) - 1) / length for value, length in zip(q, lengths, strict=True)]
    assert float(share.detach()) == pytest.approx(sum(terms) / denominator, abs=1e-12) and sum(terms) > 0
    share.backward()
    assert new.grad is not None and float(new.grad.abs().max()) > 0
    assert float(loss.kl_loss(kind, new.detach(), new.detach(), rows, denominator=denominator)) == 0.0


def test_a_mean_over_micro_batches_would_be_wrong_and_is_not_taken() -> None:
    """Rows of 8 and 2 tokens whose loss is 1 and 5: 1.8 over all tokens, not 3.0."""
    zeros, ones, rows = torch.zeros(10), torch.ones(10), torch.zeros(10, dtype=torch.long)
    advantages = -torch.tensor([1.0] * 8 + [5.0] * 2)
    parts = [
        loss.policy_loss(
            Loss.GRPO, zeros[part], zeros[part], advantages[part], ones[part], rows[part], denominator=10, **BOUNDS
        )
        for part in (slice(0, 8), slice(8, 10))
    ]
    assert float(sum(parts)) == pytest.approx(1.8)


def test_an_absurd_ratio_neither_overflows_nor_passes_the_cap() -> None:
    values, rows = (torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])), torch.tensor([0, 1])
    for kind in (Correction.TOKEN, Correction.SEQUENCE, Correction.GEOMETRIC):
        weights = correction_weights(kind, *values, rows, **CORRECTION)
        assert weights.tolist() == pytest.approx([2.0, math.exp(-20)])
    for kind in Loss:
        share = loss.policy_loss(kind, *values, -torch.ones(2), torch.ones(2), rows, denominator=2, **BOUNDS)
        assert math.isfinite(float(share))


def test_k3_is_never_negative_and_exact_for_tiny_gaps() -> None:
    gap = torch.tensor([0.0, 1e-6, -1e-6, 0.5, -3.0], dtype=torch.float64)
    values = k3(gap, torch.zeros(5))
    assert (values >= 0).all() and float(values[0]) == 0
    assert float(values[1]) == pytest.approx(5e-13, rel=1e-3)
    assert float(values[3]) == pytest.approx(math.exp(0.5) - 1.5)


def test_off_policy_metrics_of_an_unchanged_policy_are_those_of_on_policy_data() -> None:
    values = torch.linspace(-3, -0.1, 50)
    metrics = off_policy_metrics(values, values, torch.ones(50))
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(1.0)
    assert metrics["off_policy/divergence_max"] == 0.0
    assert metrics["off_policy/ratio_p01"] == metrics["off_policy/ratio_max"] == 1.0


def test_the_effective_sample_size_is_kishs_before_and_after_the_correction() -> None:
    ratios = torch.tensor([1.0, 3.0]).log()
    weights = correction_weights(Correction.TOKEN, ratios, torch.zeros(2), torch.tensor([0, 1]), **CORRECTION)
    metrics = off_policy_metrics(ratios, torch.zeros(2), weights)
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(16 / 10 / 2)
    assert metrics["off_policy/effective_sample_size_corrected"] == pytest.approx(9 / 5 / 2)


def test_what_a_correction_cut_or_masked_is_counted() -> None:
    ratios = torch.tensor([0.1, 1.0, 3.0, 9.0]).log()
    for kind, cut, masked in (
        (Correction.TOKEN, 0.5, 0.0),
        (Correction.MASKED, 0.0, 0.5),
        (Correction.NONE, 0.0, 0.0),
    ):
        weights = correction_weights(kind, ratios, torch.zeros(4), torch.arange(4), **CORRECTION)
        shares = correction_shares(kind, weights, cap=2.0)
        assert shares == {"off_policy/truncated_share": cut, "off_policy/masked_share": masked}


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
        new, _ = sampled_logprobs(logits, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)
        behaviour = torch.cat([torch.from_numpy(batch[row].logprobs[batch[row].loss_mask]) for row in rows]).to(new)
        advantages = torch.cat([torch.full((batch[row].sampled_tokens,), 2 * batch[row].reward - 1) for row in rows])
        weights = correction_weights(Correction.TOKEN, new.detach(), behaviour, micro.rows_N, **CORRECTION)
        loss.policy_loss(
            Loss.GRPO,
            new,
            new.detach(),
            advantages.to(new),
            weights,
            micro.rows_N,
            denominator=denominator,
            **BOUNDS,
        ).backward()
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
            max_mismatch_kl=1e3,
            max_divergence=1e3,
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
