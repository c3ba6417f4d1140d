"""What a killed worker had in hand, on a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest_asyncio
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from tests.workflows.conftest import start_local, unique
from workers.handover import Notes, hand_over, left_behind, started_at
from workers.temporal import plugin

DEAD = 4_000_000
"""Above the largest pid that Linux gives out by default."""


@workflow.defn(name="OneActivity", sandboxed=False)
class OneActivity:
    @workflow.run
    async def run(self) -> int:
        return await workflow.execute_activity("attempt", start_to_close_timeout=timedelta(minutes=30), result_type=int)


@activity.defn(name="attempt")
async def attempt() -> int:
    if activity.info().attempt == 1:
        await asyncio.sleep(600)
    return activity.info().attempt


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[WorkflowEnvironment]:
    made = await start_local()
    yield made
    await made.shutdown()


async def noted(folder: Path) -> Path:
    async with asyncio.timeout(30):
        while not (found := list(folder.iterdir())):
            await asyncio.sleep(0.05)
    return found[0]


async def test_an_activity_of_a_dead_process_is_tried_again_at_once_and_of_a_living_one_never(
    environment: WorkflowEnvironment, tmp_path: Path
) -> None:
    """The activity has half an hour and no heartbeat: nothing else would try it again within the test."""
    folder = tmp_path / "inflight"
    client = await Client.connect(
        environment.client.service_client.config.target_host, plugins=[plugin(notes=Notes(folder))]
    )
    queue = unique("queue")
    async with Worker(client, task_queue=queue, workflows=[OneActivity], activities=[attempt]):
        handle = await client.start_workflow("OneActivity", id=unique("w"), task_queue=queue, result_type=int)
        note = await noted(folder)
        assert await hand_over(client, folder) == 0 and note.exists(), "its process lives"
        token = note.read_bytes()
        note.rename(folder / f"{DEAD}-1-0")
        assert await hand_over(client, folder) == 1
        assert await asyncio.wait_for(handle.result(), 30) == 2
        (folder / f"{DEAD}-1-1").write_bytes(token)
        assert await hand_over(client, folder) == 0, "the server refuses a token whose attempt is over"
    assert not left_behind(folder)


def test_a_pid_that_another_process_has_now_is_dead_and_a_full_disk_costs_no_activity(tmp_path: Path) -> None:
    mine = f"{os.getpid()}-{started_at(os.getpid())}-7"
    for name in (mine, f"{os.getpid()}-1-8", f"{DEAD}-5-9", "not-one-of-ours"):
        (tmp_path / name).write_bytes(b"t")
    assert {path.name for path in left_behind(tmp_path)} == {f"{os.getpid()}-1-8", f"{DEAD}-5-9"}
    assert started_at(DEAD) == -1
    nowhere = Notes(tmp_path / mine / "below a file")
    with nowhere.of(b"token"):
        pass
    notes = Notes(tmp_path / "notes")
    with notes.of(b"token"):
        (note,) = (tmp_path / "notes").iterdir()
        assert note.read_bytes() == b"token"
    assert not list((tmp_path / "notes").iterdir())
