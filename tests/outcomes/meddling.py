"""How each service is lost under a row that is being played."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, event

from activities.sandbox.daemon import docker_root
from activities.sandbox.docker import DockerBackend
from activities.sandbox.host import Host, Limit
from storage.objects import ObjectStore
from tests.conftest import bucket_of, s3_server
from tests.generation.vllm_server import Server
from tests.outcomes.rows import CONTEXT_FULL
from tests.outcomes.worlds import LABEL, RUN, Ending, Row, World
from tests.sandbox.conftest import docker
from tests.workflows.conftest import unique
from workers.stack.private_daemon import PrivateDaemon, may_start_one
from workflows import policies
from workflows.contracts import derive_seed


async def while_it_runs(world: World, row: Row, *arguments: str) -> Ending:
    """Play the row; once its `sleep` runs, give the daemon these words about its container."""
    playing = asyncio.create_task(world.play(row))
    container = await _sleeping(world, row)
    await asyncio.to_thread(docker, _address(world), *arguments, container)
    return await playing


async def told_that_others_were_enough(world: World, row: Row) -> Ending:
    """Play the row; once its `sleep` runs, send the signal that its group would."""
    group_id = f"{RUN}/{unique(row.id)}"
    playing = asyncio.create_task(world.play(row, group_id=group_id))
    await _sleeping(world, row)
    await world.client.get_workflow_handle(f"{group_id}/e0/a0").signal("surplus")
    return await playing


async def _sleeping(world: World, row: Row) -> str:
    """The container in which the row's `sleep` runs."""
    container = await world.sandbox_of(row)
    while not any("sleep" in words for words in await _processes(world, container)):
        await asyncio.sleep(0.1)
    return container


async def killed_after_it_ran_out_of_memory(world: World, row: Row) -> Ending:
    """Play the row; kill its container from outside once a process that it left behind met the memory limit."""
    playing = asyncio.create_task(world.play(row))
    container, host = await world.sandbox_of(row), Host()
    while not (pid := await world.backend.pid(container)) or host.memory_limit(pid) is Limit.NEVER:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    await asyncio.to_thread(docker, _address(world), "kill", container)
    return await playing


async def _processes(world: World, container: str) -> list[list[str]]:
    """Command lines of what runs in a sandbox, as the host sees them."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(await world.backend.pid(container)).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found.append(process.cmdline())
    return found


def _address(world: World) -> str:
    return world.backend._daemon.docker_host


@asynccontextmanager
async def daemon_gone(folder: Path) -> AsyncIterator[tuple[DockerBackend, Callable[[], None]]]:
    """The backend of a daemon that was there and died, and what starts it again."""
    if not may_start_one():
        pytest.skip("needs root and dockerd")
    daemon = PrivateDaemon()
    await asyncio.to_thread(daemon.start)
    backend = DockerBackend(daemon.host, folder, slots=2)
    assert await docker_root(backend.daemon) is not None
    daemon.kill()
    try:
        yield backend, daemon.start
    finally:
        await backend.aclose()
        await asyncio.to_thread(daemon.stop)


@asynccontextmanager
async def store_killed(folder: Path) -> AsyncIterator[ObjectStore]:
    """A bucket whose server was killed."""
    with s3_server(folder) as (s3, server):
        store = bucket_of(s3)
        server.kill()
        yield store


@asynccontextmanager
async def locked(path: Path, engine: Engine, *, waits_s: float = 0.2) -> AsyncIterator[Callable[[], None]]:
    """Somebody else holds the database's write lock until the function is called; a transaction waits `waits_s`."""

    @event.listens_for(engine, "connect")
    def _impatient(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA busy_timeout={round(waits_s * 1000)}")

    engine.dispose()
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield holder.rollback
    finally:
        holder.close()


@asynccontextmanager
async def verify_bounded(seconds: float) -> AsyncIterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        bound = policies.Policy(timedelta(seconds=seconds), timedelta(seconds=10), policies.VERIFY.retry)
        patch.setattr(policies, "VERIFY", bound)
        patch.setattr("activities.sandbox.verification.CHECK_S", 15.0)
        yield


async def context_that_fills(server: Server, prompt: list[int], end: int) -> tuple[int, int]:
    """(seed, context length) with which the policy's first answer ends by itself and no reminder fits after it."""
    for seed in range(200):
        answer = await server.client.generate(
            prompt,
            temperature=1.0,
            max_tokens=400,
            seed=derive_seed(seed, 0),
            stop_token_ids=[end],
        )
        if answer.finish_reason == "stop":
            return seed, len(prompt) + len(answer.token_ids) + 8
    raise AssertionError(f"no answer ends by itself for {CONTEXT_FULL.id}")


async def killed_in_mid_request(world: World, server: Server, row: Row) -> Ending:
    """Play the row; kill the engine with the request in flight. Nothing restarts it."""
    playing = asyncio.create_task(world.play(row))
    await world.sandbox_of(row)
    while await _running(server) == 0:
        await asyncio.sleep(0.02)
    os.kill(server.process.pid, signal.SIGKILL)
    return await playing


async def _running(server: Server) -> float:
    metrics = (await server.client._http.get("/metrics")).text
    line = next(line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running"))
    return float(line.split()[-1])


async def prepared(server: Server) -> Server:
    """The engine carries proven weights of the run."""
    await server.client.set_label(LABEL)
    return server
