"""Messages on a run's tasks: which come next, and which an operator adds to it or retires from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field

from workflows.contracts.base import Message

MOST_CHANGED = 200
"""Tasks that one request may name: with ids as long as they may be it fits a message."""


class TaskChange(StrEnum):
    """What an operator did with a task of a running run."""

    ADDED = "added"
    RETIRED = "retired"


class DrawTasksInput(Message):
    """The run's draws from `cursor` on. A draw is made once: asked for again it is what it was."""

    run: str
    config: dict[str, object]
    """The run's configuration."""
    cursor: int
    count: int
    policy_version: int
    held: list[str] = []
    """Tasks in quarantine."""


class Draw(NamedTuple):
    """One place in a run's order of tasks. `taskset`: the task's, empty for the run's own. `passed_over`: it was
    retired, or went into quarantine, since it was drawn."""

    number: int
    task_id: str
    taskset: str
    difficulty: str
    passed_over: bool


class DrawTasksOutput(Message):
    draws: list[Draw]
    """None: no task is left to draw, and `why`."""
    taskset: str
    """The run's own, as references to its tasks name it."""
    tasks: dict[str, int]
    """Tasks that may be drawn, by difficulty."""
    why: str = ""


TaskId = Annotated[str, Field(min_length=1, max_length=200)]


class TaskRequest(Message):
    """What an operator gives to `add_tasks` and `retire_tasks`: {"tasks": ["fix-pip"], "taskset": "/data/more"}."""

    tasks: list[TaskId] = Field(min_length=1, max_length=MOST_CHANGED)
    taskset: str = Field("", max_length=1000)
    """A name or a folder; empty: the run's own."""
    why: str = Field("", max_length=500)
    """For those who read it later."""


class ChangeTasksInput(Message):
    """One request, checked against the taskset and the rows, and written: all of it, or nothing."""

    run: str
    config: dict[str, object]
    number: int
    """Of the run's requests; the same one again changes nothing."""
    change: TaskChange
    request: TaskRequest
    policy_version: int
    at: float


class ChangeTasksOutput(Message):
    """Answer of `add_tasks` and `retire_tasks`."""

    changed: list[str]
    tasks: int
    """Train tasks of the run now, those in quarantine among them."""
