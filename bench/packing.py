"""Sequence packing against padding with length bucketing: `python -m bench.packing [--rounds N] [--quick]`.

Forward and backward of the same long-tailed batch on the model of bench/update.py: in rows padded on the right, of
similar lengths, as the trainer makes them (`split_micro_batches`), and packed one after the other into one row, with
positions that begin anew and block-diagonal attention. Both with the same budget of tokens per pass, for several
budgets. The last line is JSON with `ratio` (tokens/s packed over padded at the best budget of each), and both gradients
are checked to be the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from activities.training.batch import Trajectory, pad, split_micro_batches
from activities.training.logprobs import sampled_logprobs
from bench.measure import finish, median_of, say, table
from bench.update import VOCABULARY, write_batch, write_model

BUDGETS = (512, 1024, 2048, 4096)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the medians are given")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one round of a small model: shows that it works")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.groups, options.layers = 1, 1, 2
    return options


def long_tailed(groups: int) -> list[Trajectory]:
    """bench.update's batch with one trajectory in eight three times as long, as tool output makes them."""
    batch = write_batch(groups)
    rng = np.random.default_rng(1)
    for number in range(0, len(batch), 8):
        item = batch[number]
        extra = 2 * item.sequence_tokens
        mask = np.concatenate([np.zeros(extra, np.bool_), item.loss_mask])
        batch[number] = Trajectory(
            attempt_id=item.attempt_id,
            group_id=item.group_id,
            reward=item.reward,
            token_ids=np.concatenate([rng.integers(0, VOCABULARY, extra), item.token_ids]),
            loss_mask=mask,
            logprobs=np.where(mask, -np.log(VOCABULARY), 0.0),
            temperatures=np.ones(len(mask)),
            versions=np.where(mask, 0, -1),
        )
    return batch


def padded(model: Any, batch: list[Trajectory], budget: int) -> int:
    """Gradients of the sum of log-probabilities; the tokens that were computed, padding too."""
    computed = 0
    for rows in split_micro_batches([item.sequence_tokens for item in batch], budget):
        micro = pad(batch, rows)
        logits_BTV = model(
            input_ids=micro.token_ids_BT,
            attention_mask=micro.attention_mask_BT,
            position_ids=micro.position_ids_BT,
            use_cache=False,
        ).logits
        sampled_logprobs(logits_BTV, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)[0].sum().backward()
        computed += micro.padded_tokens
    return computed


def packed(model: Any, batch: list[Trajectory], budget: int) -> int:
    """As `padded`, with the trajectories of a pass in one row."""
    computed = 0
    for rows in _rows([item.sequence_tokens for item in batch], budget):
        chosen = [batch[row] for row in rows]
        lengths = torch.tensor([item.sequence_tokens for item in chosen])
        owner_T = torch.repeat_interleave(torch.arange(len(chosen)), lengths)
        positions_T = torch.cat([torch.arange(int(length)) for length in lengths])
        causal_TT = torch.ones(len(owner_T), len(owner_T), dtype=torch.bool).tril()
        token_ids_BT = torch.from_numpy(np.concatenate([item.token_ids for item in chosen]))[None]
        logits_BTV = model(
            input_ids=token_ids_BT,
            attention_mask=(causal_TT & (owner_T[:, None] == owner_T[None, :]))[None, None],
            position_ids=positions_T[None],
            use_cache=False,
        ).logits
        # The first token of a trajectory is never sampled, so none is predicted from another trajectory's last.
        mask_BT = torch.from_numpy(np.concatenate([item.loss_mask for item in chosen]))[None]
        ones_BT = torch.ones(mask_BT.shape, dtype=torch.float64)
        sampled_logprobs(logits_BTV, token_ids_BT, mask_BT, ones_BT)[0].sum().backward()
        computed += token_ids_BT.numel()
    return computed


def _rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit, the longest first; one that is longer than the budget stands alone."""
    parts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = next((number for number, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            parts.append([])
            room.append(budget)
            place = len(parts) - 1
        parts[place].append(index)
        room[place] -= lengths[index]
    return parts


def timed(
    run: Callable[[Any, list[Trajectory], int], int], model: Any, batch: list[Trajectory], budget: int
) -> tuple[float, float, torch.Tensor]:
    """(seconds, computed tokens over real ones, gradient)."""
    model.zero_grad()
    began = time.perf_counter()
    computed = run(model, batch, budget)
    seconds = time.perf_counter() - began
    gradient = torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])
    return seconds, computed / sum(item.sequence_tokens for item in batch), gradient


def main() -> None:
    from transformers import AutoModelForCausalLM

    options = arguments()
    batch = long_tailed(options.groups)
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as name:
        folder = write_model(Path(name), options.layers)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        timed(padded, model, batch[:8], BUDGETS[0])
        timed(packed, model, batch[:8], BUDGETS[0])
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            found: dict[str, float] = {}
            for budget in BUDGETS:
                found[f"padded {budget}"], found[f"padded share {budget}"], one = timed(padded, model, batch, budget)
                found[f"packed {budget}"], found[f"packed share {budget}"], other = timed(packed, model, batch, budget)
                gap = float((one - other).norm() / one.norm())
                if gap > 1e-4:
                    raise SystemExit(f"packing and padding give other gradients: relative distance {gap:.1e}")
            rounds.append(found)
            say(f"round {number + 1} done")
    made = median_of(rounds)
    tokens = sum(item.sequence_tokens for item in batch)

    def cells(which: str, budget: int) -> tuple[float, float]:
        return tokens / made[f"{which} {budget}"], made[f"{which} share {budget}"]

    rows = [(budget, *cells("padded", budget), *cells("packed", budget)) for budget in BUDGETS]
    print(
        table(("tokens per pass", "padded: tokens/s", "computed / real", "packed: tokens/s", "computed / real"), rows)
    )
    best = {which: min(made[f"{which} {budget}"] for budget in BUDGETS) for which in ("padded", "packed")}
    finish({"ratio": round(best["padded"] / best["packed"], 3), "tokens": tokens, "rounds": options.rounds})


if __name__ == "__main__":
    main()
