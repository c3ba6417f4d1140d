"""A run over 40 tasks of known difficulty, on a real Temporal server and real rows: what it samples and reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Engine
from sqlmodel import col, select
from temporalio.client import Client

from storage.database import session
from storage.report import build_report, render_html, render_terminal
from storage.tables import Draw, Group
from tests.lineage.pages import Page
from tests.workflows.conftest import unique
from tests.workflows.known_tasks import KnownTasks, serving, write_tasks
from tests.workflows.runs import start
from workflows.config import parse_run_config
from workflows.contracts import RunState, RunStatus

SATURATES = 3
"""The version from which on the tasks that are learnt always pass."""
EASY, LEARNT, EVEN, NEVER = (
    [f"{kind}-{number:02d}" for number in range(count)]
    for kind, count in (("easy", 12), ("learnt", 8), ("even", 12), ("never", 8))
)
SAMPLING = {"by": "difficulty", "window": 16}
STEPS = 10
OFF = 6
"""Draws by which a pool may be off what was declared, over the whole run, while its share moves."""


def chance(task_id: str, version: int) -> float:
    kind = task_id.partition("-")[0]
    return {"easy": 1.0, "never": 0.0, "even": 0.5, "learnt": 1.0 if version >= SATURATES else 0.5}[kind]


def config_of(folder: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": "tiny",
        "mode": "sync",
        "taskset": folder,
        "seed": 11,
        "rollout": {"group_size": 8, "groups_per_batch": 8},
        "sampling": SAMPLING,
        "training": {"steps": STEPS},
        "evaluation": {"tasks": 0},
    }
    return config | changes


@pytest.fixture
def known(database: Engine, tmp_path: Path) -> Iterator[KnownTasks]:
    folder = write_tasks(tmp_path / "tasks", *EASY, *LEARNT, *EVEN, *NEVER)
    yield KnownTasks(database, folder, chance)


async def train(client: Client, known: KnownTasks, run: str, **changes: Any) -> RunStatus:
    handle = await start(client, config_of(known.folder, **changes), run)
    status: RunStatus = await asyncio.wait_for(handle.result(), 500)
    return status


def drawn_by(known: KnownTasks, run: str) -> list[tuple[int, str, str]]:
    """(number, task, difficulty) of a run's draws."""
    with session(known.database) as opened:
        rows = opened.exec(select(Draw).where(Draw.run == run).order_by(col(Draw.number))).all()
    return [(row.number, row.task.rpartition("/")[2], row.difficulty) for row in rows]


def rate(draws: list[tuple[int, str, str]], tasks: list[str]) -> float:
    """Of the draws, those of one such task."""
    return sum(task in tasks for _, task, _ in draws) / len(draws) / len(tasks)


async def test_shares_move_as_declared_saturated_tasks_fade_and_nothing_is_skipped_or_repeated(
    temporal: Client, known: KnownTasks
) -> None:
    """The run begins anew from its state after every step; another goes on without, and has drawn the same."""
    run, whole = unique("run"), unique("whole")
    async with serving(temporal, known):
        status = await train(temporal, known, run, continue_as_new_every=1)
        asked = list(known.drawn)
        await train(temporal, known, whole, training={"steps": 2}, continue_as_new_every=100)
    executions = [execution async for execution in temporal.list_workflows(f"WorkflowId = '{run}'")]
    assert (status.state, status.step, len(executions)) == (RunState.FINISHED, STEPS, STEPS)

    draws = drawn_by(known, run)
    with session(known.database) as opened:
        groups = opened.exec(select(Group.number, Group.draw).where(Group.run == run).order_by(col(Group.number))).all()
    assert [number for number, _, _ in draws] == [*range(len(draws))]
    assert groups == [(number, number) for number in range(len(draws))], "each draw has one group, in its order"
    assert draws[: len(drawn_by(known, whole))] == drawn_by(known, whole)

    rules, expected, got = parse_run_config(config_of(known.folder)).sampling, Counter[str](), Counter[str]()
    for message, out in asked:
        weights = {name: rules.weight_of(name) * tasks for name, tasks in out.tasks.items()}
        fresh = range(message.cursor, message.cursor + message.count)
        for name, weight in weights.items():
            expected[name] += weight / sum(weights.values()) * len(fresh)
    got.update(difficulty for _, _, difficulty in draws)
    assert all(abs(got[name] - expected[name]) <= OFF for name in expected), (got, expected)

    half, last = draws[: len(draws) // 2], draws[-40:]
    assert rate(last, EASY) < rate(last, EVEN) / 4 and rate(last, NEVER) < rate(last, EVEN) / 4
    assert rate(last, LEARNT) < rate(half, LEARNT) / 2, "what is learnt fades as well"
    checked = [difficulty for _, task, difficulty in draws if task in EASY and difficulty == "saturated"]
    assert checked, "saturated tasks are checked again"
    assert {task for _, task, _ in draws} == {*EASY, *LEARNT, *EVEN, *NEVER}
    assert status.tasks_by_difficulty["saturated"] >= len(EASY)

    with session(known.database) as opened:
        report = build_report(opened, run)
    health = report.taskset_health
    assert (health.sampled_by, health.tasks, health.seen) == ("difficulty", 40, 40)
    assert all(part.difficulty == "saturated" for part in health.best if "easy" in part.task)
    assert {part.task.rpartition("/")[2] for part in health.worst if part.passes == 0} <= {*NEVER}
    assert sum(health.by_difficulty.values()) == 40 and health.by_difficulty["saturated"] >= len(EASY)
    assert all(sum(step.tasks.values()) == 40 for step in health.steps)
    assert [step.version for step in health.steps] == [*range(STEPS)]
    early, late = health.steps[0].episodes, health.episodes
    assert early["unseen"] > 0.7 * sum(early.values()) and late["learning"] > 0.6 * sum(late.values())
    console = Console(record=True, width=110)
    render_terminal(report, console)
    text = console.export_text()
    assert "of 40 tasks seen still teach" in text and "Lowest pass rates" in text and "share of the episodes" in text
    page = render_html(report)
    Page(page)
    assert "Taskset health: what the episodes went to" in page and "of 40 tasks seen still teach" in page


async def test_in_async_mode_too_every_draw_has_its_group_across_continue_as_new(
    temporal: Client, known: KnownTasks
) -> None:
    """Draws that were at hand when an execution ended are the next one's."""
    run = unique("run")
    async with serving(temporal, known):
        small = {"rollout": {"group_size": 4, "groups_per_batch": 3}, "training": {"steps": 3}}
        await train(temporal, known, run, mode="async", continue_as_new_every=1, **small)
    draws = drawn_by(known, run)
    with session(known.database) as opened:
        groups = opened.exec(select(Group.draw).where(Group.run == run)).all()
    assert [number for number, _, _ in draws] == [*range(len(draws))]
    assert len(set(groups)) == len(groups)
    without = {*range(len(draws))} - {*groups}
    assert all(number >= len(draws) - 3 - 6 for number in without), "the end cut off what was in flight and at hand"
