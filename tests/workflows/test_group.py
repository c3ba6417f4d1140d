"""Group: what closes it, what short groups become, and an operator's hand on its attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, run_json, start
from tests.workflows.test_episode import TASK_REF, limits
from workflows.closing import close_group
from workflows.contracts import (
    EpisodeSummary,
    FailureType,
    GroupInput,
    GroupResult,
    Outcome,
    Queue,
    RunState,
    ShortGroup,
    StopReason,
)


def group_of(size: int, **changes: Any) -> GroupInput:
    values = {
        "run": unique("run"),
        "number": 3,
        "model": "/m",
        "task": TASK_REF,
        "group_size": size,
        "max_replacements": 1,
        "limits": limits(),
        "seed": 1,
        "report_to": "nobody",
    }
    return GroupInput(**(values | changes))


def sibling(index: int, reward: float | None, outcome: Outcome = Outcome.MODEL_FAILURE) -> EpisodeSummary:
    return EpisodeSummary(
        attempt_id=f"r/g3/e{index}/a0",
        outcome=outcome,
        stop_reason=StopReason.FINISHED,
        reward=reward,
        min_version=index,
        max_version=index,
        sampled_tokens=5,
        ended_at=0.0,
    )


@pytest.mark.parametrize(
    ("short_group", "rewards", "reason", "short"),
    [
        (ShortGroup.DROP, [1, 0, 0], "", False),
        (ShortGroup.DROP, [1, 1, 1], "no_signal", False),
        (ShortGroup.DROP, [1, 0], "short_group", True),
        (ShortGroup.TRAIN, [1, 0, 0], "", False),
        (ShortGroup.TRAIN, [1, 0], "", True),
        (ShortGroup.TRAIN, [1, 1], "no_signal", True),
        (ShortGroup.TRAIN, [1], "short_group", True),
        (ShortGroup.TRAIN, [], "short_group", True),
    ],
)
def test_a_short_group_is_dropped_or_trains_on_two_siblings_that_differ(
    short_group: ShortGroup, rewards: list[float], reason: str, short: bool
) -> None:
    siblings = [sibling(index, reward) for index, reward in enumerate(rewards)]
    result = close_group(group_of(3, short_group=short_group), siblings)
    assert (result.eligible, result.reason, result.short) == (not reason, reason, short)
    assert result.rewards == rewards and len(result.members) == len(rewards)


@given(st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats() | st.none()), max_size=12))
def test_only_valid_attempts_are_members_whatever_the_others_carry(items: list[tuple[Outcome, float | None]]) -> None:
    siblings = [sibling(index, reward, outcome) for index, (outcome, reward) in enumerate(items)]
    group = group_of(12, short_group=ShortGroup.TRAIN)
    valid = [item for item in siblings if item.valid and item.reward is not None]
    result = close_group(group, siblings)
    assert result.members == [item.attempt_id for item in valid]
    assert repr(result) == repr(close_group(group, valid)), "as if the others had never been"


async def started(client: Client, world: World, group: GroupInput) -> Any:
    """A group whose first attempts all wait for the engine."""
    world.gate = asyncio.Event()
    handle = await client.start_workflow(
        "Group", group, id=group.group_id, task_queue=Queue.EPISODES, result_type=GroupResult
    )
    await eventually(lambda: len(world.calls["generate"]) == group.group_size == len(world.calls["acquire"]))
    return handle


@pytest.mark.parametrize("how", ["cancel", "terminate"])
async def test_an_attempt_whose_workflow_an_operator_ends_is_counted_replaced_and_the_group_goes_on(
    temporal: Client, world: World, how: str
) -> None:
    group = group_of(2)
    handle = await started(temporal, world, group)
    attempt = temporal.get_workflow_handle(f"{group.group_id}/e0/a0")
    await (attempt.cancel() if how == "cancel" else attempt.terminate())
    await eventually(lambda: any(message.attempt_id.endswith("e0/a1") for message in world.calls["generate"]))
    assert world.gate is not None
    world.gate.set()
    result = await asyncio.wait_for(handle.result(), 30)
    assert result.eligible and result.replaced == 1
    assert result.members == [f"{group.group_id}/e0/a1", f"{group.group_id}/e1/a0"]
    assert result.outcomes == {"infra_failure": 1, "model_success": 1, "model_failure": 1}
    record = world.calls["record_episode"][0]
    assert (record.attempt_id, record.outcome) == (f"{group.group_id}/e0/a0", Outcome.INFRA_FAILURE)
    assert record.reward is None and f"an operator {how}" in record.why
    released = [message.attempt_id for message in world.calls["release"]]
    assert (f"{group.group_id}/e0/a0" in released) is (how == "cancel")


def held(world: World, *attempts: str) -> None:
    """Attempts whose id ends so wait for the gate; the others go on."""
    world.gate = asyncio.Event()
    world.gated = lambda message: message.attempt_id.endswith(attempts)


async def test_the_first_valid_siblings_are_the_group_and_spare_ones_end_as_surplus(
    temporal: Client, world: World
) -> None:
    group = group_of(2, redundancy=2)
    held(world, "e0/a0", "e3/a0")
    handle = await temporal.start_workflow(
        "Group", group, id=group.group_id, task_queue=Queue.EPISODES, result_type=GroupResult
    )
    result = await asyncio.wait_for(handle.result(), 60)
    assert result.members == [f"{group.group_id}/e1/a0", f"{group.group_id}/e2/a0"]
    assert result.eligible and not result.short and result.replaced == 0
    assert result.outcomes == {"model_success": 1, "model_failure": 1, "surplus": 2}
    records = {record.episode_id[-2:]: record for record in world.calls["record_episode"]}
    for spare in ("e0", "e3"):
        assert (records[spare].outcome, records[spare].stop_reason) == (Outcome.SURPLUS, StopReason.SURPLUS)
        assert records[spare].reward is None
    released = {message.attempt_id for message in world.calls["release"]}
    assert released == {message.attempt_id for message in world.calls["acquire"]} and len(released) == 4
    assert len(world.calls["record_group"]) == 1


async def test_a_spare_sibling_takes_the_place_of_one_that_infrastructure_broke(temporal: Client, world: World) -> None:
    def lose(name: str, message: Any) -> None:
        if name == "act" and message.lease.attempt_id.endswith("e0/a0"):
            raise final(FailureType.SANDBOX)

    world.fail = lose
    group = group_of(2, redundancy=1, max_replacements=0)
    result = await temporal.execute_workflow(
        "Group", group, id=group.group_id, task_queue=Queue.EPISODES, result_type=GroupResult
    )
    assert result.members == [f"{group.group_id}/e1/a0", f"{group.group_id}/e2/a0"]
    assert (result.eligible, result.replaced, result.outcomes["infra_failure"]) == (True, 0, 1)


async def test_a_group_that_its_batch_did_without_ends_with_what_it_had_on_record(
    temporal: Client, world: World
) -> None:
    group = group_of(3)
    held(world, "e1/a0", "e2/a0")
    handle = await temporal.start_workflow(
        "Group", group, id=group.group_id, task_queue=Queue.EPISODES, result_type=GroupResult
    )
    await eventually(lambda: len(world.calls["record_episode"]) == 1 and len(world.calls["acquire"]) == 3)
    await handle.signal("surplus")
    result = await asyncio.wait_for(handle.result(), 60)
    assert (result.eligible, result.reason, result.short, result.members) == (False, "surplus", False, [])
    assert result.outcomes == {"model_failure": 1, "surplus": 2} and result.replaced == 0
    assert [message.reason for message in world.calls["record_group"]] == ["surplus"]
    assert len(world.calls["record_episode"]) == len(world.calls["release"]) == 3


async def test_attempts_that_an_operator_ends_use_the_replacement_budget_up(temporal: Client, world: World) -> None:
    group = group_of(2, max_replacements=0)
    handle = await started(temporal, world, group)
    await temporal.get_workflow_handle(f"{group.group_id}/e0/a0").cancel()
    await eventually(lambda: bool(world.calls["record_episode"]))
    assert world.gate is not None
    world.gate.set()
    result = await asyncio.wait_for(handle.result(), 30)
    assert (result.reason, result.short, result.members) == ("short_group", True, [f"{group.group_id}/e1/a0"])


async def test_cancelling_the_group_itself_ends_its_attempts_and_replaces_none(temporal: Client, world: World) -> None:
    handle = await started(temporal, world, group_of(2))
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), 30)
    assert isinstance(caught.value.cause, CancelledError)
    assert len(world.calls["acquire"]) == len(world.calls["release"]) == 2
    assert not world.calls["record_group"] and not world.calls["record_episode"]


async def test_a_held_out_episode_that_an_operator_cancels_is_played_again(
    temporal: Client, quick_world: QuickWorld
) -> None:
    run = unique("run")
    quick_world.gate = asyncio.Event()
    handle = await start(temporal, run_json(training={"steps": 1}, evaluation={"tasks": 2}), run)
    await eventually(lambda: len(quick_world.calls["generate"]) == 2)
    await temporal.get_workflow_handle(f"{run}/eval-v0/e0/a0").cancel()
    await eventually(lambda: any("/e0/a1" in message.attempt_id for message in quick_world.calls["generate"]))
    quick_world.gate.set()
    status = await asyncio.wait_for(handle.result(), 60)
    assert (status.state, status.step) == (RunState.FINISHED, 1)
    assert [(m.result.episodes, m.result.excluded) for m in quick_world.calls["record_evaluation"]] == [(2, 0), (2, 0)]
