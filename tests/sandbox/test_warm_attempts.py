"""Attempts in sandboxes that were warm and are forks: what the workflow sees, and that nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from temporalio.client import Client
from temporalio.worker import Worker

from activities.replay.player import Player
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from activities.sandbox.preparation import key_of
from activities.sandbox.snapshots import Snapshots
from storage.objects import ObjectStore
from tasksets import open_taskset
from tests.sandbox.attempts import Recorder
from tests.sandbox.conftest import fresh_attempt, labels
from tests.sandbox.test_activities import WRITE, Episode, Tasks, call
from tests.sandbox.test_pool import eventually
from tests.sandbox.test_replay import Script
from tests.workflows.conftest import temporal, unique
from tests.workflows.test_episode import limits
from workers.parts import methods
from workflows.contracts import (
    AcquireInput,
    EpisodeInput,
    EpisodeKind,
    EpisodeSummary,
    Outcome,
    ReleaseInput,
    Split,
    TaskRef,
)
from workflows.episode import Episode as EpisodeWorkflow
from workflows.errors import VerifierError

__all__ = ["temporal"]
pytestmark = pytest.mark.docker


@pytest.fixture
async def backend(docker_host: str, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = DockerBackend(docker_host, tmp_path / "state", slots=16, pool=2)
    await backend.keep_warm(SandboxSpec())
    await eventually(lambda: sum(backend.waiting().values()) == 2)
    yield backend
    for run in ("test", "acts", "r"):
        await backend.sweep(run)
    await backend.aclose()


@pytest.fixture
def activities(backend: DockerBackend) -> SandboxActivities:
    return SandboxActivities(backend, lambda name: Tasks(), host="here")


def write_task(taskset: str = "tests") -> TaskRef:
    return TaskRef(taskset=taskset, split=Split.TRAIN, task_id="write")


async def test_an_acquire_tells_whether_the_sandbox_was_warm_and_whether_it_is_a_fork(
    activities: SandboxActivities, backend: DockerBackend
) -> None:
    seen = []
    for attempt in (fresh_attempt(), fresh_attempt()):
        message = AcquireInput(run="acts", group_id="acts/g0", attempt_id=attempt, task=write_task())
        out = await call(activities.acquire, message)
        seen.append((out.warm, out.forked))
        await call(activities.release, ReleaseInput(attempt_id=attempt, lease=out.lease))
    assert seen == [(True, False), (True, True)]


async def test_a_fork_solves_its_task_and_its_proof_is_one_too(activities: SandboxActivities) -> None:
    for number in range(2):
        episode = Episode(activities, "write", f"acts/g0/e{number}/a0")
        await episode.acquire()
        await episode.act("cat /data/word > out")
        assert (await episode.verify()).passed
        await call(activities.release, ReleaseInput(attempt_id=episode.attempt))


async def test_a_snapshot_that_breaks_the_check_is_not_blamed_on_the_model(
    activities: SandboxActivities, backend: DockerBackend
) -> None:
    """What is in the snapshot is not what the setup leaves: the check breaks on it, whatever the answer."""
    broken = WRITE.model_copy(update={"setup": "touch /work/broken"})
    sandbox = await backend.acquire(SandboxSpec(), labels(fresh_attempt()))
    await activities._preparation.prepare(broken, sandbox)
    store = Snapshots(backend.state / "snapshots")
    store.path(key_of(broken, sandbox)).rename(store.path(key_of(WRITE, sandbox)))
    episode = Episode(activities, "write", "acts/g0/e9/a0")
    await episode.acquire()
    await episode.act("cat /data/word > out; echo plum > out")
    with pytest.raises(VerifierError, match="on a known-good answer"):
        await episode.verify()


async def test_a_replay_of_a_fork_reproduces_what_depends_on_the_setups_times(
    backend: DockerBackend, database: Engine, object_store: ObjectStore, tmp_path: Path
) -> None:
    recorder = Recorder(backend, database, object_store, tmp_path)
    attempts = [await recorder.play("stat -c %y /data/word", "cat /data/word > out") for _ in range(2)]
    task = open_taskset(str(recorder.taskset)).load("write")
    for attempt in attempts:
        played = await Player(backend, recorder.recorded(attempt), task).play(go_on=False, show=lambda _: None)
        assert played.agrees and len(played.turns) == 2, played


async def test_an_episode_reports_while_its_sandbox_is_still_being_removed(
    temporal: Client, backend: DockerBackend, activities: SandboxActivities, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, remove = asyncio.Event(), backend._containers.remove

    async def slow(name: str) -> None:
        await go.wait()
        await remove(name)

    monkeypatch.setattr(backend._containers, "remove", slow)
    script, queue = Script(["cat /data/word > out"], lambda turn, attempt: None), unique("queue")
    played = EpisodeInput(
        run="acts",
        group_id=unique("acts-g"),
        index=0,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=write_task(),
        limits=limits(max_turns=4),
        seed=1,
    )
    given = [*methods(activities), *methods(script)]
    async with Worker(temporal, task_queue=queue, workflows=[EpisodeWorkflow], activities=given, build_id="tests"):
        summary: EpisodeSummary = await temporal.execute_workflow(
            "Episode", played, id=played.attempt_id, task_queue=queue, result_type=EpisodeSummary
        )
    assert summary.outcome is Outcome.MODEL_SUCCESS
    assert len(await backend._names({"ratchet.attempt": played.attempt_id})) == 1
    go.set()
    await backend.settled()
    assert await backend._names({"ratchet.attempt": played.attempt_id}) == set()
