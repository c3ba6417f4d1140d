"""Group for very many episodes: a share of them is the real one, the others are told by one activity.

A run's name ends in `-1in<k>`: groups whose number is a multiple of k run the real Group with its real Episodes; each
other asks one activity for the rows of its whole group and reports as the real one does. So TrainingRun, its pool, its
history and the lineage database carry all episodes, and the Temporal server a known share. Registered under Group's
name by bench/simulated.py alone.
"""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import TemporalError

with workflow.unsafe.imports_passed_through():
    from contextlib import suppress

    from workflows import policies
    from workflows.contracts import GroupInput, GroupResult
    from workflows.group import Group

MARK = "-1in"
TELL = "tell_group"


def stride_of(run: str) -> int:
    """Of how many groups one is real. Example: 16 of `scale-65536-1in16`, 1 of a run without the mark."""
    _, mark, digits = run.rpartition(MARK)
    return int(digits) if mark and digits.isdecimal() else 1


@workflow.defn(name="Group")
class SampledGroup(Group):
    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        if input.number % stride_of(input.run) == 0:
            return await super().run(input)
        result = await policies.call(TELL, input, GroupResult, policies.LINEAGE, summary=f"{input.group_id} is told")
        with suppress(TemporalError):
            await workflow.get_external_workflow_handle(input.report_to).signal("group_done", result)
        return result
