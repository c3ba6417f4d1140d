"""Sandboxes that nobody owns any more, with a real daemon and a real Temporal server."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.janitor.host import HostJanitorActivities
from activities.lineage.runs import RunControlActivities
from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import SMALL, labels
from tests.workflows.conftest import unique
from tests.workflows.fakes import World
from tests.workflows.test_episode import TASK_REF, limits
from workers.parts import methods
from workflows.contracts import EpisodeInput, EpisodeKind, JanitorInput, Queue, Swept
from workflows.errors import SandboxError
from workflows.registry import ON_CONTROL

AT_ONCE = JanitorInput(sandbox_grace_s=0, unowned_grace_s=0)
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def backend(docker_host: str, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = DockerBackend(docker_host, tmp_path / "state", slots=8)
    yield backend
    for item in await backend.owned():
        await backend.close(item.id)
    await backend.aclose()


async def here() -> str:
    return "default/1"


def janitor(backend: DockerBackend, endings: dict[str, str], home: Path) -> HostJanitorActivities:
    """Episodes that `endings` does not name run."""

    async def ending(attempt: str) -> str:
        return endings.get(attempt, "")

    return HostJanitorActivities(backend, ending, home, namespace=here)


async def ids(backend: DockerBackend) -> set[str]:
    return {item.id for item in await backend.owned()}


@pytest.mark.docker
async def test_a_killed_workers_container_goes_once_its_episode_is_over_though_nobody_else_is_alive(
    temporal: Client, docker_host: str, backend: DockerBackend, tmp_path: Path
) -> None:
    """F14. While the episode is open its sandbox waits for the next worker."""
    queue, address = unique("killed"), temporal.service_client.config.target_host
    words = [sys.executable, "-m", "tests.janitor.killed_worker", address, queue, docker_host, str(tmp_path / "state")]
    worker = await asyncio.create_subprocess_exec(*words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    episode = an_episode()
    handle = await temporal.start_workflow("Episode", episode, id=episode.attempt_id, task_queue=queue)
    sandbox_id = backend.id_of(episode.attempt_id)
    await eventually(lambda: _acquired(handle))
    worker.kill()
    await worker.wait()
    assert sandbox_id in await ids(backend)

    control = RunControlActivities(temporal)
    activities = HostJanitorActivities(backend, control.ending, tmp_path / "state", namespace=control.namespace)
    async with (
        Worker(temporal, task_queue=Queue.CONTROL, workflows=ON_CONTROL, activities=World().activities),
        Worker(temporal, task_queue=f"{queue}-host", activities=methods(activities)),
    ):
        assert "containers/terminated" not in (await swept(temporal, f"{queue}-host")).removed
        assert sandbox_id in await ids(backend)
        await handle.terminate()
        report = await swept(temporal, f"{queue}-host")
    assert report.removed["containers/terminated"] == 1 and not report.errors
    assert await backend.owned() == []


@pytest.mark.docker
async def test_what_was_acquired_just_now_stays_and_so_does_its_verifiers(
    backend: DockerBackend, tmp_path: Path
) -> None:
    for kind in ("agent", "verifier"):
        await backend.acquire(SMALL, labels("r/g0/e0/a0", kind=kind))
    assert (await janitor(backend, {}, tmp_path).sweep_host(AT_ONCE)).removed == {}
    young = JanitorInput(sandbox_grace_s=60)
    assert (await janitor(backend, {"r/g0/e0/a0": "completed"}, tmp_path).sweep_host(young)).removed == {}
    assert len(await backend.owned()) == 2


@pytest.mark.docker
async def test_an_attempt_that_begins_while_the_janitor_asks_is_not_its_business(
    backend: DockerBackend, tmp_path: Path
) -> None:
    """The list was made before: what is acquired in the meantime is not in it, whatever the answer."""
    await backend.acquire(SMALL, labels("r/g0/e0/a0"))

    async def ending(attempt: str) -> str:
        await backend.acquire(SMALL, labels("r/g0/e0/a1"))
        return "terminated"

    report = await HostJanitorActivities(backend, ending, tmp_path, namespace=here).sweep_host(AT_ONCE)
    assert report.removed == {"containers/terminated": 1}
    assert await ids(backend) == {backend.id_of("r/g0/e0/a1")}


@pytest.mark.docker
async def test_removals_are_counted_by_how_the_episode_ended(backend: DockerBackend, tmp_path: Path) -> None:
    endings = {"r/g0/e0/a0": "terminated", "r/g0/e0/a1": "unknown", "r/g0/e0/a2": ""}
    for attempt in endings:
        await backend.acquire(SMALL, labels(attempt))
    await backend.acquire(SMALL, labels("r/g0/e0/a0", kind="verifier"))
    await backend.acquire(SMALL, labels("canary", kind="canary"))
    backend._boxes.make("ratchet-folder-alone", {"ratchet.kind": "agent", "ratchet.attempt": "r/g0/e0/a0"})
    report = await janitor(backend, endings, tmp_path).sweep_host(AT_ONCE)
    assert report.removed == {
        "containers/terminated": 2,
        "containers/unknown": 1,
        "containers/unowned": 1,
        "folders/terminated": 1,
    }
    assert await ids(backend) == {backend.id_of("r/g0/e0/a2")}


@pytest.mark.docker
async def test_another_stacks_sandboxes_are_never_touched(
    docker_host: str, backend: DockerBackend, tmp_path: Path
) -> None:
    other = DockerBackend(docker_host, tmp_path / "other", slots=8)
    await other.acquire(SMALL, labels("r/g0/e0/a0"))
    try:
        assert (await janitor(backend, {"r/g0/e0/a0": "terminated"}, tmp_path).sweep_host(AT_ONCE)).removed == {}
        assert len(await other.owned()) == 1
    finally:
        await other.close_attempt("r/g0/e0/a0")
        await other.aclose()


@pytest.mark.docker
async def test_what_was_made_for_another_namespace_is_left_to_that_one(
    docker_host: str, backend: DockerBackend, tmp_path: Path
) -> None:
    """One home, moved from one namespace to another; the attempts are unknown here."""
    for attempt, namespace in (("r/g0/e0/a0", "default/2"), ("r/g0/e1/a0", "default/1")):
        made = DockerBackend(docker_host, tmp_path / "state", slots=8, namespace=namespace)
        await made.acquire(SMALL, labels(attempt))
        await made.aclose()
    endings = {"r/g0/e0/a0": "unknown", "r/g0/e1/a0": "unknown"}
    assert (await janitor(backend, endings, tmp_path).sweep_host(AT_ONCE)).removed == {"containers/unknown": 1}
    assert await ids(backend) == {backend.id_of("r/g0/e0/a0")}


class Stubborn:
    """A backend one of whose two sandboxes can't be removed."""

    def __init__(self, backend: DockerBackend) -> None:
        self.closed: list[str] = []
        self.owned = backend.owned

    async def close(self, sandbox_id: str) -> None:
        if not self.closed:
            self.closed.append("")
            raise SandboxError("device or resource busy")
        self.closed.append(sandbox_id)


@pytest.mark.docker
async def test_a_sandbox_that_cannot_be_removed_keeps_no_other(backend: DockerBackend, tmp_path: Path) -> None:
    endings = {"r/g0/e0/a0": "failed", "r/g0/e0/a1": "failed"}
    for attempt in endings:
        await backend.acquire(SMALL, labels(attempt))
    report = await janitor(Stubborn(backend), endings, tmp_path).sweep_host(AT_ONCE)  # type: ignore[arg-type]
    assert report.removed == {"containers/failed": 1}
    assert len(report.errors) == 1 and "busy" in report.errors[0]


async def test_temporary_files_of_dead_processes_go_and_young_ones_stay(tmp_path: Path) -> None:
    class Empty:
        async def owned(self) -> list[object]:
            return []

    gone = [tmp_path / "spool/trainer/4194305", tmp_path / "toolbox/building-x", tmp_path / "weights/d/model.1.part"]
    stays = [
        tmp_path / f"spool/trainer/{os.getpid()}",
        tmp_path / "weights/d/model",
        tmp_path / "weights/d/m.2.part.Ab",
    ]
    for path in (*gone, *stays):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if path.parent.name != "d" else path.touch()
    os.utime(tmp_path / "toolbox/building-x", (1, 1))
    os.utime(tmp_path / "weights/d/model.1.part", (1, 1))
    os.utime(tmp_path / "weights/d/model", (1, 1))
    activities = janitor(Empty(), {}, tmp_path)  # type: ignore[arg-type]
    assert (await activities.sweep_host(JanitorInput())).removed == {"temporary": 3}
    assert not any(path.exists() for path in gone) and all(path.exists() for path in stays)


def an_episode() -> EpisodeInput:
    run = unique("run")
    return EpisodeInput(
        run=run,
        group_id=f"{run}/g0",
        index=0,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK_REF,
        limits=limits(),
        seed=7,
    )


async def _acquired(handle: object) -> bool:
    """Whether the history says so: the worker may die now, and the next would go on."""
    async for event in handle.fetch_history_events():  # type: ignore[attr-defined]
        if event.HasField("activity_task_completed_event_attributes"):
            return True
    return False


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < seconds
        await asyncio.sleep(0.1)


async def swept(client: Client, queue: str) -> Swept:
    limits = AT_ONCE.model_copy(update={"sandbox_queues": [queue]})
    report: Swept = await client.execute_workflow(
        "Janitor", limits, id=unique("janitor"), task_queue=Queue.CONTROL, result_type=Swept
    )
    return report
