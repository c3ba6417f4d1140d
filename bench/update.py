"""Speed of the update: `python -m bench.update [--rounds N] [--quick]`.

The same batch on the same model of 10 M parameters: our update (trajectories to tensors, a scoring pass, advantages,
corrections, loss, metrics, DeepSpeed), and a plain PyTorch loop as people write it: padded micro-batches of the same
token budget, old log-probabilities by a scoring pass, the clipped loss, AdamW, a clip of the norm. Both begin with the
same weights and take turns. The last line is JSON with `ratio` (tokens/s of ours over the plain loop's) and
`outside_share`, the share of our update that is neither forward, backward nor optimizer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from activities.training.batch import Trajectory, pad, split_micro_batches
from activities.training.engine import Trainer
from activities.training.logprobs import sampled_logprobs
from activities.training.update import make_update
from activities.training.work import Work
from bench.measure import finish, median_of, say, table
from workflows.config import RunConfig

VOCABULARY = 4096
GROUPS, SIZE = 8, 8
PROMPT, ANSWER = (40, 120), (20, 120)
"""Tokens, drawn evenly between the two."""
BUDGET = 4096


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the medians are given")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--quick", action="store_true", help="one round of a small model: shows that it works")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.groups, options.layers = 1, 2, 2
    return options


def write_model(folder: Path, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=40,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_batch(groups: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories of random tokens with the log-probabilities of an even distribution."""
    rng = np.random.default_rng(seed)
    batch = []
    for number in range(groups * SIZE):
        prompt, answer = (int(rng.integers(*bounds)) for bounds in (PROMPT, ANSWER))
        mask = np.arange(prompt + answer) >= prompt
        batch.append(
            Trajectory(
                attempt_id=f"r/g{number // SIZE}/e{number % SIZE}/a0",
                group_id=f"r/g{number // SIZE}",
                reward=float(number % 2),
                token_ids=rng.integers(0, VOCABULARY, prompt + answer),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(VOCABULARY), 0.0),
                temperatures=np.ones(prompt + answer),
                versions=np.where(mask, 0, -1),
            )
        )
    return batch


class Timed:
    """Seconds in the methods that do the arithmetic of an update."""

    NAMES = ("logprobs", "accumulate", "optimizer_step")

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def of(self, trainer: Trainer) -> Iterator[None]:
        for name in self.NAMES:
            setattr(trainer, name, self._timed(getattr(trainer, name)))
        yield
        for name in self.NAMES:
            delattr(trainer, name)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def ours(trainer: Trainer, config: RunConfig, batch: list[Trajectory], step: int) -> dict[str, float]:
    timed, began = Timed(), time.perf_counter()
    with timed.of(trainer):
        made = make_update(trainer, batch, config=config, step=step, policy_version=step, work=Work()).metrics
    seconds = time.perf_counter() - began
    padding = 1 - made["tokens"] / made["padded_tokens"]
    return {"ours_s": seconds, "outside_share": 1 - timed.seconds / seconds, "padding_share": padding}


class Plain:
    """The loop that people write."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.training.learning_rate, weight_decay=0.0)
        self.training = config.training

    def __call__(self, batch: list[Trajectory]) -> dict[str, float]:
        began = time.perf_counter()
        parts = split_micro_batches([item.sequence_tokens for item in batch], self.training.micro_batch_tokens)
        with torch.no_grad():
            old = [self._logprobs(batch, rows) for rows in parts]
        tokens = sum(item.sampled_tokens for item in batch)
        for rows, old_N in zip(parts, old, strict=True):
            new_N = self._logprobs(batch, rows)
            advantages_N = torch.cat(
                [torch.full((batch[row].sampled_tokens,), 2 * batch[row].reward - 1) for row in rows]
            )
            behaviour_N = torch.cat([torch.from_numpy(batch[row].logprobs[batch[row].loss_mask]) for row in rows])
            ratio_N = (new_N - old_N).exp()
            clipped_N = ratio_N.clamp(1 - self.training.clip_low, 1 + self.training.clip_high)
            weights_N = (old_N - behaviour_N.float()).exp().clamp(max=self.training.importance_cap)
            objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N) * weights_N
            (-objective_N.sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"plain_s": time.perf_counter() - began}

    def _logprobs(self, batch: list[Trajectory], rows: list[int]) -> torch.Tensor:
        micro = pad(batch, rows)
        logits_BTV = self.model(
            input_ids=micro.token_ids_BT, attention_mask=micro.attention_mask_BT, use_cache=False
        ).logits
        return sampled_logprobs(logits_BTV, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)[0]


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as name:
        folder = write_model(Path(name), options.layers)
        training = {
            "micro_batch_tokens": BUDGET,
            "max_mismatch_kl": 1e3,
            "max_divergence": 1e3,
            "deepspeed": {"zero_optimization": {"stage": options.stage}},
        }
        config = RunConfig.model_validate({"model": str(folder), "training": training})
        batch = write_batch(options.groups)
        trainer, plain = Trainer(folder, config.training, seed=0), Plain(folder, config)
        ours(trainer, config, batch, 1)
        plain(batch)
        rounds = []
        for number in range(options.rounds):
            rounds.append(ours(trainer, config, batch, number + 2) | plain(batch))
            say(f"round {number + 1}: ours {rounds[-1]['ours_s']:.2f} s, plain {rounds[-1]['plain_s']:.2f} s")
        parameters = trainer.parameters
        trainer.close()
    found = median_of(rounds)
    tokens = sum(item.sequence_tokens for item in batch)
    rows = [(which, tokens / found[f"{which}_s"], found[f"{which}_s"]) for which in ("ours", "plain")]
    print(table(("update", "tokens/s", "seconds"), rows))
    ratio = found["plain_s"] / found["ours_s"]
    print(f"\n{parameters / 1e6:.1f} M parameters, {len(batch)} episodes, {tokens} tokens, ZeRO {options.stage}")
    shares = {name: round(found[name], 4) for name in ("outside_share", "padding_share")}
    finish({"ratio": round(ratio, 3), **shares})


if __name__ == "__main__":
    main()
