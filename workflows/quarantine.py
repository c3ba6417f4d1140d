"""Quarantine: tasks whose groups keep closing short, and those that an operator marked, are admitted no more. Part of
the run's state; called by it.

A short group (fewer valid siblings than `group_size`) speaks against its task only if other tasks do well meanwhile.
So the short groups in a row are held until some group closes whole: fewer than `GROUPS_TO_DEGRADE` of them then count
against their tasks; more of them in a row, of whichever tasks, were an outage and count against none. A whole group
clears its own task. Groups that were cancelled, lost or failed as workflows say nothing.

What an operator marked is held until it is released; its groups in flight end, and train nothing. Its rows are written
by who says so (`ratchet quarantine`), not by the run.
"""

from __future__ import annotations

from pydantic import BaseModel

from workflows.contracts import GroupResult, QuarantineOrder
from workflows.ready_pool import GROUPS_TO_DEGRADE

MOST = 300
"""Quarantined tasks above which no further one would be the task's own fault; bounds the state too."""


MOST_STRUCK = 100
"""Tasks with a strike that are remembered, the latest."""


class Quarantine(BaseModel):
    """By task id."""

    tasks: dict[str, str] = {}
    """Those in quarantine because of their groups, and why."""
    marked: dict[str, str] = {}
    """Those that an operator marked, and why."""
    unwritten: list[str] = []
    """Those of `tasks` whose row is not written yet."""
    strikes: dict[str, int] = {}
    """Short groups since the task's last whole one."""
    row: list[tuple[str, str]] = []
    """(task, group) of the short groups in a row that no whole group has ended yet; no more than matter."""

    @property
    def shown(self) -> dict[str, str]:
        """All in quarantine, and why."""
        return self.tasks | self.marked

    def holds(self, task_id: str) -> bool:
        """Whether the task is admitted no more."""
        return task_id in self.tasks or task_id in self.marked

    def heed(self, order: QuarantineOrder) -> None:
        """Take an operator's word in."""
        released = set(order.released)
        kept = {task_id: why for task_id, why in self.marked.items() if task_id not in released}
        self.marked = kept | order.tasks

    def note(self, result: GroupResult, *, after: int) -> None:
        """Take a closed group in. `after`: strikes that put a task into quarantine."""
        if result.short:
            if result.task_id not in self.tasks:
                self.row = [*self.row, (result.task_id, result.group_id)][:GROUPS_TO_DEGRADE]
        elif result.members:
            held, self.row = self.row, []
            if len(held) < GROUPS_TO_DEGRADE:
                for task_id, group_id in held:
                    if task_id != result.task_id:
                        self._strike(task_id, group_id, after)
            self.strikes.pop(result.task_id, None)

    def _strike(self, task_id: str, group_id: str, after: int) -> None:
        count = self.strikes.pop(task_id, 0) + 1
        if task_id in self.tasks:
            return
        if count < after:
            self.strikes[task_id] = count
            if len(self.strikes) > MOST_STRUCK:
                self.strikes.pop(next(iter(self.strikes)))
            return
        self.tasks[task_id] = f"{count} short group{'s' * (count > 1)} in a row, the last {group_id.rpartition('/')[2]}"
        self.unwritten.append(task_id)

    def exhausted(self, train_tasks: int) -> str:
        """Why no task can be admitted any more; empty while one can."""
        count = len(self.shown)
        if count < min(train_tasks, MOST):
            return ""
        first = "; ".join(f"{task_id}: {why}" for task_id, why in list(self.shown.items())[:3])
        marked = "an operator marked them, or " if self.marked else ""
        return (
            f"{count} of {train_tasks} train tasks are in quarantine, because {marked}their groups kept closing with"
            f" too few valid siblings ({first}): no task is left to admit"
        )
