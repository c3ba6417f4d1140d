"""Between attempts the server keeps a cut failure, wrapped in one of its own: it names the ending all the same."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ServerError, TimeoutError
from temporalio.worker import Worker

from tests.workflows.conftest import temporal, unique
from workers.temporal import named
from workflows.contracts import StopReason
from workflows.errors import StorageError
from workflows.outcome import Boundary, stop_reason_of

__all__ = ["temporal"]


@activity.defn(name="refused_then_silent")
async def refused_then_silent() -> None:
    """The second attempt still runs when the bound on all of them is over."""
    if activity.info().attempt > 1:
        await asyncio.sleep(30)
    try:
        raise ValueError("UPDATE episodes SET " + "everything, " * 600)
    except ValueError as error:
        refused = StorageError("database is locked")
        refused.__cause__ = error
        raise named(refused) from refused


@workflow.defn(name="Refused", sandboxed=False)
class Refused:
    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(
            "refused_then_silent",
            start_to_close_timeout=timedelta(seconds=20),
            schedule_to_close_timeout=timedelta(seconds=2),
            heartbeat_timeout=timedelta(seconds=10),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5)
            ),
        )


async def test_a_long_failure_before_an_attempt_that_runs_out_of_time_still_names_the_ending(temporal: Client) -> None:
    plain = await Client.connect(temporal.service_client.config.target_host)
    queue = unique("long")
    async with Worker(plain, task_queue=queue, workflows=[Refused], activities=[refused_then_silent]):
        with pytest.raises(WorkflowFailureError) as caught:
            await plain.execute_workflow("Refused", id=unique("long"), task_queue=queue)
    error = caught.value.cause
    assert isinstance(error, ActivityError) and isinstance(error.cause, TimeoutError)
    assert isinstance(error.cause.cause, ServerError)
    # Another boundary than the failure's own: it is not taken for a lost worker's.
    reason, why = stop_reason_of(error, Boundary.SANDBOX)
    assert (reason, "database is locked" in why) == (StopReason.STORAGE_LOST, True)
