from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from tests.workflows.fakes import World
from tests.workflows.quick_groups import QuickWorld, quick_workers
from workers.stack.parts import TEMPORAL_TUNING, tool
from workers.temporal import plugin, runtime
from workflows.attributes import OUTCOME, POLICY_VERSION, REWARD, RUN, STOP_REASON, TASK
from workflows.contracts import Queue, engine_queue, sandbox_queue
from workflows.registry import ON_CONTROL, ON_EPISODES

ATTRIBUTES = [RUN, TASK, OUTCOME, STOP_REASON, POLICY_VERSION, REWARD]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[Client]:
    async with local_server() as client:
        yield client


async def start_local(**options: Any) -> WorkflowEnvironment:
    """A server of the test's own. The SDK waits five seconds for it, which a busy machine may take longer than."""
    with pytest.MonkeyPatch.context() as patch:
        # As the stack's own server has it: less of its time goes into collecting garbage.
        patch.setenv("GOGC", "400")
        for last in (False, False, True):
            try:
                return await WorkflowEnvironment.start_local(
                    dev_server_existing_path=tool("temporal"), plugins=[plugin()], **options
                )
            except RuntimeError:
                if last:
                    raise
    raise AssertionError("unreachable")


@asynccontextmanager
async def local_server(*, identity: str | None = None) -> AsyncIterator[Client]:
    """A real local server without persistence, with the shipped flags."""
    environment = await start_local(
        search_attributes=ATTRIBUTES,
        dev_server_log_level="error",
        identity=identity,
        runtime=runtime(),
        dev_server_extra_args=[word for value in TEMPORAL_TUNING for word in ("--dynamic-config-value", value)],
    )
    try:
        yield environment.client
    finally:
        await environment.shutdown()


@pytest_asyncio.fixture
async def world(temporal: Client) -> AsyncIterator[World]:
    """A fresh script, with workers on all the queues for the test's time."""
    script = World()
    async with workers(temporal, script):
        yield script


@pytest_asyncio.fixture
async def quick_world(temporal: Client) -> AsyncIterator[QuickWorld]:
    """The same for what a run decides: its groups have no episodes."""
    script = QuickWorld()
    async with quick_workers(temporal, script):
        yield script


@asynccontextmanager
async def workers(client: Client, script: World) -> AsyncIterator[None]:
    async with (
        Worker(client, task_queue=Queue.CONTROL, workflows=ON_CONTROL, activities=script.activities),
        Worker(client, task_queue=Queue.EPISODES, workflows=ON_EPISODES, activities=script.activities),
        Worker(client, task_queue=Queue.TRAINING, activities=script.activities),
        Worker(client, task_queue=engine_queue("h"), activities=script.activities),
        Worker(client, task_queue=sandbox_queue("h"), activities=script.activities),
        Worker(client, task_queue=Queue.SANDBOXES, activities=script.activities),
    ):
        yield


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
