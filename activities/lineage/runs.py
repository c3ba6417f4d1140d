"""What the Temporal server is asked about workflows: by a run's watchdog, the engine lease and the janitor."""

from __future__ import annotations

from temporalio import activity
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from workflows.attributes import RUN
from workflows.contracts import ClosedGroupsInput, ClosedGroupsOutput


class RunControlActivities:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def namespace(self) -> str:
        """`<name>/<id>` of the client's namespace, unlike that of any other on any server.

        Raises RPCError where there is no such namespace or the server does not answer."""
        asked = DescribeNamespaceRequest(namespace=self._client.namespace)
        found = await self._client.workflow_service.describe_namespace(asked, retry=True)
        return f"{found.namespace_info.name}/{found.namespace_info.id}"

    @activity.defn(name="closed_groups")
    async def closed_groups(self, message: ClosedGroupsInput) -> ClosedGroupsOutput:
        """Those of the groups whose workflow does not run any more, or never did."""
        closed = [group_id for group_id in message.group_ids if not await self.lives(group_id)]
        return ClosedGroupsOutput(closed=closed)

    async def lives(self, workflow_id: str) -> bool:
        """Whether the workflow runs, in whichever of its executions."""
        return not await self.ending(workflow_id)

    async def ending(self, workflow_id: str) -> str:
        """How the workflow closed, e.g. `terminated`; `unknown` to the server; empty while it runs.

        Raises RPCError where the namespace is not there, which the server reports as it does a missing workflow."""
        try:
            description = await self._client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                await self.namespace()
                return "unknown"
            raise
        status = description.status
        return "" if status in (None, WorkflowExecutionStatus.RUNNING) else status.name.lower()

    async def is_over(self, run: str) -> bool:
        """Whether neither the run's workflow nor one that it started runs; its groups outlive it."""
        if await self.lives(run):
            return False
        value = run.replace("'", "''")
        found = await self._client.count_workflows(f"{RUN.name} = '{value}' AND ExecutionStatus = 'Running'")
        return found.count == 0
