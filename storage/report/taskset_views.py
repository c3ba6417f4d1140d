"""The taskset's health as people read it: words, rows of tables and a plot of text, the same for terminal and page."""

from __future__ import annotations

from itertools import pairwise

from storage.report import words
from storage.report.taskset import TaskPart, TasksetPart
from workflows.difficulty import Difficulty

STYLES = {
    Difficulty.UNSEEN: "s5",
    Difficulty.UNSOLVABLE: "s6",
    Difficulty.HARD: "s1",
    Difficulty.LEARNING: "s0",
    Difficulty.SATURATED: "s2",
}
"""Of the page's charts, by pool."""
MARKS = {
    Difficulty.UNSEEN: "·",
    Difficulty.UNSOLVABLE: "x",
    Difficulty.HARD: "▒",
    Difficulty.LEARNING: "█",
    Difficulty.SATURATED: "░",
}
ESTIMATE = "estimated as (passed + 1) / (episodes + 2)"
"""What a pass rate in the tables is; docs/tasks.md says why."""
PLOT_WIDTH, PLOT_HEIGHT = 60, 8
LATEST = 3
"""Versions of a task that a table names."""


def headline(part: TasksetPart) -> str:
    """Example: `14 of 40 tasks seen still teach (35%): 4 hard, 10 learning; 20 saturated, 6 unsolvable, 2 unseen`."""
    if not part.seen:
        return "no valid episode yet"
    of = part.by_difficulty
    unseen = f"{of[Difficulty.UNSEEN]} unseen" if part.tasks is not None else "how many are unseen is not known"
    return (
        f"{part.teaching} of {part.seen} tasks seen still teach ({words.share(part.teaching / part.seen)}):"
        f" {of[Difficulty.HARD]} hard, {of[Difficulty.LEARNING]} learning; {of[Difficulty.SATURATED]} saturated,"
        f" {of[Difficulty.UNSOLVABLE]} unsolvable, {unseen}"
    )


def pool_rows(part: TasksetPart) -> list[tuple[str, str, str, str]]:
    """By pool: tasks, their share, and the share of the latest episodes."""
    tasks, episodes = sum(part.by_difficulty.values()), sum(part.episodes.values())

    def share(count: int, total: int) -> str:
        return words.share(count / total if total else None)

    return [
        (name, str(count), share(count, tasks), share(part.episodes[name], episodes))
        for name, count in part.by_difficulty.items()
    ]


def task_row(part: TaskPart) -> tuple[str, str, str, str]:
    """Pool, pass rate, what it rests on, and the latest versions: `v3 1/8, v7 5/8`."""
    latest = ", ".join(f"v{item.version} {item.passes}/{item.episodes}" for item in part.versions[-LATEST:])
    more = f"{len(part.versions) - LATEST} before, " if len(part.versions) > LATEST else ""
    return part.difficulty, words.share(part.pass_rate), f"{part.passes} of {part.episodes}", more + latest


def episodes_plot(part: TasksetPart) -> str:
    """What the episodes went to, over the versions, as stacked shares of text. Empty without a version."""
    if not part.steps:
        return ""
    columns = [_column(counts) for counts in _bins(part)]
    lines = []
    for line in range(PLOT_HEIGHT):
        label = {0: "  100 % ┤", PLOT_HEIGHT - 1: "    0 % ┤"}.get(line, "        │")
        lines.append(label + "".join(column[PLOT_HEIGHT - 1 - line] for column in columns))
    first, last = str(part.steps[0].version), str(part.steps[-1].version)
    middle = f"{'policy version':^{max(14, len(columns) - len(first) - len(last))}}"
    legend = "   ".join(f"{MARKS[name]} {name}" for name in Difficulty)
    axis = f"        └{'─' * len(columns)}\n         {first}{middle}{last}"
    return "\n".join(["", *lines, axis, "         share of the episodes by pool", f"         {legend}", ""])


def _bins(part: TasksetPart) -> list[dict[str, int]]:
    """The versions' episodes by pool, neighbours together where there are more versions than columns."""
    count = min(PLOT_WIDTH, len(part.steps))
    edges = [len(part.steps) * index // count for index in range(count + 1)]
    return [
        {name: sum(step.episodes[name] for step in part.steps[low:high]) for name in Difficulty}
        for low, high in pairwise(edges)
    ]


def _column(counts: dict[str, int]) -> str:
    """From the bottom up, one mark per part of the whole."""
    total, reached, column = sum(counts.values()), 0, ""
    for name in Difficulty:
        reached += counts[name]
        column += MARKS[name] * (round(PLOT_HEIGHT * reached / total) - len(column))
    return column
