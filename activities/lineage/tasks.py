"""The activities on a run's tasks: the next draws, and what an operator adds or retires while it runs.

Part of LineageActivities. A request to change tasks is checked against the taskset as its files are now and against the
rows, and is written whole or refused with every mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine
from sqlmodel import Session
from temporalio import activity

from storage import difficulty, queries
from storage.database import in_transaction
from storage.tables import ChangedTask
from tasksets import Taskset, first_cycle
from workflows.config import RunConfig
from workflows.contracts import (
    ChangeTasksInput,
    ChangeTasksOutput,
    Draw,
    DrawTasksInput,
    DrawTasksOutput,
    Split,
    TaskChange,
    TaskRef,
)
from workflows.errors import InvalidConfig

Result = TypeVar("Result")


class TaskActivities:
    def __init__(self, database: Engine, open_taskset: Callable[[str], Taskset], now: Callable[[], float]) -> None:
        self._database = database
        self._open_taskset = open_taskset
        self._now = now

    async def _write(self, work: Callable[[Session], Result]) -> Result:
        return await in_transaction(self._database, work)

    @activity.defn(name="draw_tasks")
    async def draw_tasks(self, message: DrawTasksInput) -> DrawTasksOutput:
        """The run's draws from `cursor` on, with their tasks' rows. A draw that was made before is what it was."""
        config = RunConfig.model_validate(message.config)

        def work(opened: Session) -> DrawTasksOutput:
            own = self._open_taskset(config.taskset)
            difficulty.alone(opened, run=message.run)
            drawn = difficulty.draw(
                opened,
                run=message.run,
                taskset=own.name,
                order=first_cycle(own, Split.TRAIN, config.seed),
                rules=config.sampling,
                seed=config.seed,
                cursor=message.cursor,
                count=message.count,
                held=message.held,
                policy_version=message.policy_version,
                now=self._now(),
            )
            for key in sorted({row.task for row in drawn.rows}):
                self._put_task(opened, key)
            draws = []
            for row in drawn.rows:
                taskset, _, task_id = row.task.rpartition("/")
                where = "" if taskset == own.name else taskset
                draws.append(Draw(row.number, task_id, where, row.difficulty, task_id in drawn.excluded))
            why = "" if draws else self._why_none(opened, message)
            return DrawTasksOutput(draws=draws, taskset=own.name, tasks=drawn.tasks, why=why)

        return await self._write(work)

    def _put_task(self, opened: Session, key: str) -> None:
        """The row of a train task."""
        name, _, task_id = key.rpartition("/")
        put_task(opened, self._open_taskset(name), TaskRef(taskset=name, split=Split.TRAIN, task_id=task_id))

    def _why_none(self, opened: Session, message: DrawTasksInput) -> str:
        retired = len(difficulty.members(opened, run=message.run).retired)
        return f"no task is left to draw: {retired} are retired, {len(message.held)} in quarantine"

    @activity.defn(name="change_tasks")
    async def change_tasks(self, message: ChangeTasksInput) -> ChangeTasksOutput:
        """Add tasks to the run, or retire them from it. Raises InvalidConfig with every reason not to."""

        def work(opened: Session) -> ChangeTasksOutput:
            difficulty.alone(opened, run=message.run)
            config = RunConfig.model_validate(message.config)
            own = self._open_taskset(config.taskset)
            made = difficulty.changes(opened, run=message.run)
            if not any(row.number == message.number for row in made):
                source = self._source(message, own)
                members = difficulty.members(opened, run=message.run)
                check = _not_to_add if message.change is TaskChange.ADDED else _not_to_retire
                mistakes = check(message.request.tasks, own, source, members)
                if mistakes:
                    raise InvalidConfig("\n".join(mistakes))
                self._put_changes(opened, message, own, source, members)
                opened.flush()
            train = _train(own, difficulty.members(opened, run=message.run))
            return ChangeTasksOutput(changed=message.request.tasks, tasks=len(train))

        return await self._write(work)

    def _source(self, message: ChangeTasksInput, own: Taskset) -> Taskset | None:
        """The taskset that the request names; None where it names none."""
        if not message.request.taskset:
            return None
        try:
            return self._open_taskset(message.request.taskset)
        except InvalidConfig as error:
            raise InvalidConfig(f"taskset: {error}") from error

    def _put_changes(
        self,
        opened: Session,
        message: ChangeTasksInput,
        own: Taskset,
        source: Taskset | None,
        members: difficulty.Members,
    ) -> None:
        adds = message.change is TaskChange.ADDED
        for position, task_id in enumerate(message.request.tasks):
            taskset = (source or own).name if adds else _taskset_of(task_id, own, members)
            opened.add(
                ChangedTask(
                    run=message.run,
                    number=message.number,
                    task=f"{taskset}/{task_id}",
                    position=position,
                    change=message.change,
                    why=message.request.why,
                    policy_version=message.policy_version,
                    at=message.at,
                )
            )
            if adds:
                self._put_task(opened, f"{taskset}/{task_id}")


def put_task(opened: Session, taskset: Taskset, ref: TaskRef) -> None:
    """The task's row."""
    task = taskset.load(ref.task_id)
    # A script hides how many commands it runs.
    known = task.machine is None and bool(task.oracle or task.oracle_answer)
    queries.put_task(
        opened,
        ref=ref,
        kind=task.kind,
        instruction=task.instruction,
        oracle_commands=len(task.oracle) if known else None,
    )


def _train(own: Taskset, members: difficulty.Members) -> set[str]:
    """Ids of the run's train tasks."""
    return (set(own.ids(Split.TRAIN)) | members.added.keys()) - members.retired


def _taskset_of(task_id: str, own: Taskset, members: difficulty.Members) -> str:
    """The taskset that a task of the run is from. What it was added from counts for those that its own has not."""
    return own.name if task_id in own.ids(Split.TRAIN) else members.added.get(task_id, own.name)


def _not_to_add(tasks: list[str], own: Taskset, source: Taskset | None, members: difficulty.Members) -> list[str]:
    taskset, mistakes = source or own, []
    train, held_out = _train(own, members), set(own.ids(Split.HELD_OUT)) | set(taskset.ids(Split.HELD_OUT))
    for task_id in tasks:
        if task_id in train:
            mistakes.append(
                f"{task_id}: the run has it already, from {_taskset_of(task_id, own, members)}; within a run an id"
                " names one task"
            )
        elif task_id in held_out:
            mistakes.append(f"{task_id}: it is held out for the evaluation, which would then measure what was trained")
        elif task_id in members.retired and taskset.name != (were := _taskset_of(task_id, own, members)):
            mistakes.append(
                f"{task_id}: wrong taskset: the one that was retired is from {were}, and within a run an id names one"
                f" task; name that taskset, not {taskset.name}"
            )
        else:
            mistakes += _unreadable(taskset, task_id)
    return mistakes


def _unreadable(taskset: Taskset, task_id: str) -> list[str]:
    try:
        taskset.load(task_id)
    except InvalidConfig as error:
        return [f"{task_id}: unknown task: {error}"]
    return []


def _not_to_retire(tasks: list[str], own: Taskset, source: Taskset | None, members: difficulty.Members) -> list[str]:
    train, mistakes = _train(own, members), []
    for task_id in tasks:
        if task_id in members.retired:
            mistakes.append(f"{task_id}: it is retired already")
        elif task_id not in train:
            mistakes.append(f"{task_id}: unknown task: the run has none of that id; it trains on {own.name}")
        elif source is not None and source.name != (is_from := _taskset_of(task_id, own, members)):
            mistakes.append(f"{task_id}: wrong taskset: it is from {is_from}, not from {source.name}")
    if not mistakes and train <= set(tasks):
        mistakes.append("no task would be left: add others first, or cancel the run")
    return mistakes
