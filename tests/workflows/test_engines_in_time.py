"""TrainingRun with several engines, of which some do not come."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from temporalio.client import Client, WorkflowFailureError

from tests.workflows.fakes import World
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, run_json, start
from workflows import weight_sync
from workflows.contracts import ApplyInput, RunState


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


async def test_an_engine_that_does_not_come_holds_nobody_up(
    temporal: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, one never answers for versions 1 and 2, and does for 3."""
    monkeypatch.setattr(weight_sync, "LATE", timedelta(milliseconds=200))
    world.engines = ["h-e0", "h-e1"]
    never = asyncio.Event()

    async def applying(message: ApplyInput) -> None:
        if message.engine.name == "h-e1" and message.version in (1, 2):
            await never.wait()

    world.applying = applying
    status = await (await start(temporal, run_json(training={"steps": 3}))).result()
    never.set()
    assert (status.state, status.step, status.policy_version) == (RunState.FINISHED, 3, 3)
    asked = Counter((message.engine.name, message.version) for message in world.calls["apply"])
    assert all(asked[name, version] >= 1 for name in world.engines for version in range(4))


async def test_a_run_whose_engines_are_all_silent_waits_for_the_first(temporal: Client, world: World) -> None:
    world.engines = ["h-e0", "h-e1"]
    comes = asyncio.Event()

    async def applying(message: ApplyInput) -> None:
        if message.version == 1:
            await comes.wait()

    world.applying = applying
    handle = await start(temporal, run_json(training={"steps": 1}))
    await eventually(lambda: sum(message.version == 1 for message in world.calls["apply"]) == 2)
    assert (await handle.query("status"))["policy_version"] == 0
    comes.set()
    assert (await handle.result()).policy_version == 1


async def test_a_run_that_is_cancelled_while_its_engines_load_ends_at_once(temporal: Client, world: World) -> None:
    world.engines = ["h-e0", "h-e1"]
    never = asyncio.Event()

    async def applying(message: ApplyInput) -> None:
        await never.wait()

    world.applying = applying
    handle = await start(temporal, run_json())
    await eventually(lambda: len(world.calls["apply"]) == 2)
    await handle.cancel()
    never.set()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert world.calls["close_run"][0].state == RunState.CANCELLED
