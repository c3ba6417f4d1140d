"""`ratchet watch` against a real Temporal server and a workflow that answers like a TrainingRun."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console
from temporalio import workflow
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from tests.workflows.conftest import start_local
from workers.watch import ServerEyes, UnknownRun, follow
from workflows.contracts import RunState, RunStatus

QUEUE = "watch"


@workflow.defn(name="TrainingRun", sandboxed=False)
class Scripted:
    """Goes where its signal says: `finish`, `fail`, or `renew` for a continue-as-new."""

    def __init__(self) -> None:
        self._word = ""

    @workflow.signal
    def go(self, word: str) -> None:
        self._word = word

    @workflow.query
    def status(self, state: RunState = RunState.RUNNING) -> RunStatus:
        return RunStatus(
            run=workflow.info().workflow_id,
            state=state,
            step=1,
            steps=1,
            policy_version=1,
            reward=0.5,
            time_to_trainable_batch_s=1.0,
            outcomes={},
            groups_in_flight=0,
            groups_ready=0,
            groups_dropped={},
        )

    @workflow.run
    async def run(self, config: dict[str, str]) -> RunStatus:
        await workflow.wait_condition(lambda: self._word != "")
        if self._word == "renew":
            workflow.continue_as_new(config)
        if self._word == "fail":
            raise ApplicationError("the trainer is out of memory", non_retryable=True)
        return self.status(RunState.FINISHED)


@pytest_asyncio.fixture(scope="module")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    started = await start_local()
    async with started, Worker(started.client, task_queue=QUEUE, workflows=[Scripted]):
        yield started


async def watched(server: WorkflowEnvironment, run: str, *words: str) -> tuple[int, str]:
    """Start a run, watch it, send it the words one after the other."""
    handle = await server.client.start_workflow("TrainingRun", {}, id=run, task_queue=QUEUE)
    console = Console(file=io.StringIO(), soft_wrap=True)
    watch = asyncio.create_task(follow(ServerEyes(server.client, run), run, console, every_s=0.05))
    for word in words:
        await asyncio.sleep(0.3)
        await (handle.cancel() if word == "cancel" else handle.signal("go", word))
    assert isinstance(console.file, io.StringIO)
    return await asyncio.wait_for(watch, 20), console.file.getvalue()


async def test_it_follows_a_run_across_continue_as_new_to_its_end(server: WorkflowEnvironment) -> None:
    code, text = await watched(server, "watch-finishes", "renew", "finish")
    assert code == 0
    assert "step 1/1  batch reward 0.500" in text
    assert "watch-finishes finished: step 1/1" in text


async def test_it_tells_why_a_run_failed(server: WorkflowEnvironment) -> None:
    code, text = await watched(server, "watch-fails", "fail")
    assert code == 1
    assert "watch-fails failed: the trainer is out of memory" in text


async def test_it_ends_with_a_cancelled_run(server: WorkflowEnvironment) -> None:
    code, text = await watched(server, "watch-cancelled", "cancel")
    assert code == 1
    assert "watch-cancelled cancelled" in text


async def test_an_unknown_run_is_refused_with_the_known_ones(server: WorkflowEnvironment) -> None:
    await watched(server, "watch-known", "finish")
    with pytest.raises(UnknownRun, match=r"no run 'nope'; there is .*watch-known"):
        await ServerEyes(server.client, "nope").look()


async def test_a_run_that_no_worker_serves_is_waited_for(server: WorkflowEnvironment) -> None:
    await server.client.start_workflow("TrainingRun", {}, id="watch-unserved", task_queue="nobody")
    look = await ServerEyes(server.client, "watch-unserved").look()
    assert look.status is None
    assert look.trouble
