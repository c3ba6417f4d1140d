"""TrainingRun where an operator marks rewards as wrong: tasks are admitted no more, and groups leave the pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from temporalio.client import Client

from tests.workflows.conftest import unique
from tests.workflows.fakes import World
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, message_of, run_json, start
from workers.quarantine_cli import tell
from workers.settings import Settings
from workflows.config import RunConfig
from workflows.contracts import (
    FailureType,
    GroupResult,
    OpenRunOutput,
    QuarantineOrder,
    Queue,
    RunState,
    RunStatus,
)
from workflows.run_state import Carry, progress_markdown

MARKED = "count-0001"
WRONG = QuarantineOrder(tasks={MARKED: "the verifier takes an empty file"})


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


def config(steps: int, **changes: Any) -> dict[str, Any]:
    rollout = {"group_size": 2, "groups_per_batch": 1, "refill": 4}
    return run_json(rollout=rollout, training={"steps": steps}, **changes)


def settings_of(client: Client) -> Settings:
    return Settings(temporal_address=client.service_client.config.target_host, temporal_namespace=client.namespace)


def trained_tasks(world: World) -> list[str]:
    """The task of each group that was in a batch, in the order of the batches."""
    tasks = {result.number: result.task_id for result in world.calls["record_group"]}
    return [tasks[group.number] for batch in world.calls["reserve_batch"] for group in batch.groups]


async def test_a_marked_task_is_admitted_no_more_and_its_group_in_flight_trains_nothing(
    temporal: Client, world: World
) -> None:
    """Of four tasks in turn the second is held at its gate until it is marked, as `ratchet quarantine` marks it; every
    second step begins another execution."""
    run = unique("run")
    world.train_tasks, world.gate = 4, asyncio.Event()
    world.gated = lambda message: message.task.task_id == MARKED
    handle = await start(temporal, config(5, continue_as_new_every=2), run)
    await eventually(lambda: any(message.task.task_id == MARKED for message in world.calls["generate"]))
    for _ in range(2):
        assert await tell(settings_of(temporal), {run: (WRONG, ""), "gone": (WRONG, "")}) == {
            run: "",
            "gone": f"its workflow does not run in {temporal.namespace}",
        }
    world.gate.set()
    status = await asyncio.wait_for(handle.result(), 120)
    assert (status.state, status.step) == (RunState.FINISHED, 5)
    assert status.quarantined == WRONG.tasks and status.groups_dropped["quarantined"] == 1
    begun = Counter(result.task_id for result in world.calls["record_group"])
    assert begun[MARKED] == 1 and MARKED not in trained_tasks(world)
    assert not world.calls["record_quarantine"], "the row is written by who says so"
    assert f"{MARKED} (the verifier takes an empty file)" in progress_markdown(status)
    told = [number for batch in world.calls["reserve_batch"] for number in batch.dropped.get("quarantined", [])]
    assert len(told) == 1, "its group's row is told once"


async def test_a_task_whose_mark_is_undone_is_admitted_again(temporal: Client, world: World) -> None:
    run = unique("run")
    world.train_tasks, world.gate = 2, asyncio.Event()
    handle = await start(temporal, config(4), run)
    await eventually(lambda: bool(world.calls["generate"]))
    await handle.signal("quarantine", WRONG)
    await handle.signal("quarantine", QuarantineOrder(released=[MARKED, "count-0000"]))
    world.gate.set()
    status = await asyncio.wait_for(handle.result(), 120)
    assert status.step == 4 and status.quarantined == {}
    assert trained_tasks(world) == ["count-0000", MARKED] * 2


async def test_a_word_that_comes_before_the_run_is_open_holds(temporal: Client, world: World) -> None:
    world.train_tasks = 3
    handle = await temporal.start_workflow(
        "TrainingRun",
        config(4),
        id=unique("run"),
        task_queue=Queue.CONTROL,
        result_type=RunStatus,
        start_signal="quarantine",
        start_signal_args=[WRONG],
    )
    assert (await asyncio.wait_for(handle.result(), 120)).step == 4
    assert MARKED not in {result.task_id for result in world.calls["record_group"]}


async def test_a_run_whose_tasks_are_all_marked_ends_and_says_who_did_it(temporal: Client, world: World) -> None:
    world.train_tasks, world.gate = 2, asyncio.Event()
    handle = await start(temporal, config(4))
    await eventually(lambda: bool(world.calls["generate"]))
    await handle.signal("quarantine", QuarantineOrder(tasks={"count-0000": "wrong", MARKED: "wrong too"}))
    world.gate.set()
    failure, message = await message_of(handle)
    assert failure == FailureType.NO_TASKS
    assert "2 of 2 train tasks are in quarantine, because an operator marked them" in message


async def test_a_batch_that_the_rows_leave_nothing_of_makes_no_step_and_the_run_collects_another(
    temporal: Client, world: World
) -> None:
    """The mark came when nobody could tell the run."""
    run = unique("run")
    world.barred = lambda message: "all its 1 groups are in quarantine" if message.batch_id == f"{run}/b1" else ""
    status = await asyncio.wait_for((await start(temporal, config(2), run)).result(), 120)
    assert (status.state, status.step) == (RunState.FINISHED, 2) and status.groups_dropped == {"quarantined": 1}
    assert [batch.batch_id for batch in world.calls["reserve_batch"]] == [f"{run}/b1", f"{run}/b1.1", f"{run}/b2"]
    assert [update.batch_id for update in world.calls["update"]] == [f"{run}/b1.1", f"{run}/b2"]


def test_closed_groups_that_a_word_names_leave_the_pool_and_those_of_a_cut_batch_stay() -> None:
    opened = OpenRunOutput(model="/m", train_tasks=9, held_out_tasks=9, engines=[])
    carry = Carry(config=RunConfig.model_validate(config(5, mode="async")), opened=opened)
    for number in range(3):
        carry.pool.admit(carry.rules)
        carry.close(closed(number), now=1.0)
    carry.pool.cut(carry.rules)
    carry.heed(QuarantineOrder(groups=[0, 1, 7]), now=2.0)
    assert [group.number for group in carry.pool.ready] == [2] and carry.pool.reserved == 1
    assert carry.pool.dropped == {"quarantined": 1} and carry.pool.take_untold() == {"quarantined": [1]}


def closed(number: int) -> GroupResult:
    group = f"r/g{number}"
    return GroupResult(
        group_id=group,
        number=number,
        task_id=f"count-{number:04d}",
        members=[f"{group}/e0/a0", f"{group}/e1/a0"],
        rewards=[1.0, 0.0],
        eligible=True,
        min_version=0,
    )
