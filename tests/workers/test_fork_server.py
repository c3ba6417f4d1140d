"""Parts that a fork server makes: what is imported once, what each process is, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from workers.stack.forking import ForkServer
from workers.stack.health import alive
from workers.stack.parts import PROJECT, Part
from workers.stack.process import identify, stop_now
from workers.stack.runner import Runner
from workers.stack.status import PartState

from .conftest import MakeRunner
from .test_runner import running, until

MODULE = "tests.workers.forked_part"
ENV = {"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"]}


def part(mode: str, folder: Path) -> Part:
    return Part(name="part", argv=(sys.executable, "-m", MODULE, mode, str(folder)), check=alive, forked=True)


def lines(folder: Path, name: str) -> list[list[str]]:
    path = folder / name
    return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture
def made(make_runner: MakeRunner, tmp_path: Path) -> Runner:
    return make_runner(part("wait", tmp_path), ENV)


def server_pid(folder: Path) -> int:
    return int(lines(folder, "preloads")[-1][0])


async def killed(runner: Runner, folder: Path) -> None:
    """End the part's process, and wait for the next one to have begun."""
    await until(lambda: str(runner.status.pid) in [line[0] for line in lines(folder, "mains")])
    before, pid = len(lines(folder, "mains")), runner.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: runner.status.pid not in (None, pid) and len(lines(folder, "mains")) > before)


async def test_a_killed_part_comes_back_without_importing_again(made: Runner, tmp_path: Path) -> None:
    async with running(made):
        for _ in range(3):
            await killed(made, tmp_path)
    assert len(lines(tmp_path, "preloads")) == 1 and len(lines(tmp_path, "mains")) == 4
    assert made.status.restarts == 3


async def test_each_process_is_one_of_its_own(made: Runner, tmp_path: Path) -> None:
    """Its own session, by which what it leaves behind is found; its own random numbers; nothing to read."""
    async with running(made):
        await killed(made, tmp_path)
        assert made.status.pid == int(lines(tmp_path, "mains")[-1][0])
    (one, other) = lines(tmp_path, "mains")
    assert one[0] == one[1] and other[0] == other[1]
    assert one[2] != other[2]
    assert one[3] == other[3] == "0"


@pytest.mark.parametrize(("mode", "reason"), [("exit", "exit 3"), ("raise", "exit 1")])
async def test_its_exit_code_is_known(make_runner: MakeRunner, tmp_path: Path, mode: str, reason: str) -> None:
    seen: list[str] = []
    runner = make_runner(part(mode, tmp_path), ENV)
    runner._changed = lambda: seen.append(runner.status.detail)
    async with running(runner):
        await until(lambda: runner.status.restarts >= 2)
    assert reason in seen
    assert len(lines(tmp_path, "preloads")) == 1
    if mode == "raise":
        assert "ValueError: it was broken" in Path(runner.status.log).read_text()


async def test_a_signal_that_ended_it_is_named(made: Runner, tmp_path: Path) -> None:
    seen: list[str] = []
    made._changed = lambda: seen.append(made.status.detail)
    async with running(made):
        await killed(made, tmp_path)
    assert "SIGKILL" in seen


async def test_a_process_of_several_threads_is_not_copied(make_runner: MakeRunner, tmp_path: Path) -> None:
    """It becomes the part, and the next one imports again."""
    runner = make_runner(part("threaded", tmp_path), ENV)
    async with running(runner):
        await until(lambda: len(lines(tmp_path, "mains")) == 1)
        assert server_pid(tmp_path) == runner.status.pid
        await killed(runner, tmp_path)
        assert server_pid(tmp_path) == runner.status.pid
    assert len(lines(tmp_path, "preloads")) == 2


async def test_imports_that_fail_are_said_and_tried_again(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(part("broken", tmp_path), ENV)
    async with running(runner):
        await until(lambda: len(lines(tmp_path, "preloads")) >= 2)
        await until(lambda: "its log says why" in runner.status.detail)
    assert "no such library" in Path(runner.status.log).read_text()
    assert not lines(tmp_path, "mains")


async def test_a_stop_does_not_wait_for_the_imports(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(part("slow", tmp_path), ENV)
    async with running(runner):
        await until(lambda: bool(lines(tmp_path, "preloads")))
        assert runner.status.state is PartState.STARTING and not runner.ready.is_set()
    async with asyncio.timeout(60):
        await runner.stop()
    assert identify(server_pid(tmp_path)) is None
    assert not lines(tmp_path, "mains") and runner.status.state is PartState.STOPPED


async def test_a_stop_leaves_neither_part_nor_fork_server(made: Runner, tmp_path: Path) -> None:
    async with running(made):
        await made.ready.wait()
        pid = made.status.pid
    await made.stop()
    assert pid is not None and identify(pid) is None
    assert identify(server_pid(tmp_path)) is None


async def test_a_fork_server_that_died_costs_its_part_nothing(made: Runner, tmp_path: Path) -> None:
    async with running(made):
        await made.ready.wait()
        pid = made.status.pid
        os.kill(server_pid(tmp_path), signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert made.status.pid == pid and made.status.restarts == 0
        await killed(made, tmp_path)
    assert len(lines(tmp_path, "preloads")) == 2


def test_the_part_outlives_a_supervisor_that_dies(tmp_path: Path) -> None:
    """Which takes the socket with it; the fork server ends after its process."""
    arguments = (MODULE, "wait", str(tmp_path))
    told = {"env": ENV, "cwd": PROJECT, "log": tmp_path / "log", "fingerprint": "f", "patience_s": 60.0}
    server = ForkServer(arguments, **told)  # type: ignore[arg-type]
    process = server.start()
    assert server._socket is not None and server._server is not None
    server._socket.close()
    assert process.alive and identify(server_pid(tmp_path)) is not None
    stop_now(process, seconds=0)
    assert server._server.wait(20) == 0
