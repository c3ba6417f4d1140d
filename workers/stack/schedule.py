"""The schedule on which the janitor runs. Called by `prepare`, at every `ratchet up`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio.api.common.v1 import Payload
from temporalio.client import (
    Client,
    Schedule,
    ScheduleAction,
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
from workflows.errors import InvalidConfig

JANITOR = "ratchet-janitor"
"""Id of the schedule; its workflows are `ratchet-janitor-<time>`."""
EVERY = timedelta(minutes=5)


def janitor_action() -> ScheduleActionStartWorkflow:
    """One pass."""
    return ScheduleActionStartWorkflow(
        "Janitor",
        JanitorInput(),
        id=JANITOR,
        task_queue=Queue.CONTROL,
        execution_timeout=timedelta(minutes=30),
        static_summary="removes what no live attempt and no live run owns",
    )


def janitor_schedule() -> Schedule:
    """A pass every few minutes, one at a time; those that were missed are not made up for."""
    return Schedule(
        action=janitor_action(),
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
            same = found.spec.intervals == schedule.spec.intervals and found.policy == schedule.policy
            if same and await _shown(client, found.action) == await _shown(client, schedule.action):
                return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"schedule {JANITOR!r} does not take its update; delete it and run `ratchet up` again")


async def _shown(client: Client, action: ScheduleAction) -> list[object]:
    """What two actions are compared by: whom they start and how, and what that is told, seals opened.

    What is sealed with a key that is not here stays so, and is like nothing of ours."""
    assert isinstance(action, ScheduleActionStartWorkflow)
    converter, told = client.data_converter, [*action.args, action.static_summary]
    payloads = [value for value in told if isinstance(value, Payload)] or converter.payload_converter.to_payloads(told)
    if converter.payload_codec is not None:
        with suppress(InvalidConfig):
            payloads = list(await converter.payload_codec.decode(payloads))
    return [action.workflow, action.id, action.task_queue, action.execution_timeout, payloads]
