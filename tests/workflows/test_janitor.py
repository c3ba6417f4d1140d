"""The janitor's pass and its schedule over a real Temporal server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleHandle,
    ScheduleOverlapPolicy,
    ScheduleUpdate,
    ScheduleUpdateInput,
)

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from workers.codec import SealedPayloads
from workers.stack import schedule as schedule_module
from workers.stack.schedule import JANITOR, ensure_schedule, janitor_action
from workflows.contracts import FailureType, JanitorInput, Queue, Swept
from workflows.converter import data_converter, sealed_by


async def swept(client: Client, input: JanitorInput | None = None) -> tuple[Swept, Any]:
    handle = await client.start_workflow(
        "Janitor",
        args=[input] if input else [],
        id=unique("janitor"),
        task_queue=Queue.CONTROL,
        result_type=Swept,
    )
    return await asyncio.wait_for(handle.result(), 30), handle


async def test_a_pass_counts_what_its_parts_removed_and_shows_it(temporal: Client, world: World) -> None:
    report, handle = await swept(temporal)
    assert report.removed == {"containers/terminated": 2, "objects": 3, "runs_closed": 1, "uploads": 1}
    assert report.bytes == 5_000_000 and not report.errors
    details = str(await handle.query("__temporal_workflow_metadata"))
    assert "containers/terminated 2" in details and "5.0 MB" in details


@pytest.mark.parametrize("broken", ["close_gone_runs", "sweep_store", "sweep_host"])
async def test_a_part_that_fails_stops_no_other_and_is_named(temporal: Client, world: World, broken: str) -> None:
    def fail(name: str, message: Any) -> None:
        if name == broken:
            raise final(FailureType.STORAGE, "the store is away")

    world.fail = fail
    report, handle = await swept(temporal)
    assert len(report.removed) >= 2
    assert len(report.errors) == 1 and report.errors[0].startswith(broken) and "the store is away" in report.errors[0]
    assert "the store is away" in str(await handle.query("__temporal_workflow_metadata"))


async def test_every_host_is_swept_by_the_worker_of_its_own_queue(temporal: Client, world: World) -> None:
    await swept(temporal, JanitorInput(sandbox_queues=[Queue.EPISODES, Queue.TRAINING], sandbox_grace_s=7))
    assert [message.sandbox_grace_s for message in world.calls["sweep_host"]] == [7, 7]


@pytest_asyncio.fixture
async def schedule(temporal: Client) -> AsyncIterator[ScheduleHandle]:
    await ensure_schedule(temporal)
    handle = temporal.get_schedule_handle(JANITOR)
    yield handle
    await handle.delete()


async def test_the_schedule_makes_passes_that_never_overlap(
    temporal: Client, world: World, schedule: ScheduleHandle
) -> None:
    description = await schedule.describe()
    assert description.schedule.policy.overlap is ScheduleOverlapPolicy.SKIP
    assert description.schedule.policy.catchup_window == timedelta(minutes=1)
    await schedule.trigger()
    async with asyncio.timeout(20):
        while not world.calls["sweep_host"]:
            await asyncio.sleep(0.05)
    (message,) = world.calls["sweep_host"]
    assert message == JanitorInput()


async def test_the_schedule_is_brought_up_to_date_and_stays_paused(temporal: Client, schedule: ScheduleHandle) -> None:
    def other(found: ScheduleUpdateInput) -> ScheduleUpdate:
        theirs: Schedule = found.description.schedule
        theirs.spec.intervals[0].every = timedelta(hours=3)
        return ScheduleUpdate(theirs)

    async def changed() -> None:
        """The server drops an update that something else overtook."""
        while True:
            found = (await schedule.describe()).schedule
            if (found.spec.intervals[0].every, found.state.note) == (timedelta(hours=3), "maintenance"):
                return
            await schedule.update(other)
            await schedule.pause(note="maintenance")
            await asyncio.sleep(0.5)

    await asyncio.wait_for(changed(), 60)
    await ensure_schedule(temporal)
    found = (await schedule.describe()).schedule
    assert (found.spec.intervals[0].every, found.state.paused) == (schedule_module.EVERY, True)
    assert found.state.note == "maintenance"


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are asked for. The server drops the first."""
    made: list[Any] = []
    real = ScheduleHandle.update

    async def update(self: ScheduleHandle, updater: Any) -> None:
        made.append(updater)
        if len(made) > 1:
            await real(self, updater)

    monkeypatch.setattr(ScheduleHandle, "update", update)
    return made


async def test_an_update_of_the_schedule_that_the_server_dropped_is_made_again(
    temporal: Client, schedule: ScheduleHandle, updates: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_module, "EVERY", timedelta(hours=2))
    await ensure_schedule(temporal)
    assert len(updates) >= 2
    assert (await schedule.describe()).schedule.spec.intervals[0].every == timedelta(hours=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workflow", "Sweep"),
        ("args", [JanitorInput(sandbox_grace_s=7)]),
        ("task_queue", Queue.TRAINING),
        ("execution_timeout", timedelta(hours=1)),
        ("static_summary", "another word"),
    ],
)
async def test_a_dropped_update_is_seen_that_changes_no_more_than_what_a_pass_is(
    temporal: Client,
    schedule: ScheduleHandle,
    updates: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: Any,
) -> None:
    action = janitor_action()
    setattr(action, field, value)
    monkeypatch.setattr(schedule_module, "janitor_action", lambda: action)
    await ensure_schedule(temporal)
    assert len(updates) >= 2


async def test_a_schedule_is_brought_up_to_date_whose_words_are_sealed_with_a_key_that_is_here_or_gone(
    temporal: Client, schedule: ScheduleHandle
) -> None:
    for keys in (["old"], ["old"], ["new"], []):
        converter = sealed_by(SealedPayloads({key: key.ljust(32).encode() for key in keys})) if keys else data_converter
        await ensure_schedule(Client(temporal.service_client, data_converter=converter))
        action = (await schedule.describe()).schedule.action
        assert isinstance(action, ScheduleActionStartWorkflow)
        (payload,) = action.args
        assert payload.metadata.get("encryption-key-id", b"").decode() == "".join(keys)
