"""Tasks of the public formats as their authors wrote them, through the Episode workflow and real containers: an agent
that does what the solution does is paid 1, and one that does nothing 0.

Those of `examples/tasks`, or of the folder that RATCHET_PUBLIC_TASKS names. `ratchet tasks check` asks the same of the
activities alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.generation.activities import GenerationActivities
from activities.sandbox.activities import SandboxActivities
from storage.objects import ObjectStore
from tasksets import open_taskset
from tests.generation.policies import CHATML, make_tokenizer
from tests.generation.test_routing import pool_of
from tests.sandbox.machines import Ground
from tests.sandbox.rollout import Records, scripted_engine
from tests.workflows.conftest import temporal, unique
from tests.workflows.test_episode import limits
from workers.parts import methods
from workflows.contracts import EpisodeInput, EpisodeKind, EpisodeRecord, EpisodeSummary, Outcome, Split, TaskRef
from workflows.episode import Episode

__all__ = ["temporal"]

pytestmark = [pytest.mark.docker, pytest.mark.machines]

FOLDER = os.environ.get("RATCHET_PUBLIC_TASKS") or str(Path(__file__).parents[2] / "examples/tasks")
TASKSET = open_taskset(FOLDER)
TASKS = [
    (split, task_id) for split in Split for task_id in TASKSET.ids(split) if TASKSET.load(task_id).machine is not None
]
RUN = "public"
DONE = "Answer: done"


class World:
    """Where one task is attempted: an Episode per script of answers, of a worker of this process."""

    def __init__(self, client: Client, ground: Ground, store: ObjectStore, folder: Path, task: TaskRef) -> None:
        self._client, self._ground, self._store, self._folder, self._task = client, ground, store, folder, task
        make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(folder / "model")

    async def played(self, answers: list[str]) -> EpisodeRecord:
        generation = GenerationActivities(pool_of(scripted_engine(RUN, answers, 0)), self._store, open_taskset)
        parts: list[Any] = [
            SandboxActivities(self._ground.backend, open_taskset, "here"),
            generation,
            Records(self._folder / "record"),
        ]
        message = EpisodeInput(
            run=RUN,
            group_id=unique(f"{RUN}/g"),
            index=0,
            attempt=0,
            kind=EpisodeKind.TRAIN,
            model=str(self._folder / "model"),
            task=self._task,
            limits=limits(
                max_turns=len(answers),
                max_tokens=1 << 20,
                max_tokens_per_turn=1 << 18,
                context_length=1 << 21,
                step_timeout_s=300,
                time_budget_s=600,
            ),
            seed=1,
        )
        queue = unique("queue")
        activities = [method for part in parts for method in methods(part)]
        async with Worker(self._client, task_queue=queue, build_id="tests", workflows=[Episode], activities=activities):
            await self._client.execute_workflow(
                "Episode", message, id=message.attempt_id, task_queue=queue, result_type=EpisodeSummary
            )
        return EpisodeRecord.model_validate_json((self._folder / "record").read_text())


@pytest.mark.parametrize(("split", "task_id"), TASKS, ids=[task_id for _, task_id in TASKS])
async def test_what_the_solution_does_is_paid_one_and_nothing_is_paid_zero(
    split: Split, task_id: str, temporal: Client, ground: Ground, object_store: ObjectStore, tmp_path: Path
) -> None:
    task = TaskRef(taskset=FOLDER, split=split, task_id=task_id)
    world = World(temporal, ground, object_store, tmp_path, task)
    commands = [{"name": "bash", "arguments": {"command": command}} for command in TASKSET.load(task_id).oracle]
    try:
        nothing = await world.played([DONE])
        solved = await world.played([*(f"<tool_call>{json.dumps(command)}</tool_call>" for command in commands), DONE])
    finally:
        await ground.backend.sweep(RUN)
    assert (nothing.outcome, nothing.reward) == (Outcome.MODEL_FAILURE, 0.0), nothing.why
    assert (solved.outcome, solved.reward) == (Outcome.MODEL_SUCCESS, 1.0), solved.why
