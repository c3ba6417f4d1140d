"""Several sandbox hosts: who takes an acquire, what a drained or a broken host does, and what one clears away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import SlotReleaseContext, UnsandboxedWorkflowRunner, Worker

from activities.janitor.host import HostJanitorActivities
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from activities.sandbox.hosts import DRAIN_FILE, POLLS, Door, HostActivities, polls_for
from tests.sandbox.conftest import SMALL, labels
from tests.sandbox.test_activities import Tasks
from tests.sandbox.test_pool import eventually
from tests.workflows.conftest import temporal, unique
from workers.sandbox_host import HostKeeper, acquiring
from workers.temporal import plugin
from workflows import policies
from workflows.contracts import AcquireInput, AcquireOutput, HostInput, HostStatus, Queue, Split, TaskRef, sandbox_queue
from workflows.errors import SandboxError

__all__ = ["temporal"]


class Room:
    """Stands for a backend: `slots`, and the sandboxes that have one."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: set[str] = set()
        self.broken = ""

    async def living(self) -> set[str]:
        if self.broken:
            raise SandboxError(self.broken)
        return set(self.held)


def door_of(room: Any, folder: Path, **options: Any) -> Door:
    return Door(room, folder / DRAIN_FILE, **options)


async def opens(door: Door) -> Any:
    """The permit, or None where it gives none for now."""
    try:
        async with asyncio.timeout(0.05):
            return await door.reserve_slot(None)  # type: ignore[arg-type]
    except TimeoutError:
        return None


def test_a_host_has_the_fewer_polls_open_the_fuller_it_is_and_none_that_it_has_no_room_for() -> None:
    assert [polls_for(free, 16) for free in (16, 8, 4, 1, 0, -1)] == [POLLS, 3, 2, 1, 0, 0]
    assert polls_for(2, 2) == 2
    assert all(polls_for(free, slots) <= free for slots in range(1, 40) for free in range(slots + 1))


async def test_a_door_opens_for_what_there_is_room_for_and_counts_nothing_twice(tmp_path: Path) -> None:
    room = Room(2)
    door = door_of(room, tmp_path)
    first, second = await opens(door), await opens(door)
    assert first is not None and second is not None and await opens(door) is None
    assert door.try_reserve_slot(None) is None  # type: ignore[arg-type]
    door.comes("s1")
    assert await opens(door) is None, "one poll is open, one sandbox comes"
    room.held.add("s1")
    assert await opens(door) is None
    door.came("s1")
    door.release_slot(SlotReleaseContext(slot_info=None, permit=first))
    room.held.clear()
    assert await opens(door) is not None, "it is gone again"


async def test_a_drained_door_stays_shut_also_for_the_next_process_until_it_is_undone(tmp_path: Path) -> None:
    door = door_of(Room(4), tmp_path)
    door.drain(True)
    again = door_of(Room(4), tmp_path)
    assert await opens(door) is None and await opens(again) is None and again.shut == "it drains"
    again.drain(False)
    again.drain(False)
    assert await opens(door) is not None


async def test_a_host_whose_daemon_fails_draws_no_acquires_to_it_and_comes_back(tmp_path: Path) -> None:
    now = [0.0]
    room = Room(4)
    door = door_of(room, tmp_path, clock=lambda: now[0])
    room.broken = "docker list: no answer"
    assert await opens(door) is None
    room.broken = ""
    assert await opens(door) is None and door.shut == "docker list: no answer"
    now[0] = 2.1
    assert await opens(door) is not None
    for _ in range(9):
        door.failed(SandboxError("again"))
    now[0] += 59.0
    assert door.shut, "the pause grows"
    door.succeeded()
    assert not door.trouble


# --- on containers ----------------------------------------------------------------------------------------------------


@workflow.defn(name="Acquires")
class Acquires:
    @workflow.run
    async def run(self, input: AcquireInput) -> AcquireOutput:
        return await policies.call(
            "acquire", input, AcquireOutput, policies.PLACE, summary="acquire", queue=Queue.SANDBOXES
        )


class Host:
    """One host with its two workers in this process, and a state folder of its own on the machine's daemon."""

    def __init__(self, name: str, docker_host: str, folder: Path, slots: int) -> None:
        self.name = name
        self.backend = DockerBackend(docker_host, folder / name, slots)
        sandboxes = SandboxActivities(self.backend, lambda _: Tasks(), name, queue=sandbox_queue(name))
        self.door = Door(self.backend, folder / name / DRAIN_FILE)
        self.activities = HostActivities(sandboxes, self.backend, self.door, name)

    def worker(self, client: Client) -> Worker:
        return Worker(
            client,
            task_queue=Queue.SANDBOXES,
            build_id="tests",
            activities=[self.activities.acquire],
            **acquiring(self.door),
        )


class Two:
    def __init__(self, client: Client, a: Host, b: Host) -> None:
        self.client, self.a, self.b = client, a, b
        self.run = unique("hosts")
        self.asked: list[asyncio.Task[AcquireOutput]] = []
        self._count = 0

    async def ask(self) -> asyncio.Task[AcquireOutput]:
        """Begin one acquire."""
        attempt = f"{self.run}/g0/e{self._count}/a0"
        self._count += 1
        message = AcquireInput(
            run=self.run,
            group_id=f"{self.run}/g0",
            attempt_id=attempt,
            task=TaskRef(taskset="tests", split=Split.TRAIN, task_id="write"),
        )
        handle = await self.client.start_workflow(
            "Acquires", message, id=attempt, task_queue=self.run, result_type=AcquireOutput
        )
        self.asked.append(asyncio.create_task(handle.result()))
        return self.asked[-1]

    async def tell(self, host: Host, *, drain: bool) -> str:
        status: HostStatus = await ActivityEnvironment().run(
            host.activities.host, HostInput(host=host.name, drain=drain)
        )
        return status.words


@pytest.fixture
async def two(temporal: Client, docker_host: str, tmp_path: Path) -> AsyncIterator[Two]:
    """Host a with room for one sandbox, host b for three."""
    made = Two(temporal, Host("a", docker_host, tmp_path, 1), Host("b", docker_host, tmp_path, 3))
    for host in (made.a, made.b):
        host.backend.state.mkdir()
    async with AsyncExitStack() as stack:
        runner = UnsandboxedWorkflowRunner()
        play = Worker(temporal, task_queue=made.run, build_id="tests", workflows=[Acquires], workflow_runner=runner)
        address = temporal.service_client.config.target_host
        # As hosts do, each has a client of its own: the SDK lets one client poll a queue once.
        own = [await Client.connect(address, plugins=[plugin()]) for _ in range(2)]
        for worker in (play, made.a.worker(own[0]), made.b.worker(own[1])):
            await stack.enter_async_context(worker)
        yield made
        for task in made.asked:
            task.cancel()
    for host in (made.a, made.b):
        await host.backend.sweep(made.run)
        await host.backend.aclose()


@pytest.mark.docker
async def test_acquires_go_where_there_is_room_and_wait_where_there_is_none(two: Two) -> None:
    first = await asyncio.gather(*[await two.ask() for _ in range(4)])
    assert sorted(out.lease.host for out in first) == ["a", "b", "b", "b"]
    assert {out.lease.queue for out in first} == {"sandbox@a", "sandbox@b"}
    fifth = await two.ask()
    await asyncio.sleep(1)
    assert not fifth.done()
    (on_a,) = [out.lease for out in first if out.lease.host == "a"]
    await two.a.backend.close(on_a.sandbox_id)
    assert (await fifth).lease.host == "a"


@pytest.mark.docker
async def test_a_drained_host_takes_nothing_new_and_what_lives_there_lives_on(two: Two) -> None:
    await two.tell(two.a, drain=True)
    on_b = (await (await two.ask())).lease
    assert on_b.host == "b"
    await two.tell(two.a, drain=False)
    assert await two.tell(two.b, drain=True) == "draining, 1 of 3 sandboxes in use"
    others = [await two.ask() for _ in range(2)]
    await eventually(lambda: any(out.done() for out in others))
    await asyncio.sleep(1)
    assert [out.result().lease.host for out in others if out.done()] == ["a"]
    assert await two.b.backend.pid(on_b.sandbox_id) > 0
    await two.tell(two.b, drain=False)
    assert sorted([(await out).lease.host for out in others]) == ["a", "b"]


@pytest.mark.docker
async def test_a_host_that_fails_hands_the_acquire_to_another_and_keeps_nothing_of_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(message: AcquireInput) -> AcquireOutput:
        await two.b.backend.acquire(SMALL, labels(message.attempt_id, run=two.run))
        raise SandboxError("docker start: no space left on device")

    monkeypatch.setattr(two.b.activities._sandboxes, "acquire", fails)
    assert (await (await two.ask())).lease.host == "a"

    async def gone() -> bool:
        return not await two.b.backend.owned()

    await eventually(gone)


@pytest.mark.docker
async def test_a_handed_back_acquire_names_the_host_and_why(two: Two) -> None:
    two.b.door.drain(True)
    message = AcquireInput(
        run="r", group_id="r/g0", attempt_id="r/g0/e0/a0", task=TaskRef(taskset="t", split=Split.TRAIN, task_id="write")
    )
    with pytest.raises(ApplicationError, match="host b hands it back: it drains"):
        await ActivityEnvironment().run(two.b.activities.acquire, message)


@pytest.mark.docker
async def test_a_host_that_comes_back_clears_away_what_no_episode_has_any_more(
    docker_host: str, tmp_path: Path
) -> None:
    host = Host("c", docker_host, tmp_path, 4)
    running = f"{unique('back')}/g0/e0/a0"
    over = running.replace("/e0/", "/e1/")
    for attempt in (running, over):
        await host.backend.acquire(SMALL, labels(attempt, run="back"))
    dead = await host.backend.acquire(SMALL, labels(over, run="back", kind="verifier"))
    await host.backend.daemon.call("kill", lambda client: client.containers.container(dead.container_id).kill())

    async def ending(attempt: str) -> str:
        return "" if attempt == running else "completed"

    async def namespace() -> str:
        return "default/x"

    janitor = HostJanitorActivities(host.backend, ending, tmp_path / "c", namespace=namespace, now=time.time)
    told = tmp_path / "told"
    async with HostKeeper(host.activities, janitor, told):

        async def cleared() -> bool:
            return {item.attempt for item in await host.backend.owned()} == {running}

        await eventually(cleared)
        await eventually(lambda: told.exists() and "of 4 sandboxes in use" in told.read_text())
    assert not told.exists()
    await host.backend.sweep("back")
    await host.backend.aclose()
