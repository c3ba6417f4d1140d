"""Who waits for the daemon waits in nobody's time: a queue is never read as an agent's time-out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.daemon import CREATES, OTHERS, Daemon
from activities.sandbox.docker import DockerBackend
from activities.sandbox.inquest import Inquest
from tests.sandbox.conftest import SMALL, Box, MakeBox, fresh_attempt, labels
from tests.sandbox.test_activities import Episode, Tasks, activities, call
from tests.sandbox.test_pool import eventually
from workflows.contracts import ReleaseInput
from workflows.errors import SandboxError

__all__ = ["activities"]

STEP_S = 0.3
QUEUE_S = 1.5
"""Several times a command's own time-out."""


@asynccontextmanager
async def busy(daemon: Daemon, *, create: bool) -> AsyncIterator[Callable[[], None]]:
    """A daemon all of whose turns are taken until the function is called."""
    go = asyncio.Event()

    async def hold(_: Any) -> None:
        await go.wait()

    count = CREATES if create else OTHERS
    holders = [asyncio.create_task(daemon.call("hold", hold, create=create)) for _ in range(count)]
    limit = daemon._creates if create else daemon._others
    await eventually(limit.locked)
    try:
        yield go.set
    finally:
        go.set()
        await asyncio.gather(*holders)


@pytest.mark.docker
@pytest.mark.parametrize("transport", ["sbxd", "exec"])
async def test_a_command_whose_call_waits_in_the_queue_keeps_all_of_its_time(
    backend: DockerBackend, exec_backend: DockerBackend, transport: str
) -> None:
    made = backend if transport == "sbxd" else exec_backend
    episode = Episode(SandboxActivities(made, lambda name: Tasks(), host="here"), "write", fresh_attempt())
    await episode.acquire()
    async with busy(made.daemon, create=False) as let_go:
        acting = asyncio.create_task(episode.act("cat /data/word", timeout_s=STEP_S))
        asyncio.get_running_loop().call_later(QUEUE_S, let_go)
        result = await acting
    assert (result.exit_code, result.timed_out, result.output, result.sandbox_broken) == (0, False, "plum\n", "")
    assert result.command_s < QUEUE_S
    await call(episode.activities.release, ReleaseInput(attempt_id=episode.attempt))


@pytest.mark.docker
async def test_the_second_try_of_a_command_that_finds_no_room_is_not_eaten_by_the_queue(
    exec_backend: DockerBackend, make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of a command found nothing that took it up, after a wait in the queue."""
    monkeypatch.setattr("activities.sandbox.exec_channel.START_S", 0.5)
    box = await make_box(exec_backend)
    channel: Any = exec_backend._channel(box.id)
    start, starts = channel._exec, 0

    async def lost_once(command: list[str], user: str, environment: list[str]) -> Any:
        nonlocal starts
        starts += 1
        if starts == 1:
            await asyncio.sleep(QUEUE_S)
            return await start(["/bin/true"], user, environment)
        return await start(command, user, environment)

    monkeypatch.setattr(channel, "_exec", lost_once)
    monkeypatch.setattr(exec_backend, "_channel", lambda _: channel)
    assert await box.out("echo here") == "here"
    assert starts == 2


@pytest.mark.docker
async def test_an_acquire_waits_for_its_turn_however_long_a_call_may_take(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(backend.daemon, create=True) as let_go:
        acquiring = asyncio.create_task(backend.acquire(SMALL, labels(fresh_attempt(), run="queue")))
        await eventually(lambda: bool(backend.daemon._creates._waiters))
        assert not acquiring.done()
        let_go()
        assert not (await acquiring).found
    await backend.sweep("queue")


async def test_the_time_in_the_queue_is_not_in_the_limit_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon("unix:///nowhere")
    monkeypatch.setattr(daemon, "_connected", lambda: None)
    limited: dict[str, Any] = {"create": True, "limit_s": 0.2}

    async def answer(_: Any) -> str:
        return "answer"

    async with busy(daemon, create=True) as let_go:
        waiting = asyncio.create_task(daemon.call("call", answer, **limited))
        asyncio.get_running_loop().call_later(0.6, let_go)
        assert await waiting == "answer"
    with pytest.raises(SandboxError, match="no answer"):
        await daemon.call("call", lambda _: asyncio.sleep(600), **limited)


@pytest.mark.docker
async def test_a_canary_takes_no_turn_so_a_queue_is_not_taken_for_a_sick_host(box: Box) -> None:
    async with busy(box.backend.daemon, create=True):
        dead, answer = await Inquest(box.backend)._canary(box.attempt)
    assert not dead, answer
    await box.backend.settled()
