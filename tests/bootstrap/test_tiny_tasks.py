"""The tiny policy's second start, on the tasks of a folder."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from activities.generation.harness import parse_action
from tasksets import open_taskset
from tasksets.shell import WORDS
from workers.bootstrap import demos, tiny_tasks, warm_start
from workers.bootstrap.tiny import CONTEXT_LENGTH, build_tokenizer
from workflows.contracts import ActionKind, Split
from workflows.errors import InvalidConfig

API = Path(__file__).parents[2] / "examples/tasks/api"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (warm_start, tiny_tasks):
        monkeypatch.setattr(module, "PHASES", tuple(dataclasses.replace(one, steps=2) for one in module.PHASES))
    monkeypatch.setattr(warm_start, "BUCKETS", 1)


def test_it_learns_from_a_folders_oracles_and_says_so(short: None, tmp_path: Path) -> None:
    made = tiny_tasks.bootstrap_tiny_tasks(str(API), tmp_path / "tiny-api", 3)
    before, after = load_file(tmp_path / "tiny/model.safetensors"), load_file(made / "model.safetensors")
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)
    told = json.loads((made / "provenance.json").read_text())
    assert told["seed"] == 3 and len(told["tasks"]) == 24 and told["base"]["seed"] == 3
    assert len(AutoTokenizer.from_pretrained(made)) == len(build_tokenizer())
    lines: list[str] = []
    assert tiny_tasks.bootstrap_tiny_tasks(str(API), made, 4, lines.append) == made and "there already" in lines[0]


def test_a_folder_without_anything_to_learn_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('kind = "k"\ninstruction = "i"\nsetup = ""\ncheck = ""\noracle = ["ls"]\n')
    with pytest.raises(InvalidConfig, match="no training task has"):
        tiny_tasks.bootstrap_tiny_tasks(str(tmp_path), tmp_path / "out")


def test_a_renamed_task_is_the_same_with_other_words(tmp_path: Path) -> None:
    taskset = open_taskset(str(API))
    for task_id in taskset.ids(Split.TRAIN):
        task = taskset.load(task_id)
        other = tiny_tasks.renamed(task, random.Random(task_id))
        words = [word for word in WORDS if word in task.instruction.split()]
        assert words and other.instruction != task.instruction
        renamed = {word: new for word, new in zip(_words(task.instruction), _words(other.instruction), strict=True)}
        assert all(renamed.get(word, word) == new for word, new in _pairs(task.oracle, other.oracle) if word in renamed)


def _words(text: str) -> list[str]:
    return [word for word in "".join(c if c.isalpha() else " " for c in text).split() if word in WORDS]


def _pairs(first: list[str], second: list[str]) -> list[tuple[str, str]]:
    return list(zip(_words(" ".join(first)), _words(" ".join(second)), strict=True))


def test_the_examples_conversations_fit_into_the_policys_context_with_mistakes_too() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    taskset = open_taskset(str(API))
    lengths, kinds = [], set[ActionKind]()
    for task_id in taskset.ids(Split.TRAIN):
        messages = demos.transcript(tiny_tasks.renamed(taskset.load(task_id), rng), rng, 0.0)
        lengths.append(len(warm_start.encode(tokenizer, messages).ids))
        kinds |= {parse_action(m["content"]).kind for m in messages if m["role"] == "assistant"}
    assert max(lengths) <= CONTEXT_LENGTH and kinds == {ActionKind.COMMAND, ActionKind.FINAL}
