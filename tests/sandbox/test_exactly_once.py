"""A command runs at most once per key, whoever dies."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from activities.sandbox.channel import Operation, key_of
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone
from tests.sandbox.conftest import SMALL, Box, labels
from workers.stack.private_daemon import PrivateDaemon, may_start_one
from workflows.errors import SandboxError

pytestmark = pytest.mark.docker


async def test_the_same_key_gives_the_first_result_again(any_box: Box) -> None:
    first = await any_box("echo line >> log; cat log", op_id="once")
    again = await any_box("echo line >> log; cat log", op_id="once")
    assert (first.replayed, again.replayed) == (False, True)
    assert first.head == again.head == b"line\n"
    assert await any_box.out("wc -l < log") == "1"


async def test_calls_at_the_same_time_share_one_run(any_box: Box) -> None:
    results = await asyncio.gather(*(any_box("echo line >> log; sleep 0.5; echo done", op_id="once") for _ in range(5)))
    assert [result.head for result in results] == [b"done\n"] * 5
    assert await any_box.out("wc -l < log") == "1"


async def test_a_command_outlives_the_killed_client_and_its_retry_gets_the_result(box: Box) -> None:
    folder = box.backend._boxes.box(box.id)
    command = "echo line >> log; sleep 1; echo done"
    words = [sys.executable, "-m", "tests.sandbox.client", str(folder), "once", command]
    root = Path(__file__).parents[2]
    client = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, cwd=root)
    assert client.stdout is not None
    await client.stdout.readline()
    while "line" not in await box.out("cat log 2>/dev/null || :"):
        await asyncio.sleep(0.02)
    client.kill()
    await client.wait()
    result = await box(command, op_id="once")
    assert (result.replayed, result.head) == (True, b"done\n")
    assert await box.out("wc -l < log") == "1"


async def test_a_cancelled_call_leaves_the_command_running(box: Box) -> None:
    call = asyncio.create_task(box("sleep 0.5; echo line >> log; echo done", op_id="once"))
    await asyncio.sleep(0.2)
    call.cancel()
    result = await box.backend.ask(box.id, "once", wait_s=5)
    assert result is not None
    assert result.head == b"done\n"
    assert await box.out("wc -l < log") == "1"


async def test_asking_for_a_key_that_never_ran_runs_nothing(any_box: Box) -> None:
    assert await any_box.backend.ask(any_box.id, "never", wait_s=1) is None


async def test_the_agent_can_neither_read_nor_write_the_journal(any_box: Box) -> None:
    result = await any_box(
        "cat /run/ratchet/box/* ; ls /proc/1/root/run/ratchet/box; ls /proc/1/fd; echo x > /run/ratchet/box/x; "
        "nc -U /run/ratchet/box/s"
    )
    assert result.exit_code != 0
    assert result.head.count(b"ermission denied") >= 4
    forged = key_of("next")
    await any_box(f"mkdir -p /run/ratchet/box; echo '0 0 0 0 1 0 0 0 0 0 0 0 -' > /run/ratchet/box/{forged}")
    assert await any_box.backend.ask(any_box.id, "next", wait_s=1) is None


async def test_a_result_is_there_after_the_container_is_gone(box: Box) -> None:
    await box("echo kept", op_id="once")
    await box.backend._containers.remove(box.id)
    assert (await box("echo kept", op_id="once")).head == b"kept\n"
    with pytest.raises(SandboxGone) as gone:
        await box("echo next")
    assert not gone.value.by_agent


async def test_a_container_that_is_removed_under_a_command_is_infrastructure(any_box: Box) -> None:
    call = asyncio.create_task(any_box("sleep 20", timeout_s=2))
    await asyncio.sleep(0.3)
    await any_box.backend._containers.remove(any_box.id)
    with pytest.raises(SandboxGone) as gone:
        await call
    assert (gone.value.by_agent, gone.value.retryable) == (False, False)


@pytest.mark.skipif(not may_start_one(), reason="needs root and dockerd")
async def test_a_daemon_killed_in_mid_command_loses_nothing(tmp_path: Path) -> None:
    daemon = PrivateDaemon()
    await asyncio.to_thread(daemon.start)
    backend = DockerBackend(daemon.host, tmp_path / "state", slots=2)
    try:
        sandbox = await backend.acquire(SMALL, labels("crash/g0/e0/a0", run="crash"))
        op = Operation(op_id="once", command="echo line >> log; sleep 1; cat log", timeout_s=10)
        call = asyncio.create_task(backend.run(sandbox.id, op))
        await asyncio.sleep(0.3)
        daemon.kill()
        assert (await call).head == b"line\n"
        began = time.monotonic()
        assert (await backend.run(sandbox.id, Operation(op_id="t2", command="echo on", timeout_s=5))).head == b"on\n"
        assert time.monotonic() - began < 1, "a command needs no daemon"
        with pytest.raises(SandboxError, match="no answer") as unreachable:
            await backend.acquire(SMALL, labels("crash/g0/e0/a1", run="crash"))
        assert unreachable.value.retryable
        await asyncio.to_thread(daemon.start)
        assert (await backend.acquire(SMALL, labels("crash/g0/e0/a0", run="crash"))).id == sandbox.id
        assert (await backend.run(sandbox.id, op)).replayed
        assert await backend.sweep("crash") == (1, 1)
    finally:
        await backend.aclose()
        await asyncio.to_thread(daemon.stop)
