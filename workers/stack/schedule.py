"""The schedule on which the janitor runs. Called by `prepare`, at every `ratchet up`."""

from __future__ import annotations

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


async def ensure_schedule(client: Client) -> None:
    """The schedule is there and as this code has it. One that an operator paused stays paused."""
    schedule = janitor_schedule()

    def update(found: ScheduleUpdateInput) -> ScheduleUpdate:
        schedule.state = found.description.schedule.state
        return ScheduleUpdate(schedule)

    try:
        await client.create_schedule(JANITOR, schedule)
    except ScheduleAlreadyRunningError:
        await client.get_schedule_handle(JANITOR).update(update)
