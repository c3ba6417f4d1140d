"""Admission: starts groups while the pool has room, holds back when they keep failing, finds the silent ones.

Part of TrainingRun, on its state. Groups are abandoned children: they outlive a continue-as-new of the run and report
by signal to its workflow id.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.workflow import ParentClosePolicy

from workflows import policies
from workflows.attributes import started
from workflows.contracts import (
    ClosedGroupsInput,
    ClosedGroupsOutput,
    GroupInput,
    GroupResult,
    PickTasksInput,
    PickTasksOutput,
    Queue,
    Split,
    TaskRef,
    derive_seed,
)
from workflows.run_state import Carry

GROUPS_TO_DEGRADE = 4
"""Groups in a row without a valid sibling that hold admission."""
PROBE_EVERY = timedelta(seconds=20)


class Admission:
    """`task` is the loop; whoever waits for its work also watches whether it failed."""

    def __init__(self, run: str, carry: Carry) -> None:
        self._run, self._carry = run, carry
        self._tasks: list[TaskRef] = []
        self._closed_down = False
        self._starting = False
        self._probe_due = True
        self._probe: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._loop())

    @property
    def degraded(self) -> bool:
        return self._carry.pool.without_valid >= GROUPS_TO_DEGRADE

    async def close_down(self) -> None:
        """No further group starts; returns when none is half started. Picked tasks are picked again from the cursor."""
        self._closed_down = True
        await workflow.wait_condition(lambda: not self._starting or self.task.done())
        self.task.cancel()

    async def _loop(self) -> None:
        carry = self._carry
        while True:
            await workflow.wait_condition(lambda: self._room() > 0)
            if not self._tasks:
                wanted = carry.config.rollout.groups_per_batch
                self._tasks = await pick_tasks(carry, Split.TRAIN, carry.task_cursor, wanted)
                continue
            if self.degraded:
                self._probe_due = False
                self._probe = asyncio.create_task(self._probe_later())
            carry.task_cursor += 1
            self._starting = True
            await self._start_group(carry.pool.admit(carry.rules), self._tasks.pop(0))
            self._starting = False

    def _room(self) -> int:
        carry = self._carry
        if carry.paused or self._closed_down:
            return 0
        if not self.degraded:
            return carry.pool.admissible(carry.rules)
        return carry.pool.admissible(carry.rules, at_most=1) if self._probe_due else 0

    async def _probe_later(self) -> None:
        await workflow.sleep(PROBE_EVERY)
        self._probe_due = True

    async def _start_group(self, number: int, task: TaskRef) -> None:
        config = self._carry.config
        group = GroupInput(
            run=self._run,
            number=number,
            model=config.model,
            task=task,
            group_size=config.rollout.group_size,
            max_replacements=config.rollout.max_replacements,
            limits=config.rollout.limits(),
            seed=derive_seed(config.seed, "group", number),
            report_to=self._run,
        )
        handle = await workflow.start_child_workflow(
            "Group",
            group,
            id=group.group_id,
            task_queue=Queue.EPISODES,
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
