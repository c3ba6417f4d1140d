from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence

import pytest

from workers.stack.health import Health
from workers.stack.parts import Part
from workers.stack.process import read_pid_file
from workers.stack.state import Home
from workers.stack.status import PartState, StackStatus
from workers.supervisor import Supervisor, take_lock

from .conftest import SLEEP, python_part

pytestmark = pytest.mark.usefixtures("hasty")


@contextlib.asynccontextmanager
async def supervised(home: Home, stages: Sequence[Sequence[Part]]) -> AsyncIterator[None]:
    supervisor = Supervisor(home, stages, {})
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        supervisor.stop()
        await task


def status(home: Home) -> dict[str, PartState]:
    if not home.status.exists():
        return {}
    read = StackStatus.model_validate_json(home.status.read_text())
    return {part.name: part.state for part in read.parts}


async def until_status(home: Home, wanted: dict[str, PartState]) -> None:
    async with asyncio.timeout(10):
        while status(home) != wanted:
            await asyncio.sleep(0.01)


def trace(name: str) -> str:
    """Code of a part that writes when it starts and when it ends."""
    return (
        "import signal, sys, time\n"
        f"def write(word): open('trace', 'a').write('{name} ' + word + chr(10))\n"
        "def end(*_): write('ends'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); write('starts'); time.sleep(600)"
    )


def traced(home: Home, name: str) -> Part:
    async def written() -> Health:
        file = home.path / "trace"
        return Health(file.exists() and f"{name} starts" in file.read_text())

    return python_part(trace(name), name=name, check=written)


async def test_parts_come_up_stage_by_stage_and_go_down_in_reverse(home: Home) -> None:
    stages = [[traced(home, "server")], [python_part("", name="prepare", once=True)], [traced(home, "worker")]]
    async with supervised(home, stages):
        healthy, done = PartState.HEALTHY, PartState.DONE
        await until_status(home, {"server": healthy, "prepare": done, "worker": healthy})
    assert (home.path / "trace").read_text().splitlines() == [
        "server starts",
        "worker starts",
        "worker ends",
        "server ends",
    ]
    assert list(home.pids.iterdir()) == []


async def test_a_later_stage_waits_until_the_earlier_one_is_healthy(home: Home) -> None:
    stages = [[python_part("raise SystemExit(1)", name="prepare", once=True)], [python_part(SLEEP, name="worker")]]
    async with supervised(home, stages):
        async with asyncio.timeout(10):
            while status(home).get("prepare") is not PartState.RESTARTING:
                await asyncio.sleep(0.01)
        assert status(home)["worker"] is PartState.QUEUED
        assert not home.pid_file("worker").exists()


async def test_a_part_that_is_no_longer_wanted_is_ended(home: Home) -> None:
    extra = python_part(SLEEP, name="local-e1")
    first = Supervisor(home, [[extra]], {})
    task = asyncio.create_task(first.run())
    await until_status(home, {"local-e1": PartState.HEALTHY})
    # As by kill -9: the part lives on, its pid file stays.
    for running in (task, *first._tasks):
        running.cancel()
    process = read_pid_file(home.pid_file("local-e1"))
    assert process is not None and process.alive
    async with supervised(home, [[python_part(SLEEP, name="local-e0")]]):
        await until_status(home, {"local-e0": PartState.HEALTHY})
        assert not process.alive
        assert not home.pid_file("local-e1").exists()


def test_one_supervisor_holds_a_state_folder(home: Home) -> None:
    lock = take_lock(home)
    assert lock is not None
    with lock:
        holder = read_pid_file(home.lock)
        assert holder is not None and holder.pid == os.getpid()
        assert take_lock(home) is None
    again = take_lock(home)
    assert again is not None
    again.close()
