"""The taskset's health in a report: pools over versions, single tasks, what was added and retired."""

from __future__ import annotations

import io

from rich.console import Console
from sqlalchemy import Engine

from storage import queries
from storage.database import session
from storage.report import build_report, render_html, render_terminal
from storage.report.taskset import TasksetPart
from storage.tables import ChangedTask, Draw, Run
from tests.lineage.pages import Page
from tests.storage import rows
from tests.storage.conftest import MakeRun
from workflows.contracts import Split, TaskRef


def health_of(database: Engine, run: str = "r") -> tuple[TasksetPart, str, str]:
    """With its terminal, whatever its lines, and its page."""
    with session(database) as opened:
        report = build_report(opened, run)
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=110))
    page = render_html(report)
    Page(page)
    return report.taskset_health, " ".join(out.getvalue().split()), page


class Rows:
    """A run of ten tasks; groups of eight, one by one."""

    def __init__(self, database: Engine, **sampling: object) -> None:
        self.database, self.number = database, 0
        config = {"model": "tiny", "sampling": sampling}
        row = Run(id="r", state="running", config=config, mode="sync", seed=0, started_at=1.0, train_tasks=10)
        with session(database) as opened:
            opened.add(row)

    def group(self, task_id: str, passes: int, *, version: int, drawn: str = "") -> None:
        task = TaskRef(taskset="shell", split=Split.TRAIN, task_id=task_id)
        made = rows.group(self.number, rewards=tuple(float(index < passes) for index in range(8)))
        counts = {"model_success": passes, "model_failure": 8 - passes}
        made = made.model_copy(update={"task_id": task_id, "outcomes": counts, "draw": self.number if drawn else None})
        with session(self.database) as opened:
            for attempt_id, reward in zip(made.members, made.rewards, strict=True):
                record = rows.record(attempt_id, reward=reward)
                queries.put_episode(opened, record=record.model_copy(update={"task": task, "max_version": version}))
            lost = rows.record(f"{made.group_id}/e8/a0", reward=None).model_copy(update={"task": task})
            queries.put_episode(opened, record=lost)
            queries.put_group(opened, run="r", result=made)
            if drawn:
                values = {"task": f"shell/{task_id}", "difficulty": drawn, "policy_version": version, "drawn_at": 1.0}
                opened.add(Draw(run="r", number=self.number, **values))
        self.number += 1

    def changed(self, task_id: str, change: str, *, version: int, why: str = "") -> None:
        values = {"task": f"shell/{task_id}", "change": change, "why": why, "policy_version": version, "at": 2.0}
        with session(self.database) as opened:
            opened.add(ChangedTask(run="r", number=version, position=0, **values))


def test_pools_move_version_by_version_and_episodes_count_to_what_their_task_was(database: Engine) -> None:
    made = Rows(database)
    made.group("solved", 8, version=0)
    made.group("grows", 0, version=0)
    made.group("grows", 8, version=0)
    made.group("grows", 8, version=1)
    made.group("solved", 8, version=1)
    health, text, page = health_of(database)
    assert (health.sampled_by, health.tasks, health.seen, health.teaching) == ("order", 10, 2, 1)
    first, second = health.steps
    assert (first.version, first.episodes["unseen"], first.tasks["learning"], first.tasks["unseen"]) == (0, 24, 1, 8)
    assert (second.episodes["learning"], second.episodes["saturated"]) == (8, 8)
    assert health.by_difficulty == {"unseen": 8, "unsolvable": 0, "hard": 0, "learning": 1, "saturated": 1}
    worst, best = health.worst
    assert (worst.task, worst.passes, worst.episodes) == ("shell/grows", 16, 24) and best.task == "shell/solved"
    assert [(item.version, item.passes, item.episodes) for item in worst.versions] == [(0, 8, 16), (1, 8, 8)]
    assert "1 of 2 tasks seen still teach (50%): 0 hard, 1 learning; 1 saturated, 0 unsolvable, 8 unseen" in text
    assert "v0 8/16, v1 8/8" in text and "v0 8/16, v1 8/8" in page and "still teach" in page


def test_where_the_run_drew_its_tasks_episodes_count_to_what_they_were_drawn_as(database: Engine) -> None:
    made = Rows(database, by="difficulty")
    made.group("a", 8, version=0, drawn="unseen")
    made.group("a", 8, version=3, drawn="unseen")
    health, text, _ = health_of(database)
    assert health.sampled_by == "difficulty" and "sampled by difficulty" in text
    assert [step.episodes["unseen"] for step in health.steps] == [8, 8]


def test_a_retired_task_is_in_no_pool_until_it_is_added_again(database: Engine) -> None:
    made = Rows(database)
    made.group("a", 4, version=0)
    made.group("b", 4, version=0)
    made.changed("a", "retired", version=1, why="its verifier is wrong")
    made.group("a", 4, version=1)
    made.changed("new", "added", version=2)
    made.group("b", 4, version=2)
    health, text, page = health_of(database)
    assert [sum(step.tasks.values()) for step in health.steps] == [10, 9, 10]
    assert [step.tasks["learning"] for step in health.steps] == [2, 1, 1]
    assert [part.task for part in health.worst] == ["shell/b"]
    assert [(item.task, item.change) for item in health.changes] == [("shell/a", "retired"), ("shell/new", "added")]
    assert "its verifier is wrong" in text and "its verifier is wrong" in page
    made.changed("a", "added", version=3)
    health, _, _ = health_of(database)
    assert (health.tasks, health.seen, health.by_difficulty["learning"]) == (11, 2, 2)


def test_the_last_twenty_tasks_of_many_are_named_at_either_end_and_none_twice(database: Engine) -> None:
    made = Rows(database)
    for number in range(24):
        made.group(f"t{number:02d}", number % 9, version=number)
    health, text, _ = health_of(database)
    named = [part.task for part in health.worst + health.best]
    assert len(named) == len(set(named)) == 20
    rates = [part.pass_rate for part in health.worst + health.best[::-1]]
    assert rates == sorted(rates) and "share of the episodes by pool" in text


def test_a_run_of_older_rows_says_what_it_can(database: Engine, make_run: MakeRun) -> None:
    health, text, _ = health_of(database, make_run())
    assert (health.tasks, health.seen) == (None, 4) and "how many are unseen is not known" in text
    assert health.by_difficulty["unseen"] == 0


def test_a_run_without_an_episode_has_no_health_to_show(database: Engine, make_run: MakeRun) -> None:
    health, text, page = health_of(database, make_run(steps=0))
    assert (health.seen, health.steps, health.worst) == (0, [], [])
    assert "Taskset health" not in text and "Taskset health" not in page
