"""The taskset's health in a terminal: one sentence, the pools, what the episodes went to, and single tasks."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage.printable import one_line
from storage.report import words
from storage.report.taskset import TaskPart, TasksetPart
from storage.report.taskset_views import ESTIMATE, episodes_plot, headline, pool_rows, task_row


def render_taskset(part: TasksetPart, console: Console) -> None:
    """Print it; nothing for a run without a valid episode and without a change of its tasks."""
    if part.seen:
        console.print(Text("Taskset health: ", style="bold") + Text(headline(part)))
        console.print(_pools(part))
        console.print(Text(episodes_plot(part)))
    for title, tasks in (("Lowest pass rates", part.worst), ("Highest pass rates", part.best)):
        if tasks:
            console.print(_tasks(f"{title}, {ESTIMATE}", tasks))
    if part.changes:
        console.print(_changes(part))


def _pools(part: TasksetPart) -> Table:
    table = _table(f"Tasks by pool, sampled by {part.sampled_by}")
    for index, name in enumerate(("pool", "tasks", "share", "of the latest episodes")):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in pool_rows(part):
        table.add_row(*row)
    return table


def _tasks(title: str, tasks: list[TaskPart]) -> Table:
    table = _table(title)
    for name in ("task", "pool", "pass rate", "passed", "by policy version"):
        table.add_column(name, overflow="fold")
    for item in tasks:
        table.add_row(Text(one_line(item.task)), *task_row(item))
    return table


def _changes(part: TasksetPart) -> Table:
    table = _table("Tasks added and retired while it ran, the latest last")
    for name in ("when", "version", "change", "task", "why"):
        table.add_column(name, overflow="fold")
    for item in part.changes:
        told = (words.moment(item.at), str(item.policy_version), item.change)
        table.add_row(*told, Text(one_line(item.task)), Text(one_line(item.why) or words.NONE))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
