"""Evaluations at a terminal: those of a run, one of them with its tasks and fingerprint, and two side by side.

Called by `ratchet evaluation` and by the report.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage.printable import one_line
from storage.report import words
from storage.report.evaluation_parts import ComparedEvaluationsPart, MeasuredPart, change_words

WORST_TASKS = 12
DIFFERING_TASKS = 12
STALE_STYLE = "yellow"


def evaluations_table(items: Sequence[MeasuredPart]) -> Table:
    """One line per evaluation; empty where there is none."""
    table = _bare("Evaluations on held-out tasks")
    table.add_column("evaluation", overflow="fold")
    for name in ("version", "reward", "pass@k", "tasks x samples", "left out", "redone", "fingerprint"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("stands", overflow="fold")
    for item in items:
        table.add_row(
            Text(item.id),
            str(item.version),
            words.interval(item.reward) if item.reward else words.NONE,
            words.pass_at(item.pass_at),
            f"{item.tasks} x {item.samples_per_task}",
            str(item.excluded),
            str(item.redone),
            item.fingerprint or words.NONE,
            _standing(item),
        )
    return table


def _standing(item: MeasuredPart) -> Text:
    if not item.counts:
        return Text(one_line(f"{item.state}: {item.reason}" if item.reason else item.state), style=STALE_STYLE)
    return Text(f"stale: {change_words(item.stale)}", style=STALE_STYLE) if item.stale else Text("yes")


def render_evaluations(items: Sequence[MeasuredPart], shown: MeasuredPart, again: str, console: Console) -> None:
    """Print all of a run, then `shown` at length, then the command for another."""
    if items:
        console.print(evaluations_table(items))
    render_evaluation(shown, console)
    console.print(Text("another: ", style="dim") + Text(again), soft_wrap=True)


def render_evaluation(item: MeasuredPart, console: Console) -> None:
    """Print one: its figures, its worst tasks, its fingerprint."""
    console.print(Text(item.id, style="bold") + Text(f"  version {item.version}, {item.state}"))
    if item.reason:
        console.print(Text(one_line(item.reason)))
    if item.reward is not None:
        _line(console, "held-out reward", f"{words.interval(item.reward)}, 95 % interval")
        _line(console, "method", f"{item.reward.method}; {item.reward.tasks} tasks")
    if item.pass_at:
        _line(console, "pass@k", words.pass_at(item.pass_at))
    left_out = f"{item.excluded} left out, {item.redone} attempts of other weights played again"
    _line(console, "episodes", f"{item.episodes}; {left_out}")
    _line(console, "engines", ", ".join(item.engines) or words.NONE)
    for name, why in item.left_out.items():
        _line(console, "", one_line(f"{name} was no part of it: {why}"))
    if item.stale:
        _line(console, "stale", change_words(item.stale), style=STALE_STYLE)
    if item.task_scores:
        console.print(_tasks(item))
    if item.fields:
        console.print(_fingerprint(item))


def _line(console: Console, name: str, value: str, *, style: str = "") -> None:
    console.print(Text(f"  {name:<18}", style="dim") + Text(value, style=style))


def _tasks(item: MeasuredPart) -> Table:
    count = len(item.task_scores)
    title = "Tasks" if count <= WORST_TASKS else f"The {WORST_TASKS} worst of {count} tasks"
    table = _table(title, "task", "samples", "passed", "mean reward")
    for task in item.task_scores[:WORST_TASKS]:
        cells = (str(task.samples), str(task.passed), words.reward(task.mean_reward))
        table.add_row(Text(one_line(task.task)), *cells)
    return table


def _fingerprint(item: MeasuredPart) -> Table:
    table = _bare(f"Fingerprint {item.fingerprint}")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    changed = {change.field: change.after for change in item.stale}
    if changed:
        table.add_column("now", overflow="fold")
    for name in sorted(item.fields.keys() | changed.keys()):
        cells = [Text(one_line(str(item.fields.get(name, words.NONE))))]
        if changed:
            cells.append(Text(one_line(changed.get(name, "")), style=STALE_STYLE))
        table.add_row(name, *cells)
    return table


def render_comparison(part: ComparedEvaluationsPart, console: Console) -> None:
    """Print two results, their paired difference, and what differs in how they were served."""
    console.print(evaluations_table([part.first, part.second]))
    sure = part.difference
    _line(console, "difference", f"{words.interval(sure, signed=True)}, 95 % interval, second less first")
    _line(console, "method", f"{sure.method}; {sure.tasks} tasks in common")
    counts = f"{part.better} tasks better, {part.worse} worse, {part.tied} the same"
    _line(console, "sign test", f"p = {words.small(part.p_value)}: {counts}")
    if part.only_first or part.only_second:
        _line(console, "not compared", f"{part.only_first} tasks of the first alone, {part.only_second} of the second")
    _line(console, "weights", "differ" if part.weights_differ else "are the same")
    if part.changes:
        table = _bare("Fingerprints differ in")
        for name in ("field", "first", "second"):
            table.add_column(name, overflow="fold")
        for change in part.changes:
            table.add_row(change.field, Text(one_line(change.before)), Text(one_line(change.after)))
        console.print(table)
    else:
        _line(console, "served", "alike in every field")
    if part.tasks:
        count = len(part.tasks)
        more = f", {DIFFERING_TASKS} of {count}" if count > DIFFERING_TASKS else ""
        table = _table(f"Tasks that differ{more}", "task", "first", "second")
        for task in part.tasks[:DIFFERING_TASKS]:
            table.add_row(Text(one_line(task.task)), words.reward(task.first), words.reward(task.second))
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = _bare(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _bare(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
