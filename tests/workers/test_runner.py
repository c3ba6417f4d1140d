from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from workers.stack import runner as runner_module
from workers.stack.health import Health
from workers.stack.parts import Part
from workers.stack.process import read_pid_file
from workers.stack.runner import Runner, pause_after
from workers.stack.state import Home
from workers.stack.status import PartState

from .conftest import SLEEP, MakeRunner, python_part


@contextlib.asynccontextmanager
async def running(runner: Runner) -> AsyncIterator[Runner]:
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Switch:
    """A health check that a test turns off."""

    def __init__(self, on: bool = True) -> None:
        self.on = on

    async def __call__(self) -> Health:
        return Health(True) if self.on else Health(False, "switched off")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "exit 0"),
        ("raise SystemExit(3)", "exit 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
async def test_a_part_that_ends_is_started_again_whatever_its_exit_code(
    make_runner: MakeRunner, code: str, reason: str
) -> None:
    seen: list[str] = []
    runner = make_runner(python_part(code))
    runner._changed = lambda: seen.append(runner.status.detail)
    async with running(runner):
        await until(lambda: runner.status.restarts >= 3)
    assert reason in seen


async def test_a_killed_part_comes_back_as_a_new_process(make_runner: MakeRunner) -> None:
    runner = make_runner(python_part(SLEEP))
    async with running(runner):
        await runner.ready.wait()
        old = runner.status.pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        await until(lambda: runner.status.pid not in (None, old))
        assert runner.status.restarts == 1


def test_the_pause_doubles_to_half_a_minute() -> None:
    assert [pause_after(count) for count in (1, 2, 3, 6, 7, 8, 100)] == [0.5, 1, 2, 16, 30, 30, 30]


async def test_the_pause_is_forgotten_after_healthy_time(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "FORGIVE_S", 0.05)
    runner = make_runner(python_part(SLEEP))
    runner._failures = 6
    async with running(runner):
        await until(lambda: runner._failures == 0)


async def test_a_part_that_lives_but_fails_its_check_for_long_is_restarted(make_runner: MakeRunner) -> None:
    check = Switch()
    runner = make_runner(python_part(SLEEP, check=check, hang_s=0.1, stop_s=1.0))
    async with running(runner):
        await runner.ready.wait()
        old = runner.status.pid
        check.on = False
        await until(lambda: runner.status.state is PartState.UNHEALTHY)
        await until(lambda: runner.status.restarts == 1)
        check.on = True
        await until(lambda: runner.status.state is PartState.HEALTHY)
        assert runner.status.pid != old


async def test_a_short_failure_of_the_check_restarts_nothing(make_runner: MakeRunner) -> None:
    check = Switch()
    runner = make_runner(python_part(SLEEP, check=check, hang_s=60.0))
    async with running(runner):
        await runner.ready.wait()
        check.on = False
        await until(lambda: runner.status.state is PartState.UNHEALTHY)
        check.on = True
        await until(lambda: runner.status.state is PartState.HEALTHY)
        assert runner.status.restarts == 0


async def test_the_next_supervisor_takes_a_running_part_over(make_runner: MakeRunner) -> None:
    part = python_part(SLEEP)
    first = make_runner(part)
    async with running(first):
        await first.ready.wait()
    second = make_runner(part)
    async with running(second):
        await second.ready.wait()
        assert second.status.pid == first.status.pid
        assert second.status.pid is not None
        os.kill(second.status.pid, signal.SIGKILL)
        await until(lambda: second.status.pid not in (None, first.status.pid))


async def test_a_part_started_with_other_settings_is_replaced(make_runner: MakeRunner) -> None:
    first = make_runner(python_part(SLEEP), {"RATCHET_X": "1"})
    async with running(first):
        await first.ready.wait()
    old = read_pid_file(first._pid_file)
    assert old is not None
    second = make_runner(python_part(SLEEP), {"RATCHET_X": "2"})
    async with running(second):
        await second.ready.wait()
        assert second.status.pid != old.pid
        assert not old.alive


async def test_stopping_lets_a_part_drain(make_runner: MakeRunner, home: Home) -> None:
    code = (
        "import signal, sys, time\n"
        "def drain(*_): time.sleep(0.2); open('drained', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\n"
        "open('armed', 'w').close(); time.sleep(600)"
    )
    runner = make_runner(python_part(code))
    async with running(runner):
        await until((home.path / "armed").exists)
    await runner.stop()
    assert (home.path / "drained").exists()
    assert runner.status.state is PartState.STOPPED
    assert not runner._pid_file.exists()


async def test_a_part_that_runs_once_is_repeated_until_it_ends_well(make_runner: MakeRunner, home: Home) -> None:
    code = "import os, sys; seen = os.path.exists('seen'); open('seen', 'w').close(); sys.exit(0 if seen else 1)"
    runner = make_runner(python_part(code, once=True))
    await asyncio.wait_for(runner.run(), 10)
    assert runner.status.state is PartState.DONE
    assert runner.status.restarts == 1
    assert runner.ready.is_set()


async def test_somebody_elses_daemon_is_used_and_neither_started_nor_stopped(make_runner: MakeRunner) -> None:
    runner = make_runner(python_part(SLEEP, check=Switch(), elsewhere=True))
    async with running(runner):
        await runner.ready.wait()
        assert runner.status.state is PartState.ELSEWHERE
        assert runner.status.pid is None
    await runner.stop()
    assert runner.status.state is PartState.ELSEWHERE


async def test_a_daemon_is_started_where_somebody_elses_has_gone(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "ABSENT_S", 0.05)
    check = Switch()
    runner = make_runner(python_part(SLEEP, check=check, elsewhere=True))
    async with running(runner):
        await runner.ready.wait()
        check.on = False
        await until(lambda: runner.status.pid is not None)


async def test_a_part_that_cannot_be_started_says_what_to_do(make_runner: MakeRunner) -> None:
    runner = make_runner(python_part(SLEEP, missing="install it"))
    async with running(runner):
        await until(lambda: runner.status.state is PartState.MISSING)
        assert runner.status.detail == "install it"


async def test_a_program_that_is_not_there_is_named_and_tried_again(make_runner: MakeRunner, tmp_path: Path) -> None:
    program = str(tmp_path / "nothing")
    runner = make_runner(Part(name="part", argv=(program,), check=Switch()))
    async with running(runner):
        await until(lambda: runner.status.restarts >= 2)
        assert program in runner.status.detail
