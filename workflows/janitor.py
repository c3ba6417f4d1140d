"""Janitor: one pass over all that dead runs left behind, started every few minutes by the schedule `ratchet-janitor`.

Owns the order of the parts and the report; each part decides for itself what nobody owns any more. Promises: a part
that fails or finds no worker stops no other and is named in the report, and a pass is bounded in time. It depends on no
run: it acts also when all of them are dead.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.contracts import JanitorInput, Queue, Swept
    from workflows.failures import sentence


@workflow.defn(name="Janitor")
class Janitor:
    @workflow.run
    async def run(self, limits: JanitorInput | None = None) -> Swept:
        input = limits or JanitorInput()
        parts = await asyncio.gather(
            self._part(input, "close_gone_runs", "close the rows of runs whose workflow is gone", Queue.CONTROL),
            self._part(input, "sweep_store", "uploads and objects of runs that are over", Queue.CONTROL),
            *(
                self._part(input, "sweep_host", f"sandboxes and files behind {queue}", queue)
                for queue in input.sandbox_queues
            ),
        )
        report = Swept.together(parts)
        workflow.set_current_details(markdown(report))
        return report

    async def _part(self, input: JanitorInput, name: str, summary: str, queue: str) -> Swept:
        try:
            return await policies.call(name, input, Swept, policies.JANITOR, summary=summary, queue=queue)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return Swept(errors=[f"{name} on {queue}: {sentence(error)}"])


def markdown(report: Swept) -> str:
    """The report as the Temporal UI shows it."""
    counts = ", ".join(f"{name} {count}" for name, count in report.removed.items()) or "nothing"
    lines = [f"removed: {counts}" + (f" ({report.bytes / 1e6:.1f} MB)" if report.bytes else "")]
    return "\n\n".join(lines + [f"**failed**: {error}" for error in report.errors])
