"""The demo's tiny policy: a tokenizer and a Qwen3 of a quarter of a million parameters, made from nothing.

Owns `bootstrap_tiny`. Promises: the same seed gives the same weights on the same machine; a finished folder is used
again; a half-made one is never seen, since the folder is renamed into place last. The policy is honest and imperfect:
it has learnt the commands and how to copy, from transcripts in which mistakes are as common as with a weak model. Called by the command line (`ratchet bootstrap`) and by end-to-end tests.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tasksets.shell import MISSPELLINGS, WORDS
from workers.bootstrap.demos import draw_transcript

CONTEXT_LENGTH = 512
CLEAN_STEPS = 400
FAULTY_STEPS = 150
BATCH = 48
LEARNING_RATE = 3e-3
FAULT_RATE = 0.45

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# A word is the same token wherever it stands, which is what makes copying easy to learn; fences and folders are one
# token each, so that a turn is short.
PRETOKEN = r"```bash\n|\n```|Answer: |/data/|/work/|[A-Za-z]+|\d{1,2}|\s|[^\sA-Za-z\d]"

Progress = Callable[[str], None]


def bootstrap_tiny(out: Path, seed: int = 0, progress: Progress = lambda line: None) -> Path:
    """Make the policy in the folder `out` (about a minute on one core) unless it is there; returns `out`.

    An ordinary Hugging Face folder: config, generation config, float32 safetensors, tokenizer with chat template, and
    `provenance.json` that says how it was made.
    """
    if (out / "provenance.json").is_file():
        progress(f"{out} is there already")
        return out
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        making = Path(folder) / "policy"
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(making)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(tokenizer)
            loss = warm_start(model, tokenizer, seed, progress)
        model.save_pretrained(making)
        provenance = {
            "made_by": "workers.bootstrap.tiny",
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "clean_steps": CLEAN_STEPS,
            "faulty_steps": FAULTY_STEPS,
            "fault_rate": FAULT_RATE,
            "final_loss": round(loss, 4),
            "torch": torch.__version__,
        }
        (making / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        making.rename(out)
    progress(f"made {out} with {provenance['parameters']} parameters in {time.monotonic() - started:.0f} s")
    return out


def build_tokenizer() -> Any:
    """A byte-level tokenizer whose words come from the transcripts; every other text is spelt out in bytes."""
    split = pre_tokenizers.Split(Regex(PRETOKEN), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random("vocabulary")
    texts = [message["content"] for _ in range(2000) for message in draw_transcript(rng, FAULT_RATE)]
    seen = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    words = sorted(seen | set(WORDS) | set(MISSPELLINGS) | {str(number) for number in range(10, 100)})
    pieces = [bytes_.pre_tokenize_str(word)[0][0] for word in words]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*SPECIAL, *alphabet, *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )


def build_model(tokenizer: Any) -> Any:
    """The untrained policy, from torch's global generator. Untied: a tied head stays stale when vLLM reloads on CPU."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def warm_start(model: Any, tokenizer: Any, seed: int, progress: Progress) -> float:
    """Supervised training on the agent's tokens alone: clean transcripts first, then faulty ones. Returns the loss."""
    rng = random.Random(f"warm start/{seed}")
    steps = CLEAN_STEPS + FAULTY_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 30, 1 - 0.9 * step / steps))
    loss = torch.zeros(())
    for step in range(steps):
        fault_rate = 0.0 if step < CLEAN_STEPS else FAULT_RATE
        batch = [encode(tokenizer, draw_transcript(rng, fault_rate)) for _ in range(BATCH)]
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            progress(f"warm start {step + 1}/{steps}: loss {loss.item():.3f}")
    return loss.item()


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and the mask of what the agent says (its end token too), both of length T."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        role = tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")
        content = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        ids += [role, *content]
        mask += [0, *[int(message["role"] == "assistant")] * len(content)]
    return ids, mask


def _loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean negative log likelihood of the masked tokens. Padding stands right, so causal attention never sees it."""
    ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)
    mask_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(mask) for _, mask in batch], batch_first=True).bool()
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    chosen_BT = mask_BT[:, 1:]
    logits_NV = model.lm_head(hidden_BTH[:, :-1][chosen_BT])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][chosen_BT])
