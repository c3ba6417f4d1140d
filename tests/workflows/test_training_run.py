"""TrainingRun over a real Temporal server, with scripted activities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.worker import Replayer

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from workers.temporal import plugin
from workflows.contracts import FailureType, GroupResult, Queue, RunState, RunStatus
from workflows.episode import Episode
from workflows.evaluation import Evaluation
from workflows.group import Group
from workflows.training_run import TrainingRun


def run_json(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": "tiny",
        "mode": "sync",
        "rollout": {"group_size": 2, "groups_per_batch": 2, "max_turns": 3},
        "training": {"steps": 3},
        "evaluation": {"tasks": 2},
    }
    return config | changes


async def start(client: Client, config: Any, run: str | None = None) -> Any:
    return await client.start_workflow(
        "TrainingRun", config, id=run or unique("run"), task_queue=Queue.CONTROL, result_type=RunStatus
    )


async def message_of(handle: Any) -> tuple[str, str]:
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause.type or "", caught.value.cause.message


async def test_a_run_makes_its_steps_and_evaluates_before_and_after(temporal: Client, world: World) -> None:
    status = await (await start(temporal, run_json())).result()
    assert (status.state, status.step, status.policy_version) == (RunState.FINISHED, 3, 3)
    assert status.evaluation_first is not None and status.evaluation_last is not None
    assert [message.version for message in world.calls["apply"]] == [0, 1, 2, 3]
    assert [message.result.version for message in world.calls["record_evaluation"]] == [0, 3]
    closed = world.calls["close_run"][-1]
    assert (closed.state, closed.step, closed.policy_version) == (RunState.FINISHED, 3, 3)
    assert len(world.calls["sweep"]) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_continue_as_new_at_every_step_trains_each_group_once(temporal: Client, world: World, mode: str) -> None:
    run = unique("run")
    config = run_json(mode=mode, continue_as_new_every=1, training={"steps": 4})
    await (await start(temporal, config, run)).result()
    trained = [group.group_id for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert len(trained) == len(set(trained)) == 8
    assert [batch.step for batch in world.calls["reserve_batch"]] == [1, 2, 3, 4]
    executions = [execution async for execution in temporal.list_workflows(f"WorkflowId = '{run}'")]
    assert len(executions) == 4


async def test_async_generates_during_the_update_but_no_batch_lags_more_than_allowed(
    temporal: Client, world: World
) -> None:
    await (await start(temporal, run_json(mode="async", training={"steps": 4}))).result()
    for batch in world.calls["reserve_batch"]:
        for group in batch.groups:
            assert 0 <= batch.policy_version - group.min_version <= 1


async def test_sync_trains_only_on_tokens_of_the_version_it_updates(temporal: Client, world: World) -> None:
    await (await start(temporal, run_json())).result()
    for batch in world.calls["reserve_batch"]:
        assert {group.min_version for group in batch.groups} == {batch.policy_version}


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


async def test_cancel_ends_the_groups_sweeps_and_closes_the_row(temporal: Client, world: World) -> None:
    run = unique("run")
    world.gate = asyncio.Event()
    handle = await start(temporal, run_json(evaluation={"tasks": 0}), run)
    await eventually(lambda: len(world.calls["generate"]) >= 4)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), 30)
    assert isinstance(caught.value.cause, CancelledError)
    assert world.calls["close_run"][-1].state is RunState.CANCELLED
    assert len(world.calls["sweep"]) == 1
    acquired = {message.attempt_id for message in world.calls["acquire"]}
    assert acquired <= {message.attempt_id for message in world.calls["release"]}
    for number in (0, 1):
        assert (await temporal.get_workflow_handle(f"{run}/g{number}").describe()).status.name == "CANCELED"


async def test_pause_holds_admission_and_resume_goes_on(temporal: Client, world: World) -> None:
    handle = await start(temporal, run_json(evaluation={"tasks": 0}, training={"steps": 2}))
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
    await (await start(temporal, run_json(evaluation={"tasks": 0}, training={"steps": 2}))).result()
    trained = [group.number for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert trained and all(number % 2 == 0 for number in trained)


async def test_a_run_ends_with_a_plain_reason_when_nothing_is_left_to_teach(temporal: Client, world: World) -> None:
    world.reward = lambda message: 1.0
    status = await (await start(temporal, run_json(evaluation={"tasks": 0}))).result()
    assert status.state is RunState.FINISHED and status.step == 0
    assert "nothing left to teach" in status.reason


async def test_infrastructure_failures_are_replaced_and_stay_out_of_the_batch(temporal: Client, world: World) -> None:
    def lose_first_attempts(name: str, message: Any) -> None:
        if name == "act" and message.lease.attempt_id.endswith("e0/a0"):
            raise final(FailureType.SANDBOX)

    world.fail = lose_first_attempts
    await (await start(temporal, run_json(evaluation={"tasks": 0}, training={"steps": 1}))).result()
    batch = world.calls["reserve_batch"][0]
    members = [member for group in batch.groups for member in group.members]
    assert any(member.endswith("e0/a1") for member in members)
    assert not any(member.endswith("e0/a0") for member in members)


async def test_a_run_whose_groups_all_fail_is_degraded_and_says_why(temporal: Client, world: World) -> None:
    def lose_all(name: str, message: Any) -> None:
        if name == "acquire":
            raise final(FailureType.SANDBOX, "no daemon")

    world.fail = lose_all
    handle = await start(temporal, run_json(evaluation={"tasks": 0}, rollout={"group_size": 2, "groups_per_batch": 4}))
    async with asyncio.timeout(20):
        while (status := await handle.query("status", result_type=RunStatus)).state is not RunState.DEGRADED:
            await asyncio.sleep(0.05)
    assert "infra_failure" in status.reason
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 30)


async def test_a_report_that_arrives_twice_counts_once(temporal: Client, world: World) -> None:
    run = unique("run")
    handle = await start(temporal, run_json(evaluation={"tasks": 0}), run)
    await eventually(lambda: bool(world.calls["record_group"]))
    result: GroupResult = world.calls["record_group"][0]
    await handle.signal("group_done", result)
    await handle.result()
    trained = [group.group_id for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert len(trained) == len(set(trained))


async def test_every_history_replays_against_the_code(temporal: Client, world: World) -> None:
    run = unique("run")
    await (await start(temporal, run_json(continue_as_new_every=2), run)).result()
    replayer = Replayer(workflows=[TrainingRun, Group, Episode, Evaluation], plugins=[plugin()])
    count = 0
    async for execution in temporal.list_workflows(f"RatchetRun = '{run}'"):
        handle = temporal.get_workflow_handle(execution.id, run_id=execution.run_id)
        await replayer.replay_workflow(await handle.fetch_history())
        count += 1
    assert count >= 15


async def eventually(condition: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
