"""How old and how far from today's policy a batch's tokens may be, over a real Temporal server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client

from tests.workflows.fakes import World
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import run_json, start
from workflows.config import parse_run_config
from workflows.contracts import GenerateInput, OpenRunOutput, RunState, UpdateOutput
from workflows.run_state import Carry


@pytest.fixture
def world(quick_world: QuickWorld) -> World:
    return quick_world


async def test_async_generates_during_the_update_but_no_batch_lags_more_than_allowed(
    temporal: Client, world: World
) -> None:
    await (await start(temporal, run_json(mode="async", training={"steps": 4}))).result()
    for batch in world.calls["reserve_batch"]:
        for group in batch.groups:
            assert 0 <= batch.policy_version - group.min_version <= 1


async def test_a_group_too_far_from_todays_policy_is_held_out_before_the_batch_and_another_takes_its_place(
    temporal: Client, world: World
) -> None:
    """async: g2 and g3 begin under version 0 and end under 1, from which g2 turns out to be far; g4 takes its place."""

    async def hold(message: GenerateInput) -> None:
        name = message.attempt_id.split("/")[1]
        if name in ("g0", "g1"):
            await begun.wait()
        elif name in ("g2", "g3"):
            second_turns.update({message.attempt_id} if message.turn else ())
            if len(second_turns) == 4:
                begun.set()
            if message.turn:
                await applied.wait()
        elif name[0] == "g":
            await scored.wait()

    def note(name: str, message: Any) -> None:
        if name == "apply" and message.version == 1:
            applied.set()
        if name == "score":
            scored.set()

    begun, applied, scored, second_turns = asyncio.Event(), asyncio.Event(), asyncio.Event(), set[str]()
    world.hold, world.fail = hold, note
    world.divergence = lambda number: 0.6 if number == 2 else 0.1
    status = await (await start(temporal, run_json(mode="async", training={"steps": 4}))).result()
    batches = [[group.number for group in batch.groups] for batch in world.calls["reserve_batch"]]
    assert sorted(batches[0]) == [0, 1] and min(batches[1]) == 3 and not any(2 in batch for batch in batches)
    assert sorted(world.calls["score"][0].groups) == [2, 3] and [len(batch) for batch in batches] == [2] * 4
    assert status.groups_dropped["beyond_divergence"] == 1
    for message in world.calls["score"]:
        assert message.checkpoint != "c0", "tokens of the trainer's own weights are not measured"
    dropped = [batch.dropped["beyond_divergence"] for batch in world.calls["reserve_batch"] if batch.dropped]
    assert dropped == [[2]]


async def test_a_group_that_an_archived_success_joined_trains_once_its_divergence_is_known(
    temporal: Client, world: World
) -> None:
    """sync: no sibling of g1 and g2 succeeds; the success that joins g2 is too far from today's policy."""
    wrong = ("/g1/", "/g2/", "/e0/")
    world.reward = lambda m: 0.0 if any(part in m.lease.attempt_id for part in wrong) else 1.0
    world.archived = lambda result: "" if result.eligible else "r/g0/e1/a0"
    world.divergence = lambda number: 0.6 if number == 2 else 0.1
    rollout = {"group_size": 2, "groups_per_batch": 3, "refill": 4}
    training = {"steps": 1, "replay_share": 0.3}
    status = await (await start(temporal, run_json(rollout=rollout, training=training))).result()
    (batch,) = world.calls["reserve_batch"]
    assert [(group.number, group.replayed) for group in batch.groups] == [(0, False), (1, True), (3, False)]
    assert [sorted(message.groups) for message in world.calls["score"]] == [[1, 2]]
    assert status.groups_dropped == {"beyond_divergence": 1}


async def test_a_run_whose_groups_only_archived_successes_could_save_ends_with_a_plain_reason(
    temporal: Client, world: World
) -> None:
    """sync: their share is less than one in a batch of what there is, and nothing else would end their wait."""
    world.reward = lambda m: 0.0
    world.archived = lambda result: "r/g0/e1/a0" if result.number % 4 == 1 else ""
    rollout = {"group_size": 2, "groups_per_batch": 4, "refill": 2}
    status = await (await start(temporal, run_json(rollout=rollout, training={"replay_share": 0.2}))).result()
    assert (status.state, status.step) == (RunState.FINISHED, 0)
    assert "nothing left to teach" in status.reason and not world.calls["reserve_batch"]


async def test_downweighted_groups_are_not_held_out(temporal: Client, world: World) -> None:
    world.divergence = lambda number: 9.0
    config = run_json(mode="async", training={"steps": 3, "on_stale": "downweight"})
    status = await (await start(temporal, config)).result()
    assert not world.calls["score"] and "beyond_divergence" not in status.groups_dropped


async def test_a_warning_of_the_trainer_reaches_the_status_and_goes_with_its_cause(
    temporal: Client, world: World
) -> None:
    for warning in ("mismatch_kl is high", ""):
        world.answer = lambda m, warning=warning: UpdateOutput(  # type: ignore[misc]
            step=m.step, checkpoint=f"c{m.step}", metrics={}, warning=warning
        )
        status = await (await start(temporal, run_json(training={"steps": 1}))).result()
        assert status.warning == warning


def test_the_lag_follows_the_divergence_within_its_bounds() -> None:
    """An eighth and a half of max_divergence 0.4 are 0.05 and 0.2."""
    rollout = {"min_off_policy_steps": 1, "max_off_policy_steps": 5, "groups_per_batch": 2, "group_size": 2}
    config = parse_run_config(run_json(mode="async", rollout=rollout, training={"max_divergence": 0.4}))
    carry = Carry(config=config, opened=OpenRunOutput(model="/m", train_tasks=9, held_out_tasks=9, engines=[]))
    lags = [carry.lag]
    for divergence in (0.01, 0.04, 0.1, 0.01, 0.01, 0.01, 0.3, 0.3, 0.3, None):
        carry.adapt(divergence)
        lags.append(carry.lag)
        assert carry.rules.capacity == 2 * (1 + carry.lag) <= config.capacity
    assert lags == [1, 2, 3, 3, 4, 5, 5, 2, 1, 1, 1]


async def test_sync_trains_only_on_tokens_of_the_version_it_updates(temporal: Client, world: World) -> None:
    await (await start(temporal, run_json())).result()
    for batch in world.calls["reserve_batch"]:
        assert {group.min_version for group in batch.groups} == {batch.policy_version}
