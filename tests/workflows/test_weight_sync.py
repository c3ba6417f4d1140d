"""How a run brings a version to its engines: in turns, again where nobody could load it, and to sleep between."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from tests.workflows.fakes import World
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import message_of, run_json, start
from workflows import weight_sync
from workflows.contracts import ApplyInput, FailureType, InFlight, KvPlan, PublishInput, RunState


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


def versions(world: World, name: str) -> list[int]:
    return [message.version for message in world.calls[name]]


async def test_engines_that_load_in_turns_leave_half_of_them_serving(temporal: Client, world: World) -> None:
    world.engines = [f"h-e{index}" for index in range(5)]
    loading, most = set[str](), 0

    async def applying(message: ApplyInput) -> None:
        nonlocal most
        loading.add(message.engine.name)
        most = max(most, len(loading))
        await asyncio.sleep(0.02)
        loading.discard(message.engine.name)

    world.applying = applying
    status = await (await start(temporal, run_json(training={"steps": 2}, publication={"rolling": True}))).result()
    assert (status.state, status.policy_version) == (RunState.FINISHED, 2)
    assert most == 2
    assert sorted(versions(world, "apply")) == sorted([0, 1, 2] * 5)


async def test_without_turns_all_engines_load_at_once(temporal: Client, world: World) -> None:
    world.engines = ["h-e0", "h-e1"]
    both, loading = asyncio.Event(), set[str]()

    async def applying(message: ApplyInput) -> None:
        loading.add(message.engine.name)
        if len(loading) == 2:
            both.set()
        await both.wait()

    world.applying = applying
    assert (await (await start(temporal, run_json(training={"steps": 1}))).result()).policy_version == 1


async def test_an_engine_that_does_not_come_in_its_turn_is_the_last_of_the_next_round(
    temporal: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "FIRST_TURN", timedelta(milliseconds=300))
    monkeypatch.setattr(weight_sync, "LATE", timedelta(milliseconds=300))
    world.engines = ["h-e0", "h-e1"]
    never = asyncio.Event()

    async def applying(message: ApplyInput) -> None:
        if message.engine.name == "h-e0" and message.version < 2:
            await never.wait()

    world.applying = applying
    status = await (await start(temporal, run_json(training={"steps": 2}, publication={"rolling": True}))).result()
    never.set()
    assert status.policy_version == 2
    asked = {version: [] for version in range(3)}  # type: dict[int, list[str]]
    for message in world.calls["apply"]:
        asked[message.version].append(message.engine.name)
    assert asked[0][0] == "h-e0"
    assert asked[1][0] == asked[2][0] == "h-e1", "who was late waits for the others, not they for it"


async def test_engines_that_load_in_turns_have_the_time_that_as_many_bytes_took_to_publish(
    temporal: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "FIRST_TURN", timedelta(milliseconds=50))
    world.engines = ["h-e0", "h-e1"]

    async def publishing(message: PublishInput) -> None:
        await asyncio.sleep(0.5)

    async def applying(message: ApplyInput) -> None:
        await asyncio.sleep(0.4)

    world.publishing, world.applying = publishing, applying
    config = run_json(training={"steps": 1}, publication={"rolling": True})
    assert (await (await start(temporal, config)).result()).policy_version == 1
    assert [(message.version, message.engine.name) for message in world.calls["apply"]] == [
        (version, name) for version in (0, 1) for name in world.engines
    ]


async def test_the_plan_of_the_run_goes_with_every_load(temporal: Client, world: World) -> None:
    plan = {"in_flight": "abort_continue", "kv": "salt"}
    await (await start(temporal, run_json(training={"steps": 1}, publication=plan))).result()
    assert {(message.in_flight, message.kv) for message in world.calls["apply"]} == {
        (InFlight.ABORT_CONTINUE, KvPlan.SALT)
    }


@pytest.mark.parametrize("channel", ["direct", "s3"])
async def test_what_no_engine_could_load_is_published_again_which_makes_up_for_what_is_damaged(
    temporal: Client, world: World, channel: str
) -> None:
    failing = {1}

    async def applying(message: ApplyInput) -> None:
        if message.version in failing:
            failing.clear()
            raise ApplicationError("the trainer is gone", type=FailureType.ENGINE, non_retryable=True)

    world.applying = applying
    changes = {"weight_channel": channel, "training": {"steps": 1}}
    assert (await (await start(temporal, run_json(**changes))).result()).policy_version == 1
    assert [(message.version, message.again) for message in world.calls["publish"]] == [
        (0, False),
        (1, False),
        (1, True),
    ]


async def test_engines_that_take_turns_with_the_trainer_rest_before_each_update(temporal: Client, world: World) -> None:
    changes = {"weight_channel": "colocated", "mode": "sync", "training": {"steps": 2}}
    await (await start(temporal, run_json(**changes))).result()
    assert len(world.calls["rest"]) == 2
    assert versions(world, "apply") == [0, 1, 2]


async def test_engines_rest_in_no_other_channel(temporal: Client, world: World) -> None:
    await (await start(temporal, run_json(mode="sync", training={"steps": 1}))).result()
    assert not world.calls["rest"]


async def test_colocated_engines_need_a_run_in_which_nothing_is_made_during_the_update(
    temporal: Client, world: World
) -> None:
    handle = await start(temporal, run_json(weight_channel="colocated", mode="async"))
    kind, message = await message_of(handle)
    assert kind == FailureType.INVALID_CONFIG and "weight_channel colocated needs mode sync" in message
