"""Runs and their tasks: which there are, in which order they come, and those that an operator or the run ruled out."""

from typing import Any

from sqlmodel import Field, SQLModel

from storage.tables.columns import json_column


class Run(SQLModel, table=True):
    """One TrainingRun. Times are seconds since the epoch everywhere."""

    id: str = Field(primary_key=True)
    state: str
    reason: str = ""
    config: dict[str, Any] = json_column()
    mode: str
    seed: int
    execution: str = ""
    """The workflow's first execution: a second run under the same id is refused."""
    temporal_namespace: str = Field("", sa_column_kwargs={"server_default": ""})
    """`<name>/<id>` of the namespace that it was started in: only there is known whether its workflow runs. Empty where
    nobody wrote it down."""
    step: int = 0
    policy_version: int = 0
    resume_from: str | None = None
    train_tasks: int | None = None
    """Tasks that it began with; None in rows older than the column."""
    started_at: float
    ended_at: float | None = None


class Task(SQLModel, table=True):
    """One task as a run met it."""

    id: str = Field(primary_key=True, description="<taskset>/<task id>")
    taskset: str
    task_id: str
    split: str
    kind: str = ""
    instruction: str = ""
    oracle_commands: int | None = None
    """Commands with which the oracle solves it; None where that is not known, as of a script, and in older rows."""


class Quarantine(SQLModel, table=True):
    """A task that a run admits no more, because its groups kept closing without enough valid siblings."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    task: str = Field(primary_key=True)
    why: str
    since: float


class QuarantineMark(SQLModel, table=True):
    """An operator's word that the rewards of a task's episodes in a run, or of one attempt, were wrong. It holds while
    `undone_at` is None; storage/quarantine.py says what for."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    kind: str = Field(primary_key=True)
    """`task` or `episode`."""
    target: str = Field(primary_key=True)
    """A task's key or an attempt's id."""
    number: int = Field(primary_key=True)
    """0 for the first, one more each time that it was undone and marked again."""
    why: str
    by: str
    since: float
    undone_at: float | None = None
    undone_by: str = ""
    undone_why: str = ""


class Draw(SQLModel, table=True):
    """One place in the order of a run's tasks, where rows decide it. Made once, and changed by nothing."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    number: int = Field(primary_key=True)
    task: str
    difficulty: str
    """What its task was held to be: a word of workflows/difficulty.py."""
    policy_version: int
    """The run's when it was drawn."""
    drawn_at: float


class ChangedTask(SQLModel, table=True):
    """A task that an operator added to a running run, or retired from it."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    number: int = Field(primary_key=True)
    """Of the operator's request."""
    task: str = Field(primary_key=True)
    position: int
    """Within the request."""
    change: str
    """added or retired."""
    why: str = ""
    policy_version: int
    at: float
