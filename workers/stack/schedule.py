"""The schedule on which the janitor runs. Called by `prepare`, at every `ratchet up`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)

from workflows.contracts import JanitorInput, Queue

JANITOR = "ratchet-janitor"
"""Id of the schedule; its workflows are `ratchet-janitor-<time>`."""
EVERY = timedelta(minutes=5)


def janitor_schedule() -> Schedule:
    """A pass every few minutes, one at a time; those that were missed are not made up for."""
    return Schedule(
        action=ScheduleActionStartWorkflow(
            "Janitor",
            JanitorInput(),
            id=JANITOR,
            task_queue=Queue.CONTROL,
            execution_timeout=timedelta(minutes=30),
            static_summary="removes what no live attempt and no live run owns",
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=EVERY)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(minutes=1)),
    )


UPDATES = 10
"""How often an update is made that the schedule does not show."""


async def ensure_schedule(client: Client) -> None:
    """The schedule is there and as this code has it. One that an operator paused stays paused.

    The server drops an update without a word where something else changed the schedule since it was read; so what is
    there afterwards is looked at.

    Raises:
        TimeoutError: after some seconds in which no update held.
    """
    schedule = janitor_schedule()

    def update(found: ScheduleUpdateInput) -> ScheduleUpdate:
        schedule.state = found.description.schedule.state
        return ScheduleUpdate(schedule)

    try:
        await client.create_schedule(JANITOR, schedule)
        return
    except ScheduleAlreadyRunningError:
        handle = client.get_schedule_handle(JANITOR)
    for _ in range(UPDATES):
        await handle.update(update)
        for _ in range(UPDATES):
            found = (await handle.describe()).schedule
            if found.spec.intervals == schedule.spec.intervals and found.policy == schedule.policy:
                return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"schedule {JANITOR!r} does not take its update; delete it and run `ratchet up` again")
