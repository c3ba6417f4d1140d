"""Admission: starts groups while the pool has room, holds back when they keep failing, finds the silent ones, passes
over the tasks in quarantine and has their rows written.

The next tasks come from the run's order, or, where rows decide them, from its draws: as many at once as a wave has, so
that in sync mode they follow from what the groups before the wave made of theirs.

Part of TrainingRun, on its state. Groups are abandoned children: they outlive a continue-as-new of the run and report
by signal to its workflow id.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError, TemporalError
from temporalio.workflow import ParentClosePolicy

from workflows import policies
from workflows.attributes import started
from workflows.contracts import (
    ClosedGroupsInput,
    ClosedGroupsOutput,
    DrawTasksInput,
    DrawTasksOutput,
    FailureType,
    GroupInput,
    GroupResult,
    PickTasksInput,
    PickTasksOutput,
    QuarantineInput,
    Queue,
    Split,
    TaskRef,
    derive_seed,
)
from workflows.quarantine import MOST as MOST_QUARANTINED
from workflows.run_state import Carry

PROBE_EVERY = timedelta(seconds=20)
LARGEST_PAGE = 256
"""Tasks that are picked at once where whole pages of them are in quarantine."""
MOST_DRAWN = 200
"""Draws at once: with tasks from other tasksets among them they fit a message."""


@dataclass(frozen=True)
class Place:
    """The next place in the run's order of tasks. `draw`: its number where rows decide the order."""

    task: TaskRef
    draw: int | None = None
    passed_over: bool = False


class Admission:
    """`task` is the loop; whoever waits for its work also watches whether it failed."""

    def __init__(self, run: str, carry: Carry) -> None:
        self._run, self._carry = run, carry
        self._places: list[Place] = []
        self._closed_down = False
        self._starting = False
        self._probe_due = True
        self._probe: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._loop())

    async def close_down(self) -> None:
        """No further group starts; returns when none is half started. Picked tasks are picked again from the cursor."""
        self._closed_down = True
        await workflow.wait_condition(lambda: not self._starting or self.task.done())
        self.task.cancel()

    def tasks_changed(self) -> None:
        """An operator added tasks or retired some: what is at hand is asked for again."""
        self._places.clear()

    async def _loop(self) -> None:
        carry, unwritten = self._carry, self._carry.quarantine.unwritten
        while True:
            await workflow.wait_condition(lambda: self._room() > 0 or bool(unwritten))
            if unwritten:
                await self._write_quarantined(unwritten[0])
                unwritten.pop(0)
            elif place := await self._next_place():
                self._starting = True
                number = carry.pool.admit(carry.rules)
                await self._start_group(number, place)
                self._starting = False
                if number in carry.pool.surplus:
                    # A batch was cut meanwhile, and there was nobody yet to be told.
                    await end_surplus(self._run, [number])

    async def _next_place(self) -> Place | None:
        """The next place of the run's order whose task is not in quarantine; None where there is no room for it any
        more.

        Raises ApplicationError when all are in quarantine: the run ends."""
        carry, page = self._carry, self._carry.config.rollout.groups_per_batch
        while self._room() > 0:
            if why := carry.quarantine.exhausted(self._train_tasks):
                raise ApplicationError(why, type=FailureType.NO_TASKS, non_retryable=True)
            if not self._places:
                self._places = await self._more(page)
                page = min(2 * page, LARGEST_PAGE)
                continue
            carry.task_cursor += 1
            place = self._places.pop(0)
            if place.passed_over or carry.quarantine.holds(place.task.task_id):
                continue
            if carry.pool.degraded:
                self._probe_due = False
                self._probe = asyncio.create_task(self._probe_later())
            return place
        return None

    @property
    def _train_tasks(self) -> int:
        """As far as the state knows: of draws the rows say when there are none left, the state only when it is full."""
        carry = self._carry
        return max(carry.opened.train_tasks, MOST_QUARANTINED) if carry.draws_tasks else carry.opened.train_tasks

    async def _more(self, page: int) -> list[Place]:
        """The next places; none where an operator changed the tasks meanwhile. Raises ApplicationError where no task is
        left to draw."""
        carry, changes = self._carry, self._carry.task_changes
        before = changes.model_copy()
        if carry.draws_tasks:
            places = await self._draw(page)
        else:
            places = [Place(task) for task in await pick_tasks(carry, Split.TRAIN, carry.task_cursor, page)]
        return places if before == changes else []

    async def _draw(self, page: int) -> list[Place]:
        carry = self._carry
        wanted = max(1, carry.pool.wanted(carry.rules)) if carry.rules.waves else page
        count = min(wanted, MOST_DRAWN)
        out = await policies.call(
            "draw_tasks",
            DrawTasksInput(
                run=self._run,
                config=carry.config_json(),
                cursor=carry.task_cursor,
                count=count,
                policy_version=carry.policy_version,
                held=list(carry.quarantine.shown),
            ),
            DrawTasksOutput,
            policies.CHECK,
            summary=f"{count} draws from {carry.task_cursor}",
        )
        carry.tasks_by_difficulty = out.tasks
        if not out.draws:
            raise ApplicationError(out.why, type=FailureType.NO_TASKS, non_retryable=True)
        return [
            Place(
                TaskRef(taskset=draw.taskset or out.taskset, split=Split.TRAIN, task_id=draw.task_id),
                draw=draw.number,
                passed_over=draw.passed_over,
            )
            for draw in out.draws
        ]

    async def _write_quarantined(self, task_id: str) -> None:
        carry = self._carry
        why = carry.quarantine.tasks[task_id]
        await policies.call(
            "record_quarantine",
            QuarantineInput(
                run=self._run,
                task=TaskRef(taskset=carry.config.taskset, split=Split.TRAIN, task_id=task_id),
                why=why,
                since=workflow.now().timestamp(),
            ),
            type(None),
            policies.LINEAGE,
            summary=f"{task_id} is admitted no more: {why}",
        )

    def _room(self) -> int:
        carry = self._carry
        if carry.paused or self._closed_down or not carry.wants_groups:
            return 0
        if not carry.pool.degraded:
            return carry.pool.admissible(carry.rules)
        return carry.pool.admissible(carry.rules, at_most=1) if self._probe_due else 0

    async def _probe_later(self) -> None:
        await workflow.sleep(PROBE_EVERY)
        self._probe_due = True

    async def _start_group(self, number: int, place: Place) -> None:
        config, task = self._carry.config, place.task
        group = GroupInput(
            run=self._run,
            number=number,
            model=config.model,
            task=task,
            group_size=config.rollout.group_size,
            max_replacements=config.rollout.max_replacements,
            limits=self._carry.limits,
            seed=derive_seed(config.seed, "group", number),
            report_to=self._run,
            short_group=config.rollout.short_group,
            redundancy=config.rollout.group_redundancy,
            tells_left=True,
            draw=place.draw,
        )
        handle = await workflow.start_child_workflow(
            "Group",
            group,
            id=group.group_id,
            task_queue=Queue.EPISODES,
            task_timeout=policies.TASK_TIMEOUT,
            parent_close_policy=ParentClosePolicy.ABANDON,
            search_attributes=started(self._run, task.task_id),
            static_summary=f"{group.group_size} siblings of {task.task_id}",
        )
        # A group tells its end by signal; how its workflow closed is read from nowhere, and no failure of its own.
        handle.add_done_callback(lambda done: done.cancelled() or done.exception())


async def pick_tasks(carry: Carry, split: Split, cursor: int, count: int) -> list[TaskRef]:
    """`count` tasks from `cursor` in the run's order."""
    config = carry.config
    out = await policies.call(
        "pick_tasks",
        PickTasksInput(taskset=config.taskset, split=split, seed=config.seed, cursor=cursor, count=count),
        PickTasksOutput,
        policies.CHECK,
        summary=f"{count} {split} tasks from {cursor}",
    )
    return out.tasks


async def end_surplus(run: str, numbers: list[int]) -> None:
    """Tell groups that their batch was cut without them. One that has closed meanwhile reports so by itself."""

    async def end(number: int) -> None:
        with suppress(TemporalError):
            await workflow.get_external_workflow_handle(f"{run}/g{number}").signal("surplus")

    await asyncio.gather(*(end(number) for number in numbers))


async def lost_groups(run: str, carry: Carry) -> list[GroupResult]:
    """Groups that ended without a report, as when an operator terminated them; each closes without a valid sibling."""
    ids = {f"{run}/g{number}": number for number in carry.pool.in_flight}
    out = await policies.call(
        "closed_groups",
        ClosedGroupsInput(group_ids=sorted(ids)),
        ClosedGroupsOutput,
        policies.CHECK,
        summary=f"do {len(ids)} groups still live?",
    )
    return [lost_group(run, ids[group_id]) for group_id in out.closed]


def lost_group(run: str, number: int) -> GroupResult:
    return GroupResult(
        group_id=f"{run}/g{number}", number=number, task_id="", members=[], rewards=[], eligible=False, reason="lost"
    )
