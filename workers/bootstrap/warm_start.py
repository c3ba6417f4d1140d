"""The supervised warm start of the tiny policy: copying, then the trade, then the mistakes.

Owns the recipe. Promises: the same seed gives the same weights on the same machine; only the agent's tokens are learnt.
Three phases, each a mix of transcripts:

- copy: a random sequence twice over. It makes the attention heads that everything else needs (Olsson et al. 2022,
  "In-context learning and induction heads"); without it the next phase stands still for hundreds of steps.
- trade: transcripts with few mistakes. A reply's decision (act or answer, and which tool) has little weight, so that
  the phase is about doing each thing well, the wrong things too.
- mistakes: transcripts in which mistakes are common, all tokens alike. It moves the decisions and little else.

Matrices are trained by Muon (Jordan et al. 2024), which needs a third of AdamW's steps here; the rest by AdamW.
Called by `workers.bootstrap.tiny`, and by `workers.bootstrap.tiny_tasks` with phases of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.bootstrap.demos import draw_transcript

BATCH = 32
BUCKETS = 8
"""Batches drawn at once and sorted by length, so that little of a batch is padding."""
ADAM_RATE = 5e-3
MUON_RATE = 2e-2


@dataclass(frozen=True)
class Phase:
    """`rates`: learning rates at the phase's begin and end, as parts of ADAM_RATE and MUON_RATE."""

    name: str
    steps: int
    rates: tuple[float, float]
    fault_rate: float = 0.0
    decision_weight: float = 1.0


PHASES = (
    Phase("copy", 100, (1.0, 0.8)),
    Phase("trade", 260, (0.8, 0.1), fault_rate=0.12, decision_weight=0.1),
    Phase("mistakes", 70, (0.14, 0.02), fault_rate=0.58),
)


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation and the weight of each in the loss, both of length T; 0 for what others say."""

    ids: list[int]
    weights: list[float]


Draw = Callable[[random.Random, float], list[dict[str, str]]]
"""One conversation, as messages, from a generator and the chance of a mistake per turn."""


def warm_start(
    model: Any,
    tokenizer: Any,
    seed: int,
    progress: Callable[[str], None],
    *,
    phases: Sequence[Phase] | None = None,
    draw: Draw = draw_transcript,
) -> float:
    """Train `model` in place, by default as PHASES say; returns the last batch's loss, in nats per token."""
    rng = random.Random(f"warm start/{seed}")
    optimizers = _optimizers(model)
    loss = torch.zeros(())
    for phase in PHASES if phases is None else phases:
        batches = _batches(phase, tokenizer, rng, draw)
        for step in range(phase.steps):
            rate = phase.rates[0] + (phase.rates[1] - phase.rates[0]) * step / phase.steps
            loss = _loss(model, next(batches))
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, peak in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * rate
                optimizer.step()
        progress(f"warm start, {phase.name}: {phase.steps} steps, loss {loss.item():.3f}")
    return loss.item()


def encode(tokenizer: Any, messages: list[dict[str, str]], decision_weight: float = 1.0) -> Example:
    """A conversation as the chat template renders it. The first token of a reply, and the tool's name in a command,
    are its decision and have `decision_weight`; the rest of a reply, its end token too, has weight 1."""
    opening = tokenizer.encode("```bash\n", add_special_tokens=False)
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        content = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        ids += [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>"), *content]
        if message["role"] == "assistant":
            decision = 2 if content[:1] == opening else 1
            weights += [0.0, *[decision_weight] * decision, *[1.0] * (len(content) - decision)]
        else:
            weights += [0.0] * (len(content) + 1)
    return Example(ids, weights)


def _optimizers(model: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimizers and their peak learning rates. Embeddings, head and norms are not Muon's."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and not name.startswith(("lm_head", "model.embed_tokens"))
        (matrices if inner else others).append(parameter)
    return [
        (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
        (torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.9, weight_decay=0.0), MUON_RATE),
    ]


def _batches(phase: Phase, tokenizer: Any, rng: random.Random, draw: Draw) -> Iterator[list[Example]]:
    while True:
        if phase.name == "copy":
            yield [_twice(len(tokenizer), rng) for _ in range(BATCH)]
            continue
        drawn = [encode(tokenizer, draw(rng, phase.fault_rate), phase.decision_weight) for _ in range(BATCH * BUCKETS)]
        drawn.sort(key=lambda example: len(example.ids))
        batches = [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]
        rng.shuffle(batches)
        yield from batches


def _twice(vocabulary: int, rng: random.Random) -> Example:
    half = [rng.randrange(vocabulary) for _ in range(rng.randrange(12, 20))]
    return Example(half + half, [0.0] * (len(half) + 1) + [1.0] * (len(half) - 1))


def _loss(model: Any, batch: list[Example]) -> torch.Tensor:
    """Weighted mean negative log likelihood. Padding stands right, so causal attention never sees it."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids_BT = pad([torch.tensor(example.ids) for example in batch], batch_first=True)
    weights_BT = pad([torch.tensor(example.weights) for example in batch], batch_first=True)[:, 1:]
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    chosen_BT = weights_BT > 0
    logits_NV = model.lm_head(hidden_BTH[:, :-1][chosen_BT])
    losses_N = torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][chosen_BT], reduction="none")
    weights_N = weights_BT[chosen_BT]
    return (losses_N * weights_N).sum() / weights_N.sum()
