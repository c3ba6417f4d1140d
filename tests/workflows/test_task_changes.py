"""An operator adds tasks to a run that goes on, and retires some: by the command lines of docs/tasks.md."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlmodel import col, select
from temporalio.client import Client

from storage.database import session
from storage.tables import ChangedTask, Draw
from tests.workflows.conftest import unique
from tests.workflows.known_tasks import KnownTasks, serving, write_tasks
from tests.workflows.runs import start
from workers.stack.parts import tool
from workflows.contracts import RunState, RunStatus

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"
NAMES = [f"easy-{number}" for number in range(4)]
UPDATE = "temporal workflow update execute"


def documented(beginning: str) -> list[str]:
    return [line for line in DOCS.read_text().splitlines() if line.startswith(beginning)]


@pytest.fixture
def known(database: Engine, tmp_path: Path) -> Iterator[KnownTasks]:
    yield KnownTasks(database, write_tasks(tmp_path / "tasks", *NAMES), lambda task_id, version: 0.5)


class Operator:
    """A person at a terminal with the Temporal CLI."""

    def __init__(self, client: Client, run: str) -> None:
        self._client, self._run = client, run

    async def says(self, line: str, more: str = "") -> tuple[int, str]:
        """Exit code and all output of a command line of the documents, run for the test's run and server."""
        words = shlex.split(line.replace("my-run", self._run).replace("/data/more-tasks", more))
        server = ["--address", self._client.service_client.config.target_host]
        process = await asyncio.create_subprocess_exec(
            tool(words[0]), *words[1:], *server, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode or 0, out.decode()

    async def asks(self, name: str, given: str) -> tuple[int, str]:
        return await self.says(f"{UPDATE} --workflow-id my-run --name {name} --input {shlex.quote(given)}")


async def status_of(handle: Any) -> RunStatus:
    status: RunStatus = await handle.query("status", result_type=RunStatus)
    return status


async def refused(operator: Operator, more: str) -> None:
    """Requests that change nothing, each with its reason."""
    for name, given, why in (
        ("add_tasks", '{"tasks": ["late"]}', "late: the run has it already"),
        ("add_tasks", '{"tasks": ["nowhere"]}', "nowhere: unknown task"),
        ("add_tasks", '{"tasks": ["x"], "taskset": "/no/such/folder"}', "taskset: no taskset"),
        ("add_tasks", '{"tasks": []}', "tasks: List should have at least 1 item"),
        ("add_tasks", '{"task": "late"}', "task: unknown field; allowed here: tasks, taskset, why"),
        ("add_tasks", '"late"', "give one JSON object"),
        ("retire_tasks", '{"tasks": ["easy-1"]}', "easy-1: it is retired already"),
        ("retire_tasks", '{"tasks": ["easy-2", "easy-2"]}', "tasks: named twice: easy-2"),
        ("retire_tasks", '{"tasks": ["late"], "taskset": "%s"}' % more, "late: wrong taskset"),  # noqa: UP031
    ):
        code, out = await operator.asks(name, given)
        assert code == 1 and why in out, out


@pytest.mark.parametrize("by", ["order", "difficulty"])
async def test_the_documented_command_lines_change_the_tasks_of_a_run_that_goes_on(
    temporal: Client, known: KnownTasks, tmp_path: Path, by: str
) -> None:
    run = unique("run")
    more = write_tasks(tmp_path / "more", "other")
    config = {
        "model": "tiny",
        "mode": "sync",
        "taskset": known.folder,
        "rollout": {"group_size": 8, "groups_per_batch": 2},
        "sampling": {"by": by},
        "training": {"steps": 7},
        "evaluation": {"tasks": 0},
        "continue_as_new_every": 1,
    }
    async with serving(temporal, known):
        handle = await start(temporal, config, run)
        async with asyncio.timeout(60):
            while len(known.admitted) < 4:
                await asyncio.sleep(0.02)
        await handle.signal("pause")
        operator, before = Operator(temporal, run), len(known.admitted)
        write_tasks(Path(known.folder), "late")
        lines = documented(UPDATE)
        assert len(lines) == 3
        for line in lines:
            code, out = await operator.says(line, more)
            assert code == 0 and "changed" in out, out
        (query,) = documented("temporal workflow query")
        code, out = await operator.says(query)
        assert code == 0 and "added late" in out and "retired easy-1" in out
        status = await status_of(handle)
        assert (status.state, status.tasks_added, status.tasks_retired) == (RunState.PAUSED, 2, 1)
        assert status.task_changes == ["added late", "added other", "retired easy-1"]
        if by == "order":
            await refused(operator, more)
        await handle.signal("resume")
        status = await asyncio.wait_for(handle.result(), 300)
    assert (status.state, status.step, status.tasks_added) == (RunState.FINISHED, 7, 2)
    later = known.admitted[before:]
    assert {"late", "other"} <= {*(later[:4] if by == "order" else later)}, "by order, what was added comes next"
    assert {"easy-0", "easy-2", "easy-3"} <= {*later} and "easy-1" not in later[2:]
    with session(known.database) as opened:
        changed = opened.exec(select(ChangedTask).order_by(col(ChangedTask.number))).all()
        assert [(row.task.rpartition("/")[2], row.change) for row in changed] == [
            ("late", "added"),
            ("other", "added"),
            ("easy-1", "retired"),
        ]
        (draw,) = opened.exec(select(Draw).where(Draw.run == run, col(Draw.task).endswith("/other")).limit(1)).all()
        assert draw.task == f"{more}/other"


async def test_a_run_that_is_over_or_about_to_be_refuses(temporal: Client, known: KnownTasks) -> None:
    run, gate = unique("run"), asyncio.Event()
    config = {
        "model": "tiny",
        "mode": "sync",
        "taskset": known.folder,
        "rollout": {"group_size": 8, "groups_per_batch": 1},
        "training": {"steps": 1},
        "evaluation": {"tasks": 0},
    }

    async def hold(message: Any) -> None:
        if message.version == 1:
            await gate.wait()

    known.applying = hold
    async with serving(temporal, known):
        handle = await start(temporal, config, run)
        async with asyncio.timeout(60):
            while not known.calls["update"]:
                await asyncio.sleep(0.02)
        operator = Operator(temporal, run)
        code, out = await operator.asks("retire_tasks", '{"tasks": ["easy-1"]}')
        assert code == 1 and "the run is over, or about to be" in out
        gate.set()
        assert (await asyncio.wait_for(handle.result(), 300)).state is RunState.FINISHED
        code, out = await operator.asks("retire_tasks", '{"tasks": ["easy-1"]}')
        assert code == 1 and "workflow execution already completed" in out
