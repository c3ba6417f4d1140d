"""The tiny policy, barely trained: its tokenizer, its transcripts, and a folder that is whole or not there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from activities.generation.harness import initial_messages, observation_message, parse_action, system_prompt
from tasksets.shell import KINDS, WORDS, draw_task
from workers.bootstrap import demos, tiny, warm_start
from workflows.contracts import ActionKind


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.build_tokenizer()


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Every phase lasts two steps."""
    phases = tuple(dataclasses.replace(phase, steps=2) for phase in warm_start.PHASES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warm_start, "PHASES", phases)
        patched.setattr(warm_start, "BUCKETS", 1)
        yield


@pytest.fixture(scope="module")
def made(short: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of seed 0, alone in its folder."""
    return tiny.bootstrap_tiny(tmp_path_factory.mktemp("models") / "a")


def test_every_text_comes_back_from_its_tokens(tokenizer: Any) -> None:
    texts = [
        "",
        "ls",
        "```bash\nls -l | wc\n```",
        "Answer: 17",
        "/data/amber 3\t\r\n\0 ünïcode 日本 🙂",
        "x" * 300,
        "<|end|>",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_word_is_one_token_and_the_same_one_everywhere(tokenizer: Any) -> None:
    for word in WORDS:
        (token,) = tokenizer.encode(word)
        assert token in tokenizer.encode(f"cat /data/{word}")
        assert token in tokenizer.encode(f"sed -i s/{word}/x/ y")
    assert [len(tokenizer.encode(str(number))) for number in range(10, 100)] == [1] * 90


def test_the_system_prompt_fills_a_block_of_the_prefix_cache(tokenizer: Any) -> None:
    assert 32 < len(tokenizer.encode(system_prompt())) < 64


def test_tokens_added_turn_by_turn_equal_the_whole_conversation(tokenizer: Any) -> None:
    messages = initial_messages(draw_task("chain", random.Random(0)))
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for reply, observation in (("```bash\ncat /data/a\n```", "amber\n(exit 1)"), ("I am not sure.", "No.")):
        messages += [{"role": "assistant", "content": reply}, observation_message(observation)]
        ids += [*tokenizer.encode(reply), tokenizer.eos_token_id]
        ids += tokenizer.encode(f"<|user|>{observation}<|end|><|assistant|>")
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_only_what_the_agent_says_is_learnt_and_its_decisions_weigh_as_told(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "```bash\nls a\n```"},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": "Answer: 3"},
    ]
    example = warm_start.encode(tokenizer, messages, decision_weight=0.5)
    assert example.ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert example.weights == [0, 0, 0, 0, 0.5, 0.5, 1, 1, 1, 1, 0, 0, 0, 0, 0.5, 1, 1]


def test_a_transcript_without_mistakes_is_the_oracle() -> None:
    rng = random.Random(1)
    for kind in KINDS:
        task = draw_task(kind, rng)
        replies = [m["content"] for m in demos.transcript(task, rng, 0.0) if m["role"] == "assistant"]
        actions = [parse_action(reply) for reply in replies]
        assert [action.command for action in actions[:-1]] == task.oracle
        assert actions[-1].answer == task.oracle_answer


def test_a_transcript_with_mistakes_has_every_sort_and_ends_within_the_turns() -> None:
    rng = random.Random(2)
    kinds: set[ActionKind] = set()
    for _ in range(500):
        messages = demos.draw_transcript(rng, 0.7)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        kinds |= {parse_action(reply).kind for reply in replies}
        assert 1 <= len(replies) <= demos.MAX_TURNS + 1
        roles = [message["role"] for message in messages[1:]]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
    assert kinds == set(ActionKind)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    """Into an empty place, and into a folder that was left unfinished."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rubbish").write_text("x")
    threads = torch.get_num_threads()
    folders = [made, *(tiny.bootstrap_tiny(tmp_path / name, seed) for name, seed in (("b", 0), ("c", 1)))]
    a, b, c = (hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() for folder in folders)
    assert a == b != c
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
    assert [path.name for path in made.parent.iterdir()] == ["a"]
    assert not (tmp_path / "b" / "rubbish").exists()
    assert torch.get_num_threads() == threads


def test_a_finished_folder_is_used_again(made: Path) -> None:
    lines: list[str] = []
    tiny.bootstrap_tiny(made, seed=5, progress=lines.append)
    assert "there already" in lines[0]
    assert json.loads((made / "provenance.json").read_text())["seed"] == 0


def test_the_folder_opens_as_an_ordinary_model_whose_head_is_its_own(made: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert not model.config.tie_word_embeddings
    assert model.config.head_dim == 32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    ids = tokenizer.apply_chat_template(
        [observation_message("x")], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
