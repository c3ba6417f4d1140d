"""Small tokenizers with the templates that matter, and the smallest Qwen3 that an engine serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's: a default system prompt, a newline after the end of a turn."""
TINY = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The demo's: nothing between turns."""
THINKING = (
    "{{ bos_token }}{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Rewrites history: drops the thoughts of earlier turns, and begins each answer with one."""


HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' + messages[0]['content'] + '\n<tools>' }}{% for t in tools %}"
    "{{ '\n' }}{{ t | tojson }}{% endfor %}"
    '{{ \'\n</tools>\nCall: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n\' }}'
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": ' }}"
    "{{ c['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools, as Hermes 2 Pro and Qwen 2.5 render them."""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m['role'] == 'tool' else m['role']) + '<|end_header_id|>\n\n' }}"
    '{% if loop.first and tools %}{{ \'Reply with {"name": ..., "parameters": ...}.\n\n\' }}'
    "{% for t in tools %}{{ t | tojson }}{{ '\n\n' }}{% endfor %}{% endif %}"
    "{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]['function'] %}"
    "{{ '{\"name\": \"' + f['name'] + '\", \"parameters\": ' }}{{ f['arguments'] | tojson }}{{ '}' }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Llama 3.1's: a header per message, calls as bare JSON, their results from `ipython`."""
REWRITING = (
    "{% if tools %}{{ '<|im_start|>system\n' + messages[0]['content'] + '\n<tools>' }}{% for t in tools %}"
    "{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '\n</tools>\nCall: <tool_call>...</tool_call><|im_end|>\n' }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m['role'] == 'assistant' %}{% set said = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in m['content'] else '' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip('\n') }}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ said }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": ' }}"
    "{{ c['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen 3's: thoughts of turns before the last question are dropped, and empty ones put in where there were none."""
LLAMA3_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def make_tokenizer(
    template: str, *, eos: str, adds_bos: bool = False, special: Sequence[str] = (), added: Sequence[str] = ()
) -> Any:
    """Byte-level, with two merges so that text has more than one tokenisation: `ca` and `cat`. Of the tokens beside
    them, `special` ones are left out of text and `added` ones are words of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate([*alphabet, "ca", "cat"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("c", "a"), ("ca", "t")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    always = ["<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
    always += [f"<|{role}|>" for role in ("system", "user", "assistant")]
    inner.add_special_tokens(always)
    inner.add_tokens(["<think>", "</think>"])
    inner.add_special_tokens(list(special))
    inner.add_tokens(list(added))
    if adds_bos:
        bos = ("<|bos|>", inner.token_to_id("<|bos|>"))
        inner.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        bos_token="<|bos|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def save_policy(folder: Path, *, seed: int, hidden: int = 64) -> Any:
    """A random Qwen3 of 0.1 M parameters with tied embeddings, as a Hugging Face folder; returns the model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _saved(folder, seed, hidden, Qwen3Config, Qwen3ForCausalLM)


def save_drawn(folder: Path, *, seed: int) -> None:
    """What `save_policy` makes, with other weights, for who needs no model here: torch takes seconds to import."""
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    tokenizer.save_pretrained(folder)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (len(tokenizer), 64), "model.norm": (64,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.input_layernorm": (64,), f"{layer}.post_attention_layernorm": (64,)}
        shapes |= {f"{layer}.self_attn.q_norm": (32,), f"{layer}.self_attn.k_norm": (32,)}
        shapes |= {f"{layer}.self_attn.q_proj": (128, 64), f"{layer}.self_attn.o_proj": (64, 128)}
        shapes |= {f"{layer}.self_attn.k_proj": (64, 64), f"{layer}.self_attn.v_proj": (64, 64)}
        shapes |= {f"{layer}.mlp.gate_proj": (128, 64), f"{layer}.mlp.up_proj": (128, 64)}
        shapes |= {f"{layer}.mlp.down_proj": (64, 128)}
    chance = np.random.default_rng(seed)
    weights = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else chance.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_mixture(folder: Path, *, seed: int, hidden: int = 64) -> Any:
    """The same with 16 experts in each layer, of which a token goes through four."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _saved(folder, seed, hidden, Qwen3MoeConfig, Qwen3MoeForCausalLM, **experts)


def _saved(folder: Path, seed: int, hidden: int, config_type: Any, model_type: Any, **more: Any) -> Any:
    import torch

    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_type(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **more,
        )
        model = model_type(config).float().eval()
    model.save_pretrained(folder)
    return model
