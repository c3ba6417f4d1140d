"""TrainingRun where things keep failing: outages, tasks in quarantine, short groups, batches that teach nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, message_of, run_json, start
from workflows import admission
from workflows.config import RunConfig
from workflows.contracts import (
    AcquireInput,
    EngineInfo,
    FailureType,
    OpenRunOutput,
    Queue,
    RunState,
    RunStatus,
    UpdateInput,
    UpdateOutput,
)
from workflows.quarantine import Quarantine
from workflows.run_state import MAX_EMPTY_BATCHES, Carry, progress_markdown

PATIENCE_S = 120


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


class Outage:
    """While it lasts, no sandbox starts."""

    def __init__(self, world: World) -> None:
        self.lasts = True
        world.fail = self._fail

    def _fail(self, name: str, message: Any) -> None:
        if self.lasts and name == "acquire":
            raise final(FailureType.SANDBOX, "no daemon")


def lose(world: World, *, task: str, sibling: str) -> None:
    """No sandbox of the task's sibling ever starts."""

    def fail(name: str, message: Any) -> None:
        if isinstance(message, AcquireInput) and message.task.task_id == task and f"/{sibling}/" in message.attempt_id:
            raise final(FailureType.SANDBOX, "no such image")

    world.fail = fail


def small_run(**rollout: Any) -> dict[str, Any]:
    """Batches of one group of two; three groups without a signal would end it."""
    shape = {"group_size": 2, "groups_per_batch": 1, "refill": 1, "max_replacements": 0, "quarantine_after": 1}
    return run_json(rollout=shape | rollout, training={"steps": 2})


async def status_of(handle: Any) -> RunStatus:
    status: RunStatus = await handle.query("status", result_type=RunStatus)
    return status


async def reaches(handle: Any, state: RunState) -> RunStatus:
    async with asyncio.timeout(PATIENCE_S):
        while (status := await status_of(handle)).state is not state:
            await asyncio.sleep(0.05)
    return status


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROBE_EVERY", timedelta(milliseconds=100))


@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_outlasts_an_outage_says_so_in_its_row_and_resumes_when_a_probe_succeeds(
    temporal: Client, world: World, mode: str
) -> None:
    """More groups fail than may close for a batch in all the rounds that a run has."""
    outage, world.train_tasks = Outage(world), 2
    handle = await start(temporal, small_run() | {"mode": mode})
    degraded = await reaches(handle, RunState.DEGRADED)
    assert "closed without a valid sibling" in degraded.reason and "infra_failure" in degraded.reason
    assert "degraded: the last" in progress_markdown(degraded)
    await eventually(lambda: len(world.calls["record_group"]) > 4 * MAX_EMPTY_BATCHES, PATIENCE_S)
    held = await status_of(handle)
    assert held.state is RunState.DEGRADED and held.groups_in_flight <= 1
    outage.lasts = False
    finished = await asyncio.wait_for(handle.result(), PATIENCE_S)
    assert (finished.state, finished.step, finished.reason) == (RunState.FINISHED, 2, "")
    told = [(message.state, bool(message.reason)) for message in world.calls["record_progress"]]
    assert told[:3] == [(RunState.RUNNING, False), (RunState.DEGRADED, True), (RunState.RUNNING, False)]
    assert finished.quarantined == {} and not world.calls["record_quarantine"]


@pytest.mark.usefixtures("quick_probes")
async def test_an_outage_that_outgrows_a_history_crosses_continue_as_new(
    temporal: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(info: workflow.Info) -> bool:
        return info.get_current_history_length() > 60

    monkeypatch.setattr(workflow.Info, "is_continue_as_new_suggested", full)
    run, outage = unique("run"), Outage(world)
    handle = await start(temporal, small_run(), run)

    async def executions() -> int:
        return len([execution async for execution in temporal.list_workflows(f"WorkflowId = '{run}'")])

    async with asyncio.timeout(PATIENCE_S):
        while await executions() < 3:
            await asyncio.sleep(0.2)
    newest = temporal.get_workflow_handle(run)
    assert (await status_of(newest)).state is RunState.DEGRADED
    outage.lasts = False
    assert (await asyncio.wait_for(handle.result(), PATIENCE_S)).step == 2
    groups = [message.group_id for message in world.calls["record_group"]]
    assert len(groups) == len(set(groups))


async def test_a_task_that_keeps_failing_goes_into_quarantine_and_is_admitted_no_more(
    temporal: Client, world: World
) -> None:
    lose(world, task="count-0001", sibling="e0")
    world.train_tasks = 3
    config = small_run(groups_per_batch=2, refill=4, quarantine_after=2) | {"continue_as_new_every": 1}
    status = await (await start(temporal, config | {"training": {"steps": 5}})).result()
    assert (status.state, status.step) == (RunState.FINISHED, 5)
    assert list(status.quarantined) == ["count-0001"] and "2 short groups" in status.quarantined["count-0001"]
    assert status.short_groups == status.groups_dropped["short_group"] >= 2
    (written,) = world.calls["record_quarantine"]
    assert (written.task.task_id, written.why) == ("count-0001", status.quarantined["count-0001"])
    groups = [group.group_id for group in world.calls["record_group"] if group.task_id == "count-0001"]
    assert len(groups) >= 2 and written.why.endswith(f"the last {groups[-1].rpartition('/')[2]}")
    assert "count-0001 (2 short groups" in progress_markdown(status)


def carry_with(quarantined: range, *, train_tasks: int) -> Carry:
    return Carry(
        config=RunConfig.model_validate(small_run()),
        opened=OpenRunOutput(
            model="/m",
            train_tasks=train_tasks,
            held_out_tasks=9,
            engines=[EngineInfo(name="h-e0", host="h", url="http://x")],
        ),
        quarantine=Quarantine(tasks={f"count-{number:04d}": "why" for number in quarantined}),
    )


async def continued(client: Client, carry: Carry) -> Any:
    return await client.start_workflow(
        "TrainingRun", args=[None, carry], id=unique("run"), task_queue=Queue.CONTROL, result_type=RunStatus
    )


async def test_pages_of_tasks_in_quarantine_are_passed_over_in_a_few_looks(temporal: Client, world: World) -> None:
    world.train_tasks = 60
    handle = await continued(temporal, carry_with(range(59), train_tasks=60))
    assert (await asyncio.wait_for(handle.result(), PATIENCE_S)).step == 2
    assert {group.task_id for group in world.calls["record_group"]} == {"count-0059"}
    assert len(world.calls["pick_tasks"]) < 15


async def test_a_run_whose_tasks_are_all_in_quarantine_ends_with_a_plain_reason(temporal: Client, world: World) -> None:
    world.train_tasks = 4
    failure, message = await message_of(await continued(temporal, carry_with(range(4), train_tasks=4)))
    assert failure == FailureType.NO_TASKS
    assert "4 of 4 train tasks are in quarantine" in message and "no task is left to admit" in message
    closed = world.calls["close_run"][-1]
    assert (closed.state, closed.reason) == (RunState.FAILED, message)
    assert not world.calls["pick_tasks"]


@pytest.mark.parametrize("short_group", ["drop", "train"])
async def test_short_groups_train_only_where_the_run_says_so_and_their_share_is_told(
    temporal: Client, world: World, short_group: str
) -> None:
    """Of three siblings one is always lost in every second task; the other two differ."""
    lose(world, task="count-0001", sibling="e0")
    world.train_tasks = 2
    config = small_run(group_size=3, groups_per_batch=2, refill=4, quarantine_after=100, short_group=short_group)
    status = await (await start(temporal, config)).result()
    shares = {batch.step: [group.short for group in batch.groups] for batch in world.calls["reserve_batch"]}
    assert status.step == 2 and status.short_groups >= 2
    if short_group == "train":
        assert shares == {1: [False, True], 2: [False, True]} and status.short_share == 0.5
    else:
        assert shares == {1: [False, False], 2: [False, False]} and status.short_share == 0.0


def void(message: UpdateInput) -> UpdateOutput:
    why = "all 2 groups with a signal are beyond training.max_divergence 0.5"
    return UpdateOutput(step=message.step, checkpoint="", metrics={}, void=why, dropped={"beyond_divergence": 2})


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_batch_that_teaches_nothing_is_no_step_and_the_run_collects_another(
    temporal: Client, world: World, mode: str
) -> None:
    plain = world.answer
    world.answer = lambda message: void(message) if message.batch_id.endswith(("/b2", "/b2.1")) else plain(message)
    run = unique("run")
    status = await (await start(temporal, run_json(mode=mode), run)).result()
    assert (status.state, status.step, status.policy_version) == (RunState.FINISHED, 3, 3)
    assert status.groups_dropped["beyond_divergence"] == 4
    batches = world.calls["reserve_batch"]
    assert [batch.batch_id for batch in batches] == [f"{run}/{name}" for name in ("b1", "b2", "b2.1", "b2.2", "b3")]
    trained = [group.number for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 10
    assert [message.version for message in world.calls["publish"]] == [0, 1, 2, 3]
    assert len({batch.opened_at for batch in batches[1:4]}) == 1, "the wait counts from the last batch that trained"
    assert all(batch.opened_at <= batch.complete_at for batch in batches)


async def test_batches_that_teach_nothing_in_a_row_end_the_run_with_a_plain_reason(
    temporal: Client, world: World
) -> None:
    world.answer = void
    failure, message = await message_of(await start(temporal, run_json()))
    assert failure == FailureType.TRAINER
    assert message == (
        "3 batches in a row taught nothing, the last one because all 2 groups with a signal are beyond"
        " training.max_divergence 0.5"
    )
    assert len(world.calls["update"]) == MAX_EMPTY_BATCHES
