"""An external agent program as the Episode workflow uses it: one activity, which plays all of the attempt's turns.

Promises: what the program did comes back as an ending of the table; a worker that is lost with it costs the attempt,
since nothing can take a program up where another one died. Called by Episode.
"""

from __future__ import annotations

from temporalio.exceptions import ActivityError

from workflows import policies
from workflows.attributes import shorten
from workflows.contracts import EpisodeInput, RunAgentInput, RunAgentOutput, SandboxLease
from workflows.ending import ended_by
from workflows.outcome import Boundary


async def run_agent(input: EpisodeInput, lease: SandboxLease, started_at: float) -> RunAgentOutput:
    """Raises Ended where infrastructure ended it."""
    message = RunAgentInput(
        run=input.run,
        attempt_id=input.attempt_id,
        model=input.model,
        task=input.task,
        limits=input.limits,
        lease=lease,
        seed=input.seed,
        priority=input.priority,
        pinned_version=input.pinned_version,
        started_at=started_at,
    )
    program = input.limits.agent.command if input.limits.agent is not None else ""
    try:
        return await policies.call(
            "run_agent", message, RunAgentOutput, policies.AGENT, summary=f"agent program: {shorten(program)}"
        )
    except ActivityError as error:
        raise ended_by(error, Boundary.SANDBOX) from error
