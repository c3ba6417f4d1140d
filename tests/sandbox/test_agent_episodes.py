"""Agent programs through the real workflow, in a real sandbox: one that ends, and one whose worker is killed."""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import Client, WorkflowHandle

from storage.objects import ObjectStore
from tests.agents.test_run_agent import PROGRAM
from tests.sandbox.test_resume import PATIENCE_S, TURNS, Rollout, temporal, worker
from tests.workflows.conftest import unique
from tests.workflows.test_episode import limits
from workflows.contracts import (
    AgentProgram,
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    Outcome,
    Segment,
    Split,
    StopReason,
    TaskRef,
)

__all__ = ["temporal", "worker"]

pytestmark = pytest.mark.docker

APPEND = "n=$(wc -l < log 2>/dev/null || echo 0); echo line $n >> log"


async def begin(client: Client, worker: Rollout, command: str) -> WorkflowHandle[object, EpisodeSummary]:
    message = EpisodeInput(
        run="resume",
        group_id=unique("resume/g"),
        index=0,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model=str(worker.folder / "model"),
        task=TaskRef(taskset=str(worker.folder / "tasks"), split=Split.TRAIN, task_id="append"),
        limits=limits(
            max_turns=TURNS + 1,
            max_tokens=4000,
            max_tokens_per_turn=400,
            context_length=8000,
            time_budget_s=60,
            harness="external",
            agent=AgentProgram(command=command),
        ),
        seed=1,
    )
    return await client.start_workflow(
        "Episode", message, id=message.attempt_id, task_queue=worker.settings["queue"], result_type=EpisodeSummary
    )


async def ended(handle: WorkflowHandle[object, EpisodeSummary], worker: Rollout) -> EpisodeRecord:
    await asyncio.wait_for(handle.result(), PATIENCE_S)
    return EpisodeRecord.model_validate_json((worker.folder / "record").read_text())


async def test_a_programs_episode_is_graded_and_recorded_as_any(
    temporal: Client, worker: Rollout, object_store: ObjectStore
) -> None:
    worker.start()
    record = await ended(await begin(temporal, worker, f"{PROGRAM} {TURNS} '{APPEND}'"), worker)
    assert (record.stop_reason, record.outcome, record.reward) == (
        StopReason.FINISHED,
        Outcome.MODEL_SUCCESS,
        1.0,
    ), record.why
    assert [turn.exit_code for turn in record.turns] == [0] * TURNS
    segments = [Segment.model_validate_json(object_store.get(key)) for key in record.segments]
    assert sum(len(segment.token_ids) for segment in segments) == record.sequence_tokens
    assert {segment.branch for segment in segments} == {0}


async def test_a_worker_that_dies_with_a_program_costs_the_attempt_and_is_no_answer(
    temporal: Client, worker: Rollout, object_store: ObjectStore
) -> None:
    """The sandbox is changed, and no program can be taken up half way: infrastructure's failure, to be replaced."""
    worker.start()
    handle = await begin(temporal, worker, f"{PROGRAM} {TURNS} '{APPEND}'")
    await worker.begins("run_agent")
    async with asyncio.timeout(PATIENCE_S):
        while not list(object_store.keys("runs/resume/trajectories/")):
            await asyncio.sleep(0.1)
    worker.kill()
    worker.start()
    record = await ended(handle, worker)
    assert (record.stop_reason, record.outcome, record.reward) == (
        StopReason.SANDBOX_LOST,
        Outcome.INFRA_FAILURE,
        None,
    ), record.why
    assert "the worker was lost" in record.why
    assert worker.begun().count("run_agent") == 2 and worker.begun().count("verify") == 0
