"""What a run asks the Temporal server about its own workflows. Called by its watchdog and its engine lease."""

from __future__ import annotations

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from workflows.contracts import ClosedGroupsInput, ClosedGroupsOutput


class RunControlActivities:
    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name="closed_groups")
    async def closed_groups(self, message: ClosedGroupsInput) -> ClosedGroupsOutput:
        """Those of the groups whose workflow does not run any more, or never did."""
        closed = [group_id for group_id in message.group_ids if not await self.lives(group_id)]
        return ClosedGroupsOutput(closed=closed)

    async def lives(self, workflow_id: str) -> bool:
        """Whether the workflow runs, in whichever of its executions."""
        try:
            description = await self._client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        return description.status is WorkflowExecutionStatus.RUNNING
