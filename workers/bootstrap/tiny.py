"""The demo's tiny policy: a tokenizer and a Qwen3 of 0.2 million parameters, made from nothing.

Owns `bootstrap_tiny`. Promises: the same seed gives the same weights on the same machine; a finished folder is used
again; a half-made one is never seen, since the folder is renamed into place last. The policy is honest and imperfect:
it has learnt the commands and how to copy, from transcripts in which mistakes are as common as with a weak model.
Called by the command line (`ratchet bootstrap`) and by end-to-end tests.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tasksets.shell import MISSPELLINGS, WORDS
from workers.bootstrap.demos import draw_transcript
from workers.bootstrap.warm_start import PHASES, warm_start

CONTEXT_LENGTH = 512
VOCABULARY_TRANSCRIPTS = 2000

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
        with torch.random.fork_rng(devices=[]), one_thread():
            torch.manual_seed(seed)
            model = build_model(tokenizer)
            loss = warm_start(model, tokenizer, seed, progress)
            # Tied until here, since a shared embedding learns to copy sooner; apart from now on, since a tied head
            # stays stale when vLLM reloads weights on a CPU.
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.save_pretrained(making)
        provenance = {
            "made_by": "workers.bootstrap.tiny",
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "phases": [dataclasses.asdict(phase) for phase in PHASES],
            "final_loss": round(loss, 4),
            "torch": torch.__version__,
        }
        (making / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        making.rename(out)
    progress(f"made {out} with {provenance['parameters']} parameters in {time.monotonic() - started:.0f} s")
    return out


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine's cores: the weights depend on the seed alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_tokenizer() -> Any:
    """A byte-level tokenizer whose words come from the transcripts; every other text is spelt out in bytes."""
    split = pre_tokenizers.Split(Regex(PRETOKEN), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random("vocabulary")
    texts = [message["content"] for _ in range(VOCABULARY_TRANSCRIPTS) for message in draw_transcript(rng, 0.5)]
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
    """The untrained policy, from torch's global generator; embedding and head share their weights."""
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
    # Words start about a unit long and nearly orthogonal, so that a copied word is told from the others at once.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.hidden_size**-0.5)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
