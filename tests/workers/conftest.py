"""State folders and tiny parts: real child processes that do one thing each."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from workers.stack import runner as runner_module
from workers.stack.health import Check, alive
from workers.stack.parts import Part
from workers.stack.process import read_pid_file, stop_now
from workers.stack.runner import Runner
from workers.stack.state import Home

SLEEP = "import time; time.sleep(600)"

MakePart = Callable[..., Part]
MakeRunner = Callable[..., Runner]


def python_part(code: str, *, name: str = "part", check: Check = alive, **fields: object) -> Part:
    """A part that runs `code` in a bare interpreter."""
    return Part(name=name, argv=(sys.executable, "-S", "-c", code), check=check, **fields)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A state folder whose processes are ended after the test, whatever happened."""
    folder = Home(tmp_path / "home")
    folder.create()
    yield folder
    for pid_file in folder.pids.glob("*.json"):
        if (process := read_pid_file(pid_file)) is not None:
            stop_now(process, seconds=0.1)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that looks often and pauses shortly."""
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr(runner_module, "CHECK_S", 0.02)
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.01)


@pytest_asyncio.fixture
async def make_runner(home: Home, hasty: None) -> AsyncIterator[MakeRunner]:
    """Runners in `home`, stopped after the test."""
    made: list[Runner] = []

    def make(part: Part, env: dict[str, str] | None = None) -> Runner:
        made.append(Runner(part, home=home, env=env or {}, changed=lambda: None))
        return made[-1]

    yield make
    for runner in made:
        await runner.stop()
