"""bench/update.py compares like with like."""

from __future__ import annotations

from pathlib import Path

import torch

from activities.training.engine import Trainer
from bench import update
from workflows.config import RunConfig


def test_both_loops_make_the_same_step(tmp_path: Path) -> None:
    folder = update.write_model(tmp_path / "model", layers=1)
    limits = {"max_mismatch_kl": 1e3, "max_divergence": 1e3, "warmup_steps": 0, "learning_rate": 1e-3}
    config = RunConfig.model_validate({"model": str(folder), "training": limits | {"micro_batch_tokens": 1024}})
    batch = update.write_batch(groups=1)
    trainer, plain = Trainer(folder, config.training, seed=0), update.Plain(folder, config)
    before = {name: value.clone() for name, value in trainer.weights().items()}
    found = update.ours(trainer, config, batch, step=1) | plain(batch)
    assert found["ours_s"] > 0 and found["plain_s"] > 0 and 0 <= found["outside_share"] < 1
    after, theirs = trainer.weights(), dict(plain.model.named_parameters())
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before if name in theirs])
    wanted = torch.cat([(theirs[name].detach() - before[name]).flatten() for name in before if name in theirs])
    trainer.close()
    assert float(moved.norm()) > 0
    assert float(torch.nn.functional.cosine_similarity(moved, wanted, dim=0)) > 0.98


def test_the_quick_form_is_one_round() -> None:
    options = update.arguments(["--quick"])
    assert (options.rounds, options.groups, options.layers) == (1, 2, 2)
