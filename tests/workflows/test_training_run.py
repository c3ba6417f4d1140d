"""TrainingRun over a real Temporal server, with scripted activities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError
from temporalio.worker import Replayer

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from tests.workflows.runs import eventually, run_json, start
from workers.temporal import plugin
from workflows.contracts import FailureType, GenerateInput, KvPlan, RunState
from workflows.episode import Episode
from workflows.evaluation import Evaluation
from workflows.group import Group
from workflows.training_run import TrainingRun

EVALUATED = {"tasks": 2}


async def test_a_run_makes_its_steps_and_evaluates_before_and_after(temporal: Client, world: World) -> None:
    config = run_json(evaluation=EVALUATED, publication={"kv": "salt"}, training={"steps": 2})
    status = await (await start(temporal, config)).result()
    assert (status.state, status.step, status.policy_version) == (RunState.FINISHED, 2, 2)
    assert status.evaluation_first is not None and status.evaluation_last is not None
    assert [message.version for message in world.calls["apply"]] == [0, 1, 2]
    assert [message.result.version for message in world.calls["record_evaluation"]] == [0, 2]
    closed = world.calls["close_run"][-1]
    assert (closed.state, closed.step, closed.policy_version) == (RunState.FINISHED, 2, 2)
    assert len(world.calls["sweep"]) == 1
    assert {message.kv for message in world.calls["generate"]} == {KvPlan.SALT}, "of its evaluations too"


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_continue_as_new_at_every_step_trains_each_group_once(temporal: Client, world: World, mode: str) -> None:
    run = unique("run")
    config = run_json(mode=mode, continue_as_new_every=1, training={"steps": 3})
    await (await start(temporal, config, run)).result()
    trained = [group.number for batch in world.calls["reserve_batch"] for group in batch.groups]
    assert len(trained) == len(set(trained)) == 6
    assert [batch.step for batch in world.calls["reserve_batch"]] == [1, 2, 3]
    executions = [execution async for execution in temporal.list_workflows(f"WorkflowId = '{run}'")]
    assert len(executions) == 3


@pytest.mark.parametrize(("mode", "begun"), [("sync", 4), ("async", 6)])
async def test_no_group_begins_once_the_last_batch_is_cut_and_the_evaluation_has_the_engines_alone(
    temporal: Client, world: World, mode: str, begun: int
) -> None:
    """async, capacity 4: the second batch waits until two more are in flight, which are ended before the evaluation."""

    def note(name: str, message: Any) -> None:
        if name == "generate" and message.attempt_id.split("/")[1:2] == [f"g{begun - 1}"]:
            gate.set()
        if name == "pick_tasks" and message.split == "held_out" and world.calls["update"]:
            open_at_evaluation.append(len(world.calls["acquire"]) - len(world.calls["release"]))

    gate, open_at_evaluation = asyncio.Event(), list[int]()
    world.fail, world.gate = note, gate
    world.gated = lambda message: message.attempt_id.split("/")[1] in ("g2", "g3")
    await (await start(temporal, run_json(mode=mode, training={"steps": 2}, evaluation=EVALUATED))).result()
    groups = {message.attempt_id.split("/")[1] for message in world.calls["generate"]}
    assert {name for name in groups if name[0] == "g"} == {f"g{number}" for number in range(begun)}
    assert open_at_evaluation == [0]


async def test_cancel_ends_the_groups_sweeps_and_closes_the_row(temporal: Client, world: World) -> None:
    run = unique("run")
    world.gate = asyncio.Event()
    handle = await start(temporal, run_json(), run)
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


async def test_infrastructure_failures_are_replaced_and_stay_out_of_the_batch(temporal: Client, world: World) -> None:
    def lose_first_attempts(name: str, message: Any) -> None:
        if name == "act" and message.lease.attempt_id.endswith("e0/a0"):
            raise final(FailureType.SANDBOX)

    world.fail = lose_first_attempts
    await (await start(temporal, run_json(training={"steps": 1}))).result()
    numbers = {group.number for group in world.calls["reserve_batch"][0].groups}
    members = [member for group in world.calls["record_group"] if group.number in numbers for member in group.members]
    assert any(member.endswith("e0/a1") for member in members)
    assert not any(member.endswith("e0/a0") for member in members)


async def test_an_oversampled_run_cuts_its_batch_without_the_slowest_and_holds_them_against_nobody(
    temporal: Client, world: World
) -> None:
    """Groups 0, 5, 10 ... never answer: each batch is cut without them, and they end as surplus."""
    run = unique("run")
    world.gate = asyncio.Event()
    world.gated = lambda message: int(message.attempt_id.split("/g")[1].split("/")[0]) % 5 == 0
    rollout = {"group_size": 2, "groups_per_batch": 2, "oversample": 2.0}
    config = run_json(training={"steps": 2}, rollout=rollout, continue_as_new_every=1)
    status = await asyncio.wait_for((await start(temporal, config, run)).result(), 120)
    assert (status.state, status.step) == (RunState.FINISHED, 2)
    batches = world.calls["reserve_batch"]
    trained = [group.number for batch in batches for group in batch.groups]
    assert len(trained) == 4 and not any(number % 5 == 0 for number in trained)
    assert {group.min_version for batch in batches for group in batch.groups} <= {0, 1}
    assert all(group.min_version == batch.policy_version for batch in batches for group in batch.groups)
    assert status.groups_dropped["surplus"] >= 2 and "cancelled" not in status.outcomes
    assert status.outcomes.get("infra_failure", 0) == 0 and not status.quarantined and status.short_groups == 0
    closed = {result.number: result.reason for result in world.calls["record_group"]}
    assert closed[0] == "surplus" and not world.calls["record_quarantine"]


async def test_the_next_group_takes_the_places_of_siblings_that_have_ended(temporal: Client, world: World) -> None:
    """Room for seven episodes and groups of four: the last sibling of g0 goes on until g1 plays."""

    async def hold(message: GenerateInput) -> None:
        if "/g1/" in message.attempt_id:
            begun.set()
        if "/g0/e3/" in message.attempt_id:
            await begun.wait()

    begun = asyncio.Event()
    world.hold = hold
    rollout = {"group_size": 4, "groups_per_batch": 2}
    config = run_json(training={"steps": 1}, rollout=rollout, max_concurrent_episodes=7)
    status = await asyncio.wait_for((await start(temporal, config)).result(), 60)
    assert (status.state, status.step) == (RunState.FINISHED, 1)


async def test_every_history_replays_against_the_code(temporal: Client, world: World) -> None:
    run = unique("run")
    config = run_json(continue_as_new_every=1, training={"steps": 2}, evaluation=EVALUATED)
    await (await start(temporal, config, run)).result()
    replayer = Replayer(workflows=[TrainingRun, Group, Episode, Evaluation], plugins=[plugin()])
    count = 0
    async for execution in temporal.list_workflows(f"RatchetRun = '{run}'"):
        handle = temporal.get_workflow_handle(execution.id, run_id=execution.run_id)
        await replayer.replay_workflow(await handle.fetch_history())
        count += 1
    assert count >= 15
