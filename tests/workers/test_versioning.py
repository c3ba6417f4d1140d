"""Builds side by side, with real workers on a real server of the test's own: what a deploy does to what is open."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.common import VersioningBehavior
from temporalio.worker import Worker

import workflows
from tests.replay import changed
from tests.workflows.conftest import local_server
from tests.workflows.fakes import World
from tests.workflows.runs import run_json, start
from workers.settings import Settings
from workers.stack.parts import tool
from workers.versioning import deployment, workflow_digest
from workflows.contracts import Queue, RunState, engine_queue
from workflows.registry import ON_CONTROL, ON_EPISODES

NEW_CODE = [item for item in changed.ALL if item.__name__ in ("ChangedGroup", "ChangedEpisode", "ChangedEvaluation")]
"""As a deploy that no open group, episode or evaluation could be moved to."""


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with local_server() as client, unversioned(client):
        yield client


@asynccontextmanager
async def unversioned(client: Client) -> AsyncIterator[None]:
    """Trainer and engine: one process per GPU, restarted in place."""
    world = World()
    async with (
        Worker(client, task_queue=Queue.TRAINING, activities=world.activities),
        Worker(client, task_queue=engine_queue("h"), activities=world.activities),
    ):
        yield


@asynccontextmanager
async def build(client: Client, build_id: str, world: World, on_episodes: list[type[Any]]) -> AsyncIterator[None]:
    """The roles that host workflows, wired as workers/roles.py does."""
    settings = Settings(deployment="ratchet", build_id=build_id)
    async with (
        Worker(
            client,
            task_queue=Queue.CONTROL,
            workflows=ON_CONTROL,
            activities=world.activities,
            deployment_config=deployment(settings, VersioningBehavior.AUTO_UPGRADE),
        ),
        Worker(
            client,
            task_queue=Queue.EPISODES,
            workflows=on_episodes,
            activities=world.activities,
            deployment_config=deployment(settings, VersioningBehavior.PINNED),
        ),
    ):
        yield


async def temporal(client: Client, *words: str) -> str:
    """The `temporal` command, once it works: a version is known a moment after its workers."""
    command = [tool("temporal"), "--address", client.service_client.config.target_host, *words]
    async with asyncio.timeout(30):
        while True:
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout
            await asyncio.sleep(0.2)


async def make_current(client: Client, build_id: str) -> None:
    await temporal(
        client,
        *("worker", "deployment", "set-current-version", "--deployment-name", "ratchet"),
        *("--build-id", build_id, "--yes"),
    )


async def build_of(client: Client, workflow_id: str) -> str:
    description = await client.get_workflow_handle(workflow_id).describe()
    return description.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


async def moved(client: Client, workflow_id: str, build_id: str) -> None:
    """A new current version reaches the queues a moment later: each task of the workflow asks for it afresh."""
    async with asyncio.timeout(30):
        while await build_of(client, workflow_id) != build_id:
            await client.get_workflow_handle(workflow_id).signal("resume")
            await asyncio.sleep(0.1)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)


async def test_open_groups_end_on_their_build_and_the_run_goes_on_with_the_new_one(client: Client) -> None:
    """F48. The new build's Group and Episode could not replay what the old one began."""
    old, new = World(), World()
    old.gate = asyncio.Event()
    new.version = 1
    config = run_json(evaluation={"tasks": 0}, training={"steps": 2})
    async with build(client, "old", old, ON_EPISODES):
        handle = await start(client, config, "run")
        await asyncio.sleep(1)
        assert not old.calls, "without a current version nothing starts"
        await make_current(client, "old")
        await eventually(lambda: len(old.calls["generate"]) == 4)
        async with build(client, "new", new, NEW_CODE):
            await make_current(client, "new")
            await moved(client, "run", "new")
            old.gate.set()
            status = await asyncio.wait_for(handle.result(), 60)
    assert (status.state, status.step, status.outcomes["model_failure"]) == (RunState.FINISHED, 2, 4)
    builds = {name: await build_of(client, f"run{name}") for name in ("", "/g0", "/g0/e0/a0", "/g2", "/g2/e0/a0")}
    assert builds == {"": "new", "/g0": "old", "/g0/e0/a0": "old", "/g2": "new", "/g2/e0/a0": "new"}
    assert {message.attempt_id[:6] for message in old.calls["generate"]} == {"run/g0", "run/g1"}
    assert {message.attempt_id[:6] for message in new.calls["generate"]} == {"run/g2", "run/g3"}
    assert [message.step for message in new.calls["reserve_batch"]] == [1, 2] and not old.calls["reserve_batch"]


async def test_a_pinned_episode_waits_for_its_build_until_an_operator_moves_it(client: Client) -> None:
    """Why one box has no deployment: nobody there runs the build of yesterday."""
    old, new = World(), World()
    old.gate = asyncio.Event()
    async with build(client, "old", old, ON_EPISODES):
        await make_current(client, "old")
        handle = await start(client, run_json(evaluation={"tasks": 0}, training={"steps": 1}), "run")
        await eventually(lambda: len(old.calls["generate"]) == 4)
    async with build(client, "new", new, ON_EPISODES):
        await make_current(client, "new")
        await asyncio.sleep(3)
        assert not new.calls["generate"]
        await temporal(
            client,
            *("workflow", "update-options", "--query", "RatchetRun = 'run' AND ExecutionStatus = 'Running'"),
            *("--versioning-override-behavior", "auto_upgrade", "--yes"),
        )
        status = await asyncio.wait_for(handle.result(), 90)
    assert status.state is RunState.FINISHED and len(new.calls["generate"]) >= 4


def test_without_a_deployment_workers_are_unversioned() -> None:
    assert deployment(Settings(), VersioningBehavior.PINNED) is None


def test_the_build_id_changes_with_the_workflows_and_only_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "workflows"
    shutil.copytree(workflows.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = workflow_digest()
    monkeypatch.setattr(workflows, "__path__", [str(copy)])
    assert workflow_digest() == before
    (copy / "group.py").write_text((copy / "group.py").read_text() + "\n# changed\n")
    assert workflow_digest() != before
    config = deployment(Settings(deployment="ratchet"), VersioningBehavior.PINNED)
    assert config is not None and config.version.build_id == workflow_digest()
    named = deployment(Settings(deployment="ratchet", build_id="v7"), VersioningBehavior.PINNED)
    assert named is not None and named.version.build_id == "v7"
