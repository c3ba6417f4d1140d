"""Episode and Group over a real server, with scripted activities: endings, budgets, replacement, what people see."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from tests.workflows.conftest import unique
from tests.workflows.fakes import ANSWER, COMMAND, MALFORMED, World, final
from tests.workflows.runs import eventually
from workflows import policies
from workflows.attributes import OUTCOME, STOP_REASON, TASK
from workflows.contracts import (
    ActOutput,
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    FailureType,
    FinishReason,
    GroupInput,
    GroupResult,
    Outcome,
    Queue,
    RolloutLimits,
    Split,
    StopReason,
    TaskRef,
)

ASKED = "activity_task_cancel_requested_event_attributes"
TASK_REF = TaskRef(taskset="shell", split=Split.TRAIN, task_id="count-0001")


def limits(**changes: Any) -> RolloutLimits:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "max_turns": 3,
        "max_tokens_per_turn": 16,
        "max_tokens": 64,
        "context_length": 128,
        "step_timeout_s": 5,
        "time_budget_s": 10,
        "max_output_chars": 500,
        "malformed_reminders": 1,
    }
    return RolloutLimits(**(values | changes))


async def play(client: Client, world: World, **changes: Any) -> tuple[EpisodeSummary, EpisodeRecord]:
    episode = EpisodeInput(
        run=unique("run"),
        group_id=unique("g"),
        index=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK_REF,
        limits=limits(**changes),
        seed=7,
    )
    summary = await client.execute_workflow(
        "Episode", episode, id=episode.attempt_id, task_queue=Queue.EPISODES, result_type=EpisodeSummary
    )
    (record,) = world.calls["record_episode"]
    assert len(world.calls["release"]) == 1
    return summary, record


async def test_a_task_whose_verifier_may_take_long_has_that_time(temporal: Client, world: World) -> None:
    await play(temporal, world)
    world.grading_s = 2700.0
    for calls in world.calls.values():
        calls.clear()
    await play(temporal, world)
    plain, long = world.verify_limits
    assert plain == policies.VERIFY.start_to_close and long == plain + timedelta(seconds=2700)


async def test_an_episode_generates_acts_verifies_records_and_releases(temporal: Client, world: World) -> None:
    summary, record = await play(temporal, world)
    assert (summary.outcome, summary.stop_reason, summary.reward) == (Outcome.MODEL_SUCCESS, StopReason.FINISHED, 1.0)
    assert [turn.segment for turn in record.turns] == [f"{record.attempt_id}/t0", f"{record.attempt_id}/t1"]
    first, second = world.calls["generate"]
    assert first.observation is None and second.observation == "42"
    assert second.segments == [f"{record.attempt_id}/t0"]
    assert first.seed != second.seed
    assert first.started_at == second.started_at == record.started_at > 0
    assert world.calls["verify"][0].answer == "42"


async def test_a_person_reads_the_episode_in_the_ui(temporal: Client, world: World) -> None:
    summary, _ = await play(temporal, world)
    handle = temporal.get_workflow_handle(summary.attempt_id)
    description = await handle.describe()
    attributes = description.typed_search_attributes
    assert attributes[OUTCOME] == Outcome.MODEL_SUCCESS and attributes[STOP_REASON] == StopReason.FINISHED
    details = await handle.query("__temporal_workflow_metadata")
    assert "exit 0, 10 ms" in str(details) and "verdict" in str(details)
    summaries = [
        event.user_metadata.summary.data.decode()
        async for event in handle.fetch_history_events()
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert len(summaries) == 7 and all(summaries)
    assert '"turn 0: cat /data/a"' in summaries and '"turn 1: after exit 0, 10 ms"' in summaries


@pytest.mark.parametrize(
    ("name", "failure", "reason", "outcome"),
    [
        ("generate", FailureType.ENGINE, StopReason.ENGINE_LOST, Outcome.INFRA_FAILURE),
        ("act", FailureType.SANDBOX, StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE),
        ("acquire", FailureType.SANDBOX, StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE),
        ("generate", FailureType.STORAGE, StopReason.STORAGE_LOST, Outcome.INFRA_FAILURE),
        ("verify", FailureType.VERIFIER, StopReason.VERIFIER_LOST, Outcome.INFRA_FAILURE),
        ("verify", FailureType.SANDBOX, StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE),
        ("verify", FailureType.VERIFIER_BROKEN, StopReason.VERIFIER_BROKEN_BY_ANSWER, Outcome.MODEL_FAILURE),
        ("act", FailureType.PAYLOAD, StopReason.UNDETERMINED, Outcome.UNKNOWN),
    ],
)
async def test_a_failure_gets_the_ending_of_its_boundary(
    temporal: Client, world: World, name: str, failure: FailureType, reason: StopReason, outcome: Outcome
) -> None:
    def fail(called: str, message: Any) -> None:
        if called == name:
            raise final(failure)

    world.fail = fail
    summary, record = await play(temporal, world)
    assert (record.stop_reason, record.outcome) == (reason, outcome)
    assert summary.valid is (outcome is Outcome.MODEL_FAILURE)
    assert (record.reward is None) is not summary.valid


async def test_an_unnamed_exception_is_our_bug_and_unknown(temporal: Client, world: World) -> None:
    def fail(called: str, message: Any) -> None:
        if called == "act":
            raise ApplicationError("KeyError: x", type="KeyError", non_retryable=True)

    world.fail = fail
    _, record = await play(temporal, world)
    assert (record.stop_reason, record.outcome) == (StopReason.UNDETERMINED, Outcome.UNKNOWN)


async def test_a_transient_failure_is_retried_and_changes_nothing(temporal: Client, world: World) -> None:
    failures = iter([True, True])

    def fail(called: str, message: Any) -> None:
        if called == "generate" and next(failures, False):
            raise ApplicationError("503", type=FailureType.ENGINE)

    world.fail = fail
    summary, _ = await play(temporal, world)
    assert summary.outcome is Outcome.MODEL_SUCCESS


async def test_turns_are_bounded_and_the_state_is_graded(temporal: Client, world: World) -> None:
    world.actions = lambda message: COMMAND
    _, record = await play(temporal, world, max_turns=3)
    assert (record.stop_reason, record.outcome, len(record.turns)) == (StopReason.MAX_TURNS, Outcome.MODEL_SUCCESS, 3)


async def test_tokens_are_bounded_over_the_episode(temporal: Client, world: World) -> None:
    world.actions = lambda message: COMMAND
    _, record = await play(temporal, world, max_tokens=8, max_turns=50)
    assert record.stop_reason is StopReason.MAX_TOKENS
    assert [message.sampling.max_tokens for message in world.calls["generate"]] == [8, 3]


async def test_an_answer_cut_at_its_length_ends_by_tokens(temporal: Client, world: World) -> None:
    world.actions = lambda message: MALFORMED
    world.finish_reason = FinishReason.LENGTH
    _, record = await play(temporal, world)
    assert record.stop_reason is StopReason.MAX_TOKENS and world.calls["verify"]


async def test_a_full_context_is_graded(temporal: Client, world: World) -> None:
    world.finish_reason = FinishReason.CONTEXT_FULL
    _, record = await play(temporal, world)
    assert record.stop_reason is StopReason.CONTEXT_FULL and record.outcome is Outcome.MODEL_SUCCESS


async def test_a_malformed_action_gets_its_reminder_and_then_ends_ungraded(temporal: Client, world: World) -> None:
    world.actions = lambda message: MALFORMED
    _, record = await play(temporal, world)
    assert (record.stop_reason, record.outcome, record.reward) == (
        StopReason.MALFORMED_ACTION,
        Outcome.MODEL_FAILURE,
        0.0,
    )
    assert world.calls["generate"][1].observation == MALFORMED.error
    assert not world.calls["verify"]


async def test_a_reminded_agent_goes_on(temporal: Client, world: World) -> None:
    world.actions = lambda message: MALFORMED if message.turn == 0 else ANSWER
    summary, _ = await play(temporal, world)
    assert summary.outcome is Outcome.MODEL_SUCCESS


async def test_the_time_budget_counts_commands_alone_and_bounds_the_last(temporal: Client, world: World) -> None:
    world.actions = lambda message: COMMAND
    world.act_output = ActOutput(exit_code=None, timed_out=True, command_s=4.0)
    _, record = await play(temporal, world, time_budget_s=10, step_timeout_s=4, max_turns=9)
    assert (record.stop_reason, record.outcome) == (StopReason.TIME_BUDGET, Outcome.MODEL_FAILURE)
    assert [message.step_timeout_s for message in world.calls["act"]] == [4, 4, 2]
    assert not world.calls["verify"]


async def test_an_attempt_that_is_surplus_ends_with_the_turns_it_had_and_is_nobodys_failure(
    temporal: Client, world: World
) -> None:
    world.gate = asyncio.Event()
    world.gated = lambda message: message.turn == 1
    playing = asyncio.create_task(play(temporal, world))
    await eventually(lambda: any(message.turn == 1 for message in world.calls["generate"]))
    await temporal.get_workflow_handle(world.calls["generate"][0].attempt_id).signal("surplus")
    summary, record = await asyncio.wait_for(playing, 60)
    assert (summary.outcome, summary.stop_reason, summary.reward) == (Outcome.SURPLUS, StopReason.SURPLUS, None)
    assert not summary.valid and not world.calls["verify"]
    assert [turn.turn for turn in record.turns] == [0] and record.sampled_tokens == 5
    assert record.ended_at > record.started_at > 0


async def test_what_fails_under_a_cancellation_is_no_failure_on_record(temporal: Client, world: World) -> None:
    """A run that ends takes sandboxes and engines away from what it cancels."""

    def taken_away(message: Any) -> float:
        raise final(FailureType.SANDBOX, "killed by a request")

    world.verdicts, world.reward = asyncio.Event(), taken_away
    playing = asyncio.create_task(play(temporal, world))
    await eventually(lambda: bool(world.calls["verify"]))
    handle = temporal.get_workflow_handle(world.calls["generate"][0].attempt_id)
    await handle.cancel()
    async with asyncio.timeout(30):
        while not any(event.HasField(ASKED) for event in (await handle.fetch_history()).events):
            await asyncio.sleep(0.05)
    world.verdicts.set()
    with pytest.raises(WorkflowFailureError) as raised:
        await asyncio.wait_for(playing, 60)
    assert isinstance(raised.value.cause, CancelledError)
    assert not world.calls["record_episode"] and len(world.calls["release"]) == 1


async def test_what_is_surplus_after_its_verdict_stays_valid(temporal: Client, world: World) -> None:
    def surplus(name: str, message: Any) -> None:
        if name == "record_episode" and not asked:
            asked.append(asyncio.create_task(temporal.get_workflow_handle(message.attempt_id).signal("surplus")))
            raise ApplicationError("tried again after the signal")

    asked: list[asyncio.Task[None]] = []
    world.fail = surplus
    episode = EpisodeInput(
        run=unique("run"),
        group_id=unique("g"),
        index=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK_REF,
        limits=limits(),
        seed=7,
    )
    summary = await temporal.execute_workflow(
        "Episode", episode, id=episode.attempt_id, task_queue=Queue.EPISODES, result_type=EpisodeSummary
    )
    assert asked and summary.outcome is Outcome.MODEL_SUCCESS


async def test_the_run_says_how_long_one_answer_may_take(temporal: Client, world: World) -> None:
    await play(temporal, world, generate_timeout_s=12.5)
    assert {message.timeout_s for message in world.calls["generate"]} == {12.5}


async def test_a_sandbox_that_the_agent_broke_is_its_failure(temporal: Client, world: World) -> None:
    world.act_output = ActOutput(exit_code=None, signal=9, sandbox_broken="out of memory")
    _, record = await play(temporal, world)
    assert (record.stop_reason, record.outcome) == (StopReason.SANDBOX_KILLED_BY_AGENT, Outcome.MODEL_FAILURE)
    assert record.why == "out of memory"


async def test_a_group_replaces_up_to_its_budget_and_is_dropped_when_short(temporal: Client, world: World) -> None:
    def lose(name: str, message: Any) -> None:
        if name == "act" and "/e0/" in message.lease.attempt_id:
            raise final(FailureType.SANDBOX)

    world.fail = lose
    group = group_of_two(max_replacements=2)
    result = await client_group(temporal, group)
    assert (result.eligible, result.reason, result.replaced) == (False, "short_group", 2)
    assert result.outcomes == {"infra_failure": 3, "model_success": 1}
    assert result.members == [f"{group.group_id}/e1/a0"]
    seeds = {message.seed for message in world.calls["generate"] if "/e0/" in message.attempt_id and message.turn == 0}
    assert len(seeds) == 1, "a replacement plays with its sibling's seed"


def group_of_two(*, max_replacements: int) -> GroupInput:
    return GroupInput(
        run=unique("run"),
        number=3,
        model="/m",
        task=TASK_REF,
        group_size=2,
        max_replacements=max_replacements,
        limits=limits(),
        seed=1,
        report_to="nobody",
    )


async def client_group(client: Client, group: GroupInput) -> GroupResult:
    return await asyncio.wait_for(
        client.execute_workflow("Group", group, id=group.group_id, task_queue=Queue.EPISODES, result_type=GroupResult),
        30,
    )


async def test_search_attributes_name_the_task(temporal: Client, world: World) -> None:
    group = group_of_two(max_replacements=0)
    await client_group(temporal, group)
    description = await temporal.get_workflow_handle(f"{group.group_id}/e0/a0").describe()
    assert description.typed_search_attributes[TASK] == "count-0001"


async def test_a_payload_over_64_kib_ends_the_attempt_once_with_a_plain_error(temporal: Client, world: World) -> None:
    """F12: Temporal would retry an oversized result for ever."""
    world.act_output = ActOutput(exit_code=0, output="x" * 70_000)
    _, record = await play(temporal, world)
    assert record.stop_reason is StopReason.UNDETERMINED
    assert "PayloadTooLarge" in record.why and "65536" in record.why
    assert len(world.calls["act"]) == 1
