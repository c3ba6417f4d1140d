"""A group without episodes: one activity says how it ended. For tests of what a run makes of many groups."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import FailureError, TemporalError

with workflow.unsafe.imports_passed_through():
    from workflows.contracts import GroupInput, GroupResult


@workflow.defn(name="Group")
class ScriptedGroup:
    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        try:
            result = await workflow.execute_activity(
                "play_group", input, result_type=GroupResult, start_to_close_timeout=timedelta(seconds=60)
            )
        except (asyncio.CancelledError, FailureError):
            ended = {"members": [], "rewards": [], "eligible": False, "reason": "cancelled"}
            ids = {"group_id": input.group_id, "number": input.number, "task_id": input.task.task_id}
            await self._report(input, GroupResult.model_validate(ended | ids))
            raise
        await self._report(input, result)
        return result

    async def _report(self, input: GroupInput, result: GroupResult) -> None:
        with suppress(TemporalError):
            await workflow.get_external_workflow_handle(input.report_to).signal("group_done", result)
