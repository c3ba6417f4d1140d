"""Draws and changes of a run's tasks on real rows: what is asked for twice, refused, passed over, carried on."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from activities.lineage.tasks import TaskActivities
from storage import difficulty, quarantine, queries
from storage.database import session
from storage.tables import ChangedTask, Draw, Run, Task
from tasksets import open_taskset
from tests.storage import rows
from tests.workflows.known_tasks import write_tasks
from workflows.config import RunConfig
from workflows.contracts import (
    ChangeTasksInput,
    ChangeTasksOutput,
    DrawTasksInput,
    GroupResult,
    Split,
    TaskChange,
    TaskRef,
    TaskRequest,
)
from workflows.difficulty import Tally
from workflows.errors import InvalidConfig

NAMES = [f"t{number}" for number in range(6)]


class Tasks:
    """A run on a folder of six tasks, and one of a held-out task."""

    def __init__(self, database: Engine, folder: Path) -> None:
        self.database, self.folder = database, folder
        write_tasks(folder, *NAMES)
        write_tasks(folder / "held_out", "secret")
        self.activities = TaskActivities(database, open_taskset, lambda: 50.0)
        self.numbers = count()
        self.config = RunConfig(model="m", taskset=str(folder), sampling={"by": "difficulty"}, seed=4)
        self.open("r")

    def open(self, run: str, **values: Any) -> None:
        config = self.config.model_dump(mode="json") | values.pop("config", {})
        with session(self.database) as opened:
            opened.add(
                Run(
                    id=run, state="running", config=config, mode="sync", seed=4, started_at=1.0, train_tasks=6, **values
                )
            )

    async def draw(self, cursor: int, number: int, run: str = "r", **values: Any) -> list[tuple[str, str, bool]]:
        """Task, difficulty and whether it is passed over."""
        message = DrawTasksInput(
            run=run,
            config=self.config.model_dump(mode="json"),
            cursor=cursor,
            count=number,
            policy_version=values.pop("policy_version", 0),
            **values,
        )
        out = await self.activities.draw_tasks(message)
        assert [draw.number for draw in out.draws] == [*range(cursor, cursor + len(out.draws))]
        return [(draw.task_id, draw.difficulty, draw.passed_over) for draw in out.draws]

    async def drawn(self, cursor: int, number: int, run: str = "r", **values: Any) -> list[str]:
        return [task_id for task_id, _, _ in await self.draw(cursor, number, run, **values)]

    async def change(
        self, change: TaskChange, *tasks: str, number: int | None = None, **values: Any
    ) -> ChangeTasksOutput:
        message = ChangeTasksInput(
            run="r",
            config=self.config.model_dump(mode="json"),
            number=next(self.numbers) if number is None else number,
            change=change,
            request=TaskRequest(tasks=list(tasks), **values),
            policy_version=3,
            at=9.0,
        )
        return await self.activities.change_tasks(message)

    async def add(self, *tasks: str, **values: Any) -> ChangeTasksOutput:
        return await self.change(TaskChange.ADDED, *tasks, **values)

    async def retire(self, *tasks: str, **values: Any) -> ChangeTasksOutput:
        return await self.change(TaskChange.RETIRED, *tasks, **values)

    def close(self, number: int, task_id: str, passes: int, episodes: int = 8, run: str = "r") -> None:
        """The row of a closed group."""
        result = GroupResult(
            group_id=f"{run}/g{number}",
            number=number,
            task_id=f"{self.folder}/{task_id}",
            members=[],
            rewards=[],
            eligible=False,
            outcomes={"model_success": passes, "model_failure": episodes - passes, "infra_failure": 9, "surplus": 9},
            draw=number,
        )
        with session(self.database) as opened:
            queries.put_group(opened, run=run, result=result)


@pytest.fixture
def tasks(database: Engine, tmp_path: Path) -> Tasks:
    return Tasks(database, tmp_path / "tasks")


async def test_a_draw_is_made_once_however_often_and_in_whichever_pages_it_is_asked_for(tasks: Tasks) -> None:
    first = await tasks.drawn(0, 4)
    tasks.close(0, first[0], passes=8)
    assert await tasks.drawn(0, 4) == first
    more = await tasks.drawn(2, 5)
    assert more[:2] == first[2:] and sorted((first + more[2:])[:6]) == NAMES
    assert await tasks.drawn(0, 7) == first + more[2:]
    with session(tasks.database) as opened:
        assert len(opened.exec(select(Draw)).all()) == 7
        row = opened.get(Task, f"{tasks.folder}/{first[0]}")
        assert row is not None and (row.split, row.kind) == ("train", "k")


async def test_evidence_is_of_valid_episodes_alone_and_decides_the_pool(tasks: Tasks) -> None:
    drawn = await tasks.drawn(0, 6)
    for number, passes in enumerate([8, 0, 4]):
        tasks.close(number, drawn[number], passes=passes)
    tasks.close(3, drawn[3], passes=0, episodes=0)
    pools = {task_id: pool for task_id, pool, _ in await tasks.draw(6, 600)}
    assert pools == dict(zip(drawn, ["saturated", "hard", "learning", "unseen", "unseen", "unseen"], strict=True))


async def test_rewards_in_quarantine_are_no_evidence_until_the_mark_is_undone(tasks: Tasks) -> None:
    (task_id,) = await tasks.drawn(0, 1)
    tasks.close(0, task_id, passes=8)
    task = TaskRef(taskset=str(tasks.folder), split=Split.TRAIN, task_id=task_id)
    targets = [quarantine.Target(quarantine.EPISODE, f"r/g0/e{index}/a0", ["r"]) for index in range(6)]
    with session(tasks.database) as opened:
        for target in targets:
            queries.put_episode(opened, record=rows.record(target.id).model_copy(update={"task": task}))
    for marked, tally in ((True, Tally(2, 2)), (False, Tally(8, 8))):
        with session(tasks.database) as opened:
            for target in targets:
                change = quarantine.put_mark if marked else quarantine.undo_mark
                change(opened, run="r", target=target, why="an exploit", by="me")
            assert difficulty.known_tasks(opened, run="r", window=32)[task_id].tally == tally
            assert sum(group.tally.episodes for group in difficulty.evidence(opened, run="r")) == (0 if marked else 6)


async def test_a_task_in_quarantine_is_passed_over_where_it_was_drawn_and_drawn_no_more(tasks: Tasks) -> None:
    drawn = await tasks.drawn(0, 6)
    again = await tasks.draw(3, 9, held=[drawn[3]])
    assert [passed for _, _, passed in again[:3]] == [True, False, False]
    assert drawn[3] not in [task_id for task_id, _, _ in again[3:]]


async def test_a_run_whose_tasks_are_all_retired_or_in_quarantine_is_told_so(tasks: Tasks) -> None:
    await tasks.retire("t0", "t1")
    message = DrawTasksInput(
        run="r", config=tasks.config.model_dump(mode="json"), cursor=0, count=2, policy_version=0, held=NAMES[2:]
    )
    out = await tasks.activities.draw_tasks(message)
    assert out.draws == [] and out.why == "no task is left to draw: 2 are retired, 4 in quarantine"


async def test_an_added_task_comes_next_also_where_its_file_came_after_the_folder_was_read(tasks: Tasks) -> None:
    first = await tasks.drawn(0, 2)
    write_tasks(tasks.folder, "late")
    assert (await tasks.add("late", why="new")).tasks == 7
    assert (await tasks.drawn(0, 4))[:3] == [*first, "late"]
    with session(tasks.database) as opened:
        (row,) = opened.exec(select(ChangedTask)).all()
        assert (row.task, row.change, row.why, row.policy_version) == (f"{tasks.folder}/late", "added", "new", 3)


async def test_a_task_of_another_folder_keeps_its_taskset(tasks: Tasks, tmp_path: Path) -> None:
    other = write_tasks(tmp_path / "more", "other")
    await tasks.add("other", taskset=other)
    message = DrawTasksInput(run="r", config=tasks.config.model_dump(mode="json"), cursor=0, count=7, policy_version=0)
    out = await tasks.activities.draw_tasks(message)
    assert out.taskset == str(tasks.folder)
    assert {draw.task_id: draw.taskset for draw in out.draws} == {"other": other} | dict.fromkeys(NAMES, "")


async def test_a_retired_task_is_passed_over_and_comes_again_once_it_is_added_again(tasks: Tasks) -> None:
    drawn = await tasks.drawn(0, 6)
    assert (await tasks.retire(drawn[5], why="broken")).tasks == 5
    assert (await tasks.draw(5, 1))[0] == (drawn[5], "unseen", True)
    assert drawn[5] not in await tasks.drawn(6, 10)
    assert (await tasks.add(drawn[5])).tasks == 6
    assert (await tasks.drawn(16, 1)) == [drawn[5]], "it was drawn longest ago"


@pytest.mark.parametrize(
    ("change", "names", "values", "fault"),
    [
        ("added", ["t1"], {}, "t1: the run has it already, from .*/tasks"),
        ("added", ["nowhere"], {}, "nowhere: unknown task: .*/tasks has no task 'nowhere'"),
        ("added", ["secret"], {}, "secret: it is held out"),
        ("added", ["x"], {"taskset": "/no/such/folder"}, "taskset: no taskset '/no/such/folder'"),
        ("added", ["t1"], {"taskset": "{more}"}, "t1: the run has it already"),
        ("added", ["gone"], {"taskset": "{more}"}, "gone: wrong taskset: the one that was retired is from .*/tasks"),
        ("retired", ["nowhere"], {}, "nowhere: unknown task: the run has none of that id; it trains on .*/tasks"),
        ("retired", ["gone"], {}, "gone: it is retired already"),
        ("retired", ["t1"], {"taskset": "{more}"}, "t1: wrong taskset: it is from .*/tasks, not from .*/more"),
        ("retired", NAMES, {}, "no task would be left"),
        ("added", ["t1", "nowhere"], {}, "t1: the run has it already.*\nnowhere: unknown task"),
    ],
)
async def test_a_request_is_refused_whole_with_every_reason(
    tasks: Tasks, tmp_path: Path, change: str, names: list[str], values: dict[str, str], fault: str
) -> None:
    await tasks.drawn(0, 1)
    write_tasks(tasks.folder, "gone")
    more = write_tasks(tmp_path / "more", "t1", "gone")
    await tasks.add("gone")
    await tasks.retire("gone")
    with pytest.raises(InvalidConfig, match=fault):
        await tasks.change(TaskChange(change), *names, **{key: text.format(more=more) for key, text in values.items()})
    with session(tasks.database) as opened:
        assert len(opened.exec(select(ChangedTask)).all()) == 2


async def test_a_request_that_is_made_again_after_a_crash_is_granted_as_it_was(tasks: Tasks) -> None:
    first = await tasks.retire("t1", number=5)
    assert await tasks.retire("t1", number=5) == first
    with session(tasks.database) as opened:
        assert len(opened.exec(select(ChangedTask)).all()) == 1


async def test_from_a_change_on_a_run_that_samples_by_order_goes_on_where_its_cycle_was(tasks: Tasks) -> None:
    """Groups of before have no draw: their tasks come after those that had no group yet, in the same order."""
    tasks.config = RunConfig(model="m", taskset=str(tasks.folder))
    for number, task_id in enumerate(["t4", "t2"]):
        tasks.close(number, task_id, passes=8)
    await tasks.retire("t0")
    drawn = await tasks.drawn(2, 10)
    assert sorted(drawn[:3]) == ["t1", "t3", "t5"] and drawn[3:5] == ["t4", "t2"] and drawn[5:] == drawn[:5]


async def test_a_run_that_resumes_goes_on_from_the_evidence_and_the_order_of_the_other(tasks: Tasks) -> None:
    drawn = await tasks.drawn(0, 4)
    for number, task_id in enumerate(drawn):
        tasks.close(number, task_id, passes=8 if number == 0 else 4)
    tasks.open("s", resume_from="r")
    unseen = [name for name in NAMES if name not in drawn]
    resumed = await tasks.draw(0, 600, run="s")
    first = [task_id for task_id, pool, _ in resumed if pool == "learning"][:3]
    assert first == drawn[1:], "those that the other drew longest ago come first"
    assert {pool for task_id, pool, _ in resumed if task_id == drawn[0]} == {"saturated"}
    assert {task_id for task_id, pool, _ in resumed if pool == "unseen"} == set(unseen)
    tasks.open("elsewhere", resume_from="r", config={"taskset": "shell"})
    with session(tasks.database) as opened:
        assert [row.id for row in difficulty.forebears(opened, run="s")] == ["r", "s"]
        assert [row.id for row in difficulty.forebears(opened, run="elsewhere")] == ["elsewhere"]
