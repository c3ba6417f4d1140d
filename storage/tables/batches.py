"""Batches, what trained in them, and the versions of the policy that they made."""

from typing import Any

from sqlalchemy import Index, text
from sqlmodel import Field, SQLModel

from storage.tables.columns import json_column

VOID = "void"
"""State of a batch that taught nothing: no step was made of it, and its episodes are used up."""
NOT_VOID = text(f"state != '{VOID}'")


class Batch(SQLModel, table=True):
    """One optimizer update. `state`: reserved -> trained -> published, or reserved -> void. `fence` rises with each try
    of the update; only the holder of the newest may commit. A step has one batch that is not void."""

    id: str = Field(primary_key=True)
    run: str = Field(foreign_key="run.id", index=True)
    step: int
    policy_version: int
    state: str = "reserved"
    reason: str = ""
    """Why it is void."""
    fence: int = 0
    checkpoint: str = ""
    metrics: dict[str, Any] = json_column()
    waited: dict[str, Any] = json_column()
    """Seconds: `to_trainable_batch`, its parts, `median` and `tail`, as storage/waiting.py defines them."""
    tail: dict[str, Any] = json_column()
    """Who caused the tail: `group`, `attempt`, and `parts`, that attempt's way through the wait in seconds."""
    reserved_at: float
    trained_at: float | None = None

    __table_args__ = (
        Index("batch_run_step", "run", "step", unique=True, sqlite_where=NOT_VOID, postgresql_where=NOT_VOID),
    )


class BatchMember(SQLModel, table=True):
    """The attempt's place in the one batch that it may train."""

    episode: str = Field(primary_key=True, foreign_key="episode.id")
    batch: str = Field(foreign_key="batch.id", index=True)
    group_id: str
    position: int
    advantage: float | None = None


class Replay(SQLModel, table=True):
    """One use of an archived success: it trained once more, with a later group of its task."""

    batch: str = Field(primary_key=True, foreign_key="batch.id")
    group_id: str = Field(primary_key=True)
    episode: str = Field(foreign_key="episode.id", index=True)
    advantage: float | None = None


class PolicyVersion(SQLModel, table=True):
    run: str = Field(primary_key=True, foreign_key="run.id")
    version: int = Field(primary_key=True)
    step: int
    batch: str | None = None
    checkpoint: str
    """Key of the training state's manifest."""
    created_at: float
