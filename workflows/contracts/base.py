"""What all messages share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from workflows.contracts.words import Split


class Message(BaseModel):
    """Base of every message: unknown fields are refused, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskRef(Message):
    """Names one task of a taskset; activities read its content from the taskset. Example: shell, train, count-17."""

    taskset: str
    split: Split
    task_id: str


class Timing(Message):
    """Seconds of one activity: waiting for a worker or for an engine with room, and running."""

    queue_s: float = 0.0
    run_s: float = 0.0
