"""The supervised start of SmolLM2, on a model of a hundred thousand parameters in its place."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from activities.generation.transcript import Template
from tests.generation.policies import save_policy
from workers.bootstrap import smollm2_shell
from workers.bootstrap.demos import draw_transcript


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the package that only an index has."""
    folder = tmp_path / "models" / "smollm2"
    save_policy(folder, seed=0)
    (folder / "provenance.json").write_text('{"parameters": 1}')
    monkeypatch.setattr(smollm2_shell, "STEPS", 3)
    monkeypatch.setattr(smollm2_shell, "TRAINED_LAYERS", 1)
    monkeypatch.setattr(smollm2_shell, "bootstrap_smollm2", lambda out, progress: folder)
    return folder


def test_it_learns_in_its_last_layers_alone_and_says_what_it_was_made_from(base: Path) -> None:
    lines: list[str] = []
    made = smollm2_shell.bootstrap_smollm2_shell(base.parent / "smollm2-shell", 4, lines.append)
    before, after = load_file(base / "model.safetensors"), load_file(made / "model.safetensors")
    changed = {name for name in before if not before[name].to(after[name].dtype).equal(after[name])}
    assert changed and all(name.startswith("model.layers.1.") for name in changed)
    told = json.loads((made / "provenance.json").read_text())
    assert told["base"] == {"parameters": 1} and told["seed"] == 4
    assert any("step 3 of 3" in line for line in lines)
    assert Template.load(str(made)).initial([{"role": "user", "content": "q"}])
    again: list[str] = []
    assert smollm2_shell.bootstrap_smollm2_shell(made, 4, again.append) == made and "there already" in again[0]


def test_it_learns_the_agents_tokens_alone_as_a_rollout_would_have_them(base: Path) -> None:
    template = Template.load(str(base))
    messages = draw_transcript(random.Random(1), 0.0)
    ids, mask = smollm2_shell.encode(template, messages)
    assert ids == template._render(messages, (), generate=False)[: len(ids)]
    learnt = template.text([token for token, own in zip(ids, mask, strict=True) if own])
    assert learnt == "".join(message["content"] for message in messages if message["role"] == "assistant")
