"""SandboxHost: a word to one sandbox host and its answer: to drain, to take sandboxes again, or how it stands.

A workflow, so that whoever has a client of the stack's server reaches a host that only polls its own queue, and so that
the server's history says who drained it and when. Started by `ratchet drain` and `ratchet status`.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.contracts import HostInput, HostStatus, sandbox_queue


@workflow.defn(name="SandboxHost")
class SandboxHost:
    @workflow.run
    async def run(self, input: HostInput) -> HostStatus:
        """Fails with the activity's failure where the host takes nothing up."""
        summary = {True: "drain", False: "take sandboxes again", None: "how it stands"}[input.drain]
        queue = sandbox_queue(input.host)
        status = await policies.call("host", input, HostStatus, policies.HOST, summary=summary, queue=queue)
        workflow.set_current_details(f"**{status.host}**: {status.words}")
        return status
