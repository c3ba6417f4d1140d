"""What TrainingRun makes of its input, of words, of reports and of groups that teach nothing, over a real server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, message_of, run_json, start
from workflows.config import parse_run_config
from workflows.contracts import (
    EngineInfo,
    FailureType,
    GroupResult,
    OpenRunOutput,
    Queue,
    RunState,
    RunStatus,
)
from workflows.run_state import Carry


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


@pytest.mark.parametrize(
    ("config", "field", "allowed"),
    [
        (run_json(speed=9), "speed", "taskset"),
        (run_json(rollout={"group_size": 1}), "rollout.group_size", "greater than or equal to 2"),
        (run_json(rollout={"temperature": 0}), "rollout.temperature", "greater than 0"),
        (run_json(rollout={"top_p": 0.9}), "rollout.top_p", "top_p = 1"),
        ({}, "model", "missing"),
        ([1, 2], "input", "JSON object"),
        ("text", "input", "JSON object"),
        (None, "input", "JSON object"),
    ],
)
async def test_an_invalid_configuration_ends_the_run_at_once_and_names_the_field(
    temporal: Client, world: World, config: Any, field: str, allowed: str
) -> None:
    failure, message = await message_of(await start(temporal, config))
    assert failure == FailureType.INVALID_CONFIG
    assert field in message and allowed in message
    assert not world.calls["open_run"]


async def test_what_the_opening_refuses_ends_the_run_at_once(temporal: Client, world: World) -> None:
    def refuse(name: str, message: Any) -> None:
        if name == "open_run":
            raise final(FailureType.INVALID_CONFIG, "model: no such folder")

    world.fail = refuse
    failure, message = await message_of(await start(temporal, run_json()))
    assert (failure, message) == (FailureType.INVALID_CONFIG, "model: no such folder")


async def test_a_word_said_between_two_executions_holds(temporal: Client, world: World) -> None:
    """The next one hears it before it has its state."""
    engines = [EngineInfo(name="h-e0", host="h", url="http://x")]
    opened = OpenRunOutput(model="/m", train_tasks=9, held_out_tasks=9, engines=engines)
    carry = Carry(config=parse_run_config(run_json()), opened=opened)
    handle = await temporal.start_workflow(
        "TrainingRun", args=[None, carry], id=unique("run"), task_queue=Queue.CONTROL, start_signal="pause"
    )
    status = await handle.query("status", result_type=RunStatus)
    assert status.state is RunState.PAUSED and not world.calls["generate"]
    await handle.signal("resume")
    await asyncio.wait_for(handle.result(), 30)


async def test_pause_holds_admission_and_resume_goes_on(temporal: Client, world: World) -> None:
    handle = await start(temporal, run_json(training={"steps": 2}))
    await handle.signal("pause")
    await eventually(lambda: bool(world.calls["record_progress"]))
    await asyncio.sleep(0.5)
    status = await handle.query("status", result_type=RunStatus)
    assert status.state is RunState.PAUSED and not world.calls["update"]
    await handle.signal("resume")
    assert (await asyncio.wait_for(handle.result(), 30)).step == 2


async def test_groups_without_signal_are_refilled_and_never_trained(temporal: Client, world: World) -> None:
    def reward(message: Any) -> float:
        group = int(message.lease.attempt_id.split("/g")[1].split("/")[0])
        return 1.0 if group % 2 else world_default(message)

    world_default, world.reward = world.reward, reward
    await (await start(temporal, run_json(training={"steps": 2}))).result()
    trained = [group.number for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert trained and all(number % 2 == 0 for number in trained)


async def test_a_run_ends_with_a_plain_reason_when_nothing_is_left_to_teach(temporal: Client, world: World) -> None:
    world.reward = lambda message: 1.0
    status = await (await start(temporal, run_json())).result()
    assert status.state is RunState.FINISHED and status.step == 0
    assert "nothing left to teach" in status.reason


async def test_a_run_whose_groups_all_fail_is_degraded_and_says_why(temporal: Client, world: World) -> None:
    def lose_all(name: str, message: Any) -> None:
        if name == "acquire":
            raise final(FailureType.SANDBOX, "no daemon")

    world.fail = lose_all
    handle = await start(temporal, run_json(rollout={"group_size": 2, "groups_per_batch": 4}))
    async with asyncio.timeout(90):
        while (status := await handle.query("status", result_type=RunStatus)).state is not RunState.DEGRADED:
            await asyncio.sleep(0.05)
    assert "infra_failure" in status.reason
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 30)


async def test_a_probe_that_an_operator_ends_is_found_out_though_nothing_else_is_in_flight(
    temporal: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report will ever wake the run: it must look again by itself."""
    monkeypatch.setattr("workflows.training_run.WATCHDOG_S", 1.0)
    monkeypatch.setattr("workflows.admission.PROBE_EVERY", timedelta(seconds=1))

    def lose_the_first(name: str, message: Any) -> None:
        if name == "acquire" and int(message.group_id.rpartition("/g")[2]) < 4:
            raise final(FailureType.SANDBOX, "no daemon")

    run, world.fail, ended = unique("run"), lose_the_first, set[str]()
    world.is_closed = ended.__contains__
    config = run_json(training={"steps": 1}, rollout={"groups_per_batch": 1}, mode="sync")
    handle = await start(temporal, config, run)
    await eventually(lambda: len(world.calls["record_group"]) == 4)
    world.gate = asyncio.Event()
    await eventually(lambda: any(message.attempt_id.startswith(f"{run}/g4/") for message in world.calls["generate"]))
    await temporal.get_workflow_handle(f"{run}/g4").terminate("by an operator")
    ended.add(f"{run}/g4")
    world.gate.set()
    status = await asyncio.wait_for(handle.result(), 90)
    assert status.step == 1 and status.groups_dropped["lost"] == 1


async def test_the_wait_for_a_batch_begins_where_admission_opens_and_ends_with_the_report_that_completes_it(
    temporal: Client, world: World
) -> None:
    await (await start(temporal, run_json())).result()
    batches = world.calls["reserve_batch"]
    closings = {group.number: group.closed_at for batch in batches for group in batch.groups}
    for batch in batches:
        last = max(closings[group.number] for group in batch.groups)
        assert batch.opened_at < last <= batch.complete_at
    for before, batch in pairwise(batches):
        assert batch.opened_at > before.complete_at, "sync: nothing is admitted during the update"


async def test_a_report_that_arrives_twice_counts_once(temporal: Client, world: World) -> None:
    run = unique("run")
    handle = await start(temporal, run_json(), run)
    await eventually(lambda: bool(world.calls["record_group"]))
    result: GroupResult = world.calls["record_group"][0]
    await handle.signal("group_done", result)
    await handle.result()
    trained = [group.number for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert len(trained) == len(set(trained))


@pytest.mark.parametrize("how", ["cancel", "terminate"])
async def test_a_run_goes_on_without_an_evaluation_that_an_operator_ended(
    temporal: Client, world: World, how: str
) -> None:
    """The first one; the last is made as ever."""
    run = unique("run")
    world.gate, world.gated = asyncio.Event(), lambda message: f"{run}/g" not in message.attempt_id
    handle = await start(temporal, run_json(training={"steps": 1}, evaluation={"tasks": 2}), run)
    await eventually(lambda: bool(world.calls["generate"]))
    await getattr(temporal.get_workflow_handle(f"{run}/eval-v0"), how)()
    await eventually(lambda: bool(world.calls["update"]))
    world.gate.set()
    status = await handle.result()
    assert (status.state, status.step) == (RunState.FINISHED, 1)
    assert [message.result.version for message in world.calls["record_evaluation"]] == [1]
    assert status.evaluation_first == status.evaluation_last is not None
