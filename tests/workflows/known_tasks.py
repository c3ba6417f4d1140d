"""A world of tasks whose difficulty is known: groups are scripted, while draws, changes and rows are the real ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.lineage.tasks import TaskActivities
from storage import queries
from storage.database import session
from storage.tables import Run
from tasksets import open_taskset, pick
from tests.workflows.fakes import World
from tests.workflows.scripted_group import ScriptedGroup
from workflows.contracts import (
    ChangeTasksInput,
    ChangeTasksOutput,
    DrawTasksInput,
    DrawTasksOutput,
    EngineInfo,
    EpisodeKind,
    EpisodeRecord,
    GroupInput,
    GroupResult,
    OpenRunInput,
    OpenRunOutput,
    Outcome,
    PickTasksInput,
    PickTasksOutput,
    Queue,
    Split,
    StopReason,
    derive_seed,
    engine_queue,
)
from workflows.registry import ON_CONTROL

Chance = Callable[[str, int], float]
"""Of passing a task under a policy version."""


def write_tasks(folder: Path, *names: str) -> str:
    """A native task file for each name; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.toml").write_text('kind = "k"\ninstruction = "i"\nsetup = "true"\ncheck = "exit 1"\n')
    return str(folder)


class KnownTasks(World):
    """Which siblings of a group pass follows from its number and its task alone, as in a run that is made again."""

    def __init__(self, database: Engine, folder: str, chance: Chance) -> None:
        super().__init__()
        self.database, self.folder, self.chance = database, folder, chance
        self.rows = TaskActivities(database, open_taskset, time.time)
        self.drawn: list[tuple[DrawTasksInput, DrawTasksOutput]] = []
        self.admitted: list[str] = []

    @activity.defn
    async def open_run(self, message: OpenRunInput) -> OpenRunOutput:
        train = len(open_taskset(self.folder).ids(Split.TRAIN))
        values = {"state": "running", "mode": "sync", "seed": 0, "started_at": time.time()}
        with session(self.database) as opened:
            queries.upsert(opened, Run(id=message.run, config=message.config, train_tasks=train, **values))
        engines = [EngineInfo(name="h-e0", host="h", url="http://x")]
        return OpenRunOutput(model="/m", train_tasks=train, held_out_tasks=0, engines=engines)

    @activity.defn
    async def pick_tasks(self, message: PickTasksInput) -> PickTasksOutput:
        taskset = open_taskset(message.taskset)
        return PickTasksOutput(tasks=pick(taskset, message.split, message.seed, message.cursor, message.count))

    @activity.defn
    async def draw_tasks(self, message: DrawTasksInput) -> DrawTasksOutput:
        out = await self.rows.draw_tasks(message)
        self.drawn.append((message, out))
        return out

    @activity.defn
    async def change_tasks(self, message: ChangeTasksInput) -> ChangeTasksOutput:
        return await self.rows.change_tasks(message)

    @activity.defn
    async def play_group(self, message: GroupInput) -> GroupResult:
        self.admitted.append(message.task.task_id)
        chance, number = self.chance(message.task.task_id, self.version), message.number
        passed = [
            derive_seed(7, message.task.task_id, number, index) / 2**31 < chance for index in range(message.group_size)
        ]
        result = GroupResult(
            group_id=message.group_id,
            number=number,
            task_id=message.task.task_id,
            members=[f"{message.group_id}/e{index}/a0" for index in range(message.group_size)],
            rewards=[float(item) for item in passed],
            eligible=0 < sum(passed) < len(passed),
            reason="" if 0 < sum(passed) < len(passed) else "no_signal",
            min_version=self.version,
            max_version=self.version,
            outcomes={"model_success": sum(passed), "model_failure": len(passed) - sum(passed)},
            started_at=time.time(),
            closed_at=time.time(),
            draw=message.draw,
        )
        with session(self.database) as opened:
            for index, attempt_id in enumerate(result.members):
                queries.put_episode(opened, record=self._episode(message, attempt_id, passed[index]))
            queries.put_group(opened, run=message.run, result=result)
        return result

    def _episode(self, message: GroupInput, attempt_id: str, passed: bool) -> EpisodeRecord:
        return EpisodeRecord(
            attempt_id=attempt_id,
            episode_id=attempt_id.rpartition("/")[0],
            group_id=message.group_id,
            run=message.run,
            kind=EpisodeKind.TRAIN,
            task=message.task,
            attempt=0,
            outcome=Outcome.MODEL_SUCCESS if passed else Outcome.MODEL_FAILURE,
            stop_reason=StopReason.FINISHED,
            reward=float(passed),
            min_version=self.version,
            max_version=self.version,
        )


@asynccontextmanager
async def serving(client: Client, world: KnownTasks) -> AsyncIterator[KnownTasks]:
    """Workers on all the queues that a run of scripted groups needs."""
    options: dict[str, Any] = {"activities": world.activities, "workflow_runner": UnsandboxedWorkflowRunner()}
    async with (
        Worker(client, task_queue=Queue.CONTROL, workflows=ON_CONTROL, **options),
        Worker(client, task_queue=Queue.EPISODES, workflows=[ScriptedGroup], **options),
        Worker(client, task_queue=Queue.TRAINING, **options),
        Worker(client, task_queue=engine_queue("h"), **options),
    ):
        yield world
