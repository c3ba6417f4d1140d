"""The tiny policy after a second supervised start, on what solves the tasks of a folder.

Owns `bootstrap_tiny_tasks`. The tiny policy knows the taskset `shell` and nothing else, so that on other tasks every
group would fail alike and teach nothing. Here it learns from the oracles of a folder's native training tasks, mistakes
among them, with the words of each task changed for others every time: it learns the trade and not the answers.
Promises: the same seed and folder give the same weights on the same machine; the folder appears whole, with what it was
made from in `provenance.json`. Called by the command line (`ratchet bootstrap tiny --tasks PATH`).
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasksets import open_taskset
from tasksets.base import Task
from tasksets.shell import WORDS
from workers.bootstrap.demos import transcript
from workers.bootstrap.smollm2 import finish
from workers.bootstrap.tiny import bootstrap_tiny, one_thread
from workers.bootstrap.warm_start import Phase, warm_start
from workflows.contracts import Split
from workflows.errors import InvalidConfig

PHASES = (
    Phase("tasks", 80, (0.6, 0.1), fault_rate=0.1, decision_weight=0.3),
    Phase("mistakes", 20, (0.1, 0.02), fault_rate=0.45),
)


def bootstrap_tiny_tasks(
    tasks: str, out: Path, seed: int = 0, progress: Callable[[str], None] = lambda line: None
) -> Path:
    """Make the policy in the folder `out` unless it is there, and `tiny` beside it; returns `out`.

    Raises InvalidConfig where the folder has no task to learn from: one that says what its oracle's commands show."""
    if (out / "provenance.json").is_file():
        progress(f"{out} is there already")
        return out
    taskset = open_taskset(tasks)
    solved = [task for task in map(taskset.load, taskset.ids(Split.TRAIN)) if _is_shown(task)]
    if not solved:
        raise InvalidConfig(f"{tasks}: no training task has oracle, oracle_observations and oracle_answer")
    base = bootstrap_tiny(out.parent / "tiny", seed, progress)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def draw(rng: random.Random, fault_rate: float) -> list[dict[str, str]]:
        return transcript(renamed(rng.choice(solved), rng), rng, fault_rate)

    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        making = Path(folder) / "policy"
        tokenizer.save_pretrained(making)
        with one_thread():
            loss = warm_start(model, tokenizer, seed, progress, phases=PHASES, draw=draw)
        model.save_pretrained(making)
        provenance = {
            "made_by": "workers.bootstrap.tiny_tasks",
            "base": json.loads((base / "provenance.json").read_text()),
            "tasks": [task.id for task in solved],
            "seed": seed,
            "phases": [dataclasses.asdict(phase) for phase in PHASES],
            "final_loss": round(loss, 4),
        }
        finish(making, out, provenance)
    progress(f"made {out} from {len(solved)} tasks")
    return out


def renamed(task: Task, rng: random.Random) -> Task:
    """The same with other words of the taskset `shell` for those of them that it says, alike everywhere."""
    others = dict(zip(WORDS, rng.sample(WORDS, len(WORDS)), strict=True))

    def change(text: str) -> str:
        return re.sub(r"[a-z]+", lambda match: others.get(match[0], match[0]), text)

    return task.model_copy(
        update={
            "instruction": change(task.instruction),
            "oracle": [change(command) for command in task.oracle],
            "oracle_observations": [change(text) for text in task.oracle_observations],
            "oracle_answer": change(task.oracle_answer),
        }
    )


def _is_shown(task: Task) -> bool:
    return bool(task.oracle_answer) and bool(task.oracle) and len(task.oracle) == len(task.oracle_observations)
