"""Runs of the workflows' tests: a small configuration, its start, and what is waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from tests.workflows.conftest import unique
from workflows.contracts import Queue, RunStatus


def run_json(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": "tiny",
        "mode": "sync",
        "rollout": {"group_size": 2, "groups_per_batch": 2, "max_turns": 3},
        "training": {"steps": 3},
        "evaluation": {"tasks": 0},
    }
    return config | changes


async def start(client: Client, config: Any, run: str | None = None) -> Any:
    return await client.start_workflow(
        "TrainingRun", config, id=run or unique("run"), task_queue=Queue.CONTROL, result_type=RunStatus
    )


async def message_of(handle: Any) -> tuple[str, str]:
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause.type or "", caught.value.cause.message


async def eventually(condition: Any, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
