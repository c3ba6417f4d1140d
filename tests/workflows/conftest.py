from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from tests.workflows.fakes import World
from workers.temporal import plugin
from workflows.attributes import OUTCOME, POLICY_VERSION, REWARD, RUN, STOP_REASON, TASK
from workflows.contracts import Queue, engine_queue
from workflows.episode import Episode
from workflows.evaluation import Evaluation
from workflows.group import Group
from workflows.training_run import TrainingRun

ATTRIBUTES = [RUN, TASK, OUTCOME, STOP_REASON, POLICY_VERSION, REWARD]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[Client]:
    """A real local server without persistence, with the shipped flags."""
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).parent / "temporal"),
        search_attributes=ATTRIBUTES,
        dev_server_log_level="error",
        plugins=[plugin()],
        dev_server_extra_args=[
            "--dynamic-config-value",
            'history.timerProcessorMaxTimeShift="20ms"',
            "--dynamic-config-value",
            "history.transferProcessorMaxPollRPS=2000",
        ],
    )
    yield environment.client
    await environment.shutdown()


@pytest_asyncio.fixture
async def world(temporal: Client) -> AsyncIterator[World]:
    """A fresh script, with workers on all the queues for the test's time."""
    script = World()
    async with workers(temporal, script):
        yield script


@asynccontextmanager
async def workers(client: Client, script: World) -> AsyncIterator[None]:
    workflows: list[Any] = [TrainingRun, Group, Episode, Evaluation]
    async with (
        Worker(client, task_queue=Queue.CONTROL, workflows=workflows, activities=script.activities),
        Worker(client, task_queue=Queue.EPISODES, workflows=workflows, activities=script.activities),
        Worker(client, task_queue=Queue.TRAINING, activities=script.activities),
        Worker(client, task_queue=engine_queue("h"), activities=script.activities),
    ):
        yield


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
