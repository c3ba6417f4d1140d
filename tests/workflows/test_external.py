"""An external agent program as the Episode workflow plays it: one activity, and what its endings mean."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import Client

from tests.workflows.fakes import World, final
from tests.workflows.test_episode import play
from workflows.config import parse_run_config
from workflows.contracts import (
    AgentProgram,
    FailureType,
    Outcome,
    RunAgentOutput,
    StopReason,
)

PROGRAM = {"harness": "external", "agent": AgentProgram(command="mini -t ls")}


async def test_a_program_takes_the_turns_and_its_sandbox_is_graded(temporal: Client, world: World) -> None:
    summary, record = await play(temporal, world, **PROGRAM)
    assert (summary.outcome, summary.stop_reason, summary.reward) == (Outcome.MODEL_SUCCESS, StopReason.FINISHED, 1.0)
    (asked,) = world.calls["run_agent"]
    assert asked.limits.agent.command == "mini -t ls" and asked.lease.attempt_id == record.attempt_id
    assert (record.sampled_tokens, record.sequence_tokens, len(record.turns)) == (5, 9, 1)
    assert world.calls["verify"][0].answer == "42"
    assert world.calls["generate"] == world.calls["act"] == []
    details = await temporal.get_workflow_handle(summary.attempt_id).query("__temporal_workflow_metadata")
    assert "turn 0" in str(details) and "ls" in str(details)


async def test_shell_and_tools_never_start_a_program(temporal: Client, world: World) -> None:
    for harness in ("shell", "tools"):
        for calls in world.calls.values():
            calls.clear()
        await play(temporal, world, harness=harness)
        assert {message.harness for message in world.calls["generate"]} == {harness}
    assert world.calls["run_agent"] == []


@pytest.mark.parametrize(
    ("failure", "reason", "outcome"),
    [
        (FailureType.ENGINE, StopReason.ENGINE_LOST, Outcome.INFRA_FAILURE),
        (FailureType.SANDBOX, StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE),
        (FailureType.STORAGE, StopReason.STORAGE_LOST, Outcome.INFRA_FAILURE),
        (FailureType.WORKER, StopReason.SANDBOX_LOST, Outcome.INFRA_FAILURE),
        (FailureType.UNDETERMINED, StopReason.UNDETERMINED, Outcome.UNKNOWN),
    ],
)
async def test_what_infrastructure_did_is_no_answer(
    temporal: Client, world: World, failure: FailureType, reason: StopReason, outcome: Outcome
) -> None:
    def fail(called: str, message: Any) -> None:
        if called == "run_agent":
            raise final(failure)

    world.fail = fail
    _, record = await play(temporal, world, **PROGRAM)
    assert (record.stop_reason, record.outcome, record.reward) == (reason, outcome, None)
    assert world.calls["verify"] == []


@pytest.mark.parametrize(
    ("reason", "outcome", "graded"),
    [
        (StopReason.MAX_TURNS, Outcome.MODEL_SUCCESS, True),
        (StopReason.CONTEXT_FULL, Outcome.MODEL_SUCCESS, True),
        (StopReason.TIME_BUDGET, Outcome.MODEL_FAILURE, False),
        (StopReason.SANDBOX_KILLED_BY_AGENT, Outcome.MODEL_FAILURE, False),
    ],
)
async def test_what_the_policy_did_ends_by_the_table(
    temporal: Client, world: World, reason: StopReason, outcome: Outcome, graded: bool
) -> None:
    world.program = lambda m: RunAgentOutput(stop_reason=reason, why="spent", turns=[])
    summary, record = await play(temporal, world, **PROGRAM)
    assert (record.stop_reason, summary.outcome) == (reason, outcome)
    assert len(world.calls["verify"]) == graded


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"harness": "external"}, "need each other"),
        ({"agent": {"command": "mini"}}, "need each other"),
        ({"harness": "Shell"}, "rollout.harness"),
        ({"harness": "external", "agent": {"command": ""}}, "rollout.agent.command"),
    ],
)
def test_a_harness_that_can_not_play_is_refused_before_the_run(rollout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_run_config({"model": "tiny", "rollout": rollout})


def test_a_run_may_name_its_harness_and_its_program() -> None:
    rollout = {"harness": "external", "agent": {"command": "mini", "env": {"A": "b"}}}
    limits = parse_run_config({"model": "tiny", "rollout": rollout}).limits()
    assert limits.harness == "external" and limits.agent == AgentProgram(command="mini", env={"A": "b"})
    assert parse_run_config({"model": "tiny"}).limits().harness == "shell"
    assert parse_run_config({"model": "tiny", "rollout": {"harness": "mine.agents:Loud"}}).limits().agent is None
