"""One world: the real Episode workflow with real activities, on a task queue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine
from sqlmodel import Session, select
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Worker

from activities.generation.activities import GenerationActivities
from activities.generation.routing import EnginePool
from activities.lineage.activities import LineageActivities
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Episode as EpisodeRow
from storage.tables import Turn
from tasksets.base import Task
from tests.storage import rows as made
from tests.workflows.conftest import unique
from workers.parts import methods
from workflows.contracts import (
    EngineInfo,
    EpisodeInput,
    EpisodeKind,
    EpisodeSummary,
    Outcome,
    RolloutLimits,
    Split,
    StopReason,
    TaskRef,
)
from workflows.episode import Episode

RUN = "outcomes"
LABEL = f"{RUN}:3"
FAILURE_REWARD = -1.0
SOLVE = "cat /data/word > out"
PLUM = {
    "kind": "row",
    "setup": "echo plum > /data/word",
    "check": '[ -e /work/broken ] && exit 7; [ "$(cat /work/out)" = plum ]',
    "oracle": [SOLVE],
    "oracle_answer": "done",
}


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


DONE = "Answer: done"


@dataclass(frozen=True)
class Row:
    """One row of the table: what the agent says, and what must come of it."""

    id: str
    says: Sequence[str]
    stop_reason: StopReason
    outcome: Outcome
    reward: float | None
    task: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    tampered: bool = False
    why: str = ""
    """What the record's sentence holds."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    """What the record's evidence holds, among other things."""
    recorded: bool = True
    """False where the database itself is gone."""

    def limit(self) -> RolloutLimits:
        values: dict[str, Any] = {
            "temperature": 1.0,
            "max_turns": 4,
            "max_tokens_per_turn": 512,
            "max_tokens": 2048,
            "context_length": 4096,
            "step_timeout_s": 8,
            "time_budget_s": 20,
            "max_output_chars": 300,
            "malformed_reminders": 1,
            "failure_reward": FAILURE_REWARD,
        }
        return RolloutLimits(**(values | dict(self.limits)))


class Rows:
    """The rows as a taskset."""

    name = "rows"

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.id: row for row in rows}

    def ids(self, split: Split) -> list[str]:
        return list(self._rows)

    def load(self, task_id: str) -> Task:
        return Task(**({"id": task_id, "instruction": f"Row {task_id}."} | PLUM | dict(self._rows[task_id].task)))


@dataclass(frozen=True)
class Ending:
    """What came of a row: the workflow's summary, the database's row with its turns, containers that are left."""

    summary: EpisodeSummary
    recorded: EpisodeRow | None
    turns: list[Turn]
    left: set[str]
    failures: list[str]
    """What its activities failed of for good, from the workflow's history."""


@dataclass
class World:
    client: Client
    backend: DockerBackend
    database: Engine
    queue: str
    model: Path
    mend: Callable[[], None] = lambda: None
    """Puts right, after the row, what has to be there to look at what came of it."""

    async def play(self, row: Row, seed: int = 7, *, group_id: str = "") -> Ending:
        episode = EpisodeInput(
            run=RUN,
            group_id=group_id or f"{RUN}/{unique(row.id)}",
            index=0,
            attempt=0,
            kind=EpisodeKind.TRAIN,
            model=str(self.model),
            task=TaskRef(taskset="rows", split=Split.TRAIN, task_id=row.id),
            limits=row.limit(),
            seed=seed,
        )
        handle = await self.client.start_workflow(
            "Episode", episode, id=episode.attempt_id, task_queue=self.queue, result_type=EpisodeSummary
        )
        summary = await asyncio.wait_for(handle.result(), 600)
        # Before the mending: a record that waited for the database past its bound may be written as soon as it can.
        recorded, turns = await asyncio.to_thread(self._rows, episode.attempt_id)
        await asyncio.to_thread(self.mend)
        left = await self.containers(episode.attempt_id)
        return Ending(summary, recorded, turns, left, failures_in(await handle.fetch_history()))

    def _rows(self, attempt_id: str) -> tuple[EpisodeRow | None, list[Turn]]:
        # Without BEGIN IMMEDIATE, so that a lock on the database keeps nobody from reading.
        engine = create_engine(self.database.url)
        with Session(engine, expire_on_commit=False) as opened:
            turns = opened.exec(select(Turn).where(Turn.episode == attempt_id).order_by(Turn.turn)).all()  # type: ignore[arg-type]
            recorded = opened.get(EpisodeRow, attempt_id)
        engine.dispose()
        return recorded, list(turns)

    async def containers(self, attempt_id: str) -> set[str]:
        """Those that are still there of an attempt, once what is on its way out is out."""
        for _ in range(100):
            left = await self.backend._names({"ratchet.attempt": attempt_id})
            if not left:
                break
            await asyncio.sleep(0.1)
        return left

    async def sandbox_of(self, row: Row) -> str:
        """The row's container, as soon as it is there."""
        while True:
            if names := await self.backend._names({"ratchet.task": row.id, "ratchet.kind": "agent"}):
                return names.pop()
            await asyncio.sleep(0.1)


def failures_in(history: WorkflowHistory) -> list[str]:
    failed = ("activity_task_failed_event_attributes", "activity_task_timed_out_event_attributes")
    return [str(getattr(event, kind)) for event in history.events for kind in failed if event.HasField(kind)]


@asynccontextmanager
async def opened(
    client: Client,
    *,
    rows: Sequence[Row],
    engines: Sequence[EngineInfo],
    store: ObjectStore,
    database: Engine,
    backend: DockerBackend,
    model: Path,
) -> AsyncIterator[World]:
    """The world of these services, with the run's row in its database."""
    taskset = Rows(rows)
    with session(database) as writing:
        made.put_run(writing, RUN)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool(engines, wait_s=2))
        activities = [
            SandboxActivities(backend, lambda _: taskset, "here"),
            GenerationActivities(pool, store, lambda _: taskset),
            LineageActivities(database, store, engines=[], models_dir=model, open_taskset=lambda _: taskset),
        ]
        queue = unique("outcomes")
        worker = Worker(
            client,
            task_queue=queue,
            workflows=[Episode],
            activities=[method for instance in activities for method in methods(instance)],
            max_concurrent_activities=100,
            # The default is a digest of every loaded module, for which transformers would import all that it has.
            build_id="tests",
        )
        await stack.enter_async_context(worker)
        yield World(client, backend, database, queue, model)
